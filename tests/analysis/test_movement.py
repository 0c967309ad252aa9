import pytest
import torch
from families import make_model
from peft import LoraConfig

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, patch, save_patch
from hfpatch.analysis.movement import initial_tensors, movement, patch_tensors

PARTS = [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(), LoraConfig(r=2, target_modules=["q_proj"])]


def trained(tmp_path, seed=3):
    """A patch in which one tensor moved whole, one in part and the others not at all, saved."""
    model = patch(make_model("llama"), PARTS, seed=seed)
    parameters = dict(model.named_parameters())
    down = next(name for name in parameters if "layers.1" in name and "preproj_down" in name)
    up = next(name for name in parameters if "layers.0" in name and "preproj_up" in name)
    parameters[down].data += 1.0
    parameters[up].data[0] += 0.5
    save_patch(model, tmp_path / "patch")
    return tmp_path / "patch", down, up


def test_what_moved_since_the_start_is_counted(tmp_path):
    folder, down, up = trained(tmp_path)
    model = make_model("llama")
    before, after = initial_tensors(model, folder, seed=3), patch_tensors(model, folder)
    assert not any("lora" in name or "preproj" in name for name, _ in model.named_parameters())
    moved = {f"model.layers.{tensor.layer}.{tensor.tensor}": tensor for tensor in movement(before, after)}
    assert len(moved) == len(after)
    assert after.keys() == patch_tensors(patch(make_model("llama"), PARTS, seed=3)).keys()
    for name, tensor in moved.items():
        if name == down:
            assert (tensor.layer, tensor.unmoved, tensor.before) == (1, 0, 0.0)
            assert tensor.distance == tensor.after == pytest.approx(tensor.weights**0.5)
        elif name == up:
            assert (tensor.layer, tensor.unmoved) == (0, tensor.weights - 32)
            assert tensor.distance == pytest.approx(0.5 * 32**0.5, rel=1e-5)
        else:
            assert (tensor.unmoved, tensor.distance) == (tensor.weights, 0.0), name


def test_without_the_runs_seed_only_what_holds_its_own_is_compared(tmp_path):
    folder, *_ = trained(tmp_path)
    names = initial_tensors(make_model("llama"), folder)
    assert names
    assert not any("lora_" in name for name in names)
    before = initial_tensors(make_model("llama"), folder, seed=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in names.items())


def test_patches_of_different_shape_or_kind_are_refused(tmp_path):
    a, b = {"x": torch.zeros(2)}, {"x": torch.zeros(3)}
    with pytest.raises(HfpatchError, match=r"\(2,\) in one patch and \(3,\)"):
        movement(a, b)
    with pytest.raises(HfpatchError, match="y is only in one"):
        movement(a, {**a, "y": torch.zeros(1)})
    folder, *_ = trained(tmp_path)
    with pytest.raises(HfpatchError, match="has adapters already"):
        initial_tensors(patch(make_model("llama"), PARTS), folder)
