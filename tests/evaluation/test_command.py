"""lm-eval's own command with hfpatch's model."""

import json
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from families import perturb
from lm_eval.tasks import TaskManager
from own_tasks import write_task

import hfpatch
from hfpatch.__main__ import main
from hfpatch.evaluation.model import HfpatchLM

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_entry_point_is_the_model():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    ((name, target),) = project["entry-points"]["lm_eval.models"].items()
    assert name == "hfpatch"
    assert EntryPoint(name, target, "lm_eval.models").load() is HfpatchLM


def test_lm_eval_scores_a_patched_folder(tmp_path, tokenizer, support, monkeypatch):
    own_alone = partial(TaskManager, include_defaults=False)  # to read all of lm-eval's own takes seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own_alone)
    model = support.gpt2()
    base, patch, tasks = tmp_path / "base", tmp_path / "patch", tmp_path / "tasks"
    rows = [dict(zip(("text", "word"), text.rsplit(" ", 1), strict=True)) for text in support.passages(6)]
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    hfpatch.patch(model, hfpatch.PreProjectionConfig(content_skip=True))
    with torch.no_grad():
        perturb(model, std=0.2)
    hfpatch.save_patch(model, patch)
    tasks.mkdir()
    support.write_rows(tasks / "rows.jsonl", rows)
    form = {"output_type": "loglikelihood", "doc_to_text": "text", "doc_to_target": "{{' ' + word}}"}
    write_task(tasks, "last_word", **form, metric_list=[{"metric": "acc"}])
    arguments = ["lm_eval", "--model", "hfpatch", "--model_args", f"pretrained={base},patch={patch}", "--device", "cpu"]
    arguments += ["--include_path", str(tasks), "--tasks", "last_word", "--output_path", f"{tmp_path}/out"]
    assert main([*arguments, "--log_samples"]) == 0
    (written,) = tmp_path.glob("out/*/samples_last_word_*.jsonl")
    assert len(list(written.parent.glob("results_*.json"))) == 1
    scores = [float(json.loads(line)["resps"][0][0][0]) for line in written.read_text().splitlines()]
    with torch.no_grad():
        texts = [(row["text"], f" {row['word']}") for row in rows]
        expected = [float(support.continuation(model, tokenizer, *text)[0].sum()) for text in texts]
        hfpatch.unpatch(model)
        bare = [float(support.continuation(model, tokenizer, *text)[0].sum()) for text in texts]
    assert scores == pytest.approx(expected, rel=1e-6, abs=1e-4)
    assert scores != pytest.approx(bare, rel=1e-2)


def test_its_help_is_lm_evals():
    command = [sys.executable, "-m", "hfpatch", "lm_eval", "run", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--model_args" in done.stdout
