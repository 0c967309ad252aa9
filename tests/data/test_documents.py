"""Which document each token of held-out blocks is from, and the bytes of its text."""

from dataclasses import replace

import numpy as np
import pytest
from draws import drawn

from hfpatch.data.documents import describe_documents
from hfpatch.data.load import load_splits
from hfpatch.recipes.data import DataSettings

SIZE = 16
TEXTS = [f"Document {n}: " + "the Fähre – über 東京 🙂 again " * (n % 4) + "end." for n in range(9)]
KEPT = [TEXTS[index] for index in drawn(range(9), 6)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


def load(source, tokenizer, layout, **options):
    chosen = DataSettings(source=str(source), block_size=SIZE, layout=layout, held_out=len(KEPT))
    return load_splits(chosen, tokenizer, **options).held_out


def ids_of(tokenizer):
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in KEPT]


def stretches(tokenizer, layout):
    """Return (document, ids, whether the first is predicted) for every stretch of a document that is in a row."""
    documents = ids_of(tokenizer)
    if layout == "padded":
        return [(number, ids[:SIZE], False) for number, ids in enumerate(documents)]
    if layout == "packed":
        cut = [(n, ids[at : at + SIZE], False) for n, ids in enumerate(documents) for at in range(0, len(ids), SIZE)]
        return [piece for piece in cut if len(piece[1]) > 1]
    flat = [(number, token) for number, ids in enumerate(documents) for token in ids]
    rows = [flat[at : at + SIZE] for at in range(0, len(flat) - SIZE + 1, SIZE)]
    pieces = []
    for row in rows:
        for number in dict.fromkeys(number for number, _ in row):
            pieces.append((number, [token for n, token in row if n == number], number != row[0][0]))
    return pieces


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
def test_each_token_is_from_its_document(source, tokenizer, layout, cached, tmp_path):
    options = {"cache_dir": tmp_path / "cache"} if cached else {}
    load(source, tokenizer, layout, **options)
    blocks = load(source, tokenizer, layout, **options)
    pieces = []
    for index, owners in enumerate(blocks.owners):
        row = blocks[index]
        assert ((owners < 0) == (np.arange(SIZE) >= blocks.count_tokens([index]))).all()
        for start in np.flatnonzero(np.diff(owners, prepend=-2)):
            stop = next((at for at in range(start, SIZE) if owners[at] != owners[start]), SIZE)
            if owners[start] >= 0:
                ids, labels = row["input_ids"][start:stop].tolist(), row["labels"][start:stop]
                pieces.append((int(owners[start]), ids, bool(labels[0] != -100)))
    assert sorted(pieces) == sorted(stretches(tokenizer, layout))


@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
def test_bytes_are_those_of_the_predicted_text(source, tokenizer, layout):
    blocks = load(source, tokenizer, layout)
    expected = np.zeros(len(KEPT), np.int64)
    backend = tokenizer.backend_tokenizer
    for number, ids, first in stretches(tokenizer, layout):
        tokens = [backend.id_to_token(token) for token in ids[0 if first else 1 :] if token != tokenizer.eos_token_id]
        expected[number] += sum(map(len, tokens))  # a character of byte-level BPE's alphabet is a byte
    described = describe_documents(blocks, tokenizer)
    assert described.bytes.tolist() == expected.tolist()
    assert len(set(described.hashes)) == len(KEPT)


def test_hashes_tell_documents_apart_and_text_to_train_on_keeps_none(source, tokenizer, tmp_path):
    one = describe_documents(load(source, tokenizer, "packed"), tokenizer).hashes
    assert describe_documents(load(source, tokenizer, "packed"), tokenizer).hashes == one
    source.write_text("\n\n".join([*TEXTS[:-1], "Another end."]))
    other = describe_documents(load(source, tokenizer, "packed"), tokenizer).hashes
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]
    chosen = DataSettings(source=str(source), block_size=SIZE, held_out=2)
    assert load_splits(chosen, tokenizer).train.owners is None


def test_documents_beyond_the_last_row_have_neither_hash_nor_group(source, tokenizer):
    blocks = load(source, tokenizer, "stream")
    described = describe_documents(replace(blocks, groups=np.arange(len(KEPT) + 3, dtype=np.int32)), tokenizer)
    assert len(described.groups) == len(described.bytes) == len(described.hashes) == int(blocks.owners.max()) + 1


def test_a_mixture_has_the_documents_of_one_source_after_the_other(source, tokenizer, tmp_path):
    other = tmp_path / "b.txt"
    other.write_text("\n\n".join(f"Another text, {n}." for n in range(9)))
    sources = [{"source": str(path), "weight": 1.0} for path in (source, other)]
    chosen = DataSettings(mixture=sources, block_size=SIZE, held_out=8)
    blocks = load_splits(chosen, tokenizer).held_out
    alone = [
        load_splits(DataSettings(source=str(path), block_size=SIZE, held_out=4), tokenizer).held_out
        for path in (source, other)
    ]
    described, parts = describe_documents(blocks, tokenizer), [describe_documents(one, tokenizer) for one in alone]
    assert described.hashes == [digest for part in parts for digest in part.hashes]
    assert described.bytes.tolist() == [size for part in parts for size in part.bytes.tolist()]
    assert describe_documents(blocks.take(np.arange(len(alone[0]))), tokenizer).hashes == parts[0].hashes
