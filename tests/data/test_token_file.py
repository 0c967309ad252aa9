import hashlib
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from data.conftest import stream_rows, with_start
from draws import drawn, without
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hfpatch.data import token_file
from hfpatch.data.blocks import IGNORE
from hfpatch.data.load import load_blocks, load_splits
from hfpatch.data.rows import Document
from hfpatch.data.token_file import describe_token_file, open_token_file, write_token_file
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.support.files import sha256_file


@pytest.fixture
def written(tmp_path, texts, tokenizer):
    path = tmp_path / "made" / "train.bin"
    write_token_file(
        path, map(Document, texts), tokenizer, DataSettings(source="owner/set", config="c"), revision="f" * 40
    )
    return path


def settings(path, **values):
    return DataSettings(source=str(path), **{"layout": "stream", "block_size": 8, **values})


def joined(documents):
    return [token for document in documents for token in document]


def flat(texts, tokenizer):
    return joined([*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts)


def test_ids_and_mask_are_hashed_as_they_are_written(tmp_path, tokenizer, monkeypatch):
    """The files are not read again."""
    read, chat = list[str](), with_start(tokenizer, template=None)
    chat.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chat.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    monkeypatch.setattr(token_file, "sha256_file", lambda file: (read.append(file.suffix), sha256_file(file))[1])
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "At the mill."}]
    chats, path = DataSettings(source="a.jsonl", format="messages"), tmp_path / "a.bin"
    info = write_token_file(path, [Document(json.dumps({"messages": turns}))] * 3, chat, chats)
    hashes = [hashlib.sha256(path.with_suffix(suffix).read_bytes()).hexdigest() for suffix in (".bin", ".learned")]
    assert [info.sha256, info.learned_sha256] == hashes
    assert read == [".safetensors"]


def test_the_file_holds_the_ids_and_the_sidecar_says_which(written, texts, tokenizer):
    ids = np.fromfile(written, dtype="<u2")
    assert ids.tolist() == flat(texts, tokenizer)
    info = json.loads(written.with_suffix(".json").read_text())
    tokenizer_sha256 = info.pop("tokenizer_sha256")
    assert re.fullmatch("[0-9a-f]{64}", tokenizer_sha256)
    documents = written.with_suffix(".safetensors")
    assert info.pop("documents_sha256") == hashlib.sha256(documents.read_bytes()).hexdigest()
    assert load_file(documents)["lengths"].tolist() == [len(tokenizer(text)["input_ids"]) + 1 for text in texts]
    assert info == {
        "dtype": "uint16", "tokens": len(ids), "documents": 4, "vocabulary_size": 300, "end_of_text": 0,
        "source": "owner/set", "config": "c", "split": "train", "revision": "f" * 40,
        "sha256": hashlib.sha256(written.read_bytes()).hexdigest(), "learned_sha256": None,
    }  # fmt: skip
    assert {path.name for path in written.parent.iterdir()} == {"train.bin", "train.json", "train.safetensors"}


def make_gapped(largest):
    """A tokenizer of four words whose ids go up to ``largest``."""
    words = {"<end>": 0, "mill": 1, "lamp": largest - 1, "river": largest}
    backend = Tokenizer(WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.mark.parametrize(("largest", "dtype"), [(65535, "uint16"), (65536, "uint32"), (70000, "uint32")])
def test_the_largest_id_decides_how_wide_ids_are(tmp_path, largest, dtype):
    words, tokenizer, path = ["mill lamp river", "river mill"], make_gapped(largest), tmp_path / "made.bin"
    ids = [1, largest - 1, largest, 0, largest, 1, 0]
    info = write_token_file(path, map(Document, words), tokenizer, DataSettings())
    assert (info.dtype, info.vocabulary_size) == (dtype, largest + 1)
    assert np.fromfile(path, dtype=np.dtype(dtype)).tolist() == ids
    assert load_blocks(settings(path, block_size=7), tokenizer)[0]["input_ids"].tolist() == ids
    path.with_suffix(".json").unlink()
    again = describe_token_file(path, tokenizer)
    assert (again.dtype, again.vocabulary_size, again.sha256) == (dtype, largest + 1, info.sha256)


def test_an_id_that_the_vocabulary_does_not_have_is_not_cut_to_size(tmp_path, monkeypatch):
    tokenizer = make_gapped(65537)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"mill": 60000})
    with pytest.raises(HfpatchError, match="gives the id 65537, beyond 60000, the largest of its vocabulary"):
        write_token_file(tmp_path / "made.bin", map(Document, ["mill river"]), tokenizer, DataSettings())
    assert not list(tmp_path.iterdir())


def test_blocks_of_a_stream_begin_anywhere_and_predict_all_but_their_first_token(written, texts, tokenizer):
    stream = flat(texts, tokenizer)
    blocks = load_blocks(settings(written), tokenizer)
    assert len(blocks) == len(stream) // 8
    for index in range(len(blocks)):
        row = blocks[index]
        expected = stream[8 * index : 8 * index + 8]
        assert set(row) == {"input_ids", "labels"}
        assert row["input_ids"].tolist() == expected
        assert row["labels"].tolist() == [IGNORE, *expected[1:]]  # the end-of-text too
    assert isinstance(blocks.rows.base, np.memmap)
    all_blocks = range(len(blocks))
    assert (
        blocks.count_predicted(all_blocks)
        == 7 * len(blocks)
        == sum(int((blocks[i]["labels"] >= 0).sum()) for i in all_blocks)
    )
    assert (blocks.source, blocks.revision, blocks.documents) == ("owner/set", "f" * 40, 4)
    assert (blocks.tokens, blocks.to_json()["layout"]) == (8 * len(blocks), "stream")
    message = rf"owner/set: the {len(stream)} tokens of 4 documents do not fill one block \(data.block_size is 4096\)"
    with pytest.raises(HfpatchError, match=message):
        load_blocks(settings(written, block_size=4096), tokenizer)


@pytest.mark.parametrize("begun", [False, True])
@given(
    documents=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=12), min_size=1, max_size=20), data=st.data()
)
def test_documents_of_another_tool_are_told_apart_by_their_end(tokenizer, begun, documents, data):
    """Also where one id begins and ends them, and where a last one has no end."""
    ended = [[0, *document, 0] if begun else [*document, 0] for document in documents]
    if data.draw(st.booleans()):
        ended[-1].pop()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        path = Path(folder) / "a.bin"
        np.asarray(joined(ended), "<u2").tofile(path)
        patched.setattr(token_file, "_CHUNK_TOKENS", data.draw(st.integers(2, 40)))
        info = describe_token_file(path, tokenizer)
        assert open_token_file(path, tokenizer).stream.lengths.tolist() == [len(document) for document in ended]
        assert info.documents == len(ended)


@pytest.mark.parametrize("append_eos", [True, False])
@given(
    words=st.lists(st.sampled_from(["mill", "lamp <end> river", "lamp", "<end>", ""]), min_size=3, max_size=12),
    data=st.data(),
)
def test_held_out_documents_of_a_stream_are_drawn_over_it(append_eos, words, data):
    """Of a tokenizer that begins documents with the token that ends them, and of text that contains it."""
    tokenizer = make_gapped(4000)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    texts = [f"{text} {'river ' * n}" for n, text in enumerate(words, 2)]
    held_out = data.draw(st.integers(1, len(texts) - 1))
    ids = [
        [*tokenizer(text)["input_ids"], *([0] if append_eos and not text.endswith("<end>") else [])] for text in texts
    ]
    size = 3
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.bin"
        info = write_token_file(path, map(Document, texts), tokenizer, DataSettings(append_eos=append_eos))
        assert info.end_of_text == (0 if append_eos else None)
        splits = load_splits(settings(path, held_out=held_out, block_size=size), tokenizer)
        whole = load_splits(settings(path, block_size=size), tokenizer).train
        assert np.asarray(whole.rows).tolist() == stream_rows(ids, size, [0])
        places = drawn(range(len(texts)), held_out)
        for blocks, part in ((splits.train, without(ids, places)), (splits.held_out, [ids[index] for index in places])):
            assert np.asarray(blocks.rows).tolist() == stream_rows(part, size, [0])
            assert blocks.documents == len(part)
        assert len({splits.train.sha256, splits.held_out.sha256, whole.sha256}) == 3
        with pytest.raises(HfpatchError, match="so none is left to train on"):
            load_splits(settings(path, held_out=len(texts), block_size=size), tokenizer)


def test_the_hash_follows_tokens_block_size_and_part(written, texts, tokenizer):
    chosen = [{}, {"block_size": 9}, {"held_out": 1}, {"held_out": 2}]
    assert len({load_blocks(settings(written, **values), tokenizer).sha256 for values in chosen}) == 4
    other = written.with_name("other.bin")
    write_token_file(other, map(Document, texts[::-1]), tokenizer, DataSettings(source="owner/set"))
    assert load_blocks(settings(other), tokenizer).sha256 != load_blocks(settings(written), tokenizer).sha256


def test_a_failure_half_way_leaves_nothing(tmp_path, tokenizer):
    def broken():
        yield "the mill likes nobody"
        raise HfpatchError("data set owner/set: cannot be read beyond row 0")

    with pytest.raises(HfpatchError, match="beyond row 0"):
        write_token_file(tmp_path / "a.bin", map(Document, broken()), tokenizer, DataSettings())
    lone = DataSettings(source="lone.txt", append_eos=False)  # of a mixture, too, the message names it
    with pytest.raises(HfpatchError, match=r"lone\.txt: no document has two tokens"):
        write_token_file(tmp_path / "a.bin", map(Document, ["e"]), tokenizer, lone)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(written, texts, tokenizer):
    before = written.read_bytes()
    with pytest.raises(HfpatchError, match=r"train\.bin: exists already"):
        write_token_file(written, map(Document, texts[:1]), tokenizer, DataSettings())
    written.rename(written.with_name("moved.bin"))
    with pytest.raises(HfpatchError, match=r"train\.json: exists already"):
        write_token_file(written, map(Document, texts[:1]), tokenizer, DataSettings())
    with pytest.raises(HfpatchError, match=r"train\.tokens: the name of a token file must end with \.bin"):
        write_token_file(written.with_suffix(".tokens"), map(Document, texts[:1]), tokenizer, DataSettings())
    assert written.with_name("moved.bin").read_bytes() == before


def test_another_tokenizer_is_refused_and_the_same_saved_padded_and_cut_short_is_not(
    tmp_path, written, texts, tokenizer
):
    wrong = train_tokenizer(texts, 290)
    message = "made with another tokenizer, whose vocabulary has 300 ids instead of 290; use that tokenizer"
    with pytest.raises(HfpatchError, match=message):
        load_blocks(settings(written), wrong)
    other = train_tokenizer(["ein anderer Text mit ganz anderen Paaren, der Mühle und der Lampe wegen"] * 2, 300)
    assert len(other) == len(tokenizer)
    with pytest.raises(HfpatchError, match="made with another tokenizer"):
        load_blocks(settings(written), other)
    tokenizer.save_pretrained(tmp_path / "t")
    again = type(tokenizer).from_pretrained(tmp_path / "t")
    again.pad_token = "a"
    again(["the mill", "the"], truncation=True, max_length=2, padding=True)
    assert len(load_blocks(settings(written), again)) > 0


def test_bad_files_are_one_clear_line(written, tokenizer):
    def message():
        with pytest.raises(HfpatchError) as caught:
            load_blocks(settings(written), tokenizer)
        return str(caught.value)

    content, ids = written.read_bytes(), np.fromfile(written, dtype="<u2")
    for other in (content[:-1], content[:-2], content + bytes(2)):
        written.write_bytes(other)
        assert re.search(rf"has {len(other)} bytes, but .* have {len(content)}; it is truncated", message())
    (299 - ids).astype("<u2").tofile(written)
    assert re.search(r"train\.bin: has other ids than train\.json .* \(sha256 .*; restore", message())
    written.write_bytes(content)
    side = written.with_suffix(".json")
    info = json.loads(side.read_text())
    side.write_text(json.dumps({**info, "vocabulary_size": 301}))
    assert "whose vocabulary has 301 ids instead of 300" in message()
    side.write_text(json.dumps({**info, "dtype": "float16"}))
    assert "train.json" in message()
    assert "dtype" in message()
    side.write_text(json.dumps({key: value for key, value in info.items() if key != "tokens"}))
    assert "tokens" in message()
    side.write_text("{")
    assert "cannot be read as JSON" in message()
    side.unlink()
    assert "description train.json is missing" in message()
    assert "hfpatch tokenize RECIPE data.source=" in message()
    written.unlink()
    assert "no such token file; hfpatch tokenize RECIPE --out" in message()


def test_a_file_of_another_tool_is_described_and_then_used(tmp_path, text_file, texts, tokenizer, monkeypatch):
    ids = flat(texts, tokenizer)
    path = tmp_path / "theirs.bin"
    np.asarray(ids, dtype="<u2").tofile(path)
    info = describe_token_file(path, tokenizer)
    assert (info.tokens, info.documents, info.end_of_text, info.source) == (len(ids), 4, 0, "theirs.bin")
    counted, of_text = [], settings(text_file)
    monkeypatch.setattr("hfpatch.data.tokenizer._BATCH_CHARACTERS", 1)
    ours = write_token_file(
        tmp_path / "ours.bin", map(Document, texts), tokenizer, of_text, on_part=lambda *counts: counted.append(counts)
    )
    assert counted == [(count, len(flat(texts[:count], tokenizer))) for count in range(1, 5)]
    assert info.sha256 == ours.sha256
    made, read = load_blocks(settings(tmp_path / "ours.bin"), tokenizer), load_blocks(of_text, tokenizer)
    assert np.array_equal(made.rows, read.rows)
    assert made.to_json() == read.to_json()
    assert np.array_equal(load_blocks(settings(path), tokenizer).rows.reshape(-1), ids[: len(ids) // 8 * 8])
    assert load_splits(settings(path, held_out=1), tokenizer).held_out.documents == 1
    with pytest.raises(HfpatchError, match=r"theirs\.json: exists already"):
        describe_token_file(path, tokenizer)


@pytest.mark.parametrize(
    ("ids", "dtype", "message"),
    [
        ([1, 2, 299, 300], "<u2", "read as uint16 it has the id 300, beyond the tokenizer's vocabulary of 300"),
        ([1, 2, 299], "<u4", "every second uint16 in it is 0, so its ids use a wider type; write them as uint16"),
        ([1, 2, 70000], "<u4", "read as uint16 it has the id 4464"),
        ([1, 2, 3], "u1", "has 3 bytes, no whole number of uint16 ids"),
        ([], "<u2", "is missing or empty"),
    ],
)
def test_a_file_of_another_vocabulary_is_not_described(tmp_path, tokenizer, ids, dtype, message):
    path = tmp_path / "theirs.bin"
    np.asarray(ids, dtype=dtype).tofile(path)
    with pytest.raises(HfpatchError, match=message):
        describe_token_file(path, tokenizer)
    assert not path.with_suffix(".json").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layout": "packed"}, "is one stream; set data.layout=stream"),
        ({"layout": "padded"}, "is one stream; set data.layout=stream"),
        (
            {"max_documents": 3},
            "data.max_documents sets how text is read, and x.bin already contains tokens; leave it out",
        ),
        ({"append_eos": False}, "data.append_eos sets how text is read"),
        ({"streaming": True}, "data.streaming sets how text is read"),
    ],
)
def test_settings_that_a_token_file_has_no_use_for_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        settings("x.bin", **values)
