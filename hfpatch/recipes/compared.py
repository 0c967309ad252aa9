"""The keys that recipes share: those of every recipe, and those of recipes whose methods or variants are compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import Field, PositiveFloat, model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.questions import HELD_OUT, MARGINS, QuestionSettings
from hfpatch.recipes.retention import task_of
from hfpatch.recipes.strict import ExpandedPath, Section, check_among, check_names, check_once
from hfpatch.recipes.training import SeededSettings
from hfpatch.recipes.tuning import TuningSettings, tuning_seed


class NamedRecipe(Section):
    """The keys of every recipe."""

    name: str
    """Names the run; ``runs/<name>`` is where it goes unless ``--out`` says otherwise."""
    description: str = ""
    """One sentence for the report."""
    data: DataSettings
    """The training text."""
    data_dir: ExpandedPath | None = None
    """A folder that holds local copies of hub data sets, relative to the working directory."""

    @model_validator(mode="after")
    def _names_a_folder(self) -> NamedRecipe:
        check_names(self.name)
        return self


class ComparedRecipe(NamedRecipe):
    """The keys of a recipe whose methods, or variants, are compared."""

    training: SeededSettings
    """The optimiser, its schedule and the seeds."""
    tuning: TuningSettings | None = None
    """The values that each method or variant is tried at before its final runs; None trains all at ``training.lr``."""
    questions: QuestionSettings = QuestionSettings()
    """What the comparison is to decide: the primary questions."""
    margin: dict[str, PositiveFloat | None] = Field(default_factory=dict)
    """The differences that do not matter, by task or measure (``{nats_per_token: 0.02, lambada_openai: 0.07}``), in
    their units. Without it: 0.02 ``nats_per_token``, 0.01 ``bits_per_byte`` (on tinyworld bases 0.005) and 0.01
    ``accuracy``. null claims signs alone."""
    baseline: str
    """What all others are compared with."""

    @property
    def measures_held_out(self) -> bool:
        """Whether there is text whose loss is measured."""
        return self.data.held_out is not None

    @property
    def tuning_seed(self) -> int:
        """The seed of all trials of tuning, which no final run uses."""
        return tuning_seed(self.training.all_seeds)

    def check_questions(
        self,
        names: Collection[str],
        tasks: Sequence[str] = (),
        texts: Sequence[str] = (),
        *,
        of: str = "methods",
        measures: Collection[str] = tuple(MARGINS),
    ) -> None:
        """Refuse a mistake in ``training.seeds``, ``questions`` or ``margin``.

        Args:
            names: of the methods or variants.
            tasks: the tasks of the evaluation.
            texts: the texts of ``retention``, by name.
            of: the key of the recipe that names what is compared.
            measures: the measures that may have a margin.
        """
        held_out = [HELD_OUT] if self.measures_held_out else []
        gain, keep = self.questions.gain, self.questions.keep
        check_once("training.seeds", self.training.all_seeds)
        if self.training.looks and gain is None and keep is None:
            raise HfpatchError(
                "training.seeds.looks grows seeds until the primary questions are decided; ask one in questions"
            )
        choices = list(dict.fromkeys([*names, *map(family_of, names)]))
        if gain is not None and gain.on is not None and gain.on not in (*held_out, *tasks):
            hint = "; data.held_out takes documents for it" if gain.on == HELD_OUT else nearest(gain.on, tasks)
            raise HfpatchError(f"questions.gain.on is {gain.on!r}, which is not among evaluation.tasks{hint}")
        pairs = (gain.pairs if gain is not None else None) or ()
        for pair in pairs:
            check_among("questions.gain.pairs", pair, choices, of)
            if pair[0] in (pair[1], self.baseline):
                raise HfpatchError(
                    f"questions.gain.pairs has {list(pair)}; name one of {of} but the baseline, and another one "
                    "to compare it with"
                )
        check_once("questions.gain.pairs", pairs)
        trained = [name for name in choices if name != self.baseline]
        for key, asked, answers, what in (
            ("on", keep and keep.on, [*texts, *map(task_of, texts), *tasks], "evaluation.tasks and retention.texts"),
            ("methods", keep and keep.methods, trained, "the trained methods"),
        ):
            check_among(f"questions.keep.{key}", asked or (), answers, what)
            check_once(f"questions.keep.{key}", asked or ())
        measured = [*measures, *held_out, *texts, *tasks]
        if wrong := next((name for name in self.margin if name not in measured), None):
            more = f"{nearest(wrong, measured)}; there are {', '.join(measured)}"
            raise HfpatchError(f"margin.{wrong} names no task and no measure{more}")
