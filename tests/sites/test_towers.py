"""Towers beside the language model: `target_modules` reaches their self-attentions, and what is left out is said."""

import logging
from dataclasses import replace

import pytest
import torch
from architectures.formulas import tensors_of
from families import perturb
from peft import HRAConfig
from transformers import AutoModel, BartConfig, BertConfig, CLIPConfig, ViTConfig

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.sites import Family, find_sites, register_family, separate, survey
from hfpatch.surgery.budget import adapted_widths
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


@torch.no_grad()
def test_what_acts_in_another_tower_is_folded_sized_and_checked_there():
    encoder = r"encoder\.layers\.\d\.self_attn"
    model = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig(activation="identity", target_modules=encoder))
    perturb(model, std=0.3)
    plain, expected = (m(input_ids=IDS)[0] for m in (tiny(BartConfig()), model))
    assert not torch.allclose(plain, expected, atol=1e-2)
    torch.testing.assert_close(hfpatch.fold(model)(input_ids=IDS)[0], expected, rtol=1e-4, atol=1e-4)
    hfpatch.patch(model, PreProjectionConfig(target_modules=r".*\.self_attn"))
    assert len(adapted_widths(model)) == 4
    with pytest.raises(HfpatchError, match="hra does not call the projection"):
        hfpatch.patch(
            hfpatch.unpatch(model),
            [NonlinearQueryConfig(target_modules=encoder), HRAConfig(r=2, target_modules=["q_proj"])],
        )


def test_a_model_without_a_language_model_is_changed_as_a_whole():
    model = hfpatch.patch(tiny(CLIPConfig()), PreProjectionConfig(content_skip=True))
    towers = {path.split(".")[0] for path in tensors_of(model, "preproj", "pre_projection")}
    assert towers == {"text_model", "vision_model"}
    assert not hfpatch.patch_summary(model).left_out
    assert not hfpatch.patch_summary(hfpatch.patch(tiny(ViTConfig()), PreProjectionConfig())).left_out
    assert not hfpatch.patch_summary(hfpatch.patch(tiny(BertConfig()), PreProjectionConfig())).left_out


def test_the_towers_do_not_change_the_draws_of_the_language_model():
    alone = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig())
    both = hfpatch.patch(tiny(BartConfig()), PreProjectionConfig(target_modules=r".*\.self_attn"))
    tensors = tensors_of(both, "preproj", "pre_projection")
    for path, parameters in tensors_of(alone, "preproj", "pre_projection").items():
        assert torch.equal(parameters["up"], tensors[path]["up"])
    assert len({tuple(parts["up"].flatten()[:4].tolist()) for parts in tensors.values()}) == 4


def test_cross_attention_is_no_target():
    with pytest.raises(HfpatchError, match="names no attention of this model"):
        hfpatch.patch(tiny(BartConfig()), PreProjectionConfig(target_modules=r"decoder\..*encoder_attn"))


def test_a_declared_tower_is_read_as_it_is_declared(declarations):
    family = Family(
        name="bart-encoder", model_types=("bart",), tower="encoder", layers="layers", attention="self_attn",
        qkv=separate(), output="out_proj", refusals={"content_skip": "a test"},
    )  # fmt: skip
    register_family(family)
    surveyed = survey(tiny(BartConfig()))
    assert [site.family for site in surveyed.others] == ["bart-encoder"] * 2
    assert all(site.refusals["content_skip"] == "a test" for site in surveyed.others)
    assert [site.path for site in find_sites(tiny(BartConfig()))] == [f"decoder.layers.{i}.self_attn" for i in range(2)]
    with pytest.raises(HfpatchError, match="tower 'encoder' of model type 'bart' is declared already"):
        register_family(replace(family, name="another"))
