import pytest
from transformers import AutoTokenizer

from hfpatch.data.tokenise import hash_tokenizer
from hfpatch.data.tokenizer import END_OF_TEXT, train_tokenizer
from hfpatch.errors import HfpatchError


def test_any_text_comes_back(tokenizer):
    for text in ["the mill likes nobody", "  two  spaces\n\nÆgir 漢字 🙂 \t"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_size_and_end_of_text(tokenizer):
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer(END_OF_TEXT)["input_ids"] == [0]


def test_the_same_text_gives_the_same_tokenizer_also_after_saving(tokenizer, texts, tmp_path):
    assert hash_tokenizer(train_tokenizer(texts, 300)) == hash_tokenizer(tokenizer)
    assert hash_tokenizer(train_tokenizer(texts, 290)) != hash_tokenizer(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("the blue lamp")["input_ids"] == tokenizer("the blue lamp")["input_ids"]


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(HfpatchError, match="a vocabulary of 256 is too small"):
        train_tokenizer(["x"], 256)
