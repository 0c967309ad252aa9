"""The run folder: where each file of a run is, and which recipe it may take: its own, or one that adds to it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from hfpatch.data.plan import BatchPlan, write_plans
from hfpatch.errors import HfpatchError
from hfpatch.recipes import training as training_settings
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.pretraining import StudyRecipe, load_study
from hfpatch.recipes.strict import flatten, shown
from hfpatch.recipes.tuning import tuning_seed
from hfpatch.runs.locks import FOLDER as LOCKS
from hfpatch.runs.records import ResultsHead
from hfpatch.support.files import read_json, remove_leftovers, write_json, write_text

AnyRecipe: TypeAlias = Recipe | StudyRecipe
Changes: TypeAlias = dict[str, tuple[Any, Any]]
"""Dotted key of a recipe -> its value in the folder's recipe and in the one that is about to run."""

NOT_IDENTITY = {
    *("description", "data_dir", "evaluation.allow_unknown_base", "model.device_map", "model.trust_remote_code"),
    *(f"training.{key}" for key in training_settings.NOT_IDENTITY - {"seeds"}),
}
"""Keys of a recipe that may differ between a run and its continuation, with all that is below them: they change no
number, but for rounding."""
ABSENT = "absent"
COSTS = "costs.json"
"""What a training step of each method costs, in a run folder."""
REMEDY = "restore it, or delete the folder that it is in, and --resume trains the run again"
"""Of a patch or a model that a complete training has saved."""
_LIMIT = re.compile(r"evaluation\.(tasks\.[^.]+\.)?limit")


class RunPaths:
    """The paths of one method's run with one seed.

    Attributes:
        patch: what `save_patch` writes.
        model: in its place, a model from scratch.
        training: the training's outcome; written after the patch, so that it marks the training as complete.
        metrics: a line a step of the training.
        checkpoints: an interrupted training is resumed from these.
        evaluations: a file of records for each task.
        answers: the model's answers so far, for an evaluation that is interrupted or gets more documents.
        retention: the scores on the texts of ``retention``.
        tuning_losses: the base's losses on the documents of tuning's text.
        result: the whole run's outcome; written last, so that it marks the run as complete.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.patch = root / "patch"
        self.model = root / "model"
        self.training = root / "training.json"
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self.evaluations = root / "evaluations"
        self.answers = self.evaluations / ".answers"
        self.retention = root / "retention.json"
        self.tuning_losses = root / "tuning.json"
        self.result = root / "result.json"

    @classmethod
    def of(cls, out: Path, method: str, seed: int) -> RunPaths:
        """Return the paths of a method's final run with a seed in a run folder."""
        return cls(out / "runs" / method / f"seed-{seed}")

    def rewound(self, scale: float) -> Path:
        """The scores at a scale of ``rewind``, at 1 on tuning's text alone; the records are beside it."""
        return self.root / "rewind" / f"{scale:g}" / "result.json"


def require_saved(folder: Path) -> None:
    """Raise :class:`HfpatchError` if the patch or the model of a complete training was removed."""
    if not folder.is_dir():
        raise HfpatchError(f"{folder}: is missing; {REMEDY}")


def is_complete(out: Path) -> bool:
    """Return whether everything that the recipe of a folder asks for is done."""
    results = out / "results.json"
    return results.is_file() and ResultsHead.read(results).complete


def check_folder(out: Path, recipe: AnyRecipe, *, resume: bool, part: str | None = None) -> None:
    """Refuse a folder that cannot take the runs of a recipe; one with fewer methods, variants or seeds can.

    Args:
        out: the folder; it need not exist.
        recipe: the recipe that is about to run.
        resume: continue the runs that are there.
        part: the method or variant that is about to run; None if all of them are.

    Raises:
        HfpatchError: if ``out`` contains files that are not of hfpatch or another recipe's run, or this recipe's and
            ``resume`` is not set.
    """
    remove_leftovers(out)
    if not (out / "recipe.yaml").is_file():
        if out.is_dir() and not _is_empty(out):
            raise HfpatchError(f"{out}: is not empty and contains no hfpatch run; choose another --out")
        return
    added, changed = changes(out, recipe)
    for key, (there, here) in changed.items():
        raise HfpatchError(
            f"{out}: contains a run of another recipe ({difference_in(key, there, here)}); choose another --out"
        )
    if resume:
        return
    if is_complete(out):
        more = f" and {len(added) - 3} more" if len(added) > 3 else ""
        then = f"add what is new ({', '.join(list(added)[:3])}{more})" if added else "report it again"
        raise HfpatchError(f"{out}: contains a finished run; --resume to {then}, or choose another --out")
    if part is None or (out / "runs" / part).exists():
        raise HfpatchError(f"{out}: contains an unfinished run; --resume to continue it, or choose another --out")


def difference_in(key: str, there: Any, here: Any) -> str:
    """Return how a setting of a folder differs from that of a command."""
    shown_there, shown_here = ("not set" if value in (None, ABSENT) else shown(value) for value in (there, here))
    return f"{key} is {shown_there} there, {shown_here} here"


@contextmanager
def discard_failed_start(out: Path, locks: Collection[str]) -> Iterator[None]:
    """Empty a folder that was empty before, if a command fails before there is anything to resume from.

    Args:
        out: the folder.
        locks: the locks on it that this process holds; while others hold theirs, everything stays.
    """
    was_empty = not out.is_dir() or _is_empty(out)
    try:
        yield
    except BaseException:
        work = [out / "results.json", *(out / "runs").rglob("*")]
        has_begun = any(path.is_file() and path.stat().st_size for path in work)
        held = {path.name for path in (out / LOCKS).glob("[!.]*")}
        if was_empty and out.is_dir() and not has_begun and held <= set(locks):
            for entry in out.iterdir():
                if not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def _is_empty(out: Path) -> bool:
    return all(entry.name.startswith(".") for entry in out.iterdir())


def changes(out: Path, recipe: AnyRecipe) -> tuple[Changes, Changes]:
    """Return how a recipe differs from that of a folder: its additions, and its changes to something that exists.

    More seeds are an addition, unless the trials of tuning would take place with another seed. So are more documents of
    a task, labels, questions, margins, retention where there was none, more numbers to rewind by, and all that is said
    about a method or a variant that has no run in the folder.

    Raises:
        HfpatchError: if the recipe in the folder cannot be read.
    """
    file = out / "recipe.yaml"
    try:  # its code is not run
        old: AnyRecipe = load_study(file, trust_code=True) or load_recipe(file, trust_code=True)
    except HfpatchError as error:
        raise HfpatchError(f"{error}; choose another --out, or put this file back as hfpatch wrote it") from error
    there, here = (flatten(one.model_dump(mode="json")) for one in (old, recipe))
    names = {name for one in (old, recipe) for key in ("methods", "variants") for name in getattr(one, key, ())}
    unrun = [name for name in names if not (out / "runs" / name).exists()]
    added: Changes = {}
    changed: Changes = {}
    for key in [*there, *(key for key in here if key not in there)]:
        before, now = there.get(key, ABSENT), here.get(key, ABSENT)
        if before == now or any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY):
            continue
        if key == "training.seeds":
            tunes = recipe.tuning is not None
            fits = set(before) < set(now) and not (tunes and tuning_seed(before) != tuning_seed(now))
        elif _LIMIT.fullmatch(key):
            fits = now is None or (ABSENT not in (before, now) and before is not None and before < now)
        elif key == "rewind":
            fits = set(before) < set(now)
        else:
            section = key.partition(".")[0]  # questions are compared by `hfpatch.runs.declared`
            begins = section == "retention" and there.get("retention", ABSENT) is None
            begins |= section in ("questions", "margin")
            start, _, rest = key.removeprefix("tuning.grid.").partition(".")
            is_unrun = any(rest == name or rest.startswith(f"{name}.") for name in unrun)
            fits = begins or key.startswith("labels.") or (start in ("methods", "variants") and is_unrun)
        (added if fits else changed)[key] = (before, now)
    return added, changed


def adds_documents(added: Changes) -> bool:
    """Return whether tasks get more documents, so that finished evaluations are to be repeated."""
    return any(_LIMIT.fullmatch(key) for key in added)


def reopen(out: Path, recipe: AnyRecipe, plans: Mapping[int, BatchPlan], added: Changes) -> None:
    """Let a folder take a recipe's additions: its results are incomplete, and it gets a plan for each new seed.

    Where tasks get more documents, the scores on fewer are removed; the answers are kept beside the
    records. If it is killed in between, the next call does it again: the recipe is written last.
    """
    if adds_documents(added):
        for pattern in ("seed-*/result.json", "seed-*/rewind/*/result.json"):
            for result in (out / "runs").glob(f"*/{pattern}"):
                result.unlink()
    results = out / "results.json"
    if results.is_file():
        write_json(results, {**read_json(results), "complete": False})
    if plans:
        write_plans(out, plans)
    write_text(out / "recipe.yaml", recipe.to_yaml())
