"""A realistic run folder, written as the pipeline writes it."""

import csv
import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reporting.evaluation_example import evaluation
from rich.console import Console

from hfpatch.recipes.pairs import is_lora, question_of
from hfpatch.reporting import terminal
from hfpatch.reporting.comparison.document import comparison_document, read_material
from hfpatch.reporting.comparison.figures import FIGURES, draw
from hfpatch.reporting.tabular import csv_text
from hfpatch.reporting.theme import report_style
from hfpatch.results.folder import load_results
from hfpatch.results.identity import OF_BASE, OF_TASK

TASKS = {
    "tinyworld_cloze": {"primary": "acc", "higher_is_better": True, "n": 400},
    "tinyworld_endings": {"primary": "acc_norm", "higher_is_better": True, "n": 200},
    "tinyworld_text": {"primary": "word_perplexity", "higher_is_better": False, "n": 60},
}
FREEDOM, T = 100, 1.9839715185235513  # Student's t of 0.975
HOSTILE = '<script>alert("1")</script> | `$\\frac{x}$` *b* & _c_\n# x \u0000\ud800'


def task_result(task, value, *, stderr=0.02):
    info = TASKS[task]
    metrics = {info["primary"]: value} | ({"bits_per_byte": 1.25} if "perpl" in info["primary"] else {})
    fields = {"metrics": metrics, "stderr": {info["primary"]: stderr}, **dict.fromkeys(OF_TASK, "d" * 64)}
    return {"task": task, **info, **fields, "num_fewshot": 0, "version": "1"}


def train_result(speed):
    cost = {"wall_s": 409600 / speed, "tokens_per_s": speed, "peak_memory_bytes": 512 * 2**20}
    survival = {"layers.0.preproj_up": 1.0, "layers.0.preproj_down": 0.99}
    return {"steps": 200, "final_loss": 2.5, "tokens": 409600, **cost, "update_survival": survival}


def comparison(method, task, difference, half, verdict, *, reference="baseline", p=None, metric=None):
    """A difference whose p, if it is not given, makes the test say the verdict in a family of some hundred."""
    return {
        **{"method": method, "reference": reference, "task": task, "metric": metric or TASKS[task]["primary"]},
        **{"n": TASKS[task]["n"], "seeds": 2, "test": "paired bootstrap", "errors": [[half / T, FREEDOM]]},
        **{"difference": difference, "low": difference - half, "high": difference + half},
        "p": p if p is not None else 1e-5 if verdict in ("better", "worse") else 0.5,
    }


def method(name, parts, trainable, scores, *, speed=None, match=None, form=None):
    """Scores: task -> the value of each seed."""
    runs = {}
    for seed in range(len(next(iter(scores.values())))):
        evaluation = {task: task_result(task, values[seed]) for task, values in scores.items()}
        runs[str(seed)] = {"train": train_result(speed) if speed else None, "evaluation": evaluation}
        runs[str(seed)]["computed_with"] = {"code_sha256": "c" * 64, "versions": {"torch": "2.13.0"}, "device": "cpu"}
    parameters = {"trainable": trainable, "added": trainable, "base": 1_000_000}
    return name, {"parts": parts, "parameters": parameters, "match": match, "form": form, "runs": runs}


def example():
    """Three methods, two seeds, three tasks; every number below is used by hand in the tests."""
    skip, lora = "pre_projection_skip", "lora"
    match = {"to": skip, "rank": 40, "parameters": 81_920, "target_parameters": 80_000, "difference": 0.024}
    scores = [([0.40, 0.40], [0.50, 0.50], [20.0, 20.0]), ([0.44, 0.46], [0.52, 0.51], [17.5, 17.7]),
              ([0.41, 0.42], [0.50, 0.49], [18.9, 19.1])]  # fmt: skip
    base, of_skip, other = (dict(zip(TASKS, values, strict=True)) for values in scores)
    part = {"type": "lora", "match": skip, "target_modules": "attention"}
    methods = [
        method("baseline", [], 0, base),
        method(skip, [{"type": "pre_projection", "content_skip": True}], 80_000, of_skip, speed=2048.0),
        method(lora, [part], 81_920, other, speed=4096.0, match=match),
    ]
    comparisons = [
        comparison(skip, "tinyworld_cloze", 0.05, 0.03, "better", p=0.001),
        comparison(skip, "tinyworld_endings", 0.015, 0.05, "not decided"),
        comparison(skip, "tinyworld_text", -2.4, 0.6, "better"),
        comparison(lora, "tinyworld_cloze", 0.015, 0.03, "not decided"),
        comparison(lora, "tinyworld_endings", -0.005, 0.05, "not decided"),
        comparison(lora, "tinyworld_text", -1.0, 0.5, "not decided", p=0.02),
        comparison(skip, "tinyworld_text", -1.4, 0.57, "better", reference=lora, p=0.003),
    ]
    identity = {name: f"{index}" * 64 for index, name in enumerate(OF_BASE) if name != "base_weights"}
    return {
        **{"schema": 2, "kind": "comparison", "name": "quickstart", "protocol": "as_it_should_be", "complete": True},
        "description": "Every method on the embedded world.",
        "provenance": {
            **{"commit": "c95d4b4a1b2c3d4e5f60718293a4b5c6d7e8f901", "dirty": False, "wall_s": 171.2, "threads": 2},
            **{"command": "hfpatch compare recipes/quickstart.yaml", "started": "2026-01-02T03:04:05+00:00"},
            **{"python": "3.11.2", "platform": "Linux-6.1-x86_64", "device": "cpu"},
            "versions": {"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2", "lm_eval": "0.4.13"},
        },
        "model": {
            **{"name": "tinyworld/gpt-neox", "revision": None, "sha256": "a" * 64, "dtype": "float32"},
            **{"model_type": "gpt_neox", "parameters": 1_000_000, "identity": identity},
        },
        "data": {
            **{"source": "tinyworld/shifted", "sha256": "b" * 64, "documents": 2000, "blocks": 3200},
            **{"tokens": 409_600, "block_size": 128, "layout": "packed"},
        },
        "plan": {str(s): {"sha256": f"{s}" * 64, "steps": 200, "batch_size": 16} for s in range(2)},
        "training": {"steps": 200, "batch_size": 16, "lr": 1e-3, "seeds": [0, 1], "trainable_dtype": "float32"},
        "evaluation": {"tasks": list(TASKS), "limit": None, "batch_size": 16},
        "tasks": {name: {**info, **dict.fromkeys(OF_TASK, "d" * 64), "version": "1"} for name, info in TASKS.items()},
        "methods": dict(methods),
        "comparisons": comparisons,
        "warnings": ["lora has 2.4 % more trainable parameters than pre_projection_skip."],
    }


def tuned_example():
    """The example with every method tuned: one trial diverged, one choice at the edge of three rates."""
    skip, lora = "pre_projection_skip", "lora"
    losses = {skip: {1e-3: 1.5, 1e-2: 1.2, 1e-1: None}, lora: {1e-3: 1.6, 1e-2: 1.3, 1e-1: 1.25}}
    trials = [
        {
            **{"method": method, "seed": 1000, "values": {"lr": rate}, "loss": loss, "plan": "e" * 64},
            "diverged_step": None if loss else 7,
        }
        for method, by_rate in losses.items()
        for rate, loss in by_rate.items()
    ]
    chosen = {
        skip: {"values": {"lr": 1e-2}, "loss": 1.2, "trials": 3, "edge": None},
        lora: {"values": {"lr": 1e-1}, "loss": 1.25, "trials": 3, "edge": "highest"},
    }
    raw = example()
    raw["tuning"] = {
        **{
            "seed": 1000,
            "steps": 40,
            "learning_rates": [1e-3, 1e-2, 1e-1],
            "added": [1e-1],
            "trials": trials,
            "base_loss": 1.6,
        },
        **{"chosen": chosen, "text": {"documents": 200, "tokens": 12_345}},
    }
    del raw["training"]["lr"]
    return raw


def with_pairs(raw):
    """Declare the pairs that were compared, where nothing is declared."""
    methods = {name: method["parts"] for name, method in raw.get("methods", {}).items()}
    made = dict.fromkeys((pair["method"], pair["reference"]) for pair in raw.get("comparisons", ()))
    loras = [name for name, parts in methods.items() if is_lora(parts)]
    bare = [name for name, parts in methods.items() if not parts]
    baseline = "baseline" if "baseline" in bare else next(iter(bare), None)
    pairs = {}
    for pair in made:
        pairs.setdefault(question_of(pair, baseline, loras), []).append(pair)
    return {"pairs": pairs} | raw


def write_run(folder: Path, raw, *, curves=True) -> Path:
    """Write ``results.json``, with the training curve of every method that was trained, and a folder for each run."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = with_pairs(raw)
    for i, (name, content) in enumerate(raw.get("methods", {}).items()):
        trained = [seed for seed, run in content["runs"].items() if run["train"]]
        if curves and trained:
            losses = [list(_losses(int(seed), i)) for seed in trained]
            mean = [sum(at_step) / len(at_step) for at_step in zip(*losses, strict=True)]
            content["curve"] = {"steps": list(range(1, 201)), "loss": mean, "seeds": len(trained), "held_out": {}}
        for seed in trained if "/" not in name and "\0" not in name else ():
            (folder / "runs" / name / f"seed-{seed}").mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def _losses(seed, method_index, steps=200):
    batches = random.Random(seed)
    for step in range(1, steps + 1):
        yield 2.5 + math.exp(-step / 40) - 0.02 * method_index * (1 - math.exp(-step / 80)) + batches.gauss(0, 0.08)


def document_of(results, folder=Path("/nowhere")):
    """Return the document of a comparison, with what lies in its folder."""
    material = read_material("", folder, results)
    return comparison_document([replace(material, drawn=draw(material.shown))])


def rows_of(table):
    """Return the texts of each row by its first cell."""
    return {str(row.cells[0]): [*map(str, row.cells[1:])] for row in table.rows}


def texts_of(svg):
    """Return the texts of a figure."""
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def read_csv(text):
    """Return the rows of a CSV file as dictionaries."""
    return list(csv.DictReader(io.StringIO(text, newline="")))


def data_of(results, figure):
    """Return the rows of a figure's data."""
    return read_csv(csv_text(results.records(FIGURES[figure].data)))


@pytest.fixture
def printed(monkeypatch):
    """Return a function from a document to what a terminal shows of it."""

    def shown(document, width=200):
        out = io.StringIO()
        monkeypatch.setattr(terminal, "Console", lambda: Console(file=out, width=width))
        terminal.print_document(document)
        return out.getvalue()

    return shown


@pytest.fixture
def evaluated():
    return evaluation()


@pytest.fixture
def style():
    with report_style():
        yield


@pytest.fixture
def raw():
    return example()


@pytest.fixture
def build(tmp_path):
    """Return a function that writes a results.json and reads it back."""
    return lambda raw, **options: load_results(write_run(tmp_path / "run", raw, **options))


@pytest.fixture
def run_dir(tmp_path, raw):
    return write_run(tmp_path / "run", raw)


@pytest.fixture
def results(run_dir):
    return load_results(run_dir)


@pytest.fixture
def compared():
    return comparison


@pytest.fixture
def hostile(raw):
    """The example with hostile text wherever a run may hold text."""
    text = json.dumps(raw)
    for name in ("pre_projection_skip", "tinyworld_endings"):
        text = text.replace(json.dumps(name), json.dumps(name + HOSTILE))
    bad = json.loads(text)
    bad |= {"name": HOSTILE, "description": HOSTILE}
    bad["provenance"]["command"] = bad["model"]["name"] = bad["data"]["source"] = HOSTILE
    bad["warnings"] = [HOSTILE, "# heading", "1. item", "- item", "[a](javascript:alert(1))", "[x]: http://y"]
    bad["methods"]["lora"]["form"] = HOSTILE
    bad["methods"]["lora"]["parts"][0]["target_modules"] = [HOSTILE]
    return bad
