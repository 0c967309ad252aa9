"""What a run folder without a readable ``results.json`` still tells: its recipe and the files of its runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import read_yaml
from hfpatch.support.files import read_json

_SEED = re.compile(r"seed-(\d+)")
_TASK_KEYS = ("primary", "higher_is_better", "n", "data_sha256", "version")


def salvage(run_dir: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the run in the layout of ``results.json``, and one sentence for each file that cannot be read.

    None takes the place of the run where the folder holds neither a recipe nor the files of a run.
    """
    broken: list[str] = []
    recipe = _mapping(run_dir, "recipe.yaml", broken)
    runs = _runs(run_dir, broken)
    if not recipe and not runs:
        return None, broken
    parts = recipe.get("methods")
    named = parts if isinstance(parts, dict) else {}
    raw = {
        key: recipe.get(key) for key in ("name", "description", "protocol", "model", "data", "training", "evaluation")
    }
    raw["methods"] = {
        name: {"parts": named.get(name) or [], "runs": runs.get(name, {})} for name in dict.fromkeys([*named, *runs])
    }
    raw["tasks"] = _tasks(runs)
    return raw, broken


def _runs(run_dir: Path, broken: list[str]) -> dict[str, dict[str, Any]]:
    """Return the outcome of every finished run, or of the training alone, by method and seed."""
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted((run_dir / "runs").glob("*/seed-*")):
        seed = _SEED.fullmatch(folder.name)
        name = f"{folder.relative_to(run_dir).as_posix()}"
        if seed is None:
            continue
        outcome = _mapping(run_dir, f"{name}/result.json", broken)
        training = {} if outcome else _mapping(run_dir, f"{name}/training.json", broken)
        if outcome or training:
            found.setdefault(folder.parent.name, {})[seed[1]] = outcome or {"train": training, "evaluation": {}}
    return found


def _tasks(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for outcome in (outcome for method in runs.values() for outcome in method.values()):
        scores = outcome.get("evaluation")
        for task, score in scores.items() if isinstance(scores, dict) else ():
            if isinstance(score, dict):
                found.setdefault(task, {key: score.get(key) for key in _TASK_KEYS if key in score})
    return found


def _mapping(run_dir: Path, name: str, broken: list[str]) -> dict[str, Any]:
    path = run_dir / name
    if not path.is_file():
        return {}
    try:
        value = read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    except HfpatchError:
        value = None
    if isinstance(value, dict):
        return value
    broken.append(f"{name} cannot be read.")
    return {}
