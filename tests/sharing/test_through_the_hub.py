"""A base and a patch go through the real clients to a local stand-in of the hub, and come from it."""

import json
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from hfpatch.tinyworld import checkpoint

PROGRAM = """
import torch
from huggingface_hub import ModelCard, snapshot_download
from peft import PeftModel
from transformers import AutoModelForCausalLM
import hfpatch
from hfpatch.__main__ import main
from hfpatch.surgery.bases import load_base

def logits(model):
    return model.eval().requires_grad_(False)(torch.arange(3, 12)[None]).logits

base = load_base("me/base").model
before = logits(base)
expected = logits(hfpatch.patch(base, hfpatch.PreProjectionConfig(content_skip=True, init="paper")))
assert not torch.equal(expected, before)
hfpatch.save_patch(base, "patch")
assert main(["push", "patch", "--to", "me/patch"]) == 0
loaded = hfpatch.load_patch(load_base("me/base").model, snapshot_download("me/patch"))
assert torch.equal(logits(loaded), expected)
plain = AutoModelForCausalLM.from_pretrained("me/base")
adapted = PeftModel.from_pretrained(plain, "me/patch", subfolder="pre_projection")
torch.testing.assert_close(logits(adapted), expected)
ModelCard.load("me/patch").validate()  # the hub's own check
print("through the hub")
"""


@pytest.mark.slow
def test_a_base_and_a_patch_go_through_the_hub(hub, tmp_path):
    """In a process of its own, as the address of the hub is read when its client is imported."""
    hub.add("models", "me/base", checkpoint("gpt2"))
    environment = {**hub.environment, "HF_HOME": f"{tmp_path}/home", "HFPATCH_CACHE": f"{tmp_path}/cache"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout.endswith("through the hub\n"), done.stderr[-3000:]
    patch = hub.repositories["models", "me/patch"]
    assert json.loads(patch["patch.json"])["base"]["name"] == "me/base"
    data = ModelCard(patch["README.md"].decode()).data
    assert (data.base_model, data.library_name, data.tags) == ("me/base", "peft", ["hfpatch"])
    assert not [name for name, content in patch.items() if str(tmp_path).encode() in content]
