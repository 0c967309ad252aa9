"""`forecast`: a comparison's time and what it can decide, from one measured step and batch of each kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, listed
from hfpatch.evaluation.power import ASSUMED_OF_PAIRS, Assumed
from hfpatch.evaluation.sizing import Spread
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT, Asked
from hfpatch.recipes.strict import MOST_SEEDS
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import FEWEST_DOCUMENTS, MOST_DOCUMENTS, fewest
from hfpatch.results.folder import load_results
from hfpatch.results.forecast import Forecast, PlannedQuestion, PlannedTask
from hfpatch.results.parts import Comparison
from hfpatch.results.planning import level_of, stored_for
from hfpatch.results.verdicts import look_parts, margin_for
from hfpatch.runs.costs import cpu_seconds, is_shared
from hfpatch.runs.measuring import SECONDS, Measured, measure
from hfpatch.runs.plan import Unit, plan_runs
from hfpatch.runs.pretraining import StudySetup
from hfpatch.runs.progress import Progress
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.processes import start_processes


def forecast(
    recipe: Recipe | StudyRecipe,
    *,
    like: str | Path | None = None,
    seconds: float = SECONDS,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Plan a comparison or a study: its runs, their time on this machine, and what its primary questions can decide.

    As much of an optimiser step and of each task as there is time for is run for each kind of method, and the base is
    scored on some documents of what the questions are asked on; of a study as much of a step of each variant. Nothing
    is kept but caches.

    Args:
        recipe: the comparison, or the study.
        like: the folder of an earlier comparison, whose variances say what the primary questions can decide.
        seconds: about how long to measure, beside loading, see :func:`hfpatch.runs.measuring.measure`.
        jobs: how many runs at a time to say the time of, too.
        progress: called at each measurement.

    Raises:
        HfpatchError: if the recipe cannot be run, or ``like`` is no comparison.
    """
    if start_processes().num_processes > 1:
        raise HfpatchError("plan runs in one process; start it without a launcher")
    earlier = None if like is None else load_results(like)
    clock, out = Clock(), Path("runs") / recipe.name
    units = plan_runs(recipe, out).units
    started, before = time.perf_counter(), cpu_seconds()
    measured = measure(recipe, seconds, progress or Progress())
    shared = is_shared(before, time.perf_counter() - started)
    setup, recipe = measured.setup, measured.setup.recipe
    first = [unit for unit in units if unit.run.seed in recipe.training.first_seeds or unit.run.point]
    questions = [
        _question(measured, earlier, asked, pair, task)
        for asked in setup.questions
        for pair, task in product(asked.pairs, asked.on)
    ]
    return Forecast(
        name=recipe.name,
        model=_model(measured),
        seeds=list(recipe.training.all_seeds),
        methods=measured.methods,
        kinds=measured.kinds,
        tasks={name: _task(measured, name) for name in measured.asked},
        work=measured.work(units),
        questions=questions,
        first_look_s=sum(work.seconds for work in measured.work(first).values()) if recipe.training.looks else None,
        jobs=jobs,
        jobs_s=None if jobs is None else _seconds_with(measured, units, jobs),
        assumptions=_assumptions(measured, questions, shared=bool(shared)),
        warnings=[*_warnings(measured), *_warnings_of(questions, measured, like)],
        provenance={**provenance(clock), "matmul": setup.matmul},
    )


def _seconds_with(measured: Measured, units: Sequence[Unit], jobs: int) -> float:
    """Return how long all units take with so many at a time.

    That is the longest chain of units that need the one before, or the time of all units shared by the devices,
    whichever takes longer.
    """
    taken, ends = dict[int, float](), dict[int, float]()
    for unit in units:  # after the units that it needs
        taken[id(unit)] = measured.work_of(unit).seconds if unit.marker is not None else 0.0
        ends[id(unit)] = taken[id(unit)] + max((ends[id(needed)] for needed in unit.needs), default=0.0)
    return max(*ends.values(), sum(taken.values()) / jobs)


def _model(measured: Measured) -> dict[str, Any]:
    """Return the base; of a study the size of its baseline, which is trained as well."""
    setup = measured.setup
    if isinstance(setup, StudySetup):
        return {"name": "models from scratch", "parameters": measured.methods[setup.recipe.baseline].trainable}
    size = setup.sizes[setup.recipe.baseline].base
    return {**setup.base.facts, "dtype": setup.recipe.model.dtype, "parameters": size}


def _task(measured: Measured, name: str) -> PlannedTask:
    """Return the size of a task and, where documents of it were scored, the base's score."""
    asked, spread = measured.asked[name], measured.spreads.get(name)
    return PlannedTask(
        documents=asked.documents,
        requests=len(asked.encoded),
        tokens=asked.tokens,
        generated=asked.generated,
        timed=measured.timed[name].tokens,
        metric=spread and spread.metric,
        sampled=spread.documents if spread is not None else 0,
        score=spread and spread.score,
    )


def _question(
    measured: Measured, earlier: ComparisonResults | None, asked: Asked, pair: tuple[str, str], task: str
) -> PlannedQuestion:
    """Return what a pair of a primary question can decide, with measured variances or else assumed ones."""
    recipe = measured.setup.recipe
    seeds, is_base = len(recipe.training.all_seeds), isinstance(recipe, Recipe) and pair[1] == recipe.baseline
    planned = PlannedQuestion(question=asked.question, method=pair[0], other=pair[1], task=task, seeds=seeds)
    stored = None if earlier is None else stored_for(earlier, pair, task, with_base=is_base)
    documents = _documents_of(measured, task, stored)
    if stored is not None:
        metric, design = stored.metric, stored.design.with_documents(documents).with_seeds(max(2, seeds))
    elif assumption := _assumption(measured, asked.question, task):
        spread, _, assumed = assumption
        metric = spread.metric
        design = assumed.design(spread.sd or 0.0, documents, max(2, seeds))
    else:
        return planned
    margin = margin_for(recipe.margins, task, metric)
    more: dict[str, Any] = {"metric": metric, "documents": documents, "margin": margin, "is_assumed": stored is None}
    more["like"] = stored and stored.pair
    if seeds > 1:
        level = level_of(asked, look_parts(recipe.training.looks)[-1] if recipe.training.looks else 1.0)
        more["difference"] = design.smallest_difference(level, asked.question)
        more["smallest_margin"] = design.smallest_margin(level, asked.question)
    if margin is not None:
        equal = asked.question, 0.0, level_of(asked), margin
        more["seeds_needed"] = fewest(design.with_seeds, equal, above=1, most=MOST_SEEDS)
        if seeds > 1:
            with_documents = design.with_documents
            more["documents_needed"] = fewest(with_documents, equal, above=FEWEST_DOCUMENTS - 1, most=MOST_DOCUMENTS)
    return planned.model_copy(update=more)


def _documents_of(measured: Measured, task: str, stored: Comparison | None = None) -> int:
    """Return how many documents, or groups of them as the stored ones have, the recipe has of a task or text."""
    recipe = measured.setup.recipe
    if task in measured.asked:
        documents = measured.asked[task].documents
        return documents if stored is None else max(2, round(documents * stored.units / stored.n))
    if task == HELD_OUT and measured.setup.held_out is not None:
        return recipe.data.held_out or len(measured.setup.held_out_documents.hashes)
    assert isinstance(recipe, Recipe)
    assert recipe.retention is not None
    return recipe.retention.documents


def _assumption(measured: Measured, question: str, task: str) -> tuple[Spread, str, Assumed] | None:
    """Return how a task's documents vary by the measure that decides it, and what is assumed of their differences.

    That is with its kind: of ``accuracy``, of ``answers``, or of a ``text``. None where the former is not known.
    """
    spread = measured.spreads.get(task)
    spread = spread and (spread.bits or spread)
    if spread is None or spread.sd is None or spread.exponential:
        return None
    is_text = isinstance(measured.setup, StudySetup) or measured.setup.tasks.get(task, True)  # what is no task is one
    kind = "accuracy" if spread.accuracy else "text" if is_text else "answers"
    return spread, kind, ASSUMED_OF_PAIRS[question][kind]


def _warnings(measured: Measured) -> list[str]:
    """Return the cautions of the set-up and of the tasks."""
    warnings = [f"{caution}." for caution in measured.setup.cautions]
    warnings += [f"{name} is left out: {reason}." for name, reason in measured.setup.left_out.items()]
    for name, asked in measured.asked.items():
        if asked.generated:
            warnings.append(f"{name} generates {asked.generated:,} texts, whose time is not estimated.")
    return warnings


def _warnings_of(questions: Sequence[PlannedQuestion], measured: Measured, like: str | Path | None) -> list[str]:
    """Return what cannot be said of primary questions, or not be decided."""
    warnings = []
    unlike = dict.fromkeys(asked.task for asked in questions if asked.like is None)
    if like is not None and unlike:
        warnings.append(f"{like} has no pair with several seeds on {listed(list(unlike))}, so no measured variance.")
    unknown = dict.fromkeys(asked.task for asked in questions if asked.like is None and not asked.is_assumed)
    if unknown:
        why = "too few documents, or no score that is a mean over them"
        if isinstance(measured.setup, StudySetup):
            why = "there is no base whose documents vary; --like RUN takes the variances of an earlier study"
        warnings.append(
            f"The differences that the primary questions can detect on {listed(list(unknown))} are unknown: {why}."
        )
    for task in dict.fromkeys(asked.task for asked in questions):
        if (number := _documents_of(measured, task)) < FEWEST_DOCUMENTS:
            warnings.append(f"{task} has {number} documents; with fewer than {FEWEST_DOCUMENTS} nothing is tested.")
    if len(measured.setup.recipe.training.all_seeds) == 1 and questions:
        warnings.append("With one seed no primary question is decided.")
    return warnings


def _assumptions(measured: Measured, questions: Sequence[PlannedQuestion], *, shared: bool) -> list[str]:
    """Return what is assumed of the times, and of the differences of the questions."""
    setup, sentences = measured.setup, [measured.words]
    if shared:
        sentences.append("Other programs used the machine meanwhile: alone on it, the runs are faster.")
    sentences.append("Loading, hashing and saving are left out.")
    if not isinstance(setup, StudySetup):
        sentences[-1] += (
            " A method is assumed to be as fast as the largest of its kind, and slower or faster than the base by the "
            "same factor on all tasks."
        )
    if setup.held_out is not None:
        sentences.append("Held-out text takes a third of a step's time per token.")
    if not isinstance(setup, StudySetup) and setup.retained:
        sentences.append("Retention text takes two thirds: the base and the method read it.")
    others = {"gain": "the LoRA of its size", "keep": "the base"}
    scores = {"text": "losses on texts", "answers": "bits per byte of answers", "accuracy": "accuracies"}
    clauses = []
    for asked in questions:
        if asked.is_assumed and (assumption := _assumption(measured, asked.question, asked.task)):
            _, kind, assumed = assumption
            clauses.append(f"by {scores[kind]} a method {assumed.text(others[asked.question])}")
    if clauses:
        sentences.append(
            "The table of primary questions rests on assumptions and may be wrong by a factor of two: documents vary "
            "under the base as in a sample, and as in hfpatch's own comparisons "
            f"{'; '.join(dict.fromkeys(clauses))}. --like RUN takes the variances of an earlier comparison."
        )
    return sentences
