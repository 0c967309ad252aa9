"""Scales and soft caps of logits, found on every architecture that has one, compared with its stock logits."""

import pytest
import torch
from architectures.catalogue import NOT_TRIED, TYPES, options_of
from families import logits_of, make_model, make_tokens
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import CONFIG_MAPPING

from hfpatch.sites.lm_head import CAPS, SCALES, LMHead, Tail, find_lm_head
from hfpatch.twins import random_model, shrink

# model type -> options of its configuration, scale and cap of its logits, as its modelling source computes them
HEADS = {
    "beam": ({"final_logit_softcapping": 20.0}, 1, 20),
    "cohere": ({"logit_scale": 0.0625}, 1 / 16, None),
    "cohere2": ({"logit_scale": 3.0}, 3, None),
    "cohere2_moe": ({"logit_scale": 0.5}, 1 / 2, None),
    "cohere_compass_text": ({"logit_scale": 0.2}, 1 / 5, None),
    "falcon_h1": ({"lm_head_multiplier": 0.4}, 2 / 5, None),
    "gemma2": ({"final_logit_softcapping": 30.0}, 1, 30),
    "gemma3_text": ({"final_logit_softcapping": 12.0}, 1, 12),
    "gemma3n_text": ({"final_logit_softcapping": 30.0}, 1, 30),
    "gemma4_text": ({"final_logit_softcapping": 30.0}, 1, 30),
    "gemma4_unified_text": ({"final_logit_softcapping": 30.0}, 1, 30),
    "granite": ({"logits_scaling": 8.0}, 1 / 8, None),
    "granite_swa": ({"logits_scaling": 1.03}, 1 / 1.03, None),
    "granitemoe": ({"logits_scaling": 8.0}, 1 / 8, None),
    "granitemoe_swa": ({"logits_scaling": 8.0}, 1 / 8, None),
    "granitemoehybrid": ({"logits_scaling": 8.0}, 1 / 8, None),
    "granitemoeshared": ({"logits_scaling": 8.0}, 1 / 8, None),
    "hyperclovax": ({"logits_scaling": 0.125}, 1 / 8, None),
    "inkling2_loop_text": ({"final_logit_softcapping": 30.0}, 1, 30),
    "inkling2_text": ({"final_logit_softcapping": 30.0}, 1, 30),
    "inkling_text": ({"logits_mup_width_multiplier": 24.0}, 1 / 24, None),
    "minicpm3": ({"dim_model_base": 16}, 16 / 64, None),  # over the hidden size
    "mpt": ({"logit_scale": 0.5}, 1, None),  # which its source does not read
    "nanochat": ({"final_logit_softcapping": 15.0}, 1, 15),
    "recurrent_gemma": ({"logits_soft_cap": 30.0}, 1, 30),
    "vaultgemma": ({"final_logit_softcapping": 30.0}, 1, 30),
}
AROUND_A_TEXT_MODEL = {"gemma3", "gemma4", "gemma4_unified", "musicgen", "musicgen_melody", *NOT_TRIED}


def config_of(kind):
    return CONFIG_MAPPING[kind](**options_of(kind))


def make(kind, dtype=torch.float32):
    config = shrink(config_of(kind))
    for name, value in HEADS[kind][0].items():
        setattr(config, name, value)
    return random_model(config).to(dtype)


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind in TYPES])
@torch.no_grad()
def test_every_scale_and_cap_is_found_and_is_what_the_stock_model_computes(kind):
    model, (_, scale, cap) = make(kind), HEADS[kind]
    lm_head = find_lm_head(model)
    low = ("bfloat16", "float16") if kind in ("gemma2", "granite_swa", "minicpm3") else ()
    for tail in (lm_head.tail, *(find_lm_head(make(kind, getattr(torch, dtype))).tail for dtype in low)):
        assert tail == (pytest.approx(scale), cap)

    head = model.get_output_embeddings()
    head.weight *= 20 / logits_of(model, make_tokens()).abs().max() / scale  # logits that a cap changes
    tokens = make_tokens() % head.weight.shape[0]
    z = lm_head.body(tokens, use_cache=False)[0] @ head.weight.T
    expected = z * scale if cap is None else cap * torch.tanh(z * scale / cap)
    torch.testing.assert_close(expected, logits_of(model, tokens), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        lm_head.tail(lm_head.head(lm_head.body(tokens, use_cache=False)[0])), expected, rtol=1e-4, atol=1e-3
    )


def test_no_architecture_with_such_a_key_is_missing_here():
    configs = {kind: config_of(kind) for kind in TYPES if kind not in AROUND_A_TEXT_MODEL}
    having = {kind for kind, config in configs.items() if any(hasattr(config, key) for key in CAPS + SCALES)}
    assert having <= HEADS.keys()


def test_adapters_on_the_head_and_a_peft_model_around_it_are_included():
    model = get_peft_model(make_model("gemma2"), LoraConfig(r=2, target_modules=["lm_head"]))
    before = {name: module.training for name, module in model.named_modules()}
    base = model.get_base_model()
    assert find_lm_head(model) == LMHead(base.model, base.lm_head, Tail(cap=30.0))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not base.lm_head._forward_hooks


def odd(model):
    """Let a model do something to its logits that its configuration does not name."""
    stock = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            outputs = stock(self, *args, **kwargs)
            outputs.logits = outputs.logits + 0.5 * outputs.logits.sin()
            return outputs

    model.__class__ = Odd
    return model


def silent(model):
    """Let all logits be 0, which shows neither scale nor cap."""
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def with_virtual_tokens(model):
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize("change", [odd, silent, with_virtual_tokens])
def test_a_model_whose_logits_are_not_those_of_body_and_head_has_none(change):
    assert find_lm_head(change(make_model("llama"))) is None
