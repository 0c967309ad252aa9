"""The primary questions of a recipe and their margins: what a comparison is to decide, declared before it runs.

Two questions can be asked: ``gain``, is a method better than another one, by default than the LoRA of its size; and
``keep``, does it keep what the base could do. What they decide, and how, is in :mod:`hfpatch.results.verdicts`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from hfpatch.recipes.strict import Section

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


class Asked(BaseModel):
    """A primary question with everything that the recipe leaves to defaults.

    Attributes:
        question: ``gain`` or ``keep``.
        pairs: the method and the other of each pair.
        on: the tasks and texts, by the names of their scores.
    """

    model_config = ConfigDict(frozen=True)

    question: PrimaryName
    pairs: list[tuple[str, str]]
    on: list[str]

    @property
    def tests(self) -> int:
        """How many tests it has, m."""
        return len(self.pairs) * len(self.on)
