"""`forecast`: a comparison's time and the differences it can show, from one measured step and batch of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.power import ASSUMED
from hfpatch.evaluation.sizing import Spread, TaskRequests, Timed
from hfpatch.recipes.comparison import Recipe
from hfpatch.results.decision import ALPHA, POWER
from hfpatch.results.forecast import Detectable, Forecast, PlannedMethod, PlannedTask
from hfpatch.runs.measuring import SECONDS, kind_of, measure
from hfpatch.runs.plan import plan_comparison
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.processes import start_processes

_LATE_S = 10.0
"""How much longer than asked for measuring may take without a word."""


def forecast(
    recipe: Recipe, *, effect: float | None = None, seconds: float = SECONDS, progress: Progress | None = None
) -> Forecast:
    """Plan a comparison: its runs, their time on this machine, and the differences that it could show.

    As much of an optimiser step and of each task as there is time for is run for each kind of method, and the base is
    scored on some documents of each task. Nothing is kept but caches.

    Args:
        recipe: the comparison.
        effect: a difference (of accuracies, of the logarithms of perplexities) to find the documents and seeds for.
        seconds: about how long to measure, beside loading; a first batch and a block of each kind are always run.
        progress: called at each measurement.

    Raises:
        HfpatchError: if the recipe cannot be run, or the effect is no positive number.
    """
    if effect is not None and not 0 < effect < 1:
        raise HfpatchError(f"--effect {effect:g}: must lie between 0 and 1, such as 0.01 for one point of accuracy")
    if start_processes().num_processes > 1:
        raise HfpatchError("plan runs in one process; start it without a launcher")
    clock = Clock()
    units = plan_comparison(recipe, Path("runs") / recipe.name).units
    measured = measure(recipe, seconds, progress or Progress(), spread=True)
    setup, asked, spreads, recipe = measured.setup, measured.asked, measured.spreads, measured.setup.recipe
    matches = {name: method.match for name, method in setup.methods.items() if name != recipe.baseline}
    comparisons = len(matches) * sum(spread.sd is not None for spread in spreads.values())
    warnings = [f"{caution}." for caution in setup.cautions]
    warnings += [f"{name} is left out: {reason}." for name, reason in setup.left_out.items()]
    if measured.taken_s > seconds + _LATE_S:
        warnings.insert(
            0,
            f"Measuring took {measured.taken_s:.0f} s and not {seconds:g} s: a first part of each task and kind of "
            "method is always run, and this machine is slow or busy; the times are those of a machine as busy as now.",
        )
    for name, each in asked.items():
        spread, document_s = spreads.get(name), measured.timed[name].seconds / max(1, each.documents)
        warnings += [f"{name}: {each.windows}."] if each.windows else []
        if each.generated:
            warnings.append(f"{name} generates {each.generated:,} texts, whose time is not estimated.")
        elif spread is None:
            warnings.append(
                f"{name}: what differences it can show is not known: a document takes {document_s:.2g} s here; "
                f"--seconds {math.ceil(measured.enough_s / 10) * 10} would be enough."
            )
        elif spread.sd is None:
            warnings.append(f"{name}: what differences of {spread.metric} it can show is not known: it is no mean.")
    return Forecast(
        name=recipe.name,
        model={**setup.base.facts, "dtype": recipe.model.dtype, "parameters": setup.sizes[recipe.baseline].base},
        seeds=list(recipe.training.all_seeds),
        methods={
            name: PlannedMethod(
                kind=kind_of(setup.methods[name]),
                trainable=setup.sizes[name].trainable,
                match=match and match.to_json(),
            )
            for name, match in matches.items()
        },
        kinds=measured.kinds,
        tasks={
            name: _task(
                each, measured.timed[name], spreads.get(name), len(recipe.training.all_seeds), comparisons, effect
            )
            for name, each in asked.items()
        },
        work=measured.work(units),
        comparisons=comparisons,
        effect=effect,
        assumptions=[measured.words, *_assumptions(setup, spreads.values())],
        warnings=warnings,
        provenance={**provenance(clock), "matmul": setup.matmul},
    )


def _task(
    asked: TaskRequests, timed: Timed, spread: Spread | None, seeds: int, comparisons: int, effect: float | None
) -> PlannedTask:
    size = {
        "documents": asked.documents,
        "requests": len(asked.encoded),
        "tokens": asked.tokens,
        "generated": asked.generated,
        "timed": timed.tokens,
    }
    if spread is None:
        return PlannedTask(metric=None, **size)
    found, enough = {}, (asked.documents, seeds)
    for change, assumed in ASSUMED.items() if spread.sd is not None else ():
        model = assumed[spread.accuracy].differences(spread.sd or 0.0, accuracy=spread.accuracy)
        needed: dict[str, int | None] = {}
        if effect is not None:  # the recipe's seeds where they are enough
            suffices = model.power(effect, *enough) >= POWER
            needed["documents"] = model.documents_for(effect, seeds)
            needed["seeds"] = seeds if suffices else model.seeds_for(effect, asked.documents)
        found[change] = Detectable(
            sd=model.sd,
            smallest=model.smallest_effect(*enough),
            smallest_corrected=model.smallest_effect(*enough, alpha=ALPHA / max(1, comparisons)),
            **needed,
        )
    return PlannedTask(
        metric=spread.metric,
        **size,
        sampled=spread.documents,
        score=spread.score,
        sd=spread.sd,
        unit="share" if spread.accuracy else "log" if spread.exponential else "score",
        detectable=found,
    )


def _assumptions(setup: ComparisonSetup, spreads: Iterable[Spread]) -> list[str]:
    kinds = {spread.accuracy for spread in spreads if spread.sd is not None}
    said = [
        "Loading, hashing and saving are left out. A method is taken to be as fast as the largest of its kind, and to "
        "be slower or faster than the base by the same factor on all tasks."
    ]
    if setup.held_out is not None:
        said.append("The loss on held-out text takes a third of a step's time for each token.")
    if setup.retained:
        said.append("Text of retention takes two thirds: the base and the method read it.")
    if kinds:
        said.append(
            "Differences are from the base, tested as compare does, before any correction. A document's score varies "
            "under the base as on the scored sample."
        )
    for accuracy, name in ((True, "right and wrong answers"), (False, "likelihoods")):
        clauses = []
        for change, each in ASSUMED.items() if accuracy in kinds else ():
            assumed = each[accuracy]
            clauses.append(
                f"a method that changes the base {change} is assumed to correlate {assumed.correlation:g} with it, "
                f"seeds sharing {assumed.shared:.0%} of the differences' variance"
            )
            if assumed.shift:
                clauses[-1] += f", and a seed shifts all by {assumed.shift:.0%} of a difference's deviation"
        if clauses:
            said.append(f"Of {name} {'; '.join(clauses)}: as on the quickstart.")
    return said
