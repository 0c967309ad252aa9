"""Measuring parts of a comparison or study before it is run: of steps, and of tasks."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.documents import describe_documents
from hfpatch.data.plan import draw_plans
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
from hfpatch.recipes.training import LoopSettings, TrainingSettings
from hfpatch.results.forecast import MeasuredKind, Work
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.parts import NATS_PER_TOKEN
from hfpatch.runs.plan import Unit, training_steps
from hfpatch.runs.pretraining import StudySetup, set_up_study
from hfpatch.runs.progress import Progress
from hfpatch.runs.retention import by_document
from hfpatch.runs.setup import ComparisonSetup, Setup, set_up
from hfpatch.runs.tuning import Tuning
from hfpatch.support.cpu import pinned_library
from hfpatch.support.ranks import Ranks
from hfpatch.surgery.methods import Method
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.training.architecture import build_model
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory
from hfpatch.training.pretrain import pretrain
from hfpatch.training.probe import train_probe
from hfpatch.training.records import StepRecord
from hfpatch.training.validation import document_losses
from hfpatch.tuners.config import method_name

BASE = "base"
SECONDS = 20.0
"""How long a forecast measures, loading and tokenising aside."""
LATE_S = 10.0
"""How much longer it may measure first parts; what is left then is estimated from what was measured."""
_MOST = 4  # steps of each kind of method
FORWARD = 1 / 3
"""How long a forward pass takes, of a step's time for each token."""
_STEP, _SCORE, _SPREAD = 2.0, 1.0, 2.0  # shares of the time


def kind_of(method: Method) -> str:
    """Return the kind of a method, whose members take about the same time a parameter."""
    parts = [
        method_name(config) + (" (DoRA)" if getattr(config, "use_dora", False) else "") for config in method.configs
    ]
    return " + ".join(parts) or BASE


@dataclass
class Measured:
    """The measurements of a comparison.

    Attributes:
        setup: the comparison.
        asked: the requests of each task.
        timed: how long the base takes for each task.
        spreads: how documents vary under the base, of the tasks and of the questions' texts where that was measured.
        kinds: the times and the memory of each kind of method.
        taken_s: how long measuring took.
        enough_s: in how many seconds everything, the spreads of all tasks too, would have been measured.
        estimated: tasks and kinds of methods for which no time was left.
    """

    setup: Setup
    asked: dict[str, TaskRequests] = field(default_factory=dict)
    timed: dict[str, Timed] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    kinds: dict[str, MeasuredKind] = field(default_factory=dict)
    taken_s: float = 0.0
    enough_s: float = 0.0
    estimated: list[str] = field(default_factory=list)

    def kind_of(self, name: str) -> str:
        """Return the kind of a method; every variant of a study is one by itself."""
        return kind_of(self.setup.methods[name]) if isinstance(self.setup, ComparisonSetup) else name

    def estimate_task(self, name: str) -> None:
        """Take a task to need the others' time a token."""
        tokens = sum(self.asked[other].tokens for other in self.timed)
        a_token = math.fsum(timed.seconds for timed in self.timed.values()) / tokens
        self.timed[name] = Timed(a_token * self.asked[name].tokens, 0)
        self.estimated.append(name)

    def estimate_kind(self, kind: str, method: str) -> None:
        """Take a kind of method to be as slow as the slowest measured one."""
        slowest = max(self.kinds.values(), key=lambda kind: kind.step_s or 0.0)
        self.kinds[kind] = slowest.model_copy(update={"method": method, "step_share": None})
        self.estimated.append(kind)

    @property
    def words(self) -> str:
        """How far everything was sampled."""
        tokens = [timed.tokens for timed in self.timed.values() if timed.tokens]
        steps = [kind.step_share for kind in self.kinds.values() if kind.step_share is not None]
        said = [f"{_range(tokens, '{:,}')} tokens of each task"] if tokens else []
        one = "kind of method" if isinstance(self.setup, ComparisonSetup) else "variant"
        said += [f"{_range(steps, '{:.0%}')} of a step of each {one}"] if steps else []
        return f"Measured were {' and '.join(said)}; the rest in proportion to its operations."

    def work(self, units: Iterable[Unit]) -> dict[str, Work]:
        """Return the work of all units by action."""
        by_action: dict[str, Work] = {}
        for unit in units:
            if unit.action not in ("check_baseline", "look") and unit.run.variant not in self.setup.left_out:
                before, added = by_action.get(unit.action, Work()), self.work_of(unit)
                together = {name: getattr(before, name) + getattr(added, name) for name in type(added).model_fields}
                by_action[unit.action] = Work(**together)
        return by_action

    def work_of(self, unit: Unit) -> Work:
        """Return the work of one unit that trains or measures; none for a method that is left out."""
        setup, training = self.setup, self.setup.recipe.training
        if unit.run.variant in setup.left_out:
            return Work()
        kind = self.kinds[self.kind_of(unit.run.variant)]
        step_s = kind.step_s or 0.0
        if isinstance(setup, ComparisonSetup) and unit.action in ("retain", "rewind"):
            # how many blocks pass through the model; the text of retention does so with the patch on and off
            blocks = retained = 2 * sum(map(len, setup.retained.values()))
            if unit.action == "rewind":
                tuning, held_out = (0 if text is None else len(text) for text in (setup.tuning_text, setup.held_out))
                blocks = tuning + (held_out + retained if unit.scale != 1 else 0)
            seconds = step_s * blocks / training.batch_size * FORWARD
            return Work(units=1, tokens=blocks * setup.blocks.block_size, seconds=seconds)

        # how many steps take as long as the measurements of the loss on held-out text, or for a trial on tuning's
        steps = 1 if unit.action == "evaluate" else training_steps(setup.recipe, unit) or 0
        every = None if unit.action == "tune" else training.evaluate_every
        times, measured = 1 + ((steps - 1) // every + 1 if every else 0), 0.0
        if (text := setup.tuning_text if unit.run.point else setup.held_out) is not None:
            measured = times * len(text) / training.batch_size * FORWARD
        if unit.action == "evaluate":
            return Work(
                units=1,
                requests=sum(len(task.encoded) for task in self.asked.values()),
                tokens=sum(task.tokens for task in self.asked.values()),
                seconds=sum(kind.evaluation_s.values()) + step_s * measured,
            )
        return Work(
            units=1,
            steps=steps,
            tokens=steps * training.batch_size * setup.blocks.block_size,
            seconds=step_s * (steps + measured),
        )


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


class _Seconds:
    """The seconds of a forecast, of which each measurement gets its share by weight."""

    def __init__(self, seconds: float, weights: float, progress: Progress) -> None:
        self._begun, self._seconds, self._weights, self._progress = time.perf_counter(), seconds, weights, progress

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
        share, self._weights = weight / self._weights, self._weights - weight
        return left_s * share


def _largest_of_kinds(setup: ComparisonSetup) -> dict[str, str]:
    """Return the method with the most parameters by kind."""
    largest: dict[str, str] = {}
    for name, method in setup.methods.items():
        other = largest.setdefault(kind_of(method), name)
        if setup.sizes[name].trainable > setup.sizes[other].trainable:
            largest[kind_of(method)] = name
    return largest


def measure(recipe: Recipe | StudyRecipe, seconds: float, progress: Progress, *, spread: bool) -> Measured:
    """Set a comparison or a study up, and measure its parts for about ``seconds``.

    Args:
        recipe: the comparison, or the study.
        seconds: for the base on each task, a step of each kind of method, and the spreads; loading comes on top. First
            batches of tasks and blocks of kinds are run for up to ``LATE_S`` longer; then the tasks that are left are
            taken to need the others' time per token, and the kinds that of the slowest one, but for one of each.
        progress: called at each measurement.
        spread: whether to score documents of each task with the base, too.

    Raises:
        HfpatchError: if the recipe cannot be run.
    """
    if isinstance(recipe, StudyRecipe):
        study = set_up_study(recipe, Tuning(), progress)
        measured, clock = Measured(study), _Seconds(seconds, len(recipe.variants), progress)
        for name in recipe.variants:
            step, _, _ = _measure_kind(measured, name, clock.share(name, "a part of a training step", 1.0))
            measured.kinds[name] = MeasuredKind(method=name, **vars(step))
        measured.taken_s = measured.enough_s = clock.taken_s
        return measured
    setup = set_up(recipe, progress=progress)
    recipe, base, largest = setup.recipe, setup.base, _largest_of_kinds(setup)
    progress.evaluating(BASE, "requests of the tasks")
    with quiet():
        chosen = select(recipe.evaluation, recipe.data_dir)
        scorer = HfpatchLM(base.model, **scorer_options(base.tokenizer, recipe.evaluation))
    measured = Measured(setup, collect_requests(base.model, base.tokenizer, chosen))
    texts = _asked_texts(setup) if spread else {}
    weights = (
        (_SCORE + spread * _SPREAD) * len(measured.asked) + _SPREAD * len(texts) + _STEP * max(1, len(largest) - 1)
    )
    clock = _Seconds(seconds, weights, progress)

    with pinned_library(setup.matmul):
        # The base on each task
        base.model.eval()
        base_bytes = _bytes_of(base.model)
        reset_peak_memory()
        forward_s = _forward_seconds(setup, base.model)
        for name, asked in measured.asked.items():
            if clock.is_late and any(measured.asked[other].tokens for other in measured.timed):
                measured.estimate_task(name)
            else:
                measured.timed[name] = time_requests(scorer, [asked], clock.share(BASE, f"a part of {name}", _SCORE))
        spread_s = _measure_spreads(measured, chosen, texts, forward_s, clock) if spread else 0.0

        # A forward pass and a training step of each kind of method
        memory, at = peak_memory_bytes(), time.perf_counter()
        seconds_of = {task: timed.seconds for task, timed in measured.timed.items()}
        measured.kinds[BASE] = MeasuredKind(
            method=largest.pop(BASE), evaluation_s=seconds_of, evaluation_memory_bytes=memory
        )
        for kind, name in largest.items():
            if clock.is_late and len(measured.kinds) > 1:
                measured.estimate_kind(kind, name)
                continue
            left = clock.share(kind, "a part of a training step", _STEP)
            step, with_s, with_bytes = _measure_kind(measured, name, left)
            measured.kinds[kind] = MeasuredKind(
                method=name,
                evaluation_s={task: taken * with_s / forward_s for task, taken in seconds_of.items()},
                evaluation_memory_bytes=memory + with_bytes - base_bytes,
                **vars(step),
            )
    measured.taken_s = clock.taken_s
    # what was estimated would have taken as long as one kind
    kind_s = (time.perf_counter() - at) / max(1, len(largest) - sum(kind in largest for kind in measured.estimated))
    # the first spread has the smallest share of what the base's times leave
    shares = len(measured.asked) + len(texts) + _STEP / _SPREAD * max(1, len(largest))
    measured.enough_s = measured.taken_s + shares * spread_s + kind_s * len(measured.estimated)
    return measured


def _measure_kind(measured: Measured, name: str, seconds: float) -> tuple[StepTime, float, int]:
    """Return a training step, the seconds of a forward pass of one row, and the bytes of a method's model."""
    with training_of(measured.setup, name) as (model, whole, train):
        forward_s = _forward_seconds(measured.setup, model)
        # the first step of a process, or of a compiled model, is mostly start-up
        least = 2 if not measured.kinds.keys() - {BASE} or whole.compile else 1
        blocks = int(seconds / max(forward_s / FORWARD, 1e-9))
        step = time_step(measured.setup, whole, train, blocks, seconds, least=least)
        return step, forward_s, _bytes_of(model)


def _bytes_of(model: PreTrainedModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def _measure_spreads(
    measured: Measured, chosen: Selection, texts: Mapping[str, TokenBlocks], forward_s: float, clock: _Seconds
) -> float:
    """Measure how documents of tasks and texts vary under the base; return the seconds that the slowest one needs.

    Those of the primary questions come first, and may take longer than their share.
    """
    setup, all_needed_s = measured.setup, [0.0]
    assert isinstance(setup, ComparisonSetup)
    base = setup.base
    asked_on = {name for asked in setup.questions for name in asked.on}
    for name in sorted({**texts, **measured.asked}, key=lambda name: name not in asked_on):
        left = clock.share(BASE, f"documents of {name}", _SPREAD)
        task = measured.asked.get(name)
        if task is not None and (not task.encoded or task.generated):
            continue
        documents = texts[name].documents if task is None else task.documents
        document_s = (forward_s * len(texts[name]) if task is None else measured.timed[name].seconds) / documents
        needed_s = document_s * min(ENOUGH + 1, documents)
        all_needed_s.append(needed_s)
        if name in asked_on and not clock.is_late:
            left = max(left, min(needed_s, LATE_S))
        if task is None:
            spread = _text_spread(setup, name, texts[name].head(math.ceil(left / forward_s)))
            measured.spreads |= {name: spread} if spread is not None else {}
        elif number := documents_within(task, document_s, left, base.model.device.type):
            one = chosen.only(name, number)
            measured.spreads[name] = base_spread(base.model, base.tokenizer, one)
    return max(all_needed_s)


def _asked_texts(setup: ComparisonSetup) -> dict[str, TokenBlocks]:
    """Return the held-out text and the texts of retention that a primary question is asked on."""
    texts = {task_of(name): blocks for name, blocks in setup.retained.items()}
    texts |= {HELD_OUT: setup.held_out} if setup.held_out is not None else {}
    return {name: texts[name] for asked in setup.questions for name in asked.on if name in texts}


def _text_spread(setup: ComparisonSetup, name: str, blocks: TokenBlocks) -> Spread | None:
    """Return how a text's documents, or groups of them, vary under the base; None where they are too few."""
    losses = by_document(document_losses, setup.base.model, setup, blocks, Ranks()) if len(blocks) else np.zeros((0, 2))
    if (losses[:, 1] > 0).sum() < ENOUGH:
        return None
    documents, (nats, tokens) = describe_documents(blocks, setup.base.tokenizer), losses.T
    if name == HELD_OUT:
        metric, result = NATS_PER_TOKEN, held_out_result(losses, documents)
    else:  # of a patch that changes nothing
        unchanged = np.stack([tokens, nats, nats, 0 * nats, tokens], axis=1)
        metric, result = BITS_PER_BYTE, retained_result(name, unchanged, documents)
    units = result.n if result.clusters is None else result.clusters.groups
    return Spread(metric, units, result.metrics[metric], result.stderr[metric] * math.sqrt(units))


def _forward_seconds(setup: Setup, model: PreTrainedModel) -> float:
    """Return how long a forward pass of one row takes, a block of the training text: of two the shorter."""
    row = setup.blocks[0]["input_ids"][None].to(model.device)
    model.eval()
    taken = []
    with torch.inference_mode():
        for _ in range(2):
            start = time.perf_counter()
            model.base_model(row)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return min(taken)


@dataclass(frozen=True)
class StepTime:
    """Seconds and memory of an optimiser step, from one of a ``step_share`` of its blocks."""

    step_s: float
    step_share: float
    training_memory_bytes: int


@contextmanager
def training_of(setup: Setup, name: str) -> Iterator[tuple[PreTrainedModel, LoopSettings, Callable[..., object]]]:
    """Yield a model with a method, which is then taken out of the base again, or of a variant, and its training.

    That is the settings of a whole training, and a function that trains with settings like these.
    """
    seed = setup.recipe.training.all_seeds[0]
    reset_peak_memory()
    if isinstance(setup, ComparisonSetup):
        model = patch(setup.base.model, setup.methods[name].configs, seed=seed)
        train = partial(train_probe, model, origin={"frozen": setup.base.sha256}, blocks_checked=True)
        try:
            yield model, setup.recipe.training, train
        finally:
            unpatch(model)
    else:
        assert isinstance(setup, StudySetup)
        single = setup.recipe.single(name, {}, seed)
        model = build_model(single.architecture, tokenizer=setup.tokenizer, seed=seed).to(PartialState().device)
        yield model, single.training, partial(pretrain, model, save=False)


def time_step(
    setup: Setup, whole: LoopSettings, train: Callable[..., object], blocks: int, seconds: float, *, least: int
) -> StepTime:
    """Return seconds and memory of an optimiser step, from steps of about so many of its blocks.

    At least ``least`` steps are taken, at most ``_MOST`` where there is time, and the last counts.

    Args:
        setup: has the text.
        whole: the settings of the whole training.
        train: trains with settings like these.
        blocks: how many blocks there is time for.
        seconds: for so long.
        least: how many steps are taken at least.
    """
    taken, micro = list[float](), whole.micro_batch_size or 1
    blocks = min(whole.batch_size, max(1, blocks))
    blocks = max(blocks // micro * micro, 1)
    changed = {
        "steps": _MOST + 1,
        "warmup_steps": 0,
        "batch_size": blocks,
        "micro_batch_size": whole.micro_batch_size if blocks >= micro else None,
        "save_every": None,
        "evaluate_every": None,
        "patience": None,
        "keep_best": False,
        "report_to": (),
        **({"on_bad_loss": "skip"} if isinstance(whole, TrainingSettings) else {"diagnose_every": None}),
    }
    settings = whole.model_copy(update=changed)
    seed, begun = setup.recipe.training.all_seeds[0], time.perf_counter()

    def on_step(record: StepRecord) -> None:
        taken.append(record.seconds)
        late = time.perf_counter() - begun + record.seconds > seconds
        if len(taken) == _MOST or (late and len(taken) >= least):
            raise _Enough

    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        plan, run_dir = draw_plans(settings, setup.blocks, [seed])[seed], Path(folder) / "run"
        train(settings=settings, blocks=setup.blocks, plan=plan, seed=seed, run_dir=run_dir, on_step=on_step)
    share = blocks / whole.batch_size
    return StepTime(taken[-1] / share, share, peak_memory_bytes())


class _Enough(Exception):
    """Ends a run before its last step, whose checkpoint takes longer than the step."""
