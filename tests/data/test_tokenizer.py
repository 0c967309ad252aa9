import pytest
from data.conftest import with_start
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from hfpatch.data.tokenizer import (
    END_OF_TEXT,
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
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("the blue lamp")["input_ids"] == tokenizer("the blue lamp")["input_ids"]


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
