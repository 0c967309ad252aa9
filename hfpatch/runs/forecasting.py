"""`forecast`: what a comparison will take and what it can show, from one measured step and batch of each kind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from hfpatch.data.plan import draw_plans
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.power import ASSUMED, Differences
from hfpatch.evaluation.sizing import Spread, TaskRequests, base_spread, collect_requests, time_batch
from hfpatch.evaluation.stats import ALPHA, POWER
from hfpatch.nn.matmul import pinned_library
from hfpatch.recipes.comparison import Recipe
from hfpatch.results.comparison import read_match
from hfpatch.results.forecast import Detectable, Forecast, MeasuredKind, PlannedMethod, PlannedTask, Work
from hfpatch.runs.plan import Unit, plan_comparison
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import ComparisonSetup, set_up
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.methods import Method
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory
from hfpatch.training.probe import train_probe
from hfpatch.training.processes import start_processes
from hfpatch.training.records import StepRecord
from hfpatch.tuners.config import method_name

BASE = "base"
_SHORT_STEP = 2.0  # seconds, below which a first step is mostly start-up
_REPEATS = 4
_FORWARD = 1 / 3  # of a step's time for each token


def forecast(recipe: Recipe, *, effect: float | None = None, progress: Progress | None = None) -> Forecast:
    """Plan a comparison: what will be run, how long it takes here, and what differences it could show.

    One optimiser step and one batch of each task are run for each kind of method, and the base is scored on some
    documents of each task. Nothing is kept but caches.

    Args:
        recipe: the comparison.
        effect: a difference (of accuracies, of the logarithms of perplexities) to find the documents and seeds for.
        progress: shown what is measured.

    Raises:
        HfpatchError: if the recipe cannot be run, or the effect is no positive number.
    """
    if effect is not None and not 0 < effect < 1:
        raise HfpatchError(f"--effect {effect:g}: must lie between 0 and 1, such as 0.01 for one point of accuracy")
    if start_processes().num_processes > 1:
        raise HfpatchError("plan runs in one process; start it without a launcher")
    clock, listener = Clock(), progress or Progress()
    units = plan_comparison(recipe, Path("runs") / recipe.name).units
    setup = set_up(recipe)
    with pinned_library(setup.matmul):
        listener.evaluating(BASE, "requests")
        given = (setup.base.model, setup.base.tokenizer, recipe.evaluation, recipe.data_dir)
        asked = collect_requests(*given)
        spreads = base_spread(*given, asked)
        kinds = {kind: _measure(setup, kind, name, asked, listener) for kind, name in _largest(setup).items()}
    others = [name for name in recipe.methods if name != recipe.baseline]
    comparisons = len(others) * sum(spread.sd is not None for spread in spreads.values())
    base = setup.base
    return Forecast(
        name=recipe.name,
        model={"name": base.name, "revision": base.revision, "sha256": base.sha256, "dtype": recipe.model.dtype}
        | {"parameters": setup.sizes[recipe.baseline].base},
        seeds=list(recipe.training.seeds),
        methods={name: _method(setup, name) for name in others},
        kinds=kinds,
        tasks={
            name: _task(each, spreads.get(name), len(recipe.training.seeds), comparisons, effect)
            for name, each in asked.items()
        },
        work=_work(setup, units, kinds, asked),
        comparisons=comparisons,
        effect=effect,
        assumptions=_assumptions(setup, spreads.values()),
        warnings=_warnings(asked, spreads),
        provenance={**provenance(clock), "matmul": setup.matmul},
    )


def measured_seconds(recipe: Recipe, units: Sequence[Unit], progress: Progress) -> list[float]:
    """Return about how long trainings and evaluations take here, from a step and a batch of each kind of method.

    Raises:
        HfpatchError: if the recipe cannot be run.
    """
    setup = set_up(recipe)
    with pinned_library(setup.matmul):
        asked = collect_requests(setup.base.model, setup.base.tokenizer, recipe.evaluation, recipe.data_dir)
        kinds = {kind: _measure(setup, kind, name, asked, progress) for kind, name in _largest(setup).items()}
    return [_work_of(setup, unit, kinds, asked).seconds for unit in units]


def _kind(method: Method) -> str:
    """Return the kind of a method, whose members take about the same time a parameter."""
    parts = [
        method_name(config) + (" (DoRA)" if getattr(config, "use_dora", False) else "") for config in method.configs
    ]
    return " + ".join(parts) or BASE


def _largest(setup: ComparisonSetup) -> dict[str, str]:
    """Return the method of each kind that has the most parameters."""
    chosen: dict[str, str] = {}
    for name, method in setup.methods.items():
        kind = _kind(method)
        if kind not in chosen or setup.sizes[name].trainable > setup.sizes[chosen[kind]].trainable:
            chosen[kind] = name
    return chosen


def _method(setup: ComparisonSetup, name: str) -> PlannedMethod:
    match = setup.methods[name].match
    return PlannedMethod(
        kind=_kind(setup.methods[name]),
        trainable=setup.sizes[name].trainable,
        match=read_match(match.to_json()) if match else None,
    )


def _measure(
    setup: ComparisonSetup, kind: str, name: str, asked: Mapping[str, TaskRequests], listener: Progress
) -> MeasuredKind:
    """Return the times and the memory of a kind of method, measured on one of its methods."""
    evaluation = setup.recipe.evaluation
    with _patched(setup, name) as model:
        model.eval()
        reset_peak_memory()
        seconds = {}
        for task, each in asked.items():
            listener.evaluating(kind, f"a batch of {task}")
            seconds[task] = time_batch(model, setup.base.tokenizer, evaluation, each)
        scored = {"evaluation_s": seconds, "evaluation_memory_bytes": peak_memory_bytes()}
        if kind == BASE:
            return MeasuredKind(method=name, **scored)
        listener.evaluating(kind, "a training step")
        step, memory = _take_steps(setup, model, 1)
        if step < _SHORT_STEP or setup.recipe.training.compile:
            step, memory = _take_steps(setup, model, _REPEATS)
        return MeasuredKind(method=name, step_s=step, training_memory_bytes=memory, **scored)


@contextmanager
def _patched(setup: ComparisonSetup, name: str) -> Iterator[PreTrainedModel]:
    """Yield the base with a new patch in it, and take it out again."""
    model, configs = setup.base.model, setup.methods[name].configs
    if configs:
        patch(model, configs, seed=setup.recipe.training.seeds[0])
    try:
        yield model
    finally:
        if configs:
            unpatch(model)


def _take_steps(setup: ComparisonSetup, model: PreTrainedModel, steps: int) -> tuple[float, int]:
    """Return the seconds of the last of several optimiser steps, and their peak memory."""
    training, records = setup.recipe.training, list[StepRecord]()
    changed = {"steps": steps, "warmup_steps": 0, "save_every": None, "evaluate_every": None, "report_to": ()}
    settings = training.model_copy(update={**changed, "patience": None, "keep_best": False})
    seed = training.seeds[0]
    plan = draw_plans(settings, setup.blocks, [seed])[seed]
    with tempfile.TemporaryDirectory() as folder:
        outcome = train_probe(
            model,
            settings=settings,
            blocks=setup.blocks,
            plan=plan,
            seed=seed,
            run_dir=Path(folder) / "run",
            on_step=records.append,
        )
    return records[-1].seconds, outcome.peak_memory_bytes


def _task(
    asked: TaskRequests, spread: Spread | None, seeds: int, comparisons: int, effect: float | None
) -> PlannedTask:
    size = {
        "documents": asked.documents,
        "requests": len(asked.encoded),
        "tokens": asked.tokens,
        "generated": asked.generated,
    }
    if spread is None:
        return PlannedTask(metric=None, **size)
    found = {}
    for change, assumed in ASSUMED.items() if spread.sd is not None else ():
        model = assumed[spread.accuracy].differences(spread.sd or 0.0, accuracy=spread.accuracy)
        found[change] = _detectable(model, asked.documents, seeds, comparisons, effect)
    return PlannedTask(
        metric=spread.metric,
        **size,
        sampled=spread.documents,
        score=spread.score,
        sd=spread.sd,
        unit="share" if spread.accuracy else "log" if spread.exponential else "score",
        detectable=found,
    )


def _detectable(model: Differences, documents: int, seeds: int, comparisons: int, effect: float | None) -> Detectable:
    enough = documents, seeds
    return Detectable(
        sd=model.sd,
        smallest=model.smallest_effect(*enough),
        smallest_corrected=model.smallest_effect(*enough, alpha=ALPHA / max(1, comparisons)),
        documents=None if effect is None else model.documents_for(effect, seeds),
        seeds=None if effect is None else _seeds_for(model, effect, documents, seeds),
    )


def _seeds_for(model: Differences, effect: float, documents: int, seeds: int) -> int | None:
    """Return the seeds that are needed; those of the recipe where they are enough, as one may be."""
    return seeds if model.power(effect, documents, seeds) >= POWER else model.seeds_for(effect, documents)


def _work(
    setup: ComparisonSetup,
    units: Iterable[Unit],
    kinds: Mapping[str, MeasuredKind],
    asked: Mapping[str, TaskRequests],
) -> dict[str, Work]:
    """Return what all units of each action take together."""
    found: dict[str, Work] = {}
    for unit in units:
        if unit.action != "check_baseline":
            before, added = found.get(unit.action, Work()), _work_of(setup, unit, kinds, asked)
            together = {name: getattr(before, name) + getattr(added, name) for name in type(added).model_fields}
            found[unit.action] = Work(**together)
    return found


def _work_of(
    setup: ComparisonSetup, unit: Unit, kinds: Mapping[str, MeasuredKind], asked: Mapping[str, TaskRequests]
) -> Work:
    """Return what one unit takes, which trains or evaluates something."""
    kind = kinds[_kind(setup.methods[unit.run.variant])]
    if unit.action == "evaluate":
        return Work(
            units=1,
            requests=sum(len(each.encoded) for each in asked.values()),
            tokens=sum(each.tokens for each in asked.values()),
            seconds=sum(kind.evaluation_s.values()),
        )
    steps = _steps(setup.recipe, unit)
    return Work(
        units=1,
        steps=steps,
        tokens=steps * setup.recipe.training.batch_size * setup.blocks.block_size,
        seconds=(kind.step_s or 0.0) * (steps + _held_out_steps(setup, unit, steps)),
    )


def _steps(recipe: Recipe, unit: Unit) -> int:
    """Return the steps of a training; trials of tuning may have their own number."""
    own = recipe.tuning.steps if recipe.tuning is not None and unit.action == "tune" else None
    return own or recipe.training.steps


def _held_out_steps(setup: ComparisonSetup, unit: Unit, steps: int) -> float:
    """Return how many steps take as long as measuring the loss on held-out text does."""
    held_out = setup.measured_on(unit.run)
    if held_out is None:
        return 0.0
    every = None if unit.action == "tune" else setup.recipe.training.evaluate_every
    times = 1 + ((steps - 1) // every if every else 0)
    return times * len(held_out) / setup.recipe.training.batch_size * _FORWARD


def _assumptions(setup: ComparisonSetup, spreads: Iterable[Spread]) -> list[str]:
    kinds = {spread.accuracy for spread in spreads if spread.sd is not None}
    said = [
        "Times are those of the measured step and batches in proportion; loading, hashing and saving are left out. "
        "A method is taken to be as fast as the largest of its kind.",
    ]
    if setup.held_out is not None:
        said.append("The loss on held-out text takes a third of a step's time for each token.")
    if kinds:
        said.append(
            "Differences are from the base, tested as compare does, before any correction. A document's score varies "
            "under the base as on the scored sample."
        )
    for accuracy, name in ((True, "right and wrong answers"), (False, "likelihoods")):
        if accuracy in kinds:
            said.append(
                f"Of {name} {'; '.join(_assumed(change, accuracy) for change in ASSUMED)}: as on the quickstart."
            )
    return said


def _assumed(change: str, accuracy: bool) -> str:
    assumed = ASSUMED[change][accuracy]
    shift = f", and a seed shifts all by {assumed.shift:.0%} of a difference's deviation" if assumed.shift else ""
    return (
        f"a method that changes the base {change} is assumed to correlate {assumed.correlation:g} with it, seeds "
        f"sharing {assumed.shared:.0%} of the differences' variance{shift}"
    )


def _warnings(asked: Mapping[str, TaskRequests], spreads: Mapping[str, Spread]) -> list[str]:
    said = []
    for name, each in asked.items():
        if each.generated:
            said.append(f"{name} generates {each.generated:,} texts, whose time is not estimated.")
        elif spreads[name].sd is None:
            said.append(f"{name}: what differences of {spreads[name].metric} it can show is not known: it is no mean.")
    return said
