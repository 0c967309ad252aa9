"""``questions.json``: the primary questions, margins and seeds of a run folder, as they were before its first result.

Seeds that are added later, without looks that were declared, are marked with the questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.questions import Asked, margins_of
from hfpatch.results.schema import PrimaryQuestion
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.support.files import hash_values, read_json, write_json

FILE = "questions.json"
LATER = "declared when results existed already"
_CHANGED = "changed when results existed already"
_ADDED = "seeds added when results existed already"


def declare(out: Path, setup: ComparisonSetup, *, has_results: bool) -> None:
    """Write the questions, margins and seeds of a comparison, with their hash, unless some are declared already.

    Before the first result of a method they may still change.

    Args:
        out: the run folder.
        setup: the comparison.
        has_results: whether a method has a result already; what is declared then is marked.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    if has_results and (out / FILE).is_file():
        _read(out)
        return
    declared: dict[str, Any] = {"questions": [_written(each) for each in setup.questions]}
    declared |= {"margin": margins_of(setup.recipe), "seeds": list(setup.recipe.training.all_seeds)}
    write_json(out / FILE, {**declared, "later": has_results, "sha256": hash_values([declared, has_results])})


def questions_of(out: Path, setup: ComparisonSetup) -> list[PrimaryQuestion]:
    """Return the questions of a comparison, each with how it differs from what was declared before the first result.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    stored = _read(out) if (out / FILE).is_file() else {}
    before = {each["question"]: each for each in stored.get("questions", [])}
    margins = margins_of(setup.recipe)
    found = []
    for each in setup.questions:
        changed = LATER if stored.get("later") else ""
        if stored and not changed:
            if each.name not in before:
                changed = LATER
            elif before[each.name] != _written(each):
                changed = f"its pairs or tasks {_CHANGED}"
            elif stored["margin"] != margins:
                changed = f"a margin {_CHANGED}"
        if seeds_before(out, setup.recipe) is not None:
            changed = f"{changed}; {_ADDED}" if changed else _ADDED
        pairs, on = list(each.pairs), list(each.on)
        found.append(PrimaryQuestion(question=each.name, pairs=pairs, on=on, changed=changed))
    return found


def seeds_before(out: Path, recipe: Recipe) -> list[int] | None:
    """Return the declared seeds, where more were added when results existed already; None where none were.

    Raises:
        HfpatchError: if the file was changed by hand.
    """
    stored = _read(out)["seeds"] if (out / FILE).is_file() else list(recipe.training.all_seeds)
    return stored if stored != list(recipe.training.all_seeds) else None


def _written(each: Asked) -> dict[str, Any]:
    return {"question": each.name, "pairs": [list(pair) for pair in each.pairs], "on": list(each.on)}


def _read(out: Path) -> Mapping[str, Any]:
    stored = read_json(out / FILE)
    declared = {key: stored.get(key) for key in ("questions", "margin", "seeds")}
    if stored.get("sha256") != hash_values([declared, stored.get("later")]):
        raise HfpatchError(
            f"{out / FILE}: was changed since it was written (its hash does not match); restore it, or choose another "
            "--out: questions change in the recipe, which the report then says"
        )
    return stored
