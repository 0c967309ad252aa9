"""Patched models in their surroundings: generation, offloading, quantisation, encoders, compilation, meta device."""

import copy
import warnings

import pytest
import torch
from families import (
    FAMILIES,
    FEW,
    hooks_act_as_registered,
    logits_of,
    make_model,
    make_tokens,
    model_type,
    perturb,
    train,
)
from peft import prepare_model_for_kbit_training
from torch._dynamo.utils import warn_once_cache
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPTNeoXConfig,
    LlamaConfig,
)

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, find_sites, patch, unpatch
from hfpatch.twins import twin

STACK = [PreProjectionConfig(gated=True, content_skip=True), NonlinearQueryConfig()]
NEW = 5
NEVER = 10_000  # an end-of-text that no model here can generate; older prompt lookup cannot do without one


def added(model):
    return {name: p for name, p in model.named_parameters() if "hfpatch_" in name}


def patched(case, std=0.1):
    model = patch(make_model(case), STACK)
    perturb(model, std=std)
    return model


def generate(model, tokens, **options):
    quiet = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **{**quiet, **options})


@pytest.mark.parametrize("case", FEW)
def test_every_cache_and_assisted_generation_give_what_greedy_gives_and_beams_do_without_one(case):
    model, tokens = patched(case), make_tokens(batch=1)
    expected = generate(model, tokens)
    for options in (
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2, "eos_token_id": NEVER},
        {"assistant_model": make_model(case)},
    ):
        assert torch.equal(generate(model, tokens, **options), expected), options
    beams = [generate(model, make_tokens(), num_beams=3, use_cache=use) for use in (True, False)]
    assert torch.equal(*beams)
    assert not torch.equal(beams[0], generate(unpatch(model), make_tokens(), num_beams=3))


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*:UserWarning", "ignore:MatMul8bitLt:UserWarning")
@pytest.mark.parametrize("kind", [LlamaConfig, GPTNeoXConfig])
def test_a_base_quantised_to_int8(kind, tmp_path):
    plain, tokens = twin(kind()), make_tokens()
    plain.save_pretrained(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"
    )
    model = prepare_model_for_kbit_training(quantised.eval())
    base = logits_of(model, tokens)
    assert not torch.equal(base, logits_of(plain, tokens))
    patch(model, STACK)
    assert torch.equal(logits_of(model, tokens), base)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_floating_point()}
    assert weights
    assert {n for n, p in model.named_parameters() if p.requires_grad} == added(model).keys()
    losses = train(model, tokens)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)


def test_a_model_built_on_the_meta_device_takes_its_weights_later():
    source = patched("llama")
    with torch.device("meta"):
        model = type(source)(source.config)
    patch(model, STACK)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    model.model.rotary_emb = copy.deepcopy(source.model.rotary_emb)
    assert torch.equal(logits_of(model.eval(), make_tokens()), logits_of(source, make_tokens()))


def compiled_agrees(case, backend):
    """Compare on the first block alone: tracing takes seconds a block, and all are alike."""
    model, base, tokens = patched(case, std=0.2), make_model(case), make_tokens()
    for whole in (model, base):
        blocks = whole.get_submodule(find_sites(whole)[0].path.partition(".0.")[0])
        del blocks[1:]
        whole.config.num_hidden_layers = 1
    with torch.no_grad():
        eager = model(tokens, labels=tokens, use_cache=False).loss
        torch.compiler.reset()
        warn_once_cache.clear()  # torch warns once in a process
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = torch.compile(model, backend=backend)(tokens, labels=tokens, use_cache=False).loss
    torch.compiler.reset()
    assert not [str(warning.message) for warning in caught if "hfpatch" in str(warning.message)]
    assert hooks_act_as_registered(model)
    torch.testing.assert_close(loss, eager, rtol=1e-5, atol=1e-5)
    assert abs(base(tokens, labels=tokens, use_cache=False).loss - loss) > 1e-4


@pytest.mark.parametrize(
    "case",  # one of each type
    [
        case if case in FEW else pytest.param(case, marks=pytest.mark.slow)
        for case in {model_type(case): case for case in [*reversed(FAMILIES), *FEW]}.values()
    ],
)
def test_compiled(case):
    compiled_agrees(case, "eager")


@pytest.mark.slow
def test_compiled_to_machine_code():
    compiled_agrees("gpt_neox", "inductor")
