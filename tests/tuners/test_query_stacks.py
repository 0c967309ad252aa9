"""A nonlinear query with every method of PEFT on the same projection, in both orders: it acts, or is refused."""

import pytest
import torch
from architectures.formulas import nonlinear, tensors_of
from families import logits_of, make_model, make_tokens, unchanged
from peft import HRAConfig, LoraConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft_methods import OPTIONS

from hfpatch import HfpatchError, MethodConfig, NonlinearQueryConfig, PreProjectionConfig, patch

BYPASS = {"HRA", "MISS bat", "GLORA", "SHIRA", "SUPERTUNING"}  # they compute with the projection's weight
ELSEWHERE = {"LN_TUNING", "TRAINABLE_TOKENS"}  # they are for norms and embeddings
THEIRS = {str(kind.value) for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if not issubclass(cls, MethodConfig)}
KINDS = sorted(THEIRS - ELSEWHERE | {"MISS bat", "LORA dora"})


def make_config(kind):
    name, _, variant = kind.partition(" ")
    options = OPTIONS.get(name, {}) | {"bat": {"init_weights": "bat"}, "dora": {"use_dora": True}}.get(variant, {})
    return PEFT_TYPE_TO_CONFIG_MAPPING[name](target_modules=["q_proj"], **options)


@torch.no_grad()
def with_formula(model, tokens):
    """Return logits where Q + f/2 is put by hand in the place of what the innermost projection gives."""
    for path, tensors in tensors_of(model, "nonlinear_query", "nonlinear_query").items():
        attention = model.get_submodule(path)
        attention.hfpatch_query._disable_adapters = True
        attention.q_proj.get_base_layer().register_forward_hook(
            lambda _, args, out, tensors=tensors: out + nonlinear(args[0].float(), tensors, output_norm="none") / 2
        )
    return logits_of(model, tokens)


def parts_of(kind, other, other_first):
    """Return a stack of one method and another, in an order; skip what is no part of a stack anyway."""
    try:
        config = make_config(kind)
        stack = [other, config] if other_first else [config, other]
        neutral = [PreProjectionConfig() if part is other else part for part in stack]
        logits_of(patch(make_model("llama"), neutral), make_tokens())
    except (HfpatchError, AttributeError, TypeError, ValueError) as error:
        pytest.skip(f"is no part of any stack: {error}")
    return stack


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("query_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_query_acts_or_is_refused(kind, query_first):
    parts = parts_of(kind, NonlinearQueryConfig(rank=4, output_norm="none"), query_first)
    model, tokens = make_model("llama"), make_tokens()
    if kind in BYPASS:
        with unchanged(model), pytest.raises(HfpatchError, match="does not call the projection"):
            patch(model, parts)
        return
    patch(model, parts)
    silent = logits_of(model, tokens)
    for name, parameter in model.named_parameters():
        if "nonlinear_query_down" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    acting = logits_of(model, tokens)
    assert not torch.allclose(acting, silent, atol=1e-2)
    torch.testing.assert_close(with_formula(model, tokens), acting, rtol=1e-4, atol=1e-4)


def test_every_bypass_is_among_the_methods_and_another_projection_may_be_bypassed():
    assert set(KINDS) >= BYPASS
    model = patch(make_model("llama"), [NonlinearQueryConfig(), HRAConfig(target_modules=["v_proj"])])
    assert not logits_of(model, make_tokens()).isnan().any()
    patch(make_model("gpt_neox"), [NonlinearQueryConfig(), LoraConfig(target_modules=["query_key_value"])])
