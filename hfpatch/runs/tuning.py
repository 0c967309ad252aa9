"""Tuning: what its trials found, whether more rates are needed, and the values that each method's final runs take."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.data.plan import BatchPlan
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.tuning import Edge, Values
from hfpatch.results import tuning as results
from hfpatch.results.decision import rate_error
from hfpatch.results.records import DocumentLosses, loss_of
from hfpatch.runs.plan import PlannedRun, Round
from hfpatch.runs.records import Losses, Trained


@dataclass(frozen=True)
class Outcome:
    """A trial that is complete.

    Attributes:
        run: the trial.
        trained: the outcome of its training.
    """

    run: PlannedRun
    trained: Trained

    @property
    def rate(self) -> float:
        """Its learning rate."""
        return float(self.run.point["lr"] or 0.0)

    @property
    def loss(self) -> float:
        """Nats per token on tuning's text after the last step; infinite where the trial diverged."""
        loss = self.trained.final_eval_loss
        return math.inf if loss is None or self.trained.diverged_step is not None else loss


@dataclass(frozen=True)
class Tuning:
    """The trials of a comparison; the outcome of each is read again only if its file has changed.

    Args:
        rounds: the trials in the order in which they are decided on; none where the recipe does not tune.
        part: the one method whose trials decide whether more rates are needed; None for all.
        base: the file with the base's losses on the text of tuning; it need not exist.
        untrained: without a base, the loss of a model that knows nothing, the logarithm of the vocabulary's size.
    """

    rounds: Sequence[Round] = ()
    part: str | None = None
    base: Path | None = None
    untrained: float | None = None
    _read: dict[Path, tuple[int, Outcome]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def needs(self, run: PlannedRun) -> bool:
        """Whether a trial takes place, by the outcomes of the rounds before."""
        trials: list[Outcome] = []
        for tried in self.rounds:
            needed = _needed(tried, trials, self.base_loss)
            if run in tried.runs:
                return run in needed
            done = self._outcomes(tried)
            trials += [trial for trial in done if trial.run in needed and self.part in (None, trial.run.variant)]
        return False

    def outcomes(self) -> list[Outcome]:
        """Return the complete trials, rates ascending.

        Those of a round that turned out not to be needed are left out, unless one method alone is known: which rounds
        the others need is then not decided here.
        """
        trials: list[Outcome] = []
        for tried in self.rounds:
            needed = tried.runs if self.part is not None else _needed(tried, trials, self.base_loss)
            trials += [trial for trial in self._outcomes(tried) if trial.run in needed]
        return sorted(trials, key=lambda trial: trial.rate)

    @property
    def base_loss(self) -> float | None:
        """The untrained base's loss on the text of tuning; None where it was not measured."""
        return (
            loss_of(Losses.read(self.base).losses) if self.base is not None and self.base.is_file() else self.untrained
        )

    def losses(self, baseline: str) -> dict[str, list[DocumentLosses | None]]:
        """Return the documents' losses of the base and of each method's trials, rates ascending.

        A trial that diverged has none.
        """
        by_method: dict[str, list[DocumentLosses | None]] = {}
        if self.base is not None and self.base.is_file():
            by_method[baseline] = [Losses.read(self.base).losses]
        for trial in self.outcomes():
            by_method.setdefault(trial.run.variant, []).append(trial.trained.losses)
        return by_method

    def chosen(self, method: str) -> Values:
        """Return the values that a method's final runs are trained at; nothing while it has no trial."""
        best = best_of(self.outcomes(), method)
        return {} if best is None else dict(best.run.point)

    def _outcomes(self, tried: Round) -> list[Outcome]:
        """Return the trials of a round that are complete."""
        trials = []
        for run in tried.runs:
            file = run.paths.training
            with suppress(FileNotFoundError):
                changed = file.stat().st_mtime_ns
                if self._read.get(file, (None,))[0] != changed:
                    self._read[file] = changed, Outcome(run, Trained.read(file))
                trials.append(self._read[file][1])
        return trials


def best_of(trials: Sequence[Outcome], method: str) -> Outcome | None:
    """Return the trial of the lowest loss among a method's, of equal ones that of the lowest rate, or None."""
    of_method = [trial for trial in trials if trial.run.variant == method]
    return min(of_method, key=lambda trial: (trial.loss, trial.rate), default=None)


def _needed(tried: Round, trials: Sequence[Outcome], base_loss: float | None) -> Sequence[PlannedRun]:
    """Return the trials of a round that take place, by the outcomes before."""
    if tried.enough is None:
        return tried.runs if tried.edge is None or _at_edge(trials, tried.edge) else ()
    best = [best_of(trials, method) for method in dict.fromkeys(run.variant for run in tried.runs)]
    finite = [trial for trial in best if trial is not None and math.isfinite(trial.loss)]
    if all(_error(trials, trial, base_loss) < tried.enough for trial in finite):
        return ()
    beside = {}
    for trial in finite:
        rates = sorted({float(run.point["lr"] or 0.0) for run in tried.runs if run.variant == trial.run.variant})
        above = bisect(rates, trial.rate)
        beside[trial.run.variant] = rates[max(0, above - 1) : above + 1]
    return [run for run in tried.runs if run.point["lr"] in beside.get(run.variant, ())]


def _error(trials: Sequence[Outcome], best: Outcome, base_loss: float | None) -> float:
    """Return what the choice of a method's rate may be worth, in nats per token."""
    values = {key: value for key, value in best.run.point.items() if key != "lr"}
    losses = {
        trial.rate: trial.loss
        for trial in trials
        if trial.run.variant == best.run.variant and {**trial.run.point, **values} == trial.run.point
    }
    return rate_error(losses, best.rate, math.inf if base_loss is None else base_loss)


def _at_edge(trials: Sequence[Outcome], edge: Edge) -> list[str]:
    """Return the methods whose best rate is the lowest, or highest, that was tried."""
    rates: dict[str, list[float]] = {}
    for trial in trials:
        rates.setdefault(trial.run.variant, []).append(trial.rate)
    limits = {method: (min if edge == "lowest" else max)(tried) for method, tried in rates.items()}
    best = {method: best_of(trials, method) for method in rates}
    return [method for method, trial in best.items() if trial is not None and trial.rate == limits[method]]


def collect_tuning(
    tuning: Tuning, recipe: Recipe | StudyRecipe, text: Mapping[str, Any], plan: BatchPlan
) -> results.Tuning:
    """Return the outcomes of the trials so far, for the results of a recipe that tunes; ``text`` describes its text."""
    assert recipe.tuning is not None
    outcomes = tuning.outcomes()
    rates = list(dict.fromkeys(outcome.rate for outcome in outcomes))
    sides: tuple[Edge, Edge] = ("highest", "lowest")  # a single rate counts as the lowest
    tried = [settings for name in recipe.trained if (settings := recipe.tuning_of(name)) is not None]
    beyond = {rate for settings in tried for edge in sides for rate in settings.extension(edge)}
    listed = {rate for settings in tried for rate in settings.learning_rates}
    edges = {method: edge for edge in sides for method in _at_edge(outcomes, edge)}
    return results.Tuning(
        seed=recipe.tuning_seed,
        steps=plan.steps,
        learning_rates=rates,
        added=[rate for rate in rates if rate in beyond - listed],
        refined=[rate for rate in rates if rate not in beyond | listed] or None,
        text=dict(text),
        base_loss=tuning.base_loss,
        trials=[
            results.Trial(
                method=outcome.run.variant,
                seed=outcome.run.seed,
                values=dict(outcome.run.point),
                loss=outcome.loss,
                diverged_step=outcome.trained.diverged_step,
                plan=outcome.trained.identity.plan,
                commit=outcome.trained.commit,
            )
            for outcome in outcomes
        ],
        chosen={
            method: results.Choice(
                values=dict(best.run.point),
                loss=best.loss,
                trials=sum(outcome.run.variant == at for outcome in outcomes),
                edge=edges.get(at) if math.isfinite(best.loss) else None,
                at=at if at != method else None,
            )
            for method in recipe.trained
            if (best := best_of(outcomes, at := recipe.tuned_at(method))) is not None
        },
    )
