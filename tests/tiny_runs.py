"""What the tests of whole runs share: tiny bases, watchers of progress, and what two equal runs have in common."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.reporting.report import write_report
from hfpatch.runs import Progress
from hfpatch.tinyworld import documents
from hfpatch.training.architecture import build_model

NEOX = {"model_type": "gpt_neox", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NEOX |= {"intermediate_size": 32, "max_position_embeddings": 64}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "biases": False}
DIFFERENT = {
    *("seconds", "wall_s", "tokens_per_s", "peak_memory_bytes", "mfu", "seconds_per_step", "cost"),
    *("provenance", "commit", "started"),
}
"""What depends on when, where and in how many sessions a run took place."""


def save_base(folder: Path, texts: list[str] | None = None, **changes) -> Path:
    """Save a random model of the architecture ``NEOX`` with a tokenizer of 300 tokens; return the folder."""
    tokenizer = train_tokenizer(texts or list(documents("base", count=50)), 300)
    build_model({**NEOX, **changes}, tokenizer=tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_recipe(base: Path, **sections) -> Recipe:
    """Return a recipe on a base whose runs take seconds; ``sections`` replace those here."""
    values = {
        "name": "small",
        "model": {"name": str(base)},
        "data": {"block_size": 32, "max_documents": 30, "held_out": 5},
        "training": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": [0, 1]},
        "evaluation": {"tasks": ["tinyworld_cloze"], "limit": 4},
        "methods": {"baseline": [], "pre": [{"type": "pre_projection"}], "lora": [{"type": "lora", "r": 2}]},
    }
    return Recipe.model_validate(values | sections)


class Stop(Progress):
    """Interrupts at the n-th event of a kind, as Ctrl-C would."""

    def __init__(self, count: int, kind: str = "stepped") -> None:
        self.left = count
        setattr(self, kind, self.hear)

    def hear(self, run, *_):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Trained(Progress):
    """Remembers what was trained and evaluated."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.evaluated: list[str] = []

    def started(self, run, steps):
        self.trained.append(run)

    def evaluating(self, run, task):
        self.evaluated.append(f"{run} {task}")


class Nothing(Progress):
    """Fails where anything is trained or evaluated."""

    def started(self, run, steps):
        pytest.fail(f"{run} was trained")

    def evaluating(self, run, task):
        pytest.fail(f"{run} was evaluated on {task}")


def has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def refused(call, *arguments, **options) -> str:
    """Return the line with which a call is refused; `conftest.py` checks that it is one."""
    with pytest.raises(HfpatchError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def numbers(value):
    """Return JSON values without those of ``DIFFERENT``."""

    def kept(value):
        if isinstance(value, dict):
            return {key: kept(item) for key, item in value.items() if key not in DIFFERENT}
        return [kept(item) for item in value] if isinstance(value, list) else value

    return kept(json.loads(json.dumps(value)))


def lines(path: Path) -> list[dict]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def without_reports():
    """Let runs write empty reports, which take longer than all the rest and have tests of their own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hfpatch.reporting.write_report", lambda out: (out / "report.html").write_text(""))
        yield


@contextmanager
def reports():
    """Let runs write whole reports again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hfpatch.reporting.write_report", write_report)
        yield
