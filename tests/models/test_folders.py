"""A saved model is one folder that loads through hfpatch; its modelling file stands for itself."""

import pytest
import torch
from families import make_tokens
from models.test_build import config_of
from safetensors.torch import load_file, save_file

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch, load_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.surgery.bases import load_base
from hfpatch.tinyworld import checkpoint

SETTINGS = {
    "gpt2": ScratchSettings(query={"source": "mlp"}, biases=False),
    "gpt_neox": ScratchSettings(query={"anchor": "weight", "activation": "relu2"}),
    "llama": ScratchSettings(query={"fused": True}),
    "mixtral": ScratchSettings(query={"path": "residual"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}
    for case, settings in SETTINGS.items():
        model = build_scratch(config_of(case), settings, seed=7).eval()
        folder = tmp_path_factory.mktemp(case)
        model.save_pretrained(folder)
        with torch.no_grad():
            made[case] = (folder, model, model(make_tokens(), use_cache=False).logits)
    return made


def test_the_base_of_a_comparison_may_be_such_a_model(saved, tmp_path):
    from transformers import AutoTokenizer

    _, model, logits = saved["gpt_neox"]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoint("gpt-neox")).save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_base(str(tmp_path)).model(make_tokens(), use_cache=False).logits, logits)


def test_a_missing_tensor_and_another_folder_are_errors(saved, tmp_path):
    _, model, _ = saved["gpt_neox"]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "norm_out" in name)
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(HfpatchError, match="missing keys"):
        load_scratch(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(HfpatchError, match="contains no model"):
        load_scratch(tmp_path / "other")
