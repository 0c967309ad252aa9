"""The text of tuning: documents that occur once, in no task, and in nothing that is trained or measured on."""

import json

import pytest

from hfpatch.data.load import load_splits
from hfpatch.data.tuning import TuningText, choose_documents, digest_all, digest_text, put_last
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings

TEXTS = [f"document number {place} tells of things" for place in range(20)]
TEXTS[4] = TEXTS[17]  # twice
TEXTS[9] = "  document number\n 15 tells of   things"  # the same but for white space


def test_the_last_documents_are_taken_that_occur_once_and_in_no_task():
    task = digest_all(["A long article.\ndocument number 14 tells of things\nIt ends.", TEXTS[16]])
    chosen = choose_documents(TEXTS, TuningText(3, task), held_out=1)
    assert chosen == {18, 13, 12}  # 19 is held out, 17 and 15 come twice, 16 is a task's, 14 a line of one
    assert list(put_last("abcd", {1, 0})) == ["c", "d", "a", "b"]


def test_digests_differ_with_the_words_alone():
    assert digest_text("a  b\n") == digest_text(" a b") != digest_text("ab")
    keys = [TuningText(2, digest_all(texts)).to_json() for texts in (["x", "y"], ["y", "x"], ["x"])]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("documents", "held_out", "said"),
    [
        (20, 0, "tuning.held_out is 20 and there are 20 documents, so none is left"),
        (15, 5, "data.held_out 5 and there are 20 documents"),
        (17, 0, "of 20 documents only 16 occur once in the text and in none of the tasks"),
    ],
)
def test_too_few_documents_are_one_line(documents, held_out, said):
    with pytest.raises(HfpatchError, match=said):
        choose_documents(TEXTS, TuningText(documents), held_out=held_out)


@pytest.mark.parametrize("layout", ["padded", "packed", "stream"])
@pytest.mark.parametrize("held_out", [None, 2])
def test_the_splits_share_no_document_and_lose_none(tmp_path, tokenizer, layout, held_out):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    size = 8 if layout == "stream" else 64
    settings = DataSettings(source=str(path), block_size=size, layout=layout, held_out=held_out)
    tuning = TuningText(3, digest_all([TEXTS[16]]))
    splits = load_splits(settings, tokenizer, tuning=tuning)
    rest = TEXTS[: len(TEXTS) - (held_out or 0)]
    own = set(choose_documents(TEXTS, tuning, held_out=held_out or 0))
    expected = {"train": [text for place, text in enumerate(rest) if place not in own]}
    expected |= {"held_out": TEXTS[-2:]} if held_out else {}
    expected["tuning"] = [TEXTS[place] for place in sorted(own)]
    parts = {name: blocks for name, blocks in vars(splits).items() if blocks is not None}
    assert {name: blocks.documents for name, blocks in parts.items()} == {n: len(t) for n, t in expected.items()}
    for name, texts in expected.items():
        ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
        if layout == "stream":  # the rest that fills no block is left out
            joined = [token for each in ids for token in each]
            assert parts[name].rows.reshape(-1).tolist() == joined[: len(joined) // size * size]
        else:
            sizes = parts[name].sizes.tolist()
            assert sorted(sizes) == sorted(map(len, ids))
            assert parts[name].tokens == sum(map(len, ids))
    if held_out is None:
        other = load_splits(settings, tokenizer)
        assert other.tuning is None
        assert other.train.documents == len(TEXTS)
    cache = tmp_path / "cache"
    for _ in range(2):
        kept = load_splits(settings, tokenizer, tuning=tuning, cache_dir=cache)
        assert {name: blocks and blocks.sha256 for name, blocks in vars(kept).items()} == {
            name: blocks and blocks.sha256 for name, blocks in vars(splits).items()
        }
    excluding = load_splits(settings, tokenizer, tuning=TuningText(3), cache_dir=cache)
    assert excluding.tuning.sha256 != splits.tuning.sha256
