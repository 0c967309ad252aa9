"""A base, a data set and a task from the hub; a comparison; its patch and an export to the hub; and both from there.

Run as a program, as the address of the hub has to be known before anything is imported:
``python through_the_hub.py FOLDER`` with ``HF_ENDPOINT``; everything is written below FOLDER.
"""

import os
import sys
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard, snapshot_download
from peft import PeftModel
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch.__main__ import main

RECIPE = {
    "name": "through-the-hub",
    "model": {"name": "me/base"},
    "data": {"source": "me/texts", "split": "train", "block_size": 16},
    "training": {"steps": 2, "batch_size": 2, "lr": 0.05, "schedule": "constant", "warmup_steps": 0, "seeds": [0]},
    "evaluation": {"tasks": ["last_word"], "include_path": "tasks", "allow_unknown_base": True},
    "methods": {"baseline": [], "pre_projection": [{"type": "pre_projection", "content_skip": True}]},
}


@torch.no_grad()
def logits(model):
    return model.eval()(torch.arange(3, 12)[None]).logits


def run():
    os.chdir(sys.argv[1])
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    assert main(["compare", "recipe.yaml", "--trust-code", "--out", "run"]) == 0
    assert main(["push", "run", "--to", "me/patch", "--method", "pre_projection"]) == 0
    patch = Path(snapshot_download("me/patch"))
    assert main(["export", str(patch), "--out", "export"]) == 0  # patch.json names the base
    assert main(["push", "export", "--to", "me/export"]) == 0

    base = AutoModelForCausalLM.from_pretrained("me/base")
    before = logits(base)
    patched = hfpatch.load_patch(base, patch).requires_grad_(False)
    expected = logits(patched)
    assert (expected - before).abs().max() > 1e-3
    base = AutoModelForCausalLM.from_pretrained("me/base")
    adapted = PeftModel.from_pretrained(base, "me/patch", subfolder="pre_projection")
    torch.testing.assert_close(logits(adapted), expected)
    exported = AutoModelForCausalLM.from_pretrained("me/export", trust_remote_code=True)
    assert type(exported).__name__.startswith("Hfpatch")
    torch.testing.assert_close(logits(exported), expected)
    for name in ("me/patch", "me/export"):
        card = ModelCard.load(name)
        card.validate()  # the hub's own check
        assert card.data.base_model == "me/base"
    print("through the hub")


run()
