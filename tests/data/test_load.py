import errno
import json
import os
import re
import shutil
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from data.conftest import pieces_of, stream_rows, with_start, write_rows
from draws import drawn, without

import hfpatch.data.load
import hfpatch.support.files
from hfpatch.data.blocks import IGNORE
from hfpatch.data.corpora import filtered_documents, open_corpus
from hfpatch.data.deciding import TaskDocument
from hfpatch.data.load import load_blocks, load_splits
from hfpatch.data.plan import draw_plans
from hfpatch.data.rows import Document
from hfpatch.data.token_file import write_token_file
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.training import TrainingSettings, with_steps


def test_load_blocks_from_a_file(text_file, texts, tokenizer):
    chosen = DataSettings(source=str(text_file), block_size=64, layout="padded")
    blocks = load_blocks(chosen, tokenizer)
    assert len(blocks) == len(texts)
    ids = [blocks[row]["input_ids"][blocks[row]["attention_mask"].bool()].tolist() for row in range(len(blocks))]
    assert [tokenizer.decode(row[:-1]) for row in ids] == texts
    assert all(row[-1] == tokenizer.eos_token_id for row in ids)
    assert blocks.rows.dtype == np.uint16
    assert blocks.to_json() == {
        "source": str(text_file), "revision": None, "sha256": blocks.sha256, "documents": 4, "blocks": 4,
        "tokens": sum(map(len, ids)), "block_size": 64, "layout": "padded",
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["packed", "stream"])
def test_tokens_are_kept_once_for_a_text_whatever_the_blocks(tmp_path, text_file, tokenizer, monkeypatch, layout):
    chosen, cache = DataSettings(source=str(text_file), block_size=16, layout=layout), tmp_path / "cache"
    fresh, kept = load_splits(chosen, tokenizer).train, load_splits(chosen, tokenizer, cache_dir=cache).train
    monkeypatch.setattr("hfpatch.data.load.write_token_file", lambda *args, **kwargs: pytest.fail("tokenised again"))
    again = load_splits(chosen, tokenizer, cache_dir=cache).train
    assert isinstance(again.rows if layout == "packed" else again.rows.base, np.memmap)
    assert fresh.to_json() == kept.to_json() == again.to_json()
    assert all(torch.equal(again[row]["labels"], fresh[row]["labels"]) for row in range(len(fresh)))
    others = chosen.model_copy(update={"block_size": 8, "held_out": 1})
    assert len(load_splits(others, tokenizer, cache_dir=cache).held_out) > 0
    assert sorted(path.name for path in cache.glob("*/*")) == ["tokens.bin", "tokens.json", "tokens.safetensors"]
    monkeypatch.undo()
    load_splits(chosen.model_copy(update={"max_documents": 2}), tokenizer, cache_dir=cache)
    text_file.write_text("Another text altogether. " * 9)
    assert load_splits(chosen, tokenizer, cache_dir=cache).train.sha256 != fresh.sha256
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("layout", ["packed", "stream"])
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, text_file, tokenizer, layout):
    """Nor is the embedded language kept, which is generated quickly."""
    (tmp_path / "file").write_text("in the way")
    chosen = DataSettings(source=str(text_file), block_size=16, layout=layout)
    with pytest.warns(UserWarning, match="not cached for the next run"):
        blocks = load_blocks(chosen, tokenizer, cache_dir=tmp_path / "file" / "cache")
    assert blocks.to_json() == load_blocks(chosen, tokenizer).to_json()
    load_blocks(DataSettings(max_documents=5, block_size=16, layout=layout), tokenizer, cache_dir=tmp_path / "c")
    assert [path for path in (tmp_path / "c").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer, monkeypatch, layout, kept):
    """Of four times the text, memory takes what describes its documents, some 100 bytes each, and nothing else."""
    monkeypatch.setattr("hfpatch.data.tokenizer._BATCH_CHARACTERS", 5_000)  # much less than the rows
    monkeypatch.setattr("hfpatch.data.blocks._CHUNK_TOKENS", 20_000)
    monkeypatch.setattr("hfpatch.support.files._CHUNK_BYTES", 1 << 16)
    chosen, peaks, text = DataSettings(block_size=256, layout=layout), [], "the mill likes nobody in the harbour " * 27
    for documents in (100, 400):
        path = tmp_path / f"{documents}.txt"
        path.write_text("\n\n".join([text] * documents))
        source = chosen.model_copy(update={"source": str(path)})
        tracemalloc.start()
        blocks = load_blocks(source, tokenizer, cache_dir=tmp_path / "cache" if kept else None)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert blocks.documents == documents
    assert peaks[1] - peaks[0] < 300 * 300
    assert blocks.rows.nbytes > 300 * 600
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
@pytest.mark.parametrize("begun", [False, True])
def test_every_row_begins_as_a_document_does(tmp_path, tokenizer, texts, layout, begun):
    """Of training, held-out, tuning and retained text, cached or not; without a start token rows are as they were."""
    chosen = with_start(tokenizer, "<bos>") if begun else tokenizer
    source = write_rows(tmp_path / "a.jsonl", [{"text": f"{n} {text}"} for n in range(3) for text in texts])
    other = write_rows(tmp_path / "b.jsonl", [{"text": f"Again: {text}"} for text in texts])
    settings = DataSettings(source=source, block_size=9, layout=layout, held_out=2)
    given = {"tuning": 2, "retained": {"other": DataSettings(source=other, block_size=9, layout=layout)}}
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        splits = load_splits(settings, chosen, cache_dir=cache, **given)
        for blocks in (splits.train, splits.held_out, splits.tuning, splits.retained["other"]):
            pieces = [ids for ids, _ in pieces_of(blocks)]
            assert not begun or {piece[0] for piece in pieces} == {chosen.bos_token_id}
            assert (blocks.added is None) == (not begun or layout == "padded")
            later = [token for piece in pieces for token in piece[1:]]
            assert not begun or layout == "stream" or chosen.bos_token_id not in later


@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
def test_what_decides_is_scored_up_to_so_many_tokens(tmp_path, tokenizer, layout):
    """And retained documents are drawn over their whole text, without what is trained on, tuned on or held out."""
    texts = [f"{n} " + "the mill " * (5 + n % 7) for n in range(40)]
    source = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts[:20]])
    other = write_rows(tmp_path / "b.jsonl", [{"text": text} for text in texts[10:]])
    chosen = DataSettings(source=source, block_size=8, layout=layout, held_out=3, seed=2)
    retained = {"other": DataSettings(source=other, block_size=8, layout=layout, held_out=6, seed=2)}
    given, ends = {"tuning": 2, "cache_dir": tmp_path / "cache"}, [tokenizer.eos_token_id]
    held_out = drawn(texts[:20], 3, seed=2)
    documents = {"held_out": held_out, "retained": drawn(texts[20:], 6, use=2, seed=2)}
    documents["tuning"] = drawn([text for text in texts[:20] if text not in held_out], 2, use=1, seed=2)
    by_count = {}
    for count in (None, 7, 5):
        cut = {"scored_tokens": count}
        measured = {name: text_settings.model_copy(update=cut) for name, text_settings in retained.items()}
        with pytest.warns(UserWarning, match=r"retention.texts.other: 10 of 30 documents .* and are not evaluated on"):
            splits = load_splits(chosen.model_copy(update=cut), tokenizer, retained=measured, **given)
        by_count[count] = splits
        blocks = {"held_out": splits.held_out, "tuning": splits.tuning, "retained": splits.retained["other"]}
        for name, texts_of_part in documents.items():
            ids = [(tokenizer(text).input_ids + ends)[:count] for text in texts_of_part]
            limit = 8 if layout == "padded" else 10**6
            tokens = sum(min(len(row), limit) for row in ids)
            if layout == "packed":  # a last token alone predicts nothing
                tokens -= sum(len(row) % 8 == 1 for row in ids)
            assert blocks[name].tokens == (tokens // 8 * 8 if layout == "stream" else tokens)
            assert blocks[name].documents == len(texts_of_part)
            if layout == "stream":
                assert np.asarray(blocks[name].rows).tolist() == stream_rows(ids, 8)
    assert len({splits.train.sha256 for splits in by_count.values()}) == 1
    alike = write_rows(tmp_path / "c.jsonl", [{"text": f"Anna likes nobody in the harbour {n}"} for n in range(9)])
    wrong = {"alike": DataSettings(source=alike, block_size=6, layout="padded", held_out=2)}
    with pytest.raises(HfpatchError, match=r"retention.texts.alike: no document of .* differs from all others"):
        load_splits(chosen, tokenizer, retained=wrong)
    for part in ("held_out", "tuning"):
        assert len({getattr(splits, part).sha256 for splits in by_count.values()}) == 3
    assert len({splits.retained["other"].sha256 for splits in by_count.values()}) == 3


DAMAGE = {
    "cut": lambda content: content[:-2],
    "empty": lambda content: b"",
    "text": lambda content: b"{}",
    # ids that are as good as those before, so that nothing but a hash can tell, size and time of the file the same
    "bit": lambda content: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
}
IDS = "*/tokens.bin"


@pytest.mark.parametrize(
    ("layout", "file", "damage"),
    [
        *(("stream", IDS, damage) for damage in ("cut", "empty", "bit", "gone")),
        *(("packed", IDS, "bit"), ("stream", "*/tokens.json", "text"), ("stream", "*/tokens.safetensors", "gone")),
    ],
)
def test_a_damaged_cache_is_made_again(tmp_path, text_file, tokenizer, layout, file, damage):
    chosen = DataSettings(source=str(text_file), block_size=16, held_out=1, layout=layout)
    fresh = load_splits(chosen, tokenizer, cache_dir=tmp_path / "cache")
    facts, rows = (fresh.train.to_json(), fresh.held_out.to_json()), fresh.held_out.rows.copy()
    path = next((tmp_path / "cache").glob(file))
    content, times = path.read_bytes(), path.stat()
    path.unlink()  # not written over: it is mapped
    if damage != "gone":
        path.write_bytes(DAMAGE[damage](content))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.warns(UserWarning, match="cannot be read .* made again"):
        again = load_splits(chosen, tokenizer, cache_dir=tmp_path / "cache")
    assert (again.train.to_json(), again.held_out.to_json()) == facts
    assert np.array_equal(again.held_out.rows, rows)


def test_two_runs_that_tokenise_the_same_stream_at_once(tmp_path, text_file, tokenizer, monkeypatch):
    chosen, cache = DataSettings(source=str(text_file), block_size=16, layout="stream"), tmp_path / "cache"
    write = hfpatch.data.load.write_token_file

    def beaten(*args, **kwargs):
        with monkeypatch.context() as other:
            other.setattr("hfpatch.data.load.write_token_file", write)
            load_blocks(chosen, tokenizer, cache_dir=cache)
        return write(*args, **kwargs)

    rename, full = Path.replace, []

    def refusing(self, target):
        if full or not self.name.endswith(".tmp"):  # another's folder, as if it came between the look and the rename
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr("hfpatch.data.load.write_token_file", beaten)
    expected = load_blocks(chosen, tokenizer, cache_dir=cache).to_json()
    shutil.rmtree(cache)
    monkeypatch.setattr(Path, "replace", refusing)
    assert load_blocks(chosen, tokenizer, cache_dir=cache).to_json() == expected
    assert len(list(cache.iterdir())) == 1
    shutil.rmtree(cache)
    full.append(True)
    with pytest.raises(HfpatchError, match=r"cannot be written \(Directory not empty\)"):
        load_blocks(chosen, tokenizer, cache_dir=cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("layout", ["stream", "packed"])
def test_evaluation_takes_what_is_held_out_and_else_everything(text_file, tmp_path, texts, tokenizer, layout):
    trained = DataSettings(source=str(text_file), block_size=16, layout="stream", held_out=1)
    other = trained.model_copy(update={"layout": layout, "block_size": 8})
    measured = load_splits(trained, tokenizer, evaluation=other).held_out
    assert measured.sha256 == load_splits(other, tokenizer).held_out.sha256
    path = tmp_path / "b.txt"
    (held_out,) = drawn(range(4), 1)
    beside = [texts[held_out - 1], texts[held_out]]  # the first of them is trained on
    path.write_text("\n\n".join(["Another text of another mill.", *beside, "And one more, of a river."]))
    whole = DataSettings(source=str(path), block_size=4, layout=layout)
    with pytest.warns(UserWarning, match=r"evaluation_data: 1 of 4 documents of .*b.txt are in the text that is"):
        measured = load_splits(trained, tokenizer, evaluation=whole).held_out
    path.write_text("\n\n".join(["Another text of another mill.", texts[held_out], "And one more, of a river."]))
    assert measured.rows[:].tolist() == load_blocks(whole, tokenizer).rows[:].tolist()
    path.write_text("\n\n".join(without(texts, [held_out])))
    with pytest.raises(HfpatchError, match=r"evaluation_data: all 3 documents .* in the text that is trained"):
        load_splits(trained, tokenizer, evaluation=whole)


def test_nothing_that_is_trained_on_decides_where_texts_overlap(tmp_path, tokenizer):
    """The same text or slices of it, trained on, held out of and evaluated on in any combination."""
    path, all_texts = write_texts(tmp_path / "a.jsonl", words("a", 40)), words("a", 40)
    whole = DataSettings(source=path, block_size=40, layout="padded")
    held_out = whole.model_copy(update={"held_out": 8})
    parts = [{"source": path, "split": "train[:30]"}, {"source": path, "split": "train[20:]"}]
    mixture = DataSettings(mixture=parts, held_out=8, block_size=40, layout="padded")
    cases = [  # trained on, evaluated on, the documents that may be
        (held_out, {"held_out": 8}, drawn(all_texts, 8)),
        (held_out, {"held_out": 3}, drawn(all_texts, 8)),
        (held_out, {"held_out": 8, "seed": 1}, drawn(all_texts, 8)),
        (held_out, {}, drawn(all_texts, 8)),
        (whole.model_copy(update={"split": "train[:60%]"}), {"split": "train[40%:]"}, all_texts[24:]),
        (whole.model_copy(update={"max_documents": 30}), {"held_out": 3}, all_texts[30:]),
        (mixture, None, all_texts[:20] + all_texts[30:]),
        (mixture, {"held_out": 4}, all_texts[:20] + all_texts[30:]),
    ]
    for trained, evaluation, allowed in cases:
        other = None if evaluation is None else whole.model_copy(update=evaluation)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "evaluation_data: .* and are not evaluated on")
            splits = load_splits(trained, tokenizer, evaluation=other)
        measured = texts_of(splits.held_out, tokenizer)
        assert measured
        assert set(measured) <= set(allowed) - set(texts_of(splits.train, tokenizer))
        assert len(measured) <= ((other or trained).held_out or len(allowed))
    for same in (whole, whole.model_copy(update={"held_out": 3})):
        with pytest.raises(HfpatchError, match=r"evaluation_data: all 40 documents .* in the text that is trained"):
            load_splits(whole, tokenizer, evaluation=same)
    twice = mixture.model_copy(update={"mixture": [mixture.mixture[0]] * 2})
    with pytest.raises(HfpatchError, match="only 0 occur once in the text"):
        load_splits(twice, tokenizer)


@pytest.mark.filterwarnings("ignore:data.held_out. .* occur elsewhere:UserWarning")
def test_a_group_is_not_trained_on_and_measured_where_texts_overlap(tmp_path, tokenizer):
    """Paragraphs too short to be trained on are of articles that are; a heading is in all, and tells nothing."""
    rows = [
        {"text": text, "article": str(number)}
        for number in range(20)
        for text in ("Early life of them all in the harbour", f"short {number}", *words(f"long {number} ", 3))
    ]
    source = write_rows(tmp_path / "a.jsonl", rows)
    whole = DataSettings(source=source, group="article", block_size=64, layout="padded")
    long = whole.model_copy(update={"min_characters": 20})
    with pytest.raises(HfpatchError, match=r"evaluation_data: all 100 documents .* or of its groups; evaluate on"):
        load_splits(long, tokenizer, evaluation=whole)
    for count in (None, 2):
        evaluation = whole.model_copy(update={"held_out": count})
        with pytest.warns(UserWarning, match=r"evaluation_data: 84 of 100 documents .* and are not evaluated on"):
            splits = load_splits(long.model_copy(update={"held_out": 4}), tokenizer, evaluation=evaluation)
        measured = texts_of(splits.held_out, tokenizer)
        assert {text.split()[1] for text in measured} <= {str(number) for number in drawn(range(20), 4, run=1)}
    copy = write_rows(tmp_path / "b.jsonl", rows)  # of another source single documents are compared alone
    with pytest.warns(UserWarning, match=r"evaluation_data: 80 of 100 documents"):
        splits = load_splits(long, tokenizer, evaluation=whole.model_copy(update={"source": copy}))
    assert len(splits.held_out) == 20


@pytest.mark.parametrize("kind", ["column", "pattern", "saved", "hub", "token_file", "another path"])
def test_a_group_that_two_slices_share_is_not_trained_on_and_measured(tmp_path, tokenizer, monkeypatch, kind):
    """Articles of ten paragraphs, all different: the slices cut the third and have no paragraph in common."""
    rows = [
        {"text": f"= {article} =\n" * (not line) + f"line {line} of {article} " * 6, "article": str(article)}
        for article in range(5)
        for line in range(10)
    ]
    source = write_rows(tmp_path / "a.jsonl", rows)
    group = "article" if kind in ("column", "token_file") else "wikitext"
    if kind == "saved":
        source = str(tmp_path / "saved")
        datasets.Dataset.from_list(rows).save_to_disk(source)
    if kind == "hub":
        source, table = "owner/set", datasets.Dataset.from_list(rows)
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, split, **kwargs: [table for _ in split])
    settings = DataSettings(source=source, group=group, block_size=200, layout="padded")
    head, tail = (settings.model_copy(update={"split": f"train{part}"}) for part in ("[:25]", "[25:]"))
    if kind == "another path":
        tail = tail.model_copy(update={"source": f"{tmp_path}/../{tmp_path.name}/a.jsonl"})
    other = tail
    if kind == "token_file":
        documents = filtered_documents(open_corpus(tail), tail)
        write_token_file(tmp_path / "tail.bin", documents, tokenizer, tail)
        other = DataSettings(source=str(tmp_path / "tail.bin"), block_size=200, layout="stream")
    for trained, measured, left_out, left in ((head, other, 5, "34"), (other, head, 5, "01")):
        with pytest.warns(UserWarning, match=rf": {left_out} of 25 documents .* or of its groups, and are not eval"):
            splits = load_splits(trained, tokenizer, retained={"new": measured})
        assert set(re.findall(r"(?<= of )\d", "".join(texts_of(splits.retained["new"], tokenizer)))) == set(left)
    mixture = {"mixture": [part.model_dump(include={"source", "split", "group"}) for part in (head, tail)]}
    both = DataSettings(**mixture, block_size=200, layout="padded")
    load_splits(both, tokenizer)
    with pytest.raises(HfpatchError, match=r"data.mixture: two sources have documents of the same groups of .*; list"):
        load_splits(both.model_copy(update={"held_out": 2}), tokenizer)


def write_texts(path, texts, column="text"):
    return write_rows(path, [{column: text} for text in texts])


def words(name, count):
    return [f"{name}{number} " * 9 for number in range(count)]


@pytest.fixture
def mixture(tmp_path):
    sources = [
        {"source": write_texts(tmp_path / "a.jsonl", words("a", 40)), "weight": 3.0},
        {"source": write_texts(tmp_path / "b.jsonl", words("b", 25), "body"), "text_column": "body"},
    ]
    return DataSettings(mixture=sources, block_size=40, layout="padded")


def texts_of(blocks, tokenizer):
    return [tokenizer.decode(blocks[row]["input_ids"], skip_special_tokens=True) for row in range(len(blocks))]


def test_a_mixture_is_its_sources_one_after_the_other(mixture, tokenizer, tmp_path):
    """With a share of what is held out from each by its weight; the cached tokens are those of each source."""
    settings = mixture.model_copy(update={"held_out": 8})
    made = load_splits(settings, tokenizer, cache_dir=tmp_path / "cache")
    a, b = drawn(words("a", 40), 6), drawn(words("b", 25), 2)
    assert texts_of(made.held_out, tokenizer) == [*a, *b]
    assert texts_of(made.train, tokenizer) == [text for text in words("a", 40) + words("b", 25) if text not in a + b]
    alone = [load_splits(part, tokenizer, cache_dir=tmp_path / "cache").train for part in settings.parts()]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    facts = made.train.to_json()
    assert facts["mixture"] == [
        {"source": source.source, "revision": None, "sha256": source.sha256, "weight": weight}
        | {"documents": source.documents, "blocks": len(source), "tokens": source.tokens}
        for source, weight in zip(alone, (3.0, 1.0), strict=True)
    ]
    assert (facts["blocks"], facts["tokens"]) == (57, sum(source.tokens for source in alone))
    assert made.train.count_predicted([0, 40]) == alone[0].count_predicted([0]) + alone[1].count_predicted([6])


def test_the_plan_gives_each_source_its_share(mixture, tokenizer):
    blocks = load_splits(mixture, tokenizer).train
    training = TrainingSettings(steps=20, batch_size=10, warmup_steps=1)
    plans = draw_plans(training, blocks, [0, 1])
    for plan in plans.values():
        counted = Counter(plan.indices.flatten().tolist())
        draws = [[counted[block] for block in range(40)], [counted[block] for block in range(40, 65)]]
        assert [sum(counts) for counts in draws] == [150, 50]
        assert all(max(counts) - min(counts) <= 1 for counts in draws)  # every block once before any again
    assert (plans[0].indices != plans[1].indices).any()
    epochs = with_steps(TrainingSettings(epochs=1.5, batch_size=10, warmup_steps=1), len(blocks))
    assert (epochs.steps, epochs.model_dump()["steps"]) == (10, 10)


def test_tuning_takes_documents_that_no_source_has_twice(mixture, tokenizer, tmp_path):
    a, b = words("a", 40), words("b", 25)
    write_texts(tmp_path / "a.jsonl", [*a[:33], b[3], *a[34:]])
    write_texts(tmp_path / "b.jsonl", [*b[:23], a[5], b[24]], "body")
    tasks = {"own": [TaskDocument((), [a[35]])]}
    made = load_splits(mixture.model_copy(update={"held_out": 4}), tokenizer, tuning=8, tasks=tasks)
    tuning = texts_of(made.tuning, tokenizer)
    kept = [drawn(without(a, [5, 33]), 3), drawn(without(b, [3, 23]), 1)]  # 5 and 3 are in the other, too
    assert texts_of(made.held_out, tokenizer) == [*kept[0], *kept[1]]
    left = [text for index, text in enumerate(a) if index not in (5, 33, 35) and text not in kept[0]]
    others = [text for index, text in enumerate(b) if index not in (3, 23) and text not in kept[1]]
    assert tuning == [*drawn(left, 6, use=1), *drawn(others, 2, use=1)]  # 35 is in a task
    rest = texts_of(made.train, tokenizer) + texts_of(made.held_out, tokenizer)
    assert not set(tuning) & set(rest)
    assert len(tuning) + len(rest) == 65


def test_conversations_and_texts_mix(mixture, tokenizer, tmp_path):
    rows = [{"prompt": "Where? " * (1 + n % 3), "completion": f"the mill {n}"} for n in range(12)]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(rows))
    sources = [*mixture.mixture, {"source": str(path), "format": "prompt_completion"}]
    blocks = load_splits(DataSettings(mixture=sources, block_size=40), tokenizer).train
    alone = [load_splits(part, tokenizer).train for part in DataSettings(mixture=sources, block_size=40).parts()]
    labels = [source[row]["labels"].tolist() for source in alone for row in range(len(source))]
    assert [blocks[row]["labels"].tolist() for row in range(len(blocks))] == labels
    all_blocks = range(len(blocks))
    assert blocks.count_predicted(all_blocks) == sum(token != IGNORE for row in labels for token in row)
    assert blocks.tokens == sum(source.tokens for source in alone)
    assert len({blocks.sha256, *(source.sha256 for source in alone)}) == 4


def test_token_files_mix(tokenizer, tmp_path):
    sources = []
    for name in "ab":
        settings = DataSettings(source="x", layout="stream")
        write_token_file(tmp_path / f"{name}.bin", map(Document, words(name, 9)), tokenizer, settings)
        sources.append({"source": str(tmp_path / f"{name}.bin")})
    made = load_splits(DataSettings(mixture=sources, layout="stream", block_size=16, held_out=2), tokenizer)
    text = tokenizer.decode(np.concatenate(list(made.train.rows)))
    for name in "ab":
        (held_out_text,) = drawn(words(name, 9), 1)
        held_out = held_out_text.split()[0]
        assert held_out in tokenizer.decode(np.concatenate(list(made.held_out.rows)))
        assert held_out not in text
        assert all(text_of_file.split()[0] in text for text_of_file in words(name, 8) if text_of_file != held_out_text)
