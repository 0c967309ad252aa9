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
"""How long a forecast measures, loading and tokenising and the first part of everything aside."""
FORWARD = 1 / 3
"""How long a forward pass takes, of a step's time for each token."""
_FORWARDS_S = 0.2  # how long forward passes of one row are repeated
_MOST = 400  # documents that are scored for their variance: a standard deviation is then known to 4 %


@dataclass
class Measured:
    """The measurements of a comparison, or of a study.

    Attributes:
        setup: the comparison, or the study.
        asked: the requests of each task.
        timed: how long the base takes for each task.
        spreads: how documents of the questions' tasks and texts vary under the base, where that can be measured.
        kinds: the times and the memory of each kind of method.
        forward_s: how long a forward pass of one row takes with the base.
    """

    setup: ComparisonSetup | StudySetup
    asked: dict[str, TaskRequests] = field(default_factory=dict)
    timed: dict[str, Timed] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    kinds: dict[str, MeasuredKind] = field(default_factory=dict)
    forward_s: float = 0.0

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


def measure(recipe: Recipe | StudyRecipe, seconds: float, progress: Progress) -> Measured:
    """Set a comparison or a study up, and measure its parts for about ``seconds``.

    Args:
        recipe: the comparison, or the study.
        seconds: shared by the base on each task, the documents of each question and a step of each kind of method;
            loading comes on top. However few they are, each of these is measured on a batch, on eight documents, or on
            a block.
        progress: called at each measurement.

    Raises:
        HfpatchError: if the recipe cannot be run.
    """
    if isinstance(recipe, StudyRecipe):
        measured = Measured(set_up_study(recipe, Tuning(), progress))
        return _measure_kinds(measured, seconds / len(measured.largest), progress)
    setup = set_up(recipe, progress=progress)
    recipe, base, measured = setup.recipe, setup.base, Measured(setup)
    progress.evaluating(BASE, "requests of the tasks")
    with quiet():
        chosen = select(recipe.evaluation, recipe.data_dir)
        scorer = HfpatchLM(base.model, **scorer_options(base.tokenizer, recipe.evaluation))
    measured.asked = collect_requests(base.model, base.tokenizer, chosen)
    asked_on = dict.fromkeys(name for asked in setup.questions for name in asked.on)
    score_s = seconds / max(1, len(measured.asked) + 2 * len(asked_on) + 2 * len(measured.largest))  # steps vary more

    with pinned_library(setup.matmul):
        base.model.eval()
        reset_peak_memory()
        measured.forward_s = _forward_seconds(setup, base.model)
        for name, asked in measured.asked.items():
            progress.evaluating(BASE, f"a part of {name}")
            measured.timed[name] = time_requests(scorer, asked, score_s)
        for name in asked_on:
            progress.evaluating(BASE, f"documents of {name}")
            if (spread := _spread(measured, setup, chosen, name, 2 * score_s)) is not None:
                measured.spreads[name] = spread
        measured.kinds[BASE] = MeasuredKind(
            method=recipe.baseline,
            evaluation_s={task: timed.seconds for task, timed in measured.timed.items()},
            evaluation_memory_bytes=peak_memory_bytes(),
        )
        return _measure_kinds(measured, 2 * score_s, progress)


def _measure_kinds(measured: Measured, seconds: float, progress: Progress) -> Measured:
    """Measure a training step of each kind, for so many seconds."""
    for kind, name in measured.largest.items():
        progress.evaluating(kind, "a part of a training step")
        measured.kinds[kind] = _measure_kind(measured, name, seconds)
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


def _spread(measured: Measured, setup: ComparisonSetup, chosen: Selection, name: str, seconds: float) -> Spread | None:
    """Return how documents of a task or text vary under the base, of as many as there are seconds for."""
    if (task := measured.asked.get(name)) is None:
        blocks = _texts(setup)[name]
        few = math.ceil(len(blocks) * (ENOUGH + 1) / blocks.documents)  # rows of so many documents
        return _text_spread(setup, name, blocks.head(max(few, int(seconds / measured.forward_s))))
    if not task.encoded or task.generated:
        return None
    within = int(seconds * task.documents / measured.timed[name].seconds)
    number = min(task.documents, max(ENOUGH, min(_MOST, within)))
    return base_spread(setup.base.model, setup.base.tokenizer, chosen.only(name, number))


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
        while len(taken) < 5 or sum(taken) < _FORWARDS_S:  # a busy machine is a hundred times slower for an instant
            start = time.perf_counter()
            model.base_model(row)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return min(taken)
