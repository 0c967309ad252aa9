"""Every command on a GGUF file, as a user calls it."""

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import refused
from families import logits_of
from gguf_models import write_gguf
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch.__main__ import main
from hfpatch.evaluation import HfpatchLM
from hfpatch.support.files import sha256_file
from hfpatch.surgery.bases import load_base

NAME = "tiny.Q4_1.gguf"
RECIPE = """
name: small
model: {name: tinyworld/gpt2}
data: {source: tinyworld/shifted, max_documents: 40, block_size: 32, held_out: 4}
training: {steps: 2, warmup_steps: 1, batch_size: 4, lr: 1.0e-2, seeds: [0]}
evaluation: {tasks: [tinyworld_cloze], limit: 4}
methods:
  baseline: []
  linear: [{type: pre_projection, activation: identity}]
  lora: [{type: lora, match: linear}]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / NAME, "llama", "Q4_1")
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path


def check_results(folder, file):
    model = json.loads((folder / "results.json").read_text())["model"]
    assert model["name"] == str(file)
    assert model["gguf"]["file_sha256"] == sha256_file(Path(file))
    assert model["gguf"]["weights"] == "dequantised from Q4_1"


@pytest.mark.slow
def test_from_a_recipe_to_an_export(here):
    assert main(["compare", "small.yaml", "--model", NAME, "--out", "run"]) == 0
    check_results(here / "run", NAME)
    assert "dequantised from Q4_1" in (here / "run" / "report.md").read_text()
    assert main(["train", "small.yaml", "--method", "linear", "--model", ".", "--gguf-file", NAME, "--out", "two"]) == 0
    patch = "run/runs/linear/seed-0/patch"
    arguments = ["--patch", patch, "--baseline", "--tasks", "tinyworld_cloze", "--limit", "4"]
    assert main(["eval", "--model", ".", "--gguf_file", NAME, *arguments, "--output", "scores"]) == 0
    check_results(here / "scores", f"./{NAME}")
    assert main(["inspect", NAME, "--patch", patch]) == 0
    assert main(["export", patch, "--out", "standalone"]) == 0
    tokens = torch.arange(3, 12)[None]
    alone = AutoModelForCausalLM.from_pretrained(here / "standalone", trust_remote_code=True)
    assert torch.equal(logits_of(alone, tokens), logits_of(hfpatch.load_patch(load_base(NAME).model, patch), tokens))


def test_the_model_of_lm_eval_takes_its_own_spelling(here):
    plain = load_base(NAME).model
    for given in ({"pretrained": ".", "gguf_file": NAME}, {"pretrained": NAME}):
        scorer = HfpatchLM(**given, device="cpu")
        tokens = torch.arange(3, 12)[None]
        assert torch.equal(logits_of(scorer.model, tokens), logits_of(plain, tokens))
        assert scorer.tokenizer("the")["input_ids"] == load_base(NAME).tokenizer("the")["input_ids"]
        scorer.model.save_pretrained(here / "plain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "a", "--model", "b", "--gguf-file", "x.gguf"], "name the file of each model as"),
        (["--model", ".", "--gguf-file", "x.txt"], "not a .gguf file"),
        (["--model", NAME, "--gguf-file", "x.gguf"], "is a GGUF file already"),
        (["--model", NAME, "model.load_in_8bit=true"], "a GGUF file is dequantised"),
    ],
)
def test_contradictions_are_one_line(here, capsys, arguments, message):
    assert message in refused(capsys, "eval", *arguments, "--tasks", "tinyworld_cloze")
