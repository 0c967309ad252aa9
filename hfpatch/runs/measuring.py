"""Measuring a comparison before it is run: parts of steps and of tasks, for as long as there is time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hfpatch.data.plan import draw_plans
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.run import scorer_options
from hfpatch.evaluation.selection import select
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
from hfpatch.results.forecast import MeasuredKind, Work
from hfpatch.runs.plan import Unit, training_steps
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import ComparisonSetup, set_up
from hfpatch.support.cpu import pinned_library
from hfpatch.surgery.methods import Method
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory
from hfpatch.training.probe import train_probe
from hfpatch.training.records import StepRecord
from hfpatch.tuners.config import method_name

BASE = "base"
SECONDS = 20.0
"""How long a forecast measures, loading and tokenising aside."""
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
        spreads: how documents vary under the base, of the tasks where that was measured.
        kinds: the times and the memory of each kind of method.
        taken_s: how long measuring took.
        enough_s: in how many seconds the spreads of all tasks would have been measured as well.
    """

    setup: ComparisonSetup
    asked: dict[str, TaskRequests]
    timed: dict[str, Timed] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    kinds: dict[str, MeasuredKind] = field(default_factory=dict)
    taken_s: float = 0.0
    enough_s: float = 0.0

    @property
    def words(self) -> str:
        """How far everything was sampled."""
        tokens = [timed.tokens for timed in self.timed.values() if timed.tokens]
        steps = [kind.step_share for kind in self.kinds.values() if kind.step_share is not None]
        said = [f"{_range(tokens, '{:,}')} tokens of each task"] if tokens else []
        said += [f"{_range(steps, '{:.0%}')} of a step of each kind of method"] if steps else []
        return f"Measured were {' and '.join(said)}; the rest in proportion to its operations."

    def work(self, units: Iterable[Unit]) -> dict[str, Work]:
        """Return the work of all units by action."""
        found: dict[str, Work] = {}
        for unit in units:
            if unit.action not in ("check_baseline", "look") and unit.run.variant not in self.setup.left_out:
                before, added = found.get(unit.action, Work()), self.work_of(unit)
                together = {name: getattr(before, name) + getattr(added, name) for name in type(added).model_fields}
                found[unit.action] = Work(**together)
        return found

    def work_of(self, unit: Unit) -> Work:
        """Return the work of one unit that trains or measures; none for a method that is left out."""
        setup, training = self.setup, self.setup.recipe.training
        if unit.run.variant in setup.left_out:
            return Work()
        kind = self.kinds[kind_of(setup.methods[unit.run.variant])]
        step_s = kind.step_s or 0.0
        if unit.action in ("retain", "rewind"):
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
        times, measured = 1 + ((steps - 1) // every if every else 0), 0.0
        if (text := setup.tuning_text if unit.run.point else setup.held_out) is not None:
            measured = times * len(text) / training.batch_size * FORWARD
        if unit.action == "evaluate":
            return Work(
                units=1,
                requests=sum(len(each.encoded) for each in self.asked.values()),
                tokens=sum(each.tokens for each in self.asked.values()),
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


def measure(recipe: Recipe, seconds: float, progress: Progress, *, spread: bool) -> Measured:
    """Set a comparison up, and measure its parts for about ``seconds``.

    Args:
        recipe: the comparison.
        seconds: for the base on each task, a step of each kind of method, and the spreads; loading comes on top. A
            first batch of each task and a block of each kind are always run, however long they take.
        progress: called at each measurement.
        spread: whether to score documents of each task with the base, too.

    Raises:
        HfpatchError: if the recipe cannot be run.
    """
    setup = set_up(recipe, progress=progress)
    recipe, base, largest = setup.recipe, setup.base, dict[str, str]()
    for name, method in setup.methods.items():  # that of each kind with the most parameters
        other = largest.setdefault(kind_of(method), name)
        if setup.sizes[name].trainable > setup.sizes[other].trainable:
            largest[kind_of(method)] = name
    progress.evaluating(BASE, "requests of the tasks")
    given = (base.model, base.tokenizer, recipe.evaluation)
    with quiet():
        chosen = select(recipe.evaluation, recipe.data_dir)
        scorer = HfpatchLM(base.model, **scorer_options(base.tokenizer, recipe.evaluation))
    found = Measured(setup, collect_requests(*given, chosen))
    weights = (_SCORE + spread * _SPREAD) * len(found.asked) + _STEP * max(1, len(largest) - 1)
    begun = time.perf_counter()
    end, spread_s = begun + seconds, [0.0]

    def share(kind: str, what: str, weight: float) -> float:
        """Return a measurement's share of the seconds that are left, and show how many are left."""
        nonlocal weights
        left_s = max(0.0, end - time.perf_counter())
        progress.evaluating(kind, f"{what}, about {left_s:.0f} s left")
        own, weights = weight / weights, weights - weight
        return left_s * own

    with pinned_library(setup.matmul):
        # The base on each task
        base.model.eval()
        base_bytes = sum(each.numel() * each.element_size() for each in base.model.parameters())
        reset_peak_memory()
        for name, asked in found.asked.items():
            found.timed[name] = time_requests(scorer, [asked], share(BASE, f"a part of {name}", _SCORE))
        for name, asked in found.asked.items() if spread else ():
            left = share(BASE, f"documents of {name}", _SPREAD)
            if asked.encoded and not asked.generated:
                each = found.timed[name].seconds / asked.documents
                spread_s.append(each * min(ENOUGH, asked.documents))
                if documents := documents_within(asked, each, left, base.model.device.type):
                    found.spreads[name] = base_spread(*given, chosen.only(name, documents))

        # A forward pass and a training step of each kind of method
        memory, forward_s = peak_memory_bytes(), _forward_seconds(setup, base.model)
        for kind, name in sorted(largest.items(), key=lambda pair: pair[0] != BASE):
            own_s, added, step = forward_s, 0, dict[str, Any]()
            if kind != BASE:
                left = share(kind, "a part of a training step", _STEP)
                model = patch(base.model, setup.methods[name].configs, seed=recipe.training.all_seeds[0])
                try:
                    own_s = _forward_seconds(setup, model)
                    # the first step of a process, or of a compiled model, is mostly start-up
                    least = 2 if len(found.kinds) == 1 or recipe.training.compile else 1
                    step = _time_step(setup, model, own_s / setup.blocks.block_size / FORWARD, left, least=least)
                    added = sum(each.numel() * each.element_size() for each in model.parameters()) - base_bytes
                finally:
                    unpatch(model)
            scored = {task: timed.seconds * own_s / forward_s for task, timed in found.timed.items()}
            found.kinds[kind] = MeasuredKind(
                method=name, evaluation_s=scored, evaluation_memory_bytes=memory + added, **step
            )
    found.taken_s = time.perf_counter() - begun
    # the first spread has the smallest share of what the base's times leave
    shares = len(found.asked) + _STEP / _SPREAD * max(1, len(largest) - 1)
    found.enough_s = found.taken_s + shares * max(spread_s)
    return found


def _forward_seconds(setup: ComparisonSetup, model: PreTrainedModel) -> float:
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


def _time_step(
    setup: ComparisonSetup, model: PreTrainedModel, token_s: float, seconds: float, *, least: int
) -> dict[str, Any]:
    """Return seconds and memory of an optimiser step, from steps of as many of its blocks as there is time for.

    At least ``least`` steps are taken, at most ``_MOST``, and the last counts.
    """
    training, taken = setup.recipe.training, list[float]()
    micro = training.micro_batch_size or 1
    blocks = min(training.batch_size, max(1, int(seconds / max(token_s * setup.blocks.block_size, 1e-9))))
    blocks = max(blocks // micro * micro, 1)
    changed = {
        "steps": _MOST + 1,
        "warmup_steps": 0,
        "batch_size": blocks,
        "micro_batch_size": training.micro_batch_size if blocks >= micro else None,
        "on_bad_loss": "skip",
        "save_every": None,
        "evaluate_every": None,
        "patience": None,
        "keep_best": False,
        "report_to": (),
    }
    settings = training.model_copy(update=changed)
    seed, begun = training.all_seeds[0], time.perf_counter()

    def on_step(record: StepRecord) -> None:
        taken.append(record.seconds)
        late = time.perf_counter() - begun + record.seconds > seconds
        if len(taken) == _MOST or (late and len(taken) >= least):
            raise _Enough

    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        train_probe(
            model,
            settings=settings,
            blocks=setup.blocks,
            plan=draw_plans(settings, setup.blocks, [seed])[seed],
            seed=seed,
            run_dir=Path(folder) / "run",
            on_step=on_step,
            origin={"frozen": setup.base.sha256},
            blocks_checked=True,
        )
    share = blocks / training.batch_size
    return {"step_s": taken[-1] / share, "step_share": share, "training_memory_bytes": peak_memory_bytes()}


class _Enough(Exception):
    """Ends a run before its last step, whose checkpoint takes longer than the step."""
