import gzip
import json
import os
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from hfpatch.data.corpora import documents, filtered_documents, open_corpus
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.tinyworld.language import documents as tinyworld_documents


def write_jsonl(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_tinyworld_is_the_embedded_language():
    settings = DataSettings(source="tinyworld/shifted", max_documents=3)
    assert list(documents(settings)) == list(tinyworld_documents("shifted", count=3))
    other = DataSettings(source="tinyworld/base", max_documents=3)
    assert open_corpus(settings).digest() != open_corpus(other).digest()


def test_a_file_of_the_same_size_and_time_is_another_text(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", "one two")
    settings, before = DataSettings(source=str(file)), file.stat()
    digest = open_corpus(settings).digest()
    os.utime(write_jsonl(file, "six two"), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(documents(settings)) == ["six two"]
    assert open_corpus(settings).digest() != digest


def test_a_folder_is_read_file_by_file_and_filters_apply(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", "third one")
    write_jsonl(tmp_path / "a.jsonl.gz", "  x  ", "first one", "second one")
    (tmp_path / "README.md").write_text("not data")
    settings = DataSettings(source=str(tmp_path), min_characters=5)
    assert list(documents(settings)) == ["first one", "second one", "third one"]
    assert list(documents(settings.model_copy(update={"max_documents": 2}))) == ["first one", "second one"]


def test_a_pattern_takes_all_files_that_match(tmp_path):
    write_jsonl(tmp_path / "b" / "2.jsonl", "third")
    write_jsonl(tmp_path / "a" / "1.jsonl.gz", "first", "second")
    (tmp_path / "a" / "1.md").write_text("not data")
    settings = DataSettings(source=str(tmp_path / "**" / "[12].*"))
    assert list(documents(settings)) == ["first", "second", "third"]
    write_jsonl(tmp_path / "c" / "2.jsonl", "fourth")
    other = settings.model_copy(update={"source": str(tmp_path / "b")})
    assert open_corpus(settings).digest() != open_corpus(other).digest()
    for pattern, problem in (("*.txt", "has no files"), ("a/*.md", "has no file of a known type")):
        wrong = DataSettings(source=str(tmp_path / pattern))
        with pytest.raises(HfpatchError, match=f"data.source: .* {problem}; use .jsonl"):
            open_corpus(wrong)


SLICES = [
    "train[:1%]",
    "train[7:9]",
    "train[-3:]",
    "train[33%:66%]",
    "train[:]",
    "train[:-90%]",
    "train[5%:5%]",
    "train[-10%:100%]",
    "train[7%:9%]",
    "train[-2:]+train[:3]",
    "train",
]


@pytest.mark.parametrize("split", SLICES)
@pytest.mark.parametrize("kind", ["file", "data_dir", "saved", "saved_dict"])
def test_a_slice_is_that_of_datasets(tmp_path, split, kind):
    texts = [f"text {number}" for number in range(157)]
    table = datasets.Dataset.from_dict({"text": texts})
    wanted = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(texts)})
    expected = [text for part in wanted for text in texts[part.from_ : part.to]]
    values = {"source": "owner/set", "split": split}
    if kind == "data_dir":
        write_jsonl(tmp_path / "set" / "train.jsonl", *texts)
    elif kind == "file":
        values["source"] = str(write_jsonl(tmp_path / "a.jsonl", *texts))
    else:
        made = table if kind == "saved" else datasets.DatasetDict(train=table, test=table.select([0]))
        made.save_to_disk(tmp_path / "saved")
        values["source"] = str(tmp_path / "saved")
    settings = DataSettings(**values)
    corpus = open_corpus(settings, tmp_path)
    assert [document.text for document in corpus.read()] == expected
    whole = open_corpus(settings.model_copy(update={"split": "train"}), tmp_path)
    assert (corpus.digest() == whole.digest()) == (split in ("train", "train[:]"))
    if kind in ("saved_dict", "data_dir"):
        write_jsonl(tmp_path / "set" / "test.jsonl", texts[0])
        both = open_corpus(settings.model_copy(update={"split": f"{split}+test"}), tmp_path)
        assert [document.text for document in both.read()] == [*expected, texts[0]]
        assert both.digest() not in (corpus.digest(), whole.digest())


@pytest.mark.parametrize("kind", ["file", "saved"])
def test_slices_are_of_rows_whatever_is_left_out_of_them(tmp_path, kind):
    """So two halves share nothing, although each format leaves other rows out."""
    rows = [
        {"text": None if n % 3 else f"text {n}", "prompt": f"text {n}", "completion": f"more {n}" if n < 20 else None}
        for n in range(40)
    ]
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    else:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(tmp_path / ("saved" if kind == "saved" else "a.jsonl"))
    first = DataSettings(source=source, split="train[:25%]", format="prompt_completion")
    second = DataSettings(source=source, split="train[25%:]")
    with pytest.warns(UserWarning, match="left out rows .*: 20$"):
        texts = list(documents(second))
    assert texts == [row["text"] for row in rows[10:] if row["text"]]
    assert [json.loads(document)["prompt"] for document in documents(first)] == [f"text {n}" for n in range(10)]


@pytest.mark.parametrize(
    ("source", "values", "message"),
    [
        ("{tmp}/saved", {"split": "tset"}, r"saved has no split 'tset' \(did you mean 'test'\?\)"),
        ("{tmp}/saved", {"split": "train+test"}, "has no split 'train'; there are test"),
        ("{tmp}/a.jsonl", {"split": "validation"}, "is local, which has the one split 'train'"),
        ("{tmp}/a.jsonl", {"split": "train[200:]"}, r"no document has text; .* data.split \(train\[200:\]\)"),
        (
            "{tmp}/a.jsonl",
            {"group": "^One"},
            r"a.jsonl: no text matches data.group \('\^One'\), so all of it would be one",
        ),
        ("{tmp}/a.jsonl", {"min_characters": 100}, "no document has 100 characters; lower data.min_characters"),
        ("tinyworld/base", {"split": "train[:9]"}, "data.split: tinyworld/base is plain text of one split"),
        ("tinyworld/base", {"format": "messages"}, "data.format: tinyworld/base is plain text"),
        ("tinyworld/shiftd", {}, r"tinyworld/shiftd: no such text \(did you mean 'tinyworld/shifted'\?\)"),
        ("{tmp}/saved", {"text_column": "txt", "split": "test"}, r"no column 'txt' \(did you mean 'text'\?\)"),
        ("a/b.bin", {"layout": "stream"}, "data.source: a/b.bin is a token file, but text is needed here"),
        ("{tmp}/broken", {}, "cannot be read as a data set of save_to_disk .*; save it again"),
        ("{tmp}/missing.jsonl", {}, "missing.jsonl does not exist"),
        ("missing.txt", {}, "data.source: missing.txt does not exist"),
        ("{tmp}/notes.md", {}, "notes.md is of an unknown type; use .jsonl"),
        ("{tmp}/plain*", {"text_column": "body"}, "data.text_column: .*plain. is plain text, without columns"),
        ("{tmp}/empty", {}, "empty has no files; use .jsonl"),
    ],
)
def test_bad_sources_and_splits_are_one_clear_error(tmp_path, source, values, message):
    datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path / "saved")
    for folder in ("broken", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    for name in ("notes.md", "plain.txt"):
        (tmp_path / name).write_text("x")
    write_jsonl(tmp_path / "a.jsonl", "one")
    with pytest.raises(HfpatchError, match=message):
        list(documents(DataSettings(source=source.format(tmp=tmp_path), **values)))
    with pytest.raises(HfpatchError, match=r"data_dir: .*absent is not a folder"):
        open_corpus(DataSettings(), tmp_path / "absent")


@pytest.mark.parametrize(("config", "path"), [("c-1", "set/c-1/train.jsonl"), (None, "set/train.jsonl.gz")])
def test_data_dir_maps_hub_names(tmp_path, config, path):
    write_jsonl(tmp_path / path, "one", "two")
    settings = DataSettings(source="owner/set", config=config)
    assert list(documents(settings, data_dir=tmp_path)) == ["one", "two"]


def test_hub_data_set_is_loaded_with_its_revision(monkeypatch):
    revision = "b" * 40
    table = datasets.Dataset.from_dict({"text": ["one", "", "two", None], "n": [1, 2, 3, 4]})
    table.info.download_checksums = {f"hf://datasets/owner/set@{revision}/c/train.parquet": {}}
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or table)
    settings = DataSettings(source="owner/set", config="c", split="validation", revision="v1")
    with pytest.warns(UserWarning, match="data set owner/set: left out rows .*: 1$"):
        assert list(documents(settings)) == ["one", "two"]
    assert open_corpus(settings).revision == revision
    assert calls[0] == (("owner/set", "c"), {"split": "validation", "revision": "v1"})
    with pytest.raises(HfpatchError, match="no column 'body'; the columns are: text, n"):
        open_corpus(settings.model_copy(update={"text_column": "body"}))


class Stream:
    """A hub stream that breaks at its end."""

    info = datasets.DatasetInfo()

    def __init__(self, *texts, columns=None):
        self.texts, self.column_names = texts, columns

    def select_columns(self, names):
        assert set(names) <= set(self.column_names or ())
        return self

    def __iter__(self):
        yield from ({"text": text} for text in self.texts)
        raise ConnectionError("Server disconnected\nmore")


@pytest.mark.parametrize("columns", [None, ["text", "n"]])
def test_a_streamed_data_set_is_read_as_far_as_needed(monkeypatch, columns):
    calls, commit = [], "c" * 40
    made = Stream("", "one", "two", "x", columns=columns)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append(kwargs) or made)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda source, revision: SimpleNamespace(sha=commit))
    settings = DataSettings(source="owner/set", streaming=True, max_documents=2)
    corpus = open_corpus(settings)
    assert list(filtered_documents(corpus, settings)) == [("one", None), ("two", None)]
    assert (corpus.revision, corpus.digest(), corpus.cacheable) == (commit, commit, True)
    assert calls[0]["streaming"] is True
    monkeypatch.setattr(huggingface_hub, "dataset_info", fail_offline)
    assert not open_corpus(settings).cacheable


def fail_offline(*args, **kwargs):
    raise ConnectionError("Couldn't reach 'owner/set' on the Hub (OfflineModeIsEnabled)\nmore")


def test_streaming_contradictions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"say how far with data.max_documents"):
        DataSettings(source="owner/set", streaming=True)
    path = write_jsonl(tmp_path / "a.jsonl", "one")
    with pytest.raises(HfpatchError, match=r"is local; data.streaming is for hub data sets"):
        open_corpus(DataSettings(source=str(path), streaming=True, max_documents=1))
    for key, source in (("config", path), ("revision", path), ("config", tmp_path / "*.jsonl")):
        with pytest.raises(HfpatchError, match=rf"is local; data.{key} is for hub data sets"):
            open_corpus(DataSettings(source=str(source), **{key: "v2"}))
    write_jsonl(tmp_path / "set" / "train.jsonl", "one")
    with pytest.raises(HfpatchError, match=r"data.revision v2: .*train.jsonl is a local copy of no known revision"):
        open_corpus(DataSettings(source="owner/set", revision="v2"), tmp_path)


def test_unreachable_hub_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", fail_offline)
    message = r"data set owner/set .*Couldn't reach.*train.jsonl does not exist"
    with pytest.raises(HfpatchError, match=message):
        open_corpus(DataSettings(source="owner/set"), tmp_path)


def test_a_stream_layout_reads_a_streamed_set_to_its_end_and_says_where_it_broke(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: Stream("one", "two"))
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda source, revision: SimpleNamespace(sha="c" * 40))
    stream = documents(DataSettings(source="owner/set", streaming=True, layout="stream"))
    assert [next(stream), next(stream)] == ["one", "two"]
    with pytest.raises(HfpatchError, match=r"owner/set: cannot be read beyond row 1 \(Server disconnected\); check"):
        next(stream)
