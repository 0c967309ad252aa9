import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hfpatch.data.readers import read_rows
from hfpatch.data.rows import Rows
from hfpatch.errors import HfpatchError
from hfpatch.recipes.sources import TextSource


def read_documents(path, **settings):
    rows = Rows(TextSource(source=str(path), **settings))
    return (document.text for document in rows.documents(read_rows(path, rows), str(path)))


def read(path, text_column="text"):
    return list(read_documents(path, text_column=text_column))


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zst(data):
    """Two frames, one after the other, as parallel compressors write them."""
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:9], data[9:]))


COMPRESSORS = [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress), (".zst", zst)]


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSORS)
def test_jsonl_is_read_in_order_blank_lines_skipped(tmp_path, suffix, compress):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(jsonl({"text": "één"}) + b"\n" + jsonl({"text": "two\n", "id": 2})))
    assert read(path) == ["één", "two\n"]


def test_txt_is_split_at_separator_lines_or_else_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\nstill one\r\n\r\n \ntwo\n\n")
    assert read(path) == ["one\nstill one", "two"]
    path = tmp_path / "a.txt.xz"
    text = "first\n\nbook says <|endoftext|> here\n<|endoftext|>\nsecond\n\nbook\n<|endoftext|>\n"
    path.write_bytes(lzma.compress(text.encode()))
    assert read(path) == ["first\n\nbook says <|endoftext|> here", "second\n\nbook"]


def test_txt_is_read_a_document_at_a_time(tmp_path):
    """A text that is far longer than a document takes the memory of one."""
    path = tmp_path / "a.txt"
    path.write_text("the mill likes nobody\n\n" * 15_000 + "the end\n")
    tracemalloc.start()
    last, count = "", 0
    for text in read_documents(path):
        last, count = text, count + 1
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (count, last) == (15_001, "the end")
    assert used < 0.1 * path.stat().st_size


@given(st.lists(st.lists(st.sampled_from(["a", "b b", " c", "<|x|> d"]), min_size=1), min_size=1), st.booleans())
def test_txt_gives_its_documents_back(documents, separated):
    texts = ["\n".join(lines) for lines in documents]
    separator = "\n<|endoftext|>\n" if separated else "\n\n \n"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_text(separator.join(texts) + ("\n<|endoftext|>\n" if separated else ""))
        assert list(read_documents(path)) == texts


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSORS)
def test_csv_is_read_with_quoted_commas_and_lines(tmp_path, suffix, compress):
    texts = ["one, two", 'she said "no"', "two\nlines", "", "x" * 200_000]
    table = io.StringIO()
    csv.writer(table).writerows([["", "text", ""], *(("x", text, number) for number, text in enumerate(texts))])
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(compress(b"\xef\xbb\xbf\n" + table.getvalue().encode() + b"\r\n"))
    assert read(path) == texts


@pytest.mark.parametrize("content", [b' [{"text": "one"},\n{"text": "two"}]', b'{"text": "one"}\n{"text": "two"}\n'])
def test_json_is_a_list_or_lines(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    assert read(tmp_path / "a.json") == ["one", "two"]


def test_parquet_column(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"body": ["one", "two"], "n": [1, 2]}), path)
    assert read(path, "body") == ["one", "two"]
    with pytest.raises(HfpatchError, match=r"no column 'bodi' \(did you mean 'body'\?\); the columns are: body, n"):
        read(path, "bodi")


def test_rows_without_text_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": None}, {"text": "one"}, {"text": None}, {"text": "two"}))
    parquet.write_table(pa.table({"text": ["one", None, "two", None]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.warns(UserWarning, match=rf"{name}: left out rows whose 'text' is null: 2"):
            assert read(tmp_path / name) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = jsonl({"text": "one"}) if name.endswith("jsonl") else b"one\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read(tmp_path / name) == ["one"]


def parquet_of(texts):
    stream = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), stream)
    return stream.getvalue()


def damaged_parquet():
    content = bytearray(parquet_of([f"{number} abcdefgh" for number in range(500)]))
    content[40:1000] = b"\xff" * 960  # inside a page; the table of contents is at the end
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl: the file is empty"),
        ("a.jsonl", jsonl({"text": "x"}, {"txt": "y", "n": 1}), r"a.jsonl:2: no column 'text' .*columns are: txt, n"),
        ("a.jsonl", jsonl({"text": "x"}) + b'{"text": "\xff"}\n', "a.jsonl:2: not UTF-8"),
        ("a.jsonl", jsonl({"text": "x"}) + b"\n{broken\n", "a.jsonl:3: not valid JSON"),
        ("a.jsonl", b'["x"]\n', "a.jsonl:1: is a JSON list; each line must be one JSON object"),
        ("a.jsonl", jsonl({"text": 3}), "a.jsonl:1: column 'text' is int, not text"),
        ("a.jsonl", jsonl({"text": None}, {"text": None}), "a.jsonl: column 'text' is null in every row"),
        ("a.jsonl", jsonl({"text": "x"}, {"text": "abc\ud800"}), r"a.jsonl:2: .*surrogate pair \(\\ud800, character 4"),
        ("a.jsonl", b'{"text": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", "1: not valid JSON .nested too deeply"),
        ("a.jsonl", jsonl({"text": "x"}) + b"[" + b"1" * 5_000, "a.jsonl:2: not valid JSON .an integer has thousands"),
        ("a.json", b"[" + b"1" * 5_000, "a.json: not valid JSON .an integer has thousands"),
        ("a.txt", b"one\n\ntwo\n\xe9\n", "a.txt:4: not UTF-8"),
        ("a.txt.xz", b"no xz at all", "a.txt.xz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(jsonl({"text": "x" * 999}), mtime=0)[:-9], "a.jsonl.gz: cannot be read"),
        ("a.txt.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, "a.txt.gz: cannot be read .*invalid block type"),
        ("a.txt.bz2", b"no bz2 at all", "a.txt.bz2: cannot be read"),
        ("a.jsonl.zst", zst(jsonl({"text": "x" * 999}))[:-9], "a.jsonl.zst: cannot be read .*Truncated"),
        ("a.csv", b"text,n\none\n", "a.csv:2: has 1 fields, the first line 2; quote commas"),
        ("a.csv", b'text\n"one\n', "a.csv:2: not valid CSV"),
        ("a.csv", b"\ntext,n,text\none,1,two\n", "a.csv:2: several columns are called 'text'; rename them"),
        ("a.csv", b"txt\none\n", r"a.csv:2: no column 'text' \(did you mean 'txt'\?\)"),
        ("a.json", b'[{"text": "one"}, 3]', "a.json, row 2: is a JSON int; each row must be an object"),
        ("a.json", b'[{"text": "one"}', "a.json: not valid JSON .*; it must be a list of objects"),
        ("a.parquet", parquet_of([["x"], None]), "a.parquet, row 1: column 'text' is list, not text"),
        ("a.parquet", b"no parquet", "a.parquet: not a parquet file"),
        ("a.parquet", damaged_parquet(), "a.parquet: cannot be read"),
        ("a.parquet", parquet_of(pa.array([b"\xff"]).view(pa.string())), "a.parquet: cannot be read .*can't decode"),
    ],
)  # fmt: skip
def test_bad_files_are_one_clear_error(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(HfpatchError, match=message):
        read(path)


def test_plain_text_has_no_columns(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(HfpatchError, match=r"a \.txt file has no columns; data.format=messages needs"):
        list(read_documents(tmp_path / "a.txt", format="messages"))
