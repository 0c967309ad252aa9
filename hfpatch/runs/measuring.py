"""Measuring parts of a comparison or study before it is run: of steps, and of tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.documents import describe_documents
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.retention import held_out_result, retained_result
from hfpatch.evaluation.run import scorer_options
from hfpatch.evaluation.selection import Selection, select
from hfpatch.evaluation.sizing import (
    ENOUGH,
    Spread,
    TaskRequests,
    Timed,
    base_spread,
    collect_requests,
    documents_within,
    time_requests,
)
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.recipes.retention import task_of
from hfpatch.results.forecast import MeasuredKind, PlannedMethod, Work
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.parts import NATS_PER_TOKEN
from hfpatch.runs.costs import time_step, training_of
from hfpatch.runs.plan import Unit
from hfpatch.runs.pretraining import StudySetup, set_up_study
from hfpatch.runs.progress import Progress
from hfpatch.runs.retention import by_document
from hfpatch.runs.setup import ComparisonSetup, Setup, set_up
from hfpatch.runs.tuning import Tuning
from hfpatch.support.cpu import pinned_library
from hfpatch.support.ranks import Ranks
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory
from hfpatch.training.validation import document_losses
from hfpatch.tuners.config import method_name

BASE = "base"
SECONDS = 20.0
"""How long a forecast measures, loading and tokenising aside."""
LATE_S = 10.0
"""How much longer it may measure first parts; what is left then is estimated from what was measured."""
FORWARD = 1 / 3
"""How long a forward pass takes, of a step's time for each token."""
_FORWARDS_S = 0.2  # how long forward passes of one row are repeated
_STEP, _SCORE, _SPREAD = 2.0, 1.0, 2.0  # shares of the time


@dataclass
class Measured:
    """The measurements of a comparison, or of a study.

    Attributes:
        setup: the comparison, or the study.
        asked: the requests of each task.
        timed: how long the base takes for each task.
        spreads: how documents vary under the base, of the tasks and of the questions' texts where that was measured.
        kinds: the times and the memory of each kind of method.
        forward_s: how long a forward pass of one row takes with the base.
        taken_s: how long measuring took.
        enough_s: in how many seconds everything, the spreads of all tasks too, would have been measured.
        estimated: tasks and kinds of methods for which no time was left.
    """

    setup: ComparisonSetup | StudySetup
    asked: dict[str, TaskRequests] = field(default_factory=dict)
    timed: dict[str, Timed] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    kinds: dict[str, MeasuredKind] = field(default_factory=dict)
    forward_s: float = 0.0
    taken_s: float = 0.0
    enough_s: float = 0.0
    estimated: list[str] = field(default_factory=list)

    @cached_property
    def methods(self) -> dict[str, PlannedMethod]:
        """The trained methods with their kinds, whose members take about the same time; a variant is its only one."""
        setup, methods = self.setup, dict[str, PlannedMethod]()
        if isinstance(setup, StudySetup):
            return {name: PlannedMethod(kind=name, trainable=setup.sizes[name][0]) for name in setup.recipe.variants}
        for name in setup.recipe.trained:
            method = setup.methods[name]
            parts = [method_name(one) + " (DoRA)" * bool(getattr(one, "use_dora", False)) for one in method.configs]
            match = method.match and method.match.to_json()
            methods[name] = PlannedMethod(kind=" + ".join(parts), trainable=setup.sizes[name].trainable, match=match)
        return methods

    @property
    def largest(self) -> dict[str, str]:
        """The method of each kind that trains most parameters."""
        kinds: dict[str, list[str]] = {}
        for name, method in self.methods.items():
            kinds.setdefault(method.kind, []).append(name)
        return {kind: max(names, key=lambda name: self.methods[name].trainable) for kind, names in kinds.items()}

    def kind_of(self, name: str) -> MeasuredKind:
        """Return what was measured of the kind of a method, of the baseline or of a variant."""
        return self.kinds[self.methods[name].kind if name in self.methods else BASE]

    @property
    def words(self) -> str:
        """How far everything was sampled."""
        tokens = [timed.tokens for timed in self.timed.values() if timed.tokens]
        steps = [kind.step_share for kind in self.kinds.values() if kind.step_share is not None]
        parts = [f"{_range(tokens, '{:,}')} tokens of each task"] if tokens else []
        one = "variant" if isinstance(self.setup, StudySetup) else "kind of method"
        parts += [f"{_range(steps, '{:.0%}')} of a step of each {one}"] if steps else []
        return f"Sampled: {' and '.join(parts)}; the rest is estimated in proportion to its operations."

    def work(self, units: Iterable[Unit]) -> dict[str, Work]:
        """Return the work of all units by action."""
        by_action: dict[str, Work] = {}
        for unit in units:
            if unit.action not in ("check_baseline", "look") and unit.run.variant not in self.setup.left_out:
                by_action[unit.action] = by_action.get(unit.action, Work()) + self.work_of(unit)
        return by_action

    def work_of(self, unit: Unit) -> Work:
        """Return the work of one unit that trains or measures; none for a method that is left out."""
        setup, training = self.setup, self.setup.recipe.training
        if unit.run.variant in setup.left_out:
            return Work()
        kind, steps, requests, evaluation_s = self.kind_of(unit.run.variant), 0, 0, 0.0
        # how many blocks of texts pass forwards alone; those of retention do so with the patch on and off
        tuning, held_out = (0 if text is None else len(text) for text in (setup.tuning_text, setup.held_out))
        retained = 2 * sum(map(len, setup.retained.values())) if isinstance(setup, ComparisonSetup) else 0
        if unit.action in ("train", "tune"):
            trials, every, blocks = setup.recipe.tuning, training.evaluate_every, tuning
            steps = trials.steps if trials and trials.steps and unit.action == "tune" else training.steps
            if not unit.run.point:  # studies measure the loss before the first step, too
                first = every is not None or isinstance(setup, StudySetup)
                blocks = held_out * (first + (math.ceil(steps / every) if every else 1))
            tokens = steps * training.batch_size * setup.blocks.block_size
        elif unit.action == "evaluate":
            blocks, evaluation_s = held_out, sum(kind.evaluation_s.values())
            requests = sum(len(task.encoded) for task in self.asked.values())
            tokens = sum(task.tokens for task in self.asked.values()) + blocks * setup.blocks.block_size
        else:
            blocks = retained
            if unit.action == "rewind":
                blocks = tuning + (held_out + retained if unit.scale != 1 else 0)
            tokens = blocks * setup.blocks.block_size
        seconds = (kind.step_s or 0.0) * (steps + blocks / training.batch_size * FORWARD) + evaluation_s
        return Work(units=1, steps=steps, tokens=tokens, requests=requests, seconds=seconds)


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


class _Clock:
    """The seconds of a forecast, of which each measurement gets its share by weight."""

    def __init__(self, seconds: float, weights: float, progress: Progress) -> None:
        self.weights = weights  # of what is not measured yet
        self._begun, self._seconds, self._progress = time.perf_counter(), seconds, progress

    @property
    def taken_s(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def is_late(self) -> bool:
        """Whether nothing more is to be measured."""
        return self.taken_s > self._seconds + LATE_S

    def share(self, kind: str, what: str, weight: float) -> float:
        """Return a measurement's share of the seconds that are left, and show how many are left."""
        left_s = max(0.0, self._seconds - self.taken_s)
        self._progress.evaluating(kind, f"{what}, about {left_s:.0f} s left")
        share, self.weights = weight / self.weights, self.weights - weight
        return left_s * share


def measure(recipe: Recipe | StudyRecipe, seconds: float, progress: Progress) -> Measured:
    """Set a comparison or a study up, and measure its parts for about ``seconds``.

    Args:
        recipe: the comparison, or the study.
        seconds: for the base on each task, a step of each kind of method, and the spreads; loading comes on top. First
            batches of tasks and blocks of kinds are run for up to ``LATE_S`` longer; then the tasks that are left are
            taken to need the others' time per token, and the kinds that of the slowest one, but for one of each.
        progress: called at each measurement.

    Raises:
        HfpatchError: if the recipe cannot be run.
    """
    if isinstance(recipe, StudyRecipe):
        measured = Measured(set_up_study(recipe, Tuning(), progress))
        return _measure_kinds(measured, _Clock(seconds, _STEP * len(measured.largest), progress))
    setup = set_up(recipe, progress=progress)
    recipe, base, measured = setup.recipe, setup.base, Measured(setup)
    progress.evaluating(BASE, "requests of the tasks")
    with quiet():
        chosen = select(recipe.evaluation, recipe.data_dir)
        scorer = HfpatchLM(base.model, **scorer_options(base.tokenizer, recipe.evaluation))
    measured.asked = collect_requests(base.model, base.tokenizer, chosen)
    asked_on = list(dict.fromkeys(name for asked in setup.questions for name in asked.on))
    weights = _SCORE * len(measured.asked) + _SPREAD * len(asked_on) + _STEP * len(measured.largest)
    clock = _Clock(seconds, weights, progress)

    with pinned_library(setup.matmul):
        base.model.eval()
        reset_peak_memory()
        measured.forward_s = _forward_seconds(setup, base.model)
        for name, asked in measured.asked.items():
            if clock.is_late and (tokens := sum(measured.asked[other].tokens for other in measured.timed)):
                token_s = math.fsum(timed.seconds for timed in measured.timed.values()) / tokens
                measured.timed[name] = Timed(token_s * asked.tokens, 0)
                measured.estimated.append(name)
            else:
                measured.timed[name] = time_requests(scorer, [asked], clock.share(BASE, f"a part of {name}", _SCORE))
        _measure_spreads(measured, setup, chosen, asked_on, clock)
        measured.kinds[BASE] = MeasuredKind(
            method=recipe.baseline,
            evaluation_s={task: timed.seconds for task, timed in measured.timed.items()},
            evaluation_memory_bytes=peak_memory_bytes(),
        )
        return _measure_kinds(measured, clock)


def _measure_kinds(measured: Measured, clock: _Clock) -> Measured:
    """Measure a training step of each kind, and how long everything took; no kind of a study is estimated."""
    begun, tasks = clock.taken_s, len(measured.estimated)
    for kind, name in measured.largest.items():
        if clock.is_late and BASE in measured.kinds and len(measured.kinds) > 1:
            slowest = max(measured.kinds.values(), key=lambda kind: kind.step_s or 0.0)
            measured.kinds[kind] = slowest.model_copy(update={"method": name, "step_share": None})
            measured.estimated.append(kind)
        else:
            measured.kinds[kind] = _measure_kind(measured, name, clock.share(kind, "a part of a training step", _STEP))
    measured.taken_s = clock.taken_s
    # what was estimated would have taken as long as one kind
    kind_s = (measured.taken_s - begun) / max(1, len(measured.largest) - len(measured.estimated[tasks:]))
    measured.enough_s += measured.taken_s + kind_s * len(measured.estimated)
    return measured


def _measure_kind(measured: Measured, name: str, seconds: float) -> MeasuredKind:
    """Measure a training step of a method and a forward pass, which is to the base's as its evaluations are."""
    setup, base = measured.setup, measured.kinds.get(BASE)
    base_bytes = setup.base.model.get_memory_footprint(False) if isinstance(setup, ComparisonSetup) else 0
    with training_of(setup, name) as (model, whole, train):
        forward_s = _forward_seconds(setup, model)
        # the first step of a process, or of a compiled model, is mostly start-up
        least = 2 if not measured.kinds.keys() - {BASE} or whole.compile else 1
        blocks = int(seconds / max(forward_s / FORWARD, 1e-9))
        step = time_step(setup, whole, train, blocks, seconds, least=least)
        added_bytes = model.get_memory_footprint(False) - base_bytes
    kind = MeasuredKind(method=name, **step._asdict())
    if base is None:
        return kind
    evaluation_s = {task: taken * forward_s / measured.forward_s for task, taken in base.evaluation_s.items()}
    memory_bytes = (base.evaluation_memory_bytes or 0) + added_bytes
    return kind.model_copy(update={"evaluation_s": evaluation_s, "evaluation_memory_bytes": memory_bytes})


def _measure_spreads(
    measured: Measured, setup: ComparisonSetup, chosen: Selection, names: Sequence[str], clock: _Clock
) -> None:
    """Measure how documents of tasks and texts vary under the base, and in how many seconds all would have been.

    They may take longer than their share.
    """
    base, shares, longest_s, texts = setup.base, clock.weights / _SPREAD, 0.0, _texts(setup)
    for name in names:
        left = clock.share(BASE, f"documents of {name}", _SPREAD)
        task = measured.asked.get(name)
        if task is not None and (not task.encoded or task.generated):
            continue
        documents = texts[name].documents if task is None else task.documents
        whole_s = measured.forward_s * len(texts[name]) if task is None else measured.timed[name].seconds
        needed_s = whole_s / documents * min(ENOUGH + 1, documents)
        longest_s = max(longest_s, needed_s)
        if not clock.is_late:
            left = max(left, min(needed_s, LATE_S))
        if task is not None:
            if number := documents_within(task, whole_s / documents, left, base.model.device.type):
                measured.spreads[name] = base_spread(base.model, base.tokenizer, chosen.only(name, number))
        elif (rows := math.ceil(left / measured.forward_s)) and (
            spread := _text_spread(setup, name, texts[name].head(rows))
        ):
            measured.spreads[name] = spread
    # the first spread has the smallest share of what the base's times leave
    measured.enough_s = shares * longest_s


def _texts(setup: ComparisonSetup) -> dict[str, TokenBlocks]:
    """Return the held-out text and the texts of retention."""
    texts = {task_of(name): blocks for name, blocks in setup.retained.items()}
    return texts | ({HELD_OUT: setup.held_out} if setup.held_out is not None else {})


def _text_spread(setup: ComparisonSetup, name: str, blocks: TokenBlocks) -> Spread | None:
    """Return how a text's documents, or groups of them, vary under the base; None where they are too few."""
    losses = by_document(document_losses, setup.base.model, setup, blocks, Ranks())
    if (losses[:, 1] > 0).sum() < ENOUGH:
        return None
    documents, (nats, tokens) = describe_documents(blocks, setup.base.tokenizer), losses.T
    if name == HELD_OUT:
        metric, result = NATS_PER_TOKEN, held_out_result(losses, documents)
    else:  # of a patch that changes nothing
        unchanged = np.stack([tokens, nats, nats, 0 * nats, tokens], axis=1)
        metric, result = BITS_PER_BYTE, retained_result(name, unchanged, documents)
    units = result.n if result.clusters is None else result.clusters.groups
    if metric not in result.stderr:  # of one group
        return None
    return Spread(metric, units, result.metrics[metric], result.stderr[metric] * math.sqrt(units))


def _forward_seconds(setup: Setup, model: PreTrainedModel) -> float:
    """Return how long a forward pass of one row takes, a block of the training text: the shortest of several."""
    row = setup.blocks[0]["input_ids"][None].to(model.device)
    model.eval()
    taken = list[float]()
    with torch.inference_mode():
        while len(taken) < 2 or sum(taken) < _FORWARDS_S:  # a busy machine is a hundred times slower for an instant
            start = time.perf_counter()
            model.base_model(row)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return min(taken)
