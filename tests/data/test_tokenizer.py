from itertools import combinations

import pytest
import torch
from data.conftest import with_start
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfpatch.data.tokenizer import (
    END_OF_TEXT,
    ByteCounter,
    check_tokenizer,
    hash_tokenizer,
    start_of_document,
    tokenize_in_parts,
    train_tokenizer,
)
from hfpatch.errors import HfpatchError


def test_size_and_end_of_text(tokenizer):
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer(END_OF_TEXT)["input_ids"] == [0]
    with pytest.raises(HfpatchError, match="a vocabulary of 256 is too small"):
        train_tokenizer(["x"], 256)


def test_the_same_text_gives_the_same_tokenizer_also_after_saving(tokenizer, texts, tmp_path):
    assert hash_tokenizer(train_tokenizer(texts, 300)) == hash_tokenizer(tokenizer)
    assert hash_tokenizer(train_tokenizer(texts, 290)) != hash_tokenizer(tokenizer)
    split = with_start(tokenizer, template=None)
    before, split.split_special_tokens = hash_tokenizer(split), True
    assert split("a<|endoftext|>")["input_ids"] != tokenizer("a<|endoftext|>")["input_ids"]
    assert hash_tokenizer(split) != before
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("the blue lamp")["input_ids"] == tokenizer("the blue lamp")["input_ids"]


def test_tokens_without_an_embedding_are_refused_but_for_special_ones(tokenizer):
    model = torch.nn.Embedding(300, 2)
    model.get_input_embeddings = lambda: model
    check_tokenizer(model, tokenizer)
    check_tokenizer(model, with_start(tokenizer, "<image_soft_token>", template=None))
    gaps = Tokenizer(WordLevel({END_OF_TEXT: 0, "mill": 300}))
    with pytest.raises(HfpatchError, match="the tokenizer has ids up to 300 and the model 300 embeddings"):
        check_tokenizer(model, PreTrainedTokenizerFast(tokenizer_object=gaps, eos_token=END_OF_TEXT))


@given(
    texts=st.lists(st.text(alphabet="the mil<|endoftext|>", max_size=30), min_size=1, max_size=5), first=st.booleans()
)
def test_tokenising_is_calling_the_tokenizer(tokenizer, texts, first):
    chosen = with_start(tokenizer) if first else tokenizer
    chosen(["the mill", "x"], truncation=True, max_length=2, padding=True)  # must not matter afterwards
    rows = [row if row and row[-1] == 0 else [*row, 0] for row in chosen(["mill", *texts])["input_ids"]]
    chosen(["the mill", "x"], truncation=True, max_length=2, padding=True)
    ((made, *_),) = tokenize_in_parts(["mill", *texts], chosen, append_eos=True)
    kept = [row for row in rows if len(row) > 1]
    assert made.lengths.tolist() == [len(row) for row in kept]
    assert made.tokens.tolist() == [token for row in kept for token in row]


@pytest.mark.parametrize(
    ("template", "expected"), [(None, []), ("{0} $A", [0]), ("$A {0}", []), ("{0} {0} $A {0}", [0, 0])]
)
def test_what_begins_a_document_is_what_the_tokenizer_puts_before_its_text(tokenizer, template, expected):
    words = Tokenizer(WordLevel({END_OF_TEXT: 0, "mill": 1}))  # it has no letters
    for one in (tokenizer, type(tokenizer)(tokenizer_object=words, eos_token=END_OF_TEXT)):
        assert start_of_document(with_start(one, template=template)) == expected


def with_fallback():
    """Return a tokenizer like Llama's: a few letters, every other character byte by byte, a space before the text."""
    letters = {"▁": 257, "a": 258, "▁a": 259, "é": 260}
    vocabulary = {"<s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, **letters}
    backend = Tokenizer(BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_bytes_of_tokens_are_those_of_their_text_also_inside_a_character(tokenizer):
    """Of byte-level BPE, byte fallback and whole words, from each token to each: counted by hand."""
    text = "a \ufffd東é aé <|endoftext|>🙂éa"
    level, fallback = with_start(tokenizer, "<s>"), with_fallback()
    level.add_tokens(["🙂é"])
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"é": 0, "Ġa": 1, "<0xE6>a": 2})))
    of_token = {"<s>": 0, END_OF_TEXT: 0, "🙂é": 6, "é": 2}

    def in_bytes(token, is_first):
        return of_token.get(token, len(token))

    def with_spaces(token, is_first):
        spaces, letters = 0 if is_first else token.count("▁"), token.strip("▁")
        return spaces + of_token.get(letters, 1 if letters else 0)

    def between_spaces(token, is_first):
        return {"é": 2, "Ġa": 3, "<0xE6>a": 7}[token] + (0 if is_first else 1)

    cases = [(level, level(text)["input_ids"], in_bytes), (fallback, fallback(text)["input_ids"], with_spaces)]
    for made, ids, size in [*cases, (words, [0, 1, 2, 1], between_spaces)]:
        tokens, counter = made.convert_ids_to_tokens(ids), ByteCounter(made)
        for start, stop in combinations(range(len(ids) + 1), 2):
            expected = sum(size(token, index == 0) for index, token in enumerate(tokens[start:stop]))
            assert counter.count(ids[start:stop]) == expected, tokens[start:stop]
    assert ByteCounter(level).count(cases[0][1]) == len(text.replace(END_OF_TEXT, "").encode())
