import pytest
import torch

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.training.architecture import build_model

TINY = {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def test_a_seed_fixes_the_weights_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = build_model(TINY, seed=1), build_model(TINY, seed=1), build_model(TINY, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.get_input_embeddings().weight for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one.config.hidden_size == 32
    assert one.dtype is torch.float32


def test_the_tokenizer_gives_the_vocabulary_and_a_larger_one_is_refused():
    tokenizer = train_tokenizer(["a mill"], 257)
    bare = {key: value for key, value in TINY.items() if key != "vocab_size"}
    assert build_model(bare, tokenizer=tokenizer).config.vocab_size == 257
    assert build_model({**bare, "vocab_size": 320}, tokenizer=tokenizer).config.vocab_size == 320
    with pytest.raises(HfpatchError, match=r"architecture.vocab_size is 256 and the tokenizer has 257 tokens; make it"):
        build_model({**TINY, "vocab_size": 256}, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neo_x"}, r"gpt_neo_x is not a causal language model \(did you mean 'gpt_neox'\?\)"),
        ({"model_type": None}, "None is not a causal language model"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({"hiden_size": 3}, r"hiden_size: gpt_neox has no such key \(did you mean 'hidden_size'\?\)"),
        ({"hidden_size": 30}, "gpt_neox refuses it .*not divisible"),
        ({"hidden_size": "wide"}, "gpt_neox refuses it .*expected int"),
    ],
)
def test_bad_architectures_are_one_clear_error(change, message):
    with pytest.raises(HfpatchError, match=message):
        build_model({**TINY, **change})


def test_a_models_own_spelling_of_a_key_is_known_too():
    model = build_model({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "num_attention_heads": 4, "vocab_size": 64})
    assert (model.config.hidden_size, model.config.n_head) == (32, 4)
