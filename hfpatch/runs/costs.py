"""What a training step of each method costs, measured at the end of a comparison."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import torch

from hfpatch.results.layout import Cost
from hfpatch.runs.measuring import StepTime, time_step, training_of
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.support.cpu import pinned_library
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory, resident_memory_bytes

ROUNDS = 3
"""How often the cost of each method is measured."""
_LEAST_S = 0.05  # seconds that a measurement of a cost takes at least
_OTHERS = 0.1  # processors that other programs may use
_OTHERS_BYTES = 1 << 30  # the CUDA context of this process takes less
_CPUS = Path("/proc/stat")


def measure_costs(setup: ComparisonSetup, seconds: float) -> dict[str, Cost]:
    """Measure a training step of every method that is trained, for at most about ``seconds``; nothing if these are few.

    The methods take turns on the same batches, in three rounds, so that what slows the machine for a while slows all of
    them. A step has as many of its blocks as there is time for, the same number for all.
    """
    names = [name for name, method in setup.methods.items() if method.configs]
    turns, started, before = len(names) * (ROUNDS + 1), time.perf_counter(), _cpu_seconds()
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
    shared = _is_shared(before, time.perf_counter() - started)
    return {
        name: Cost(
            steps_s=[step.step_s for step in taken],
            memory_bytes=int(median(step.training_memory_bytes for step in taken)) if is_reset else None,
            share=taken[0].step_share,
            shared=shared,
        )
        for name, taken in zip(names, zip(*rounds, strict=True), strict=True)
    }


def _cpu_seconds() -> tuple[float, float] | None:
    """Return how long all processors were busy, and how long with this process; None where that is not known."""
    if not _CPUS.is_file():
        return None
    user, nice, system, _, _, irq, soft, *_ = map(
        float, _CPUS.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK"), time.process_time()


def _is_shared(before: tuple[float, float] | None, seconds: float) -> bool | None:
    """Return whether other programs took more than a tenth of a processor since, or have memory of the GPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if total - free - torch.cuda.memory_reserved() > _OTHERS_BYTES:
            return True
    if before is None or (now := _cpu_seconds()) is None:
        return None
    all_s, process_s = (after - since for after, since in zip(now, before, strict=True))
    return all_s - process_s > _OTHERS * seconds
