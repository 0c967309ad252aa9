"""Towers beside the language model: `target_modules` reaches their self-attentions, and what is left out is said."""

import logging
from dataclasses import replace

import pytest
import torch
from architectures.formulas import pre_projected, tensors_of, with_first
from families import close, frozen, perturb
from transformers import AutoModel, BartConfig, BertConfig, CLIPConfig, LlavaConfig, T5Config, ViTConfig

import hfpatch
from hfpatch import HfpatchError, PreProjectionConfig
from hfpatch.sites import Family, find_sites, register_family, separate, survey
from hfpatch.sites import family as registry
from hfpatch.tuners import model as tuner
from hfpatch.twins import shrink

IDS = torch.arange(3, 19).reshape(2, 8)


def tiny(config):
    torch.manual_seed(0)
    model = AutoModel.from_config(shrink(config)).eval()
    return perturbed(model)


def perturbed(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def pixels(model):
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def outputs(model, inputs):
    with frozen(model):
        found = model(**inputs)
    return torch.cat([value.flatten() for value in found.to_tuple() if isinstance(value, torch.Tensor)])


CASES = {
    "bart": (
        BartConfig(),
        r"encoder\.layers\.\d+\.self_attn",
        "encoder.layers.{}.self_attn",
        "encoder.layers.{}.self_attn",
    ),
    "t5": (
        T5Config(),
        r"encoder\..*SelfAttention",
        "encoder.block.{}.layer.0.SelfAttention",
        "encoder.block.{}.layer.0.SelfAttention",
    ),
    "llava": (
        LlavaConfig(),
        r"vision_tower\..*self_attn",
        "vision_tower.encoder.layers.{}.self_attn",
        "vision_tower.encoder.layers.{}.self_attn",
    ),
}


def inputs_of(case, model):
    if case == "llava":
        return {"pixel_values": pixels(model)}
    return {"input_ids": IDS, "decoder_input_ids": IDS}


@pytest.mark.parametrize("case", CASES)
def test_target_modules_reaches_a_tower_beside_the_language_model(case, tmp_path):
    config, pattern, attention, exit_ = CASES[case]
    base = tiny(config)
    part = base.vision_tower if case == "llava" else base
    inputs = inputs_of(case, part)
    plain = outputs(part, inputs)
    model = hfpatch.patch(
        tiny(config), PreProjectionConfig(content_skip=True, expansion=0.5, target_modules=pattern), names=["a"]
    )
    changed = model.vision_tower if case == "llava" else model
    assert torch.equal(outputs(changed, inputs), plain)
    perturb(model, std=0.1)
    tensors = tensors_of(model, "preproj", "a")
    assert [*tensors] == [attention.format(layer) for layer in range(2)]

    expected = tiny(config)
    for path in tensors:
        add_formula(
            expected,
            path,
            exit_.format(path.split(".")[path.split(".").index("layers" if "layers" in path else "block") + 1]),
            tensors[path],
        )
    inside = expected.vision_tower if case == "llava" else expected
    assert not close(outputs(inside, inputs), plain)
    assert close(outputs(changed, inputs), outputs(inside, inputs))
    hfpatch.save_patch(model, tmp_path / "patch")
    again = hfpatch.load_patch(tiny(config), tmp_path / "patch")
    assert torch.equal(outputs(again.vision_tower if case == "llava" else again, inputs), outputs(changed, inputs))
    assert torch.equal(
        outputs(hfpatch.unpatch(model).vision_tower if case == "llava" else hfpatch.unpatch(model), inputs), plain
    )


def add_formula(model, attention, exit_, tensors):
    received = []

    def enter(module, args, kwargs):
        if "hidden_states" in kwargs:
            received.append(pre_projected(kwargs["hidden_states"], tensors))
            return args, {**kwargs, "hidden_states": received[-1]}
        received.append(pre_projected(args[0], tensors))
        return (received[-1], *args[1:]), kwargs

    def leave(module, args, output):
        return with_first(output, lambda branch: branch + received[-1] @ tensors["skip"].T)

    model.get_submodule(attention).register_forward_pre_hook(enter, with_kwargs=True)
    model.get_submodule(exit_).register_forward_hook(leave)


def test_the_default_is_the_language_model_and_what_is_left_out_is_said(caplog, monkeypatch):
    monkeypatch.setattr(tuner, "_LOGGED", set())
    caplog.set_level(logging.WARNING, logger=tuner.__name__)  # commands turn it off
    model = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig())
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "left out: encoder: 2 self-attentions" in line
    assert "cross-attention: 2" in line
    summary = hfpatch.patch_summary(model)
    assert [*summary.per_layer] == [0, 1]
    assert summary.left_out["encoder"].startswith("2 self-attentions, such as encoder.layers.0.self_attn")
    assert summary.left_out["cross-attention"].startswith("2, such as decoder.layers.0.encoder_attn")
    assert str(summary).count("left out: ") == 2
    both = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig(target_modules=r".*\.self_attn"))
    assert [*hfpatch.patch_summary(both).per_layer] == [0, 1, 2, 3]
    assert [*hfpatch.patch_summary(both).left_out] == ["cross-attention"]


def test_a_model_without_a_language_model_is_changed_as_a_whole():
    model = hfpatch.patch(tiny(CLIPConfig()), PreProjectionConfig(content_skip=True))
    assert {path.split(".")[0] for path in tensors_of(model, "preproj", "pre_projection")} == {
        "text_model",
        "vision_model",
    }
    assert not hfpatch.patch_summary(model).left_out
    assert not hfpatch.patch_summary(hfpatch.patch(tiny(ViTConfig()), PreProjectionConfig())).left_out
    assert not hfpatch.patch_summary(hfpatch.patch(tiny(BertConfig()), PreProjectionConfig())).left_out


def test_the_towers_do_not_change_the_draws_of_the_language_model():
    alone = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig())
    both = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig(target_modules=r".*\.self_attn"))
    tensors = tensors_of(both, "preproj", "pre_projection")
    for path, own in tensors_of(alone, "preproj", "pre_projection").items():
        assert torch.equal(own["up"], tensors[path]["up"])
    assert len({tuple(each["up"].flatten()[:4].tolist()) for each in tensors.values()}) == 4


def test_cross_attention_is_no_target():
    with pytest.raises(HfpatchError, match="names no attention of this model"):
        hfpatch.patch(tiny(BartConfig()), PreProjectionConfig(target_modules=r"decoder\..*encoder_attn"))


@pytest.fixture
def declarations(monkeypatch):
    """Let a test declare families that are forgotten again."""
    monkeypatch.setattr(registry, "DECLARED", dict(registry.DECLARED))
    monkeypatch.setattr(registry, "TOWERS", dict(registry.TOWERS))


def test_a_declared_tower_is_read_as_it_is_declared(declarations):
    family = Family(
        name="bart-encoder", model_types=("bart",), tower="encoder", layers="layers", attention="self_attn",
        qkv=separate(), output="out_proj", refusals={"content_skip": "a test"},
    )  # fmt: skip
    register_family(family)
    found = survey(tiny(BartConfig()))
    assert [site.family for site in found.others] == ["bart-encoder"] * 2
    assert all(site.refusals["content_skip"] == "a test" for site in found.others)
    assert [site.path for site in find_sites(tiny(BartConfig()))] == [f"decoder.layers.{i}.self_attn" for i in range(2)]
    with pytest.raises(HfpatchError, match="tower 'encoder' of model type 'bart' is declared already"):
        register_family(replace(family, name="another"))
