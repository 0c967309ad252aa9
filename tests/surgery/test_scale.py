"""`scale_patch`: the base at 0 and the patch at 1, bit for bit, and the formula between them, for every method."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from families import logits_of, make_model, make_tokens, perturb
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

import hfpatch
from hfpatch.evaluation.cache import model_key
from hfpatch.surgery.scale import is_scaled

CONFIGS = {
    "pre_projection": hfpatch.PreProjectionConfig(content_skip=True),
    "nonlinear_query": hfpatch.NonlinearQueryConfig(),
    "literal": hfpatch.NonlinearQueryConfig(form="literal", targets=("query", "value")),
    "temperature": hfpatch.QueryTemperatureConfig(),
    "canon": hfpatch.CanonConfig(),
    "output_gate": hfpatch.OutputGateConfig(),
    "value_residual": hfpatch.ValueResidualConfig(),
    "nonlinear_lora": hfpatch.NonlinearLoraConfig(targets=("query", "output")),
    "parallel_adapter": hfpatch.ParallelAdapterConfig(rank=4),
    "loreft": hfpatch.LoReFTConfig(),
    "lora": LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"]),
    "rslora": LoraConfig(r=4, use_rslora=True, target_modules=["q_proj"]),
}


def patched(config, name="llama"):
    model = hfpatch.patch(make_model(name), config).eval()
    perturb(model, std=0.2)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_from_the_base_to_the_patch_bit_for_bit(name):
    model, base, tokens = patched(CONFIGS[name]), make_model("llama"), make_tokens()
    for frozen in (model, base):
        frozen.requires_grad_(False)
    full, none = logits_of(model, tokens), logits_of(base, tokens)
    half = logits_of(hfpatch.scale_patch(model, 0.5), tokens)
    assert not torch.allclose(half, full, atol=1e-4)
    assert not torch.allclose(half, none, atol=1e-4)
    assert torch.equal(logits_of(hfpatch.scale_patch(model, 0), tokens), none)
    assert torch.equal(logits_of(hfpatch.scale_patch(model, 0.5), tokens), half)  # replaces, does not multiply
    assert torch.equal(logits_of(hfpatch.scale_patch(model, 1), tokens), full)


@pytest.mark.parametrize("scale", [0.25, 0.5, 2.0])
def test_the_formulas(scale):
    """x + s W_down σ(W_up x);  x W_Q + s f(x)/2;  q (1 + s τ);  s (x A) B: as the weights of another patch give it."""
    tokens = make_tokens()
    skip = hfpatch.PreProjectionConfig(content_skip=True)
    for config, factors in [
        (skip, {"down": scale, "skip": scale}),
        (hfpatch.QueryTemperatureConfig(), {"": scale}),
        (hfpatch.NonlinearQueryConfig(), {"norm_out": scale}),
        (CONFIGS["lora"], {"lora_B": scale}),
    ]:
        model, other = patched(config), patched(config)
        added = {n for n, _ in make_model("llama").named_parameters()}
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                plain = name.replace(".base_layer", "")
                if plain not in added and any(key in name for key in factors):
                    parameter.mul_(scale)
        expected = logits_of(other, tokens)
        torch.testing.assert_close(logits_of(hfpatch.scale_patch(model, scale), tokens), expected, rtol=1e-4, atol=1e-4)


def test_an_output_gate_moves_towards_one():
    """A ⊙ (1 + s (2 σ(x W_g) - 1)) in plain torch."""
    model = patched(hfpatch.OutputGateConfig())
    site = hfpatch.find_sites(model)[0]
    layer = next(m for m in model.modules() if hasattr(m, "scales"))
    hfpatch.scale_patch(model, 0.25)
    ((method, parts, layer_site),) = layer.acting("mixed")
    x, a = torch.randn(1, 3, site.hidden_size), torch.randn(1, 3, layer_site.mixed_size)
    gate = 2 * torch.sigmoid(F.linear(x, parts["gate"].weight))
    torch.testing.assert_close(method.mixed(parts, a, x, layer_site), a * (1 + 0.25 * (gate - 1)))


def test_a_stack_is_scaled_part_by_part_and_a_fold_has_the_scale():
    stack = [hfpatch.PreProjectionConfig(activation="identity"), LoraConfig(r=2, target_modules=["o_proj"])]
    model, tokens = patched(stack), make_tokens()
    hfpatch.scale_patch(model, 0.5)
    assert not torch.equal(logits_of(model, tokens), logits_of(hfpatch.scale_patch(model, 1), tokens))
    linear = hfpatch.scale_patch(patched(stack[0]), 0.3)
    expected = logits_of(linear, tokens)
    torch.testing.assert_close(logits_of(hfpatch.fold(linear), tokens), expected, rtol=1e-4, atol=1e-4)
    wrapped = get_peft_model(make_model("llama"), stack[0])
    perturb(wrapped, std=0.2)
    hfpatch.scale_patch(wrapped, 0.3)
    expected = logits_of(wrapped, tokens)
    torch.testing.assert_close(logits_of(wrapped.merge_and_unload(), tokens), expected, rtol=1e-4, atol=1e-4)


def test_generation_training_and_the_cache_follow_the_scale():
    model, tokens = patched(CONFIGS["pre_projection"]), make_tokens(1, 6)
    keys = {str(model_key(hfpatch.scale_patch(model, scale))) for scale in (1, 0.5, 0.25)}
    assert len(keys) == 3
    lora = patched(CONFIGS["lora"])
    assert len({str(model_key(hfpatch.scale_patch(lora, scale))) for scale in (1, 0.5)}) == 2
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached, plain = (model.generate(tokens, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_saved_patch_is_the_one_that_was_trained(tmp_path):
    model, tokens = patched(CONFIGS["pre_projection"]), make_tokens()
    hfpatch.save_patch(model, tmp_path / "patch")
    half = logits_of(hfpatch.scale_patch(model, 0.5), tokens)
    for save in (partial(hfpatch.save_patch, model), model.save_pretrained):
        with pytest.raises(hfpatch.HfpatchError, match="the patch is scaled, but a folder stores it as trained"):
            save(tmp_path / "half")
        assert not (tmp_path / "half").exists()
    loaded = hfpatch.load_patch(make_model("llama"), tmp_path / "patch", scale=0.5)
    assert torch.equal(logits_of(loaded, tokens), half)


def swapped(model, folder):
    hotswap_adapter(model, folder, "default")


def replaced(model, folder):
    model.delete_adapter("default")
    model.load_adapter(folder, "default")
    model.set_adapter("default")


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("alpha", [4, 6, 12])  # a factor of 1, to which the first one, 2, is scaled; and others
@pytest.mark.parametrize("replace", [swapped, replaced])
def test_a_factor_goes_with_the_lora_that_it_is_of(replace, alpha, is_tensor, tmp_path):
    """PEFT's own factor, alpha / rank, after the adapter of a scaled model was replaced by another of its name."""
    first, other = (LoraConfig(r=4, lora_alpha=a, target_modules=["q_proj", "v_proj"]) for a in (8, alpha))
    saved = get_peft_model(make_model("llama"), other)
    perturb(saved, std=0.2, seed=1)
    saved.save_pretrained(tmp_path)
    tokens = make_tokens()
    expected = logits_of(PeftModel.from_pretrained(make_model("llama"), tmp_path), tokens)
    model = get_peft_model(make_model("llama"), first).eval()
    if is_tensor:
        prepare_model_for_compiled_hotswap(model)
    hfpatch.scale_patch(model, 0.5)
    replace(model, tmp_path)
    model.requires_grad_(False)
    for scale in (1, 0.5, 1):
        actual = logits_of(hfpatch.scale_patch(model, scale), tokens)
    torch.testing.assert_close(actual, expected)
    assert not is_scaled(model)
    assert is_scaled(hfpatch.scale_patch(model, 0.5))


def test_a_factor_that_becomes_a_tensor_is_still_the_loras():
    model, tokens = get_peft_model(make_model("llama"), CONFIGS["lora"]).eval(), make_tokens()
    perturb(model, std=0.2)
    model.requires_grad_(False)
    expected = logits_of(model, tokens)
    hfpatch.scale_patch(model, 0.3)
    prepare_model_for_compiled_hotswap(model)
    torch.testing.assert_close(logits_of(hfpatch.scale_patch(model, 1), tokens), expected)


@pytest.mark.parametrize(
    ("config", "scale", "message"),
    [
        (CONFIGS["lora"], math.nan, "scale=nan must be a finite number"),
        (CONFIGS["lora"], "half", "scale='half' must be a finite number"),
        (LoraConfig(use_dora=True, target_modules=["q_proj"]), 0.5, "the variant of LoRA at .*q_proj has no factor"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), 0.5, r"\(IA\)|Linear at .*k_proj has no factor"),
    ],
)
def test_what_cannot_be_scaled_is_one_line(config, scale, message):
    with pytest.raises(hfpatch.HfpatchError, match="no adapters to scale"):
        hfpatch.scale_patch(make_model("llama"), 0.5)
    model, tokens = patched(config), make_tokens()
    before = logits_of(model, tokens)
    with pytest.raises(hfpatch.HfpatchError, match=message):
        hfpatch.scale_patch(model, scale)
    assert torch.equal(logits_of(model, tokens), before)
    assert torch.equal(logits_of(hfpatch.scale_patch(model, 1), tokens), before)
