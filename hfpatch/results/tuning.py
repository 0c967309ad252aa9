"""What tuning tried, and what it chose."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hfpatch.results.parts import Measured, Part, Values


class Trial(Part):
    """One method trained at one learning rate with the seed of tuning.

    Attributes:
        method: the method.
        seed: the seed, the same for all trials and of no final run.
        values: what it was trained with: ``lr``, and other values of the grid.
        loss: nats per token on the text of tuning after the last step; None where the trial diverged, which counts as
            infinite.
        diverged_step: the step at which it diverged, or None.
        plan: SHA-256 of its batch plan, the same for all trials.
        commit: the commit of hfpatch that made it.
    """

    method: str
    seed: int
    values: Values
    loss: Measured = None
    diverged_step: int | None = None
    plan: str | None = None
    commit: str | None = None

    @property
    def rate(self) -> float | None:
        """The learning rate, or None if it is no number."""
        rate = self.values.get("lr")
        return float(rate) if isinstance(rate, int | float) and rate > 0 else None


class Choice(Part):
    """What a method's final runs are trained with.

    Attributes:
        values: those of its trial of the lowest loss.
        loss: that loss; None where all its trials diverged, so that the method is not tuned.
        trials: how many trials it had.
        edge: whether the rate is the lowest or the highest that was tried, so that a better one may lie beyond; None
            where all diverged.
        at: the method whose trials these are, where it is another budget of it; None is its own.
    """

    written_if_set = frozenset({"at"})

    values: Values
    loss: Measured = None
    trials: int
    edge: Literal["lowest", "highest"] | None = None
    at: str | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a trial came to its end, so that there is a best one."""
        return self.loss is not None


class Tuning(Part):
    """The trials of a comparison.

    Attributes:
        seed: the seed of all trials.
        steps: optimiser steps of each.
        learning_rates: the rates that every method was tried at, ascending.
        added: those of them that the recipe does not list: beyond an edge that was some method's best.
        text: the text whose loss decides: documents, tokens, hash.
        trials: every trial that is complete.
        chosen: what each method's final runs take.
    """

    seed: int
    steps: int
    learning_rates: list[float] = Field(default_factory=list)
    added: list[float] = Field(default_factory=list)
    text: Values = Field(default_factory=dict)
    trials: list[Trial] = Field(default_factory=list)
    chosen: dict[str, Choice] = Field(default_factory=dict)

    def of(self, method: str) -> list[Trial]:
        """Return the trials of a method."""
        return [trial for trial in self.trials if trial.method == method]

    def rates_of(self, method: str) -> list[float]:
        """Return the learning rates that a method was tried at, ascending; without its trials those of all."""
        rates = {trial.rate for trial in self.of(method) if trial.rate is not None}
        return sorted(rates) or self.learning_rates

    def is_chosen(self, trial: Trial) -> bool:
        """Whether a trial is its method's best, at whose values the final runs are trained."""
        choice = self.chosen.get(trial.method)
        return choice is not None and choice.is_tuned and choice.values == trial.values
