import gzip

import pytest

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.local import read_documents


def test_reads_plain_and_compressed_rows_and_only_the_fields(tmp_path):
    text = '{"a": 1, "b": "é", "c": null}\n\n{"b": "\\u2028", "a": [2]}\n'
    expected = [{"a": 1, "b": "é"}, {"a": [2], "b": "\u2028"}]
    plain, packed = tmp_path / "x.jsonl", tmp_path / "x.jsonl.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_documents(plain, ["a", "b"]) == expected
    assert read_documents(packed, ["a", "b"]) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no documents"),
        (b"\n \n", "contains no documents"),
        (b'{"text": "x"}\n{"page": "y"}\n', "x.jsonl:2: no field 'text'; required fields: text"),
        (b'{"text": "x"}\n\n{"text": "\xff"}\n', r"x.jsonl:3: not UTF-8"),
        (b'{"text": "x"\n', "x.jsonl:1: not valid JSON"),
        (b'["text"]\n', "x.jsonl:1: is a JSON list"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(HfpatchError, match=message):
        read_documents(path, ["text"])


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(HfpatchError, match=r"none\.jsonl: no such data file"):
        read_documents(tmp_path / "none.jsonl", ["text"])
    damaged = tmp_path / "x.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-12])
    with pytest.raises(HfpatchError, match="cannot be read"):
        read_documents(damaged, ["text"])
    damaged.write_bytes(b"not gzip")
    with pytest.raises(HfpatchError, match="cannot be read"):
        read_documents(damaged, ["text"])
