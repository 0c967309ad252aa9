"""The trials of a comparison's tuning, and the values that they chose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from hfpatch.results.decision import rate_error
from hfpatch.results.parts import Measured, Part, Values


class Trial(Part):
    """One method trained at one learning rate with the seed of tuning.

    Attributes:
        seed: the seed, the same for all trials and of no final run.
        values: ``lr``, and other values of the grid.
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
        return _rate(self.values)

    @property
    def compared_loss(self) -> float:
        """The loss by which trials are compared: infinite where one diverged."""
        return math.inf if self.loss is None else self.loss


class Choice(Part):
    """The values that a method's final runs are trained with.

    Attributes:
        values: those of its trial of the lowest loss.
        loss: that loss; None where all its trials diverged, so that the method is not tuned.
        trials: how many trials it had.
        edge: whether the rate is the lowest or the highest that was tried, so that a better one may lie beyond; None
            where all diverged.
    """

    values: Values
    loss: Measured = None
    trials: int
    edge: Literal["lowest", "highest"] | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a trial came to its end, so that there is a best one."""
        return self.loss is not None


def _rate(values: Values) -> float | None:
    rate = values.get("lr")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def error_of_rate(trials: Iterable[Trial], method: str, values: Values, cap: float) -> float | None:
    """Return what the choice of the rate in a method's ``values`` may be worth; None where no trial had these values.

    It is :func:`hfpatch.results.decision.rate_error`, capped at ``cap``, over its trials that differ in the rate alone.
    """
    best, losses = _rate(values), dict[float, float]()
    for trial in trials:
        if trial.method == method and trial.rate is not None and {**trial.values, "lr": best} == values:
            losses[trial.rate] = trial.compared_loss
    return rate_error(losses, best, cap) if best is not None and best in losses else None


class Tuning(Part):
    """The trials of a comparison.

    Attributes:
        seed: the seed of all trials.
        steps: optimiser steps of each.
        learning_rates: the rates that every method was tried at, ascending.
        added: those of them that the recipe does not list: beyond an edge that was some method's best.
        refined: those of them that lie between others, of which each method was tried at those beside its best.
        text: the text whose loss decides: documents, tokens, predicted tokens and their bytes, groups if any, hash.
        trials: every trial that is complete.
        chosen: the values of each method's final runs.
        base_loss: the untrained base's loss on the text, nats per token; None where it was not measured.
    """

    seed: int
    steps: int
    learning_rates: list[float] = Field(default_factory=list)
    added: list[float] = Field(default_factory=list)
    refined: list[float] | None = None
    text: Values = Field(default_factory=dict)
    trials: list[Trial] = Field(default_factory=list)
    chosen: dict[str, Choice] = Field(default_factory=dict)
    base_loss: Measured = None

    def rate_error(self, method: str, otherwise: float | None = None) -> float | None:
        """Return what the choice of a method's rate may be worth, in nats per token; None where it had no trials.

        It is that of `error_of_rate`, capped at the base's loss on tuning's text, or ``otherwise`` on another text
        where that was not measured; infinite where all trials diverged.
        """
        choice = self.chosen.get(method)
        if choice is None:
            return None
        if not choice.is_tuned:
            return math.inf
        caps = (cap for cap in (self.base_loss, otherwise) if cap is not None)
        return error_of_rate(self.trials, method, choice.values, next(caps, math.inf))

    @property
    def bits_per_nat(self) -> float | None:
        """What a nat per token of the text is in bits per byte; None where its bytes are not known."""
        size = self.text.get("bytes")
        return self.text["predicted_tokens"] / (size * math.log(2)) if size else None

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
