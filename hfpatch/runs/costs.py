"""The time and memory of a training step: of a part of one step, and of all methods at the end of a comparison."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hfpatch.data.plan import draw_plans
from hfpatch.recipes.training import LoopSettings, TrainingSettings
from hfpatch.results.layout import Cost
from hfpatch.runs.pretraining import StudySetup
from hfpatch.runs.setup import ComparisonSetup, Setup
from hfpatch.support.cpu import pinned_library
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.training.architecture import build_model
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory, resident_memory_bytes
from hfpatch.training.pretrain import pretrain
from hfpatch.training.probe import train_probe
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run

ROUNDS = 3
"""How often the cost of each method is measured."""
_MOST_STEPS = 4  # of one measurement
_LEAST_S = 0.05  # seconds that a measurement of a cost takes at least
_OTHERS = 0.1  # processors that other programs may use
_OTHERS_BYTES = 1 << 30  # the CUDA context of this process takes less
_CPUS = Path("/proc/stat")


class StepTime(NamedTuple):
    """Seconds and memory of an optimiser step, from one of a ``step_share`` of its blocks."""

    step_s: float
    step_share: float
    training_memory_bytes: int


class _Enough(Exception):
    """Ends a run before its last step, whose checkpoint takes longer than the step."""


@contextmanager
def training_of(
    setup: ComparisonSetup | StudySetup, name: str
) -> Iterator[tuple[PreTrainedModel, LoopSettings, Callable[[Run], object]]]:
    """Yield a model with a method, which is then taken out of the base again, or of a variant, and its training.

    That is the settings of a whole training, and a function that does a run with settings like these.
    """
    seed = setup.recipe.training.all_seeds[0]
    reset_peak_memory()
    if isinstance(setup, ComparisonSetup):
        model = patch(setup.base.model, setup.methods[name].configs, seed=seed)
        try:
            yield model, setup.recipe.training, partial(train_probe, model)
        finally:
            unpatch(model)
    else:
        single = setup.recipe.single(name, {}, seed)
        model = build_model(single.architecture, tokenizer=setup.tokenizer, seed=seed).to(PartialState().device)
        yield model, single.training, partial(pretrain, model, save=False)


def time_step(
    setup: Setup, whole: LoopSettings, train: Callable[[Run], object], blocks: int, seconds: float, *, least: int
) -> StepTime:
    """Return seconds and memory of an optimiser step, from steps of about so many of its blocks.

    Args:
        setup: has the text.
        whole: the settings of the whole training.
        train: does a run with settings like these.
        blocks: how many blocks there is time for.
        seconds: for so long steps are taken, at most four; the last one counts.
        least: how many steps are taken at least.
    """
    taken, micro = list[float](), whole.micro_batch_size or 1
    blocks = max(1, min(whole.batch_size, blocks) // micro * micro)
    changed = {
        "steps": _MOST_STEPS + 1,
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
        if len(taken) == _MOST_STEPS or (late and len(taken) >= least):
            raise _Enough

    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        run = Run(
            settings,
            setup.blocks,
            plan=draw_plans(settings, setup.blocks, [seed])[seed],
            seed=seed,
            folder=Path(folder, "run"),
            origin=setup.shared.to_json(),
            on_step=on_step,
            blocks_checked=isinstance(setup, ComparisonSetup),
        )
        train(run)
    share = blocks / whole.batch_size
    return StepTime(taken[-1] / share, share, peak_memory_bytes())


def measure_costs(setup: ComparisonSetup, seconds: float) -> dict[str, Cost]:
    """Measure a training step of every method that is trained, for at most about ``seconds``; nothing if these are few.

    The methods take turns on the same batches, in three rounds, so that what slows the machine for a while slows all of
    them. A step has as many of its blocks as there is time for, the same number for all.
    """
    names = [name for name, method in setup.methods.items() if method.configs]
    turns, started, before = len(names) * (ROUNDS + 1), time.perf_counter(), cpu_seconds()
    if not names or seconds < _LEAST_S * turns:
        return {}

    def take(name: str, blocks: int, least: int) -> StepTime:
        with training_of(setup, name) as (_, whole, train):
            return time_step(setup, whole, train, blocks, 0.0, least=least)

    reset_peak_memory()
    is_reset = peak_memory_bytes() <= 1.02 * resident_memory_bytes()
    with pinned_library(setup.matmul):
        # One block of each shows how many there is time for, two steps a turn
        first, steps_s = list[StepTime](), 0.0
        for name in names:
            first.append(take(name, 1, 1))
            steps_s += first[-1].step_s * first[-1].step_share
            if (time.perf_counter() - started) / len(first) * turns > seconds:
                return {}
        taken_s = time.perf_counter() - started
        left = seconds - taken_s - ROUNDS * max(0.0, taken_s - steps_s)  # a turn takes as long beside its steps
        smallest = first[0].step_share * setup.recipe.training.batch_size
        blocks = int(smallest * left / (2 * ROUNDS * steps_s))
        rounds = [[take(name, blocks, 2) for name in names] for _ in range(ROUNDS)]
    shared = is_shared(before, time.perf_counter() - started)
    return {
        name: Cost(
            steps_s=[step.step_s for step in taken],
            memory_bytes=int(median(step.training_memory_bytes for step in taken)) if is_reset else None,
            share=taken[0].step_share,
            shared=shared,
        )
        for name, taken in zip(names, zip(*rounds, strict=True), strict=True)
    }


def cpu_seconds() -> tuple[float, float] | None:
    """Return how long all processors were busy, and how long with this process; None where that is not known."""
    if not _CPUS.is_file():
        return None
    user, nice, system, _, _, irq, soft, *_ = map(
        float, _CPUS.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK"), time.process_time()


def is_shared(before: tuple[float, float] | None, seconds: float) -> bool | None:
    """Return whether other programs took more than a tenth of a processor since, or have memory of the GPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if total - free - torch.cuda.memory_reserved() > _OTHERS_BYTES:
            return True
    if before is None or (now := cpu_seconds()) is None:
        return None
    all_s, process_s = (after - since for after, since in zip(now, before, strict=True))
    return all_s - process_s > _OTHERS * seconds
