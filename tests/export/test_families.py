"""Exports of models whose branches end, multiply or project in ways of their own, loaded through the written file."""

import pytest
import torch
from families import logits_of, make_tokens, perturb
from in_step import in_step
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    BertConfig,
    BitsAndBytesConfig,
    DeepseekV3Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)

import hfpatch
from hfpatch import NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.export import export_patch
from hfpatch.export.write import imported
from hfpatch.surgery.bases import load_base, locate
from hfpatch.twins import random_model, shrink

STACK = [
    PreProjectionConfig(content_skip=True),
    PreProjectionConfig(expansion=0, content_skip=True),
    QueryTemperatureConfig(),
    NonlinearQueryConfig(rank=3),
    QueryTemperatureConfig(),
]
CONFIGS = {
    "bert": BertConfig(is_decoder=True),
    "deepseek_v3": DeepseekV3Config(first_k_dense_replace=1),
    "gemma2": Gemma2Config(),
    "granite": GraniteConfig(residual_multiplier=0.3),
    "qwen3": Qwen3Config(),  # norms the query of each head
}


@torch.no_grad()
def write(folder, config, configs):
    """Write a base of which every tensor is random, and its patch; return the patched model."""
    model = random_model(shrink(config))
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(locate("tinyworld/gpt-neox")[0]).save_pretrained(folder / "base")
    model = load_base(str(folder / "base")).model
    hfpatch.patch(model, configs)
    perturb(model)
    hfpatch.save_patch(model, folder / "patch")
    return model


def classes(folder, prefix=""):
    """Return the written model class, or that of the part below a prefix."""
    module = imported(folder)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, module.Hooked)]
    return next(kind for kind in kinds[1:] if kind.hfpatch_prefix == prefix)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_an_export_holds_and_computes_what_the_patched_model_does(case, tmp_path):
    model, tokens = write(tmp_path, CONFIGS[case], STACK), [make_tokens(2, 7, seed=seed) for seed in (0, 1)]
    expected = [logits_of(model, each) for each in tokens]
    folder = export_patch(tmp_path / "patch", tmp_path / "export").directory
    exported = classes(folder).from_pretrained(folder).eval()
    held = exported.state_dict()
    for name, tensor in model.state_dict().items():
        module, _, last = name.rpartition(".")  # `base` where a part is around it
        assert "hfpatch_" in name or torch.equal(held.get(name, held.get(f"{module}.base.{last}")), tensor), name
    assert torch.equal(logits_of(exported, tokens[0]), expected[0])
    assert all(map(torch.equal, in_step(exported.requires_grad_(False), tokens), expected))

    tower = classes(folder, model.base_model_prefix).from_pretrained(folder).eval().requires_grad_(False)
    model.requires_grad_(False)
    with torch.no_grad():
        hidden = [each(tokens[0], use_cache=False).last_hidden_state for each in (tower, model.base_model)]
    assert torch.equal(*hidden)

    exported.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    assert not [name for name, _ in exported.named_parameters() if "hfpatch_" in name and "lora_A" in name]
    assert torch.equal(logits_of(exported, tokens[0]), expected[0])
    perturb(exported)
    assert not torch.allclose(logits_of(exported, tokens[0]), expected[0], atol=1e-2)


@pytest.mark.slow
def test_an_export_is_quantised_as_its_base_would_be(tmp_path):
    write(tmp_path, LlamaConfig(), [*STACK, LoraConfig(r=2, target_modules=["q_proj", "o_proj", "up_proj"])])
    folder, tokens = export_patch(tmp_path / "patch", tmp_path / "export").directory, make_tokens()
    eight_bits = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", **eight_bits).eval()
    plain = logits_of(model, tokens)
    hfpatch.load_patch(model, tmp_path / "patch", allow_other_base=True)
    exported = classes(folder).from_pretrained(folder, **eight_bits).eval()
    assert {p.dtype for name, p in exported.named_parameters() if "q_proj.base.weight" in name} == {torch.int8}
    assert torch.equal(logits_of(exported, tokens), logits_of(model, tokens))
    assert not torch.allclose(logits_of(exported, tokens), plain, atol=1e-2)
