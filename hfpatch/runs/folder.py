"""The run folder: where each file of a run is, and which folder may take a run."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.runs.locks import held_by_others
from hfpatch.runs.recipe_changes import AnyRecipe, changes
from hfpatch.support.files import read_json, remove_leftovers


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run folder."""

    root: Path

    @property
    def results(self) -> Path:
        """Everything that was measured."""
        return self.root / "results.json"

    def run(self, method: str, seed: int) -> RunPaths:
        """Return the paths of one method's run with one seed."""
        return RunPaths(self.root / "runs" / method / f"seed-{seed}")

    def is_complete(self) -> bool:
        """Return whether everything that the recipe asks for is done."""
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
        """What an interrupted training is resumed from."""
        return self.root / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """A file of records for each task."""
        return self.root / "evaluations"

    @property
    def retention(self) -> Path:
        """What was measured on the texts of ``retention``."""
        return self.root / "retention.json"

    def rewound(self, scale: float) -> Path:
        """What was measured at a scale of ``rewind``, or of 1 on tuning's text; the records are beside it."""
        return self.root / "rewind" / f"{scale:g}" / "result.json"

    @property
    def answers(self) -> Path:
        """What the model answered so far, until the evaluation is complete."""
        return self.root / "evaluations" / ".answers"

    @property
    def result(self) -> Path:
        """The whole run's outcome; written last, so that it marks the run as complete."""
        return self.root / "result.json"


def check_folder(out: Path, recipe: AnyRecipe, *, resume: bool, part: str | None = None) -> None:
    """Refuse a folder that cannot take the runs of a recipe; one with fewer methods, variants or seeds can.

    Args:
        out: the folder; it need not exist.
        recipe: what is about to run.
        resume: continue the runs that are there.
        part: the method or variant that is about to run; None if all of them are.

    Raises:
        HfpatchError: if ``out`` is a file, contains files that are not of hfpatch or another recipe's run, or this
            recipe's and ``resume`` is not set.
    """
    remove_leftovers(out)
    if not _contains_run(out):
        return
    added, changed = changes(out, recipe)
    for key, (there, here) in changed.items():
        raise HfpatchError(
            f"{out}: contains a run of another recipe ({key} is {there!r} there, {here!r} here); choose another --out"
        )
    if resume:
        return
    if RunFolder(out).is_complete() or (out / "result.json").is_file():
        then = f"add what is new ({_first(added)})" if added else "report it again"
        raise HfpatchError(f"{out}: contains a finished run; --resume to {then}, or choose another --out")
    if part is None or (out / "runs" / part).exists():
        raise HfpatchError(f"{out}: contains an unfinished run; --resume to continue it, or choose another --out")


def _first(keys: Mapping[str, object], most: int = 3) -> str:
    """Return the first keys in one line, and how many more there are."""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"{', '.join(list(keys)[:most])}{more}"


def check_place(folder: Path, option: str) -> None:
    """Refuse a path where no folder can be.

    Args:
        folder: what is to be written.
        option: by which the user chose it.

    Raises:
        HfpatchError: if the path or one above it is a file, or a link to nothing.
    """
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise HfpatchError(f"{place}: is a link to a folder that does not exist; choose another {option}")
        if place.exists() and not place.is_dir():
            raise HfpatchError(f"{place}: is a file, not a folder; choose another {option}")


def _contains_run(out: Path) -> bool:
    check_place(out, "--out")
    if (out / "recipe.yaml").is_file():
        return True
    if out.is_dir() and not _is_empty(out):
        raise HfpatchError(f"{out}: is not empty and contains no hfpatch run; choose another --out")
    return False


@contextmanager
def discard_failed_start(out: Path, locks: Collection[str]) -> Iterator[None]:
    """Empty a folder again that was empty, if what runs in it fails before there is anything to resume from.

    Args:
        out: the folder.
        locks: the locks on it that this process holds; while others hold theirs, everything stays.
    """
    was_empty = not out.is_dir() or _is_empty(out)
    try:
        yield
    except BaseException:
        if was_empty and out.is_dir() and not _contains_work(out) and not held_by_others(out, locks):
            for entry in out.iterdir():
                if not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def _is_empty(out: Path) -> bool:
    return all(entry.name.startswith(".") for entry in out.iterdir())


def _contains_work(out: Path) -> bool:
    """Return whether a run or an evaluation has left something in ``out``: steps, answers, records or results."""
    files = [out / name for name in ("metrics.jsonl", "result.json", "results.json")]
    files += [path for name in ("runs", "checkpoints", "model") for path in (out / name).rglob("*")]
    return any(path.is_file() and path.stat().st_size for path in files)


def diverged_step(trained: Mapping[str, Any] | None) -> int | None:
    """Return the step at which a run, a training.json, diverged; None where it did not or nothing was trained."""
    return None if trained is None else trained.get("diverged_step")


def summarise(result: Mapping[str, Any]) -> str:
    """Return a run's result.json in one line: its scores, its losses, or that it diverged."""
    trained = result["train"]
    if (step := diverged_step(trained)) is not None:
        return f"diverged at step {step}"
    if "evaluation" in result:
        scores = result["evaluation"].items()
        return ", ".join(
            f"{task} {score['primary']} {score['metrics'][score['primary']]:.4g}" for task, score in scores
        )
    measured = trained.get("final_eval_loss")
    return f"loss {trained['final_loss']:.4f}" + (f", on held-out text {measured:.4f}" if measured is not None else "")
