"""Every method on models whose weights are elsewhere between calls, in every way that accelerate has."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from families import logits_of, make_model, make_tokens, perturb
from own_methods import defined, forgotten
from peft import PeftModel
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch import methods

CONFIGS = {
    **{name: getattr(methods, name) for name in methods.__all__},
    "Skip": lambda: hfpatch.PreProjectionConfig(gated=True, content_skip=True),
    "Branch": lambda: hfpatch.LoReFTConfig(at="branch"),
    "Convolved": lambda: hfpatch.CanonConfig(at="qkv"),
    "PerHead": lambda: hfpatch.ValueResidualConfig(per_head=True),
    "own": lambda: defined(method="mine", query=reads_and_calls)(),
}
PLACES = {  # the second block is on the disk
    **dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"], "cpu"),
    "model.layers.1": "disk",
}


def reads_and_calls(self, parts, q, x, site):
    """A part is called, and its weight read before and after."""
    before = parts["b"].weight.sum()
    return q + parts["b"](parts["a"](x)) * (1 + before - parts["b"].weight.sum())


def base_in_pieces(tmp_path, case="llama"):
    make_model(case).save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", device_map=PLACES, offload_folder=str(tmp_path / "offload"), dtype=torch.float32
    ).eval()


def moved(model, config):
    perturb(hfpatch.patch(model, config), std=0.2)
    return model


def to_memory(model, tmp_path):
    return cpu_offload(model, execution_device=torch.device("cpu"))


def to_disk(model, tmp_path):
    return disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))


def in_pieces(model, tmp_path):
    return dispatch_model(model, PLACES, main_device="cpu", offload_dir=str(tmp_path / "pieces"))


def loaded(model, config, tmp_path):
    return hfpatch.load_patch(model, hfpatch.save_patch(moved(make_model("llama"), config), tmp_path / "patch"))


def by_peft(model, config, tmp_path):
    folder = hfpatch.save_patch(moved(make_model("llama"), config), tmp_path / "patch")
    return PeftModel.from_pretrained(model, folder / config.spec.name)


WAYS = {
    "in memory, after patching": lambda config, at: to_memory(moved(make_model("llama"), config), at),
    "in memory, before patching": lambda config, at: moved(to_memory(make_model("llama"), at), config),
    "in memory, before loading": lambda config, at: loaded(to_memory(make_model("llama"), at), config, at),
    "in memory, before PEFT loads": lambda config, at: by_peft(to_memory(make_model("llama"), at), config, at),
    "on disk, after patching": lambda config, at: to_disk(moved(make_model("llama"), config), at),
    "on disk, before patching": lambda config, at: moved(to_disk(make_model("llama"), at), config),
    "in pieces, after patching": lambda config, at: in_pieces(moved(make_model("llama"), config), at),
    "a device_map, before patching": lambda config, at: moved(base_in_pieces(at), config),
    "a device_map, before loading": lambda config, at: loaded(base_in_pieces(at), config, at),
}


PAIRS = [(name, way) for way in WAYS for name in CONFIGS if "load" not in way or name in ("CanonConfig", "Skip", "own")]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_a_model_elsewhere_computes_the_same(name, way, tmp_path):
    with forgotten():
        tokens, config = make_tokens(), CONFIGS[name]()
        expected = logits_of(moved(make_model("llama"), config).requires_grad_(False), tokens)
        model = WAYS[way](config, tmp_path)
        is_away = {name: p.is_meta for name, p in model.named_parameters()}
        assert any(is_away.values())
        for _ in range(2):
            torch.testing.assert_close(logits_of(model, tokens), expected)
        assert {name: p.is_meta for name, p in model.named_parameters()} == is_away


@pytest.mark.parametrize("way", [way for way in WAYS if "PEFT" not in way])
def test_a_patch_elsewhere_is_counted_scaled_saved_and_removed(way, tmp_path):
    config, tokens = [hfpatch.PreProjectionConfig(content_skip=True), hfpatch.LoReFTConfig()], make_tokens()
    model, base = moved(make_model("llama"), config).requires_grad_(False), make_model("llama").requires_grad_(False)
    expected, plain, added = logits_of(model, tokens), logits_of(base, tokens), hfpatch.patch_summary(model).added
    away = WAYS[way](config, tmp_path)
    assert hfpatch.patch_summary(away).added == added
    torch.testing.assert_close(logits_of(hfpatch.scale_patch(away, 0), tokens), plain)
    hfpatch.scale_patch(away, 1)
    if way.endswith("before patching"):  # only then it is trained
        away(tokens, labels=tokens, use_cache=False).loss.backward()
        assert {p.grad is not None for name, p in away.named_parameters() if "hfpatch_" in name} == {True}
    if "after" in way:
        for save in (hfpatch.save_patch, lambda model, folder: model.save_pretrained(folder)):
            with pytest.raises(hfpatch.HfpatchError, match="has no values here"):
                save(away, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        back = remove_hook_from_module(WAYS[way](config, tmp_path / "again"), recurse=True)
        hfpatch.save_patch(back, tmp_path / "saved")
    else:
        hfpatch.save_patch(away, tmp_path / "saved")
    again = hfpatch.load_patch(make_model("llama"), tmp_path / "saved")
    torch.testing.assert_close(logits_of(again, tokens), expected)
    torch.testing.assert_close(logits_of(hfpatch.unpatch(away), tokens), plain)


def test_weights_that_are_nowhere_are_refused():
    """transformers' ``load_adapter`` leaves them so in an offloaded model, and torch computes with them."""
    model = hfpatch.patch(make_model("llama"), hfpatch.LoReFTConfig())
    model.model.layers[1].self_attn.hfpatch_loreft.to("meta")
    with pytest.raises(hfpatch.HfpatchError, match="layer 1: the adapter's weights have no values"):
        model(make_tokens())
