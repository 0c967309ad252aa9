"""The run folder: where each file of a run lies, and which folder may take a run."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hfpatch.errors import HfpatchError
from hfpatch.recipes import training as training_settings
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.runs.locks import held_by_others
from hfpatch.support.files import read_json, remove_leftovers

NOT_IDENTITY = {
    *("description", "data_dir", "evaluation.allow_unknown_base"),
    *(f"training.{key}" for key in training_settings.NOT_IDENTITY - {"seeds"}),
}
"""Keys of a recipe that may differ between a run and its continuation: they change no number, but for rounding."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run folder."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe; written first, so that it marks the folder as a run."""
        return self.root / "recipe.yaml"

    @property
    def results(self) -> Path:
        """Everything that was measured."""
        return self.root / "results.json"

    def run(self, method: str, seed: int) -> RunPaths:
        """Return the paths of one method's run with one seed."""
        return RunPaths(self.root / "runs" / method / f"seed-{seed}")

    def is_complete(self) -> bool:
        """Return whether the folder holds a finished comparison."""
        return self.results.is_file() and bool(self.read_results().get("complete"))

    def read_results(self) -> dict[str, Any]:
        """Return the content of results.json."""
        results: dict[str, Any] = read_json(self.results)
        return results


@dataclass(frozen=True)
class RunPaths:
    """The paths of one method's run with one seed."""

    root: Path

    @property
    def patch(self) -> Path:
        """What `save_patch` writes."""
        return self.root / "patch"

    @property
    def training(self) -> Path:
        """The training's outcome; written after the patch, so that it marks the training as complete."""
        return self.root / "training.json"

    @property
    def metrics(self) -> Path:
        """A line a step of the training."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What an interrupted training goes on from."""
        return self.root / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """A file of records for each task."""
        return self.root / "evaluations"

    @property
    def answers(self) -> Path:
        """What the model answered so far; it is there while an evaluation goes on or is interrupted."""
        return self.root / "evaluations" / ".answers"

    @property
    def result(self) -> Path:
        """The whole run's outcome; written last, so that it marks the run as complete."""
        return self.root / "result.json"


def open_folder(out: Path, recipe: Recipe, *, resume: bool, method: str | None = None) -> RunFolder:
    """Return the run folder ``out`` if this recipe may write there.

    Args:
        out: the folder; it need not exist.
        recipe: what is about to run.
        resume: continue the run that lies there.
        method: look at this method's runs alone; None looks at the whole folder.

    Raises:
        HfpatchError: if ``out`` is a file, holds something else or another recipe's run, or this recipe's and
            ``resume`` is not set.
    """
    folder = RunFolder(out)
    remove_leftovers(out)
    if not holds_run(out):
        return folder
    check_same_recipe(out, load_recipe(folder.recipe), recipe)
    if resume:
        return folder
    if folder.is_complete():
        raise HfpatchError(f"{out}: holds a finished run; --resume to report it again, or choose another --out")
    if method is None or (out / "runs" / method).exists():
        raise HfpatchError(f"{out}: holds an unfinished run; --resume to continue it, or choose another --out")
    return folder


def holds_run(out: Path) -> bool:
    """Return whether ``out`` holds a run; False where it is empty or not there yet.

    Raises:
        HfpatchError: if it is a file or holds something else.
    """
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise HfpatchError(f"{place}: is a file, not a folder; choose another --out")
    if (out / "recipe.yaml").is_file():
        return True
    if out.is_dir() and not _is_empty(out):
        raise HfpatchError(f"{out}: is not empty and holds no run of hfpatch; choose another --out")
    return False


def check_same_recipe(out: Path, stored: BaseModel, recipe: BaseModel) -> None:
    """Refuse a folder whose stored recipe differs from ``recipe`` in a key that changes a number.

    Raises:
        HfpatchError: naming the first such key and both values.
    """
    old, new = (flatten(each.model_dump(mode="json")) for each in (stored, recipe))
    for key in [*old, *(key for key in new if key not in old)]:
        there, here = old.get(key, "absent"), new.get(key, "absent")
        if there != here and key not in NOT_IDENTITY:
            raise HfpatchError(
                f"{out}: holds a run of another recipe ({key} is {there!r} there, {here!r} here); choose another --out"
            )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@contextmanager
def no_false_start(out: Path, locks: Collection[str]) -> Iterator[None]:
    """Take away what a start has written to an empty folder if it fails before there is anything to continue from.

    Args:
        out: the folder.
        locks: the locks on it that this process holds; where others hold theirs, everything stays.
    """
    fresh = not out.is_dir() or _is_empty(out)
    try:
        yield
    except BaseException:
        if fresh and out.is_dir() and not _holds_work(out) and not held_by_others(out, locks):
            for entry in out.iterdir():
                if not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def _is_empty(out: Path) -> bool:
    return all(entry.name.startswith(".") for entry in out.iterdir())


def _holds_work(out: Path) -> bool:
    """Return whether a run or an evaluation has left something in ``out``: steps, answers, records or results."""
    files = [out / name for name in ("metrics.jsonl", "result.json", "results.json")]
    folders = [out / name for name in ("runs", "checkpoints", "model")]
    files += [path for folder in folders for path in folder.rglob("*")]
    return any(path.is_file() and path.stat().st_size for path in files)
