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


class RunPaths:
    """The paths of one method's run with one seed.

    Attributes:
        patch: what `save_patch` writes.
        training: the training's outcome; written after the patch, so that it marks the training as complete.
        metrics: a line a step of the training.
        checkpoints: what an interrupted training is resumed from.
        evaluations: a file of records for each task.
        answers: what the model answered so far, for an evaluation that is interrupted or gets more documents.
        retention: what was measured on the texts of ``retention``.
        result: the whole run's outcome; written last, so that it marks the run as complete.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.patch = root / "patch"
        self.training = root / "training.json"
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self.evaluations = root / "evaluations"
        self.answers = self.evaluations / ".answers"
        self.retention = root / "retention.json"
        self.result = root / "result.json"

    def rewound(self, scale: float) -> Path:
        """What was measured at a scale of ``rewind``, or of 1 on tuning's text; the records are beside it."""
        return self.root / "rewind" / f"{scale:g}" / "result.json"


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
    check_place(out, "--out")
    if not (out / "recipe.yaml").is_file():
        if out.is_dir() and not _is_empty(out):
            raise HfpatchError(f"{out}: is not empty and contains no hfpatch run; choose another --out")
        return
    added, changed = changes(out, recipe)
    for key, (there, here) in changed.items():
        raise HfpatchError(
            f"{out}: contains a run of another recipe ({key} is {there!r} there, {here!r} here); choose another --out"
        )
    if resume:
        return
    if RunFolder(out).is_complete() or (out / "result.json").is_file():
        more = f" and {len(added) - 3} more" if len(added) > 3 else ""
        then = f"add what is new ({', '.join(list(added)[:3])}{more})" if added else "report it again"
        raise HfpatchError(f"{out}: contains a finished run; --resume to {then}, or choose another --out")
    if part is None or (out / "runs" / part).exists():
        raise HfpatchError(f"{out}: contains an unfinished run; --resume to continue it, or choose another --out")


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
        work = [out / name for name in ("metrics.jsonl", "result.json", "results.json")]
        work += [path for name in ("runs", "checkpoints", "model") for path in (out / name).rglob("*")]
        has_begun = any(path.is_file() and path.stat().st_size for path in work)
        if was_empty and out.is_dir() and not has_begun and not held_by_others(out, locks):
            for entry in out.iterdir():
                if not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def _is_empty(out: Path) -> bool:
    return all(entry.name.startswith(".") for entry in out.iterdir())


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
