"""``questions.json``: the primary questions of a run folder, as they were before its first result.

With them are the margins, the seeds and the limits of documents. A question that is asked later, or of more seeds or
documents than were declared, is marked, and a caution says which of them changed.
"""

from __future__ import annotations

from pathlib import Path

from hfpatch.errors import HfpatchError, listed
from hfpatch.recipes.comparison import Recipe
from hfpatch.results.verdicts import PrimaryQuestion
from hfpatch.runs.folder import Changes
from hfpatch.runs.plan import Plan
from hfpatch.runs.records import Questions
from hfpatch.runs.setup import Setup

FILE = "questions.json"
_LATER = "when results existed already"


def declare(plan: Plan, setup: Setup, added: Changes) -> None:
    """Write the questions, margins, seeds and limits of a comparison with their hash, unless some are declared already.

    Before the first training, which may measure the held-out text, they may still change. What is first declared when a
    method was scored already, or was trained with a recipe that asked something else, is marked.

    Args:
        plan: the comparison's.
        setup: its inputs.
        added: how its recipe differs from the one that was in the folder.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    trained = [run.paths for run in plan.runs if run.variant in setup.recipe.trained and not run.point]
    # where tasks get more documents, only the records are left of a method's results
    scored = any(run.result.is_file() or any(run.evaluations.glob("*.jsonl")) for run in trained)
    begun = scored or any(run.metrics.is_file() for run in trained)
    if begun and _read(plan.out) is not None:
        return
    asked_else = any(key.partition(".")[0] in ("questions", "margin", "evaluation", "training") for key in added)
    asked = _asked(setup).model_copy(update={"later": scored or (begun and asked_else)})
    asked.model_copy(update={"sha256": asked.hash}).write(plan.out / FILE)


def questions_of(out: Path, setup: Setup) -> list[PrimaryQuestion]:
    """Return the questions of a comparison, with marks on what was not declared before the first result.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    stored, now = _read(out), _asked(setup)
    if stored is None:
        return now.questions
    declared = stored.questions if stored.margin == now.margin and not stored.later else []
    grown = _changed(stored, now)
    later = f"{listed(grown)} changed {_LATER}" if grown else ""
    marks = [later if asked in declared else f"declared {_LATER}" for asked in now.questions]
    marked = zip(now.questions, marks, strict=True)
    return [asked.model_copy(update={"changed": mark}) if mark else asked for asked, mark in marked]


def growth_of(out: Path, setup: Setup) -> list[str]:
    """Return a caution if seeds, documents or a margin changed when results existed already.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    if (stored := _read(out)) is None or not setup.questions:
        return []
    changed = _changed(stored, _asked(setup))
    looks = "; training.seeds.looks declares more seeds before" if "seeds" in changed else ""
    what = f"{listed(changed).capitalize()} changed {_LATER}: no test is corrected for that{looks}."
    return [what] if changed else []


def _changed(stored: Questions, now: Questions) -> list[str]:
    return [name for name in ("seeds", "documents", "margin") if getattr(stored, name) != getattr(now, name)]


def _asked(setup: Setup) -> Questions:
    """Return what the recipe asks now."""
    recipe, documents = setup.recipe, {}
    if isinstance(recipe, Recipe):
        tasks = recipe.evaluation.tasks if isinstance(recipe.evaluation.tasks, dict) else {}
        limits = {name: task.limit for name, task in tasks.items() if task is not None and task.limit is not None}
        documents = {"documents": (recipe.evaluation.limit, limits)}
    return Questions(
        questions=[PrimaryQuestion(**dict(asked)) for asked in setup.questions],
        margin=recipe.margins,
        seeds=list(recipe.training.all_seeds),
        **documents,
    )


def _read(out: Path) -> Questions | None:
    """Return what is declared in a folder; None where it has no such file."""
    if not (out / FILE).is_file():
        return None
    stored = Questions.read(out / FILE)
    if stored.sha256 != stored.hash:
        raise HfpatchError(
            f"{out / FILE}: was changed since it was written (its hash does not match); restore it, or choose another "
            "--out: questions change in the recipe, which the report then says"
        )
    return stored
