"""Tuning: what its trials found, whether more rates are needed, and the values that each method's final runs take."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.data.plan import BatchPlan
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.tuning import Edge, Values, point_name
from hfpatch.results import tuning as results
from hfpatch.results.records import DocumentLosses, loss_of
from hfpatch.runs.plan import PlannedRun, Round
from hfpatch.runs.records import Losses, Trained


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
    _read: dict[Path, tuple[int, results.Trial]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def needs(self, run: PlannedRun) -> bool:
        """Whether a trial takes place, by the outcomes of the rounds before."""
        trials: list[results.Trial] = []
        for tried in self.rounds:
            needed = _needed(tried, trials, self.base_loss)
            if run in tried.runs:
                return run in needed
            trials += self._complete([one for one in needed if self.part in (None, one.variant)])
        return False

    def outcomes(self) -> list[results.Trial]:
        """Return the complete trials, rates ascending.

        Those of a round that turned out not to be needed are left out, unless one method alone is known: which rounds
        the others need is then not decided here.
        """
        trials: list[results.Trial] = []
        for tried in self.rounds:
            trials += self._complete(tried.runs if self.part is not None else _needed(tried, trials, self.base_loss))
        return sorted(trials, key=lambda trial: trial.rate or 0.0)

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
        runs = {(run.variant, point_name(run.point)): run for tried in self.rounds for run in tried.runs}
        for trial in self.outcomes():
            file = runs[trial.method, point_name(trial.values)].paths.training
            by_method.setdefault(trial.method, []).append(Trained.read(file).losses)
        return by_method

    def chosen(self, method: str) -> Values:
        """Return the values that a method's final runs are trained at; nothing while it has no trial."""
        best = best_of(self.outcomes(), method)
        return {} if best is None else dict(best.values)

    def _complete(self, runs: Iterable[PlannedRun]) -> list[results.Trial]:
        """Return the trials among runs that are complete."""
        trials = []
        for run in runs:
            file = run.paths.training
            with suppress(FileNotFoundError):
                changed = file.stat().st_mtime_ns
                if self._read.get(file, (None,))[0] != changed:
                    trained = Trained.read(file)
                    trial = results.Trial(
                        method=run.variant,
                        seed=run.seed,
                        values=dict(run.point),
                        loss=trained.final_eval_loss if trained.diverged_step is None else None,
                        diverged_step=trained.diverged_step,
                        plan=trained.identity.plan,
                        commit=trained.commit,
                    )
                    self._read[file] = changed, trial
                trials.append(self._read[file][1])
        return trials


def best_of(trials: Sequence[results.Trial], method: str) -> results.Trial | None:
    """Return the trial of the lowest loss among a method's, of equal ones that of the lowest rate, or None."""
    of_method = [trial for trial in trials if trial.method == method]
    return min(of_method, key=lambda trial: (trial.compared_loss, trial.rate or 0.0), default=None)


def _needed(tried: Round, trials: Sequence[results.Trial], base_loss: float | None) -> Sequence[PlannedRun]:
    """Return the trials of a round that take place, by the outcomes before."""
    if tried.enough is None:
        return tried.runs if tried.edge is None or _at_edge(trials, tried.edge) else ()
    best = [best_of(trials, method) for method in dict.fromkeys(run.variant for run in tried.runs)]
    finite = [trial for trial in best if trial is not None and trial.loss is not None]
    cap = math.inf if base_loss is None else base_loss
    errors = [results.error_of_rate(trials, trial.method, trial.values, cap) for trial in finite]
    if all(error is not None and error < tried.enough for error in errors):
        return ()
    beside = {}
    for trial in finite:
        rates = sorted({float(run.point["lr"] or 0.0) for run in tried.runs if run.variant == trial.method})
        above = bisect(rates, trial.rate or 0.0)
        beside[trial.method] = rates[max(0, above - 1) : above + 1]
    return [run for run in tried.runs if run.point["lr"] in beside.get(run.variant, ())]


def _at_edge(trials: Sequence[results.Trial], edge: Edge) -> list[str]:
    """Return the methods whose best rate is the lowest, or highest, that was tried."""
    rates: dict[str, list[float]] = {}
    for trial in trials:
        rates.setdefault(trial.method, []).append(trial.rate or 0.0)
    limits = {method: (min if edge == "lowest" else max)(tried) for method, tried in rates.items()}
    best = {method: best_of(trials, method) for method in rates}
    return [method for method, trial in best.items() if trial is not None and trial.rate == limits[method]]


def collect_tuning(
    tuning: Tuning, recipe: Recipe | StudyRecipe, text: Mapping[str, Any], plan: BatchPlan
) -> results.Tuning:
    """Return the outcomes of the trials so far, for the results of a recipe that tunes; ``text`` describes its text."""
    assert recipe.tuning is not None
    trials = tuning.outcomes()
    rates = list(dict.fromkeys(trial.rate for trial in trials if trial.rate is not None))
    sides: tuple[Edge, Edge] = ("highest", "lowest")  # a single rate counts as the lowest
    tried = [settings for name in recipe.trained if (settings := recipe.tuning_of(name)) is not None]
    beyond = {rate for settings in tried for edge in sides for rate in settings.extension(edge)}
    listed = {rate for settings in tried for rate in settings.learning_rates}
    edges = {method: edge for edge in sides for method in _at_edge(trials, edge)}
    return results.Tuning(
        seed=recipe.tuning_seed,
        steps=plan.steps,
        learning_rates=rates,
        added=[rate for rate in rates if rate in beyond - listed],
        refined=[rate for rate in rates if rate not in beyond | listed] or None,
        text=dict(text),
        base_loss=tuning.base_loss,
        trials=trials,
        chosen={
            method: results.Choice(
                values=dict(best.values),
                loss=best.loss,
                trials=sum(trial.method == method for trial in trials),
                edge=edges.get(method) if best.loss is not None else None,
            )
            for method in recipe.trained
            if (best := best_of(trials, method)) is not None
        },
    )
