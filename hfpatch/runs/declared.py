"""``questions.json``: the primary questions of a run folder, as they were before its first result.

With them are the margins, the seeds and the limits of documents. What is changed or added later, without looks that
were declared, is marked with the questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, listed
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import Asked
from hfpatch.results.schema import PrimaryQuestion
from hfpatch.runs.setup import Setup
from hfpatch.support.files import hash_values, read_json, write_json

FILE = "questions.json"
_LATER = "when results existed already"


def declare(out: Path, setup: Setup, *, begun: bool, late: bool) -> None:
    """Write the questions, margins, seeds and limits of a comparison with their hash, unless some are declared already.

    Before the first training, which may measure the held-out text, they may still change.

    Args:
        out: the run folder.
        setup: the comparison.
        begun: whether a training has begun.
        late: whether what is first declared now is marked: a method was scored already, or was trained with a recipe
            that asked something else.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    if begun and (out / FILE).is_file():
        _read(out)
        return
    questions = [_written(question) for question in setup.questions]
    declared = {"questions": questions, "margin": setup.recipe.margins, **_size(setup.recipe)}
    write_json(out / FILE, {**declared, "later": late, "sha256": hash_values([declared, late])})


def questions_of(out: Path, setup: Setup) -> list[PrimaryQuestion]:
    """Return the questions of a comparison, each with how it differs from what was declared before the first result.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    stored, questions = _read(out), list[PrimaryQuestion]()
    before = {question["question"]: question for question in stored.get("questions", [])}
    for asked in setup.questions:
        changed = []
        if stored.get("later") or (stored and asked.name not in before):
            changed.append("declared")
        elif stored:
            changed += ["its pairs or tasks changed"] if before[asked.name] != _written(asked) else []
            changed += ["a margin changed"] if stored["margin"] != setup.recipe.margins else []
        changed += [f"{name} added" for name in _grown(stored, setup.recipe)]
        marks = "; ".join(f"{what} {_LATER}" for what in changed)
        questions.append(
            PrimaryQuestion(question=asked.name, pairs=list(asked.pairs), on=list(asked.on), changed=marks)
        )
    return questions


def growth_of(out: Path, recipe: Recipe | StudyRecipe) -> list[str]:
    """Return a caution for the seeds, and one for the documents, that were added when results existed already.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    stored = _read(out)
    first = {"seeds": f", to {listed(list(map(str, stored.get('seeds', ()))))}", "documents": ""}
    return [
        f"{name.capitalize()} were added {_LATER}{first[name]}: no test is corrected for that"
        f"{'; training.seeds.looks declares it before' if name == 'seeds' else ''}."
        for name in _grown(stored, recipe)
    ]


def _written(asked: Asked) -> dict[str, Any]:
    return {"question": asked.name, "pairs": [list(pair) for pair in asked.pairs], "on": list(asked.on)}


def _size(recipe: Recipe | StudyRecipe) -> dict[str, Any]:
    """Return what may grow: the seeds, and the limit of all tasks and of each."""
    seeds = {"seeds": list(recipe.training.all_seeds)}
    if not isinstance(recipe, Recipe):
        return seeds
    settings = recipe.evaluation.model_dump(mode="json")
    tasks = settings["tasks"] if isinstance(settings["tasks"], dict) else {}
    limits = {name: options["limit"] for name, options in tasks.items() if options and options["limit"] is not None}
    return {**seeds, "documents": [settings["limit"], limits]}


def _grown(stored: Mapping[str, Any], recipe: Recipe | StudyRecipe) -> list[str]:
    return [name for name, value in _size(recipe).items() if stored.get(name, value) != value]


def _read(out: Path) -> Mapping[str, Any]:
    """Return what is declared in a folder; nothing where it has no such file."""
    if not (out / FILE).is_file():
        return {}
    stored: dict[str, Any] = read_json(out / FILE)
    declared = {key: value for key, value in stored.items() if key not in ("later", "sha256")}
    if stored.get("sha256") != hash_values([declared, stored.get("later")]):
        raise HfpatchError(
            f"{out / FILE}: was changed since it was written (its hash does not match); restore it, or choose another "
            "--out: questions change in the recipe, which the report then says"
        )
    return stored
