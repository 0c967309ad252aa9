import pytest
import torch
from families import make_model, perturb
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from hfpatch import PreProjectionConfig, patch, save_patch
from hfpatch.errors import HfpatchError
from hfpatch.training.precision import cast_trainables, trainable_parameters
from hfpatch.training.saved import check_saved


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def saved(request, tmp_path):
    configs = [PreProjectionConfig(content_skip=True), LoraConfig(r=2, target_modules=["dense"])]
    model = patch(make_model("gpt_neox"), configs)
    cast_trainables(model, request.param)
    perturb(model)
    save_patch(model, tmp_path / "patch")
    return model, tmp_path / "patch"


def test_a_whole_stack_is_found(saved):
    check_saved(*saved)


def change(folder, edit):
    path = folder / "pre_projection" / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def first(tensors):
    return sorted(tensors)[0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.clear(),
        lambda tensors: tensors.pop(first(tensors)),
        lambda tensors: tensors.update({first(tensors): torch.empty(0)}),
        lambda tensors: tensors.update({first(tensors): tensors[first(tensors)][:1].clone()}),
        lambda tensors: tensors[first(tensors)].view(-1)[-1:].zero_(),
        lambda tensors: tensors.update({first(tensors): tensors[first(tensors)].to(torch.float16)}),
    ],
    ids=["empty file", "one missing", "one empty", "one partial", "one value", "another dtype"],
)
def test_anything_less_is_refused(saved, edit):
    model, folder = saved
    change(folder, edit)
    with pytest.raises(HfpatchError, match=r"was trained and is not in the saved files; .*--resume"):
        check_saved(model, folder)


def test_a_tensor_that_stands_for_two_is_not_enough(tmp_path):
    model = patch(make_model("gpt_neox"), PreProjectionConfig(content_skip=True))
    save_patch(model, tmp_path / "patch")
    names = [name for name in trainable_parameters(model) if "skip" in name]
    assert len(names) == 2  # both still zero, so that their bytes are the same
    check_saved(model, tmp_path / "patch")
    change(tmp_path / "patch", lambda tensors: tensors.pop(next(name for name in tensors if "skip" in name)))
    with pytest.raises(HfpatchError, match="was trained and is not in the saved files"):
        check_saved(model, tmp_path / "patch")
