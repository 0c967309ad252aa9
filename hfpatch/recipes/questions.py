"""The primary questions of a recipe and their margins: what a comparison is to decide, declared before it runs.

Two questions can be asked: ``gain``, is a method better than another one, by default than the LoRA of its size; and
``keep``, does it keep what the base could do. What they decide, and how, is in :mod:`hfpatch.results.verdicts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.pairs import at_budgets, loras_of
from hfpatch.recipes.retention import task_of
from hfpatch.recipes.strict import Section, check_among, check_once

if TYPE_CHECKING:
    from hfpatch.recipes.comparison import Recipe
    from hfpatch.recipes.pretraining import StudyRecipe

PrimaryName = Literal["gain", "keep"]
HELD_OUT = "held_out_text"
"""The name of the held-out text, where questions and margins name tasks."""
MARGINS: dict[str, float] = {"nats_per_token": 0.02, "bits_per_byte": 0.01, "accuracy": 0.01}
"""The margins of measures without one in the recipe: 0.02 nats a token are 2 % of perplexity."""
TINYWORLD_MARGINS = {**MARGINS, "bits_per_byte": 0.005}
"""The same for the embedded models."""
SAME_SIZE = 0.01
"""The share by which the parameters of two methods of one size may differ."""


class GainQuestion(Section):
    """Is the first method of each pair better than the second?"""

    on: str | None = None
    """The task, or ``held_out_text``; None takes held-out text, else the first text among the tasks, else the first."""
    pairs: tuple[tuple[str, str], ...] | None = None
    """The pairs. None takes each method and the first LoRA of its match group whose size differs by at most 1 %."""


class KeepQuestion(Section):
    """Does each method keep what the base could do?"""

    on: tuple[str, ...] | None = None
    """Tasks, and texts of ``retention`` by name; None takes the texts and tasks of ``retention``."""
    methods: tuple[str, ...] | None = None
    """The methods; None takes all that are trained."""


class QuestionSettings(Section):
    """The primary questions; everything else that a comparison tests is secondary."""

    gain: GainQuestion | None = GainQuestion()
    """None does not ask it."""
    keep: KeepQuestion | None = KeepQuestion()
    """None does not ask it."""


@dataclass(frozen=True)
class Asked:
    """A primary question with everything that the recipe leaves to defaults.

    Attributes:
        name: ``gain`` or ``keep``.
        pairs: the method and the other of each pair.
        on: the tasks and texts, by the names of their scores.
    """

    name: PrimaryName
    pairs: tuple[tuple[str, str], ...]
    on: tuple[str, ...]


def asked(recipe: Recipe, sizes: Mapping[str, int], tasks: Mapping[str, bool]) -> list[Asked]:
    """Return the primary questions that have a pair and a task.

    Args:
        recipe: the recipe.
        sizes: the trained parameters of each method.
        tasks: whether each task scores whole texts.
    """
    questions, settings = [], recipe.questions
    if settings.gain is not None:
        pairs = settings.gain.pairs
        if pairs is None:  # the first LoRA of each method's size
            of_size = {
                name: [lora for lora in loras_of(recipe, name) if abs(sizes[lora] / sizes[name] - 1) <= SAME_SIZE]
                for name in recipe.trained
            }
            pairs = tuple((name, loras[0]) for name, loras in of_size.items() if loras)
        held_out = [HELD_OUT] if recipe.data.held_out is not None else []
        texts = [task for task, is_text in tasks.items() if is_text]
        on = settings.gain.on or next(iter([*held_out, *texts, *tasks]), None)
        pairs = tuple(pair for named in pairs for pair in at_budgets(named, recipe.methods))
        questions.append(Asked("gain", pairs, (on,) if on else ()))
    if settings.keep is not None:
        retention, keep = recipe.retention, settings.keep
        sources = [task_of(name) for name in retention.sources(recipe.model.name)] if retention is not None else []
        if keep.on is not None:
            on_all = tuple(task_of(name) if task_of(name) in sources else name for name in keep.on)
        else:
            kept = () if retention is None else retention.tasks
            on_all = (*sources, *(tasks if kept is None else kept))
        methods = recipe.trained if keep.methods is None else keep.methods
        pairs = tuple(pair for name in methods for pair in at_budgets((name, recipe.baseline), recipe.methods))
        questions.append(Asked("keep", pairs, on_all))
    return [each for each in questions if each.pairs and each.on]


def margins_of(recipe: Recipe) -> dict[str, float]:
    """Return the margin of each measure and task that has one: those of the recipe, else the defaults."""
    defaults = TINYWORLD_MARGINS if recipe.model.name.startswith("tinyworld/") else MARGINS
    texts = recipe.retention.sources(recipe.model.name) if recipe.retention is not None else {}
    given = {task_of(name) if name in texts else name: value for name, value in recipe.margin.items()}
    return {name: value for name, value in {**defaults, **given}.items() if value is not None}


def check_questions(
    recipe: Recipe | StudyRecipe,
    tasks: Sequence[str] = (),
    texts: Sequence[str] = (),
    *,
    of: str = "methods",
    measures: Collection[str] = tuple(MARGINS),
) -> None:
    """Refuse a mistake in ``questions`` or ``margin``.

    Args:
        recipe: the recipe.
        tasks: the tasks of its evaluation.
        texts: the texts of ``retention``, by name.
        of: the key of the recipe that names what is compared.
        measures: the measures that may have a margin.
    """
    held_out = [HELD_OUT] if recipe.data.held_out is not None else []
    gain, keep = recipe.questions.gain, recipe.questions.keep
    families = [family_of(name) for name in recipe.methods if family_of(name) not in recipe.methods]  # of budgets
    methods = [*recipe.methods, *dict.fromkeys(families)]
    if gain is not None and gain.on is not None and gain.on not in (*held_out, *tasks):
        hint = "; data.held_out takes documents for it" if gain.on == HELD_OUT else nearest(gain.on, tasks)
        raise HfpatchError(f"questions.gain.on is {gain.on!r}, which is not among evaluation.tasks{hint}")
    pairs = (gain.pairs if gain is not None else None) or ()
    for pair in pairs:
        check_among("questions.gain.pairs", pair, methods, of)
        if pair[0] == pair[1] or pair[0] == recipe.baseline:
            raise HfpatchError(
                f"questions.gain.pairs has {list(pair)}; name one of {of} but the baseline, and another one "
                "to compare it with"
            )
    check_once("questions.gain.pairs", pairs)
    trained = [name for name in methods if name != recipe.baseline]
    for key, names, choices, what in (
        ("on", keep and keep.on, [*texts, *map(task_of, texts), *tasks], "evaluation.tasks and retention.texts"),
        ("methods", keep and keep.methods, trained, "the trained methods"),
    ):
        check_among(f"questions.keep.{key}", names or (), choices, what)
        check_once(f"questions.keep.{key}", names or ())
    choices = [*measures, *held_out, *texts, *tasks]
    if wrong := next((name for name in recipe.margin if name not in choices), None):
        more = f"{nearest(wrong, choices)}; there are {', '.join(choices)}"
        raise HfpatchError(f"margin.{wrong} is of no task and no measure{more}")
