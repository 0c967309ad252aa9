"""`forecast`: a comparison's time and the differences it can show, from one measured step and batch of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, listed
from hfpatch.evaluation.power import ASSUMED, ASSUMED_OF_PAIRS
from hfpatch.evaluation.sizing import Spread, TaskRequests, Timed
from hfpatch.evaluation.stats import FEWEST_DOCUMENTS
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA, POWER
from hfpatch.results.folder import load_results
from hfpatch.results.forecast import Detectable, Forecast, PlannedMethod, PlannedQuestion, PlannedTask
from hfpatch.results.parts import Comparison
from hfpatch.results.planning import cheapest, level_of, stored_for
from hfpatch.results.verdicts import look_parts, margin_for
from hfpatch.runs.measuring import FORWARD, LATE_S, SECONDS, Measured, measure
from hfpatch.runs.plan import Unit, plan_comparison, plan_study
from hfpatch.runs.pretraining import StudySetup
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import ComparisonSetup, Setup
from hfpatch.support.paths import takes_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.processes import start_processes


@takes_text
def forecast(
    recipe: Recipe | StudyRecipe,
    *,
    effect: float | None = None,
    like: Path | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Forecast:
    """Plan a comparison or a study: its runs, their time on this machine, and the differences that it could show.

    As much of an optimiser step and of each task as there is time for is run for each kind of method, and the base is
    scored on some documents of each task; of a study as much of a step of each variant. Nothing is kept but caches.

    Args:
        recipe: the comparison, or the study.
        effect: a difference (of accuracies, of the logarithms of perplexities) to find the documents and seeds for.
        like: the folder of an earlier comparison, whose variances say what the primary questions can decide.
        seconds: about how long to measure, beside loading, see :func:`hfpatch.runs.measuring.measure`.
        progress: called at each measurement.

    Raises:
        HfpatchError: if the recipe cannot be run, the effect is no positive number, or ``like`` is no comparison.
    """
    if effect is not None and not 0 < effect < 1:
        raise HfpatchError(f"--effect {effect:g}: must lie between 0 and 1, such as 0.01 for one point of accuracy")
    if start_processes().num_processes > 1:
        raise HfpatchError("plan runs in one process; start it without a launcher")
    earlier = None if like is None else load_results(like)
    if earlier is not None and not isinstance(earlier, ComparisonResults):
        raise HfpatchError(f"--like {like}: holds no comparison; give the folder of one")
    clock = Clock()
    out = Path("runs") / recipe.name
    units = (plan_study(recipe, out) if isinstance(recipe, StudyRecipe) else plan_comparison(recipe, out)).units
    measured = measure(recipe, seconds, progress or Progress(), spread=True)
    setup, spreads, recipe = measured.setup, measured.spreads, measured.setup.recipe
    comparisons = len(recipe.trained) * sum(spread.sd is not None for spread in spreads.values())
    questions = _questions(measured, units, earlier)
    warnings = [*_warnings(measured, seconds), *_warnings_of(questions, measured, like)]
    first = [unit for unit in units if unit.run.seed in recipe.training.first_seeds or unit.run.point]
    return Forecast(
        name=recipe.name,
        model=_model(setup),
        seeds=list(recipe.training.all_seeds),
        methods=_methods(measured),
        kinds=measured.kinds,
        tasks={
            name: _task(
                asked, measured.timed[name], spreads.get(name), len(recipe.training.all_seeds), comparisons, effect
            )
            for name, asked in measured.asked.items()
        },
        work=measured.work(units),
        questions=questions,
        first_look_s=sum(work.seconds for work in measured.work(first).values()) if recipe.training.looks else None,
        comparisons=comparisons,
        effect=effect,
        assumptions=[measured.words, *_assumptions(setup, spreads.values()), *_assumed_of(questions, measured)],
        warnings=warnings,
        provenance={**provenance(clock), "matmul": setup.matmul},
    )


def _model(setup: Setup) -> dict[str, Any]:
    """Return the base; of a study the size of its baseline, which is trained as well."""
    if isinstance(setup, ComparisonSetup):
        size = setup.sizes[setup.recipe.baseline].base
        return {**setup.base.facts, "dtype": setup.recipe.model.dtype, "parameters": size}
    assert isinstance(setup, StudySetup)
    return {"name": "models from scratch", "parameters": setup.sizes[setup.recipe.baseline][0]}


def _methods(measured: Measured) -> dict[str, PlannedMethod]:
    """Return each method that is trained, with its size."""
    methods, setup = {}, measured.setup
    for name in setup.recipe.trained:
        if isinstance(setup, ComparisonSetup):
            match, size = setup.methods[name].match, setup.sizes[name].trainable
        else:
            assert isinstance(setup, StudySetup)
            match, size = None, setup.sizes[name][0]
        methods[name] = PlannedMethod(kind=measured.kind_of(name), trainable=size, match=match and match.to_json())
    return methods


def _warnings(measured: Measured, seconds: float) -> list[str]:
    """Return what was not measured, or not in the seconds that were asked for."""
    warnings = [f"{caution}." for caution in measured.setup.cautions]
    warnings += [f"{name} is left out: {reason}." for name, reason in measured.setup.left_out.items()]
    enough = math.ceil(measured.enough_s / 10) * 10
    if measured.estimated:
        warnings.insert(
            0,
            f"No time was left to measure {listed(measured.estimated)}: a task is taken to need the others' time a "
            f"token, a method that of the slowest measured one; --seconds {enough} would be enough.",
        )
    if measured.taken_s > seconds + LATE_S:
        warnings.insert(
            0,
            f"Measuring took {measured.taken_s:.0f} s and not {seconds:g} s: this machine is slow or busy; the times "
            "are those of a machine as busy as now.",
        )
    for name, asked in measured.asked.items():
        spread, document_s = measured.spreads.get(name), measured.timed[name].seconds / max(1, asked.documents)
        warnings += [f"{name}: {asked.windows}."] if asked.windows else []
        if asked.generated:
            warnings.append(f"{name} generates {asked.generated:,} texts, whose time is not estimated.")
        elif spread is None:
            warnings.append(
                f"{name}: what differences it can show is not known: a document takes {document_s:.2g} s here; "
                f"--seconds {enough} would be enough."
            )
        elif spread.sd is None:
            warnings.append(f"{name}: what differences of {spread.metric} it can show is not known: it is no mean.")
    return warnings


def _warnings_of(questions: Sequence[PlannedQuestion], measured: Measured, like: Path | None) -> list[str]:
    """Return what cannot be said of primary questions, or not be decided."""
    warnings = []
    if like is not None and (unlike := dict.fromkeys(asked.task for asked in questions if asked.like is None)):
        named = listed(list(unlike))
        warnings.append(f"{like} has no pair with several seeds on {named}: no measured variance to go by there.")
    unknown = dict.fromkeys(asked.task for asked in questions if asked.like is None and not asked.is_assumed)
    if unknown:
        why = "too few documents were scored"
        if isinstance(measured.setup, StudySetup):
            why = "there is no base whose documents vary; --like RUN takes the variances of an earlier study"
        warnings.append(f"What the primary questions can decide on {listed(list(unknown))} is not known: {why}.")
    for task in dict.fromkeys(asked.task for asked in questions):
        if (number := _units_of(measured, task, None)) < FEWEST_DOCUMENTS:
            warnings.append(f"{task} has {number} documents; with fewer than {FEWEST_DOCUMENTS} nothing is tested.")
    if len(measured.setup.recipe.training.all_seeds) == 1 and questions:
        warnings.append("With one seed no primary question is decided.")
    return warnings


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
    detectable, design = {}, (asked.documents, seeds)
    for change, assumed in ASSUMED.items() if spread.sd is not None else ():
        model = assumed[spread.accuracy].differences(spread.sd or 0.0, accuracy=spread.accuracy)
        needed: dict[str, int | None] = {}
        if effect is not None:  # the recipe's seeds where they are enough
            suffices = model.power(effect, *design) >= POWER
            needed["documents"] = model.documents_for(effect, seeds)
            needed["seeds"] = seeds if suffices else model.seeds_for(effect, asked.documents)
        detectable[change] = Detectable(
            sd=model.sd,
            smallest=model.smallest_effect(*design),
            smallest_corrected=model.smallest_effect(*design, alpha=ALPHA / max(1, comparisons)),
            **needed,
        )
    return PlannedTask(
        metric=spread.metric,
        **size,
        sampled=spread.documents,
        score=spread.score,
        sd=spread.sd,
        unit="share" if spread.accuracy else "log" if spread.exponential else "score",
        detectable=detectable,
    )


def _questions(measured: Measured, units: Sequence[Unit], earlier: ComparisonResults | None) -> list[PlannedQuestion]:
    """Return what each pair of the primary questions can decide, with measured variances or else assumed ones."""
    setup, questions = measured.setup, list[PlannedQuestion]()
    training, seeds = setup.recipe.training, len(setup.recipe.training.all_seeds)
    part = look_parts(training.looks)[-1] if training.looks else 1.0
    for asked in setup.questions:
        for pair, task in product(asked.pairs, asked.on):
            fields: dict[str, Any] = {"question": asked.name, "method": pair[0], "other": pair[1], "task": task}
            fields["seeds"] = seeds
            is_base = isinstance(setup, ComparisonSetup) and pair[1] == setup.recipe.baseline
            stored = earlier and stored_for(earlier, pair, task, with_base=is_base)
            spread = _deciding(measured.spreads.get(task))
            number = _units_of(measured, task, stored or None)
            if stored:
                metric, design = stored.metric, stored.design.with_documents(number).with_seeds(max(2, seeds))
                fields["like"] = stored.pair
            elif spread is not None and spread.sd is not None:
                assumed = ASSUMED_OF_PAIRS[asked.name][_kind_of(spread, task, setup)]
                differences = assumed.differences(spread.sd, accuracy=spread.accuracy)
                metric, design = spread.metric, differences.design(number, max(2, seeds))
            else:
                questions.append(PlannedQuestion(**fields))
                continue
            margin = margin_for(setup.recipe.margins, task, metric)
            fields |= {"metric": metric, "documents": number, "margin": margin, "is_assumed": not stored}
            if seeds > 1:
                fields["difference"] = design.smallest_difference(level_of(asked, part), asked.name)
                fields["smallest_margin"] = design.smallest_margin(level_of(asked, part), asked.name)
            if margin is not None:
                first = [unit for unit in units if unit.run.variant in pair and unit.run.seed == training.all_seeds[0]]
                seconds = _seconds_of(measured, first, task)
                if (needed := cheapest(design, asked.name, level_of(asked), margin, number, seconds)) is not None:
                    names = ("seeds_needed", "documents_needed", "seconds")
                    fields |= dict(zip(names, needed, strict=True))
            questions.append(PlannedQuestion(**fields))
    return questions


def _deciding(spread: Spread | None) -> Spread | None:
    """Return how documents vary by the measure that decides their task; None where that is not planned for."""
    spread = spread and (spread.bits or spread)
    return None if spread is None or spread.exponential else spread


def _kind_of(spread: Spread, task: str, setup: Setup) -> str:
    """Return which assumption a task's differences are under."""
    is_text = not isinstance(setup, ComparisonSetup) or setup.tasks.get(task, True)  # what is no task is a text
    return "accuracy" if spread.accuracy else "text" if is_text else "answers"


def _assumed_of(questions: Sequence[PlannedQuestion], measured: Measured) -> list[str]:
    """Return what is assumed of the variances of primary questions."""
    others = {"gain": "the LoRA of its size", "keep": "the base"}
    of = {"text": "losses on texts", "answers": "bits per byte of answers", "accuracy": "accuracies"}
    clauses = []
    for asked in [question for question in questions if question.is_assumed]:
        spread = _deciding(measured.spreads[asked.task])
        assert spread is not None
        kind = _kind_of(spread, asked.task, measured.setup)
        assumed = ASSUMED_OF_PAIRS[asked.question][kind]
        clauses.append(
            f"by {of[kind]} a method correlates {assumed.correlation:g} with {others[asked.question]}, seeds share "
            f"{assumed.shared:.0%} of the differences' variance, and a seed shifts all by {assumed.shift:.0%} of a "
            "difference's deviation"
        )
    said = (
        "What the primary questions can decide is assumed, and may be wrong by a factor of two: documents vary under "
        f"the base as on a sample, and as in hfpatch's own comparisons {'; '.join(dict.fromkeys(clauses))}. --like RUN "
        "takes the variances of an earlier comparison."
    )
    return [said] if clauses else []


def _units_of(measured: Measured, task: str, stored: Comparison | None) -> int:
    """Return how many documents, or groups of them as the stored ones have, the recipe has of a task or text."""
    recipe = measured.setup.recipe
    if task in measured.asked:
        documents = measured.asked[task].documents
        return documents if stored is None else max(2, round(documents * stored.units / stored.n))
    if task == HELD_OUT and recipe.data.held_out is not None:
        return recipe.data.held_out
    assert isinstance(recipe, Recipe)
    assert recipe.retention is not None
    return recipe.retention.documents


def _seconds_of(measured: Measured, units: Sequence[Unit], task: str) -> tuple[float, float]:
    """Return the seconds of some units that all documents of a task take, in second place, and of all else."""
    setup, training = measured.setup, measured.setup.recipe.training
    of_task = 0.0
    trained = [unit for unit in units if unit.run.variant in setup.recipe.trained]
    for unit in [unit for unit in trained if unit.action == "evaluate"]:
        kind = measured.kinds[measured.kind_of(unit.run.variant)]
        of_task += kind.evaluation_s.get(task, 0.0)
        if task == HELD_OUT and setup.held_out is not None:
            of_task += (kind.step_s or 0.0) * len(setup.held_out) / training.batch_size * FORWARD
    whole = sum(work.seconds for work in measured.work(trained).values())
    return max(0.0, whole - of_task), of_task


def _assumptions(setup: Setup, spreads: Iterable[Spread]) -> list[str]:
    kinds = {spread.accuracy for spread in spreads if spread.sd is not None}
    said = ["Loading, hashing and saving are left out."]
    if isinstance(setup, ComparisonSetup):
        said[0] += (
            " A method is taken to be as fast as the largest of its kind, and to be slower or faster than the base by "
            "the same factor on all tasks."
        )
    if setup.held_out is not None:
        said.append("The loss on held-out text takes a third of a step's time for each token.")
    if isinstance(setup, ComparisonSetup) and setup.retained:
        said.append("Text of retention takes two thirds: the base and the method read it.")
    if kinds:
        said.append(
            "Differences are from the base, tested as compare does, before any correction. A document's score varies "
            "under the base as on the scored sample."
        )
    for accuracy, name in ((True, "right and wrong answers"), (False, "likelihoods")):
        clauses = []
        for change, by_kind in ASSUMED.items() if accuracy in kinds else ():
            assumed = by_kind[accuracy]
            clauses.append(
                f"a method that changes the base {change} is assumed to correlate {assumed.correlation:g} with it, "
                f"seeds sharing {assumed.shared:.0%} of the differences' variance"
            )
            if assumed.shift:
                clauses[-1] += f", and a seed shifts all by {assumed.shift:.0%} of a difference's deviation"
        if clauses:
            said.append(f"Of {name} {'; '.join(clauses)}: as on the quickstart.")
    return said
