"""Peak memory of a run, and its speed as a share of the hardware's."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel

from hfpatch.sites import count_values
from hfpatch.training.processes import runs_on_cpu

_SIDE = {"cpu": 512, "cuda": 8192}  # of square matrices that keep a device busy for milliseconds
_REPEATS = 5  # of which the fastest counts
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak_memory() -> None:
    """Start measuring again: CUDA's allocator where a run is on one, else the process's resident memory.

    Where the system cannot reset the latter, the peak is that of the whole process.
    """
    if _is_on_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def resident_memory_bytes() -> int:
    """Return the memory in use now, in bytes; 0 where the system does not report it."""
    if _is_on_cuda():
        return int(torch.cuda.memory_allocated())
    return _from_status("VmRSS") or 0


def peak_memory_bytes() -> int:
    """Return the peak since the last reset, in bytes."""
    if _is_on_cuda():
        return int(torch.cuda.max_memory_allocated())
    peak = _from_status("VmHWM")
    if peak is not None:
        return peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _is_on_cuda() -> bool:
    """Return whether runs of this process use a CUDA device, which they may leave alone."""
    return torch.cuda.is_available() and not runs_on_cpu()


def _from_status(name: str) -> int | None:
    """Return an entry of Linux's process status in bytes; None where there is none, as on other systems."""
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024 if name in lines else None


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the floating-point operations that a training step must do for each token.

    Two per weight in the forward pass, two more for each weight that the gradient passes on its way to the first
    trained tensor, two more for each trained weight; only matrices count, and an embedding's look-up is free. The
    attention's own products, which depend on the length of the text, are left out, so that the utilisation computed
    from this is a lower bound; in a mixture of experts all are counted, though a token reaches only some.
    """
    from hfpatch.tuners.adapters import block_of  # imports PEFT; memory is measured where nothing is trained, too

    head = getattr(model.get_output_embeddings(), "weight", None)
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [block_of(name) for name, value in model.named_parameters() if value.requires_grad]
    first = min(trained, default=sys.maxsize)
    operations = 0.0 if head is None else 2.0 * count_values(head) * (2 + head.requires_grad)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or id(parameter) in lookups or parameter is head:
            continue
        operations += 2.0 * count_values(parameter) * (1 + (block_of(name) >= first) + parameter.requires_grad)
    return operations


def tokens_per_s_at_most(model: PreTrainedModel, state: PartialState, autocast: str | None) -> float:
    """Return the tokens a second that all processes could train on at the speed of one large matrix product."""
    dtype = getattr(torch, autocast) if autocast else next(model.parameters()).dtype
    rate = matrix_rate(state.device, dtype) * int(state.num_processes)
    return rate / flops_per_token(model)


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of a large matrix product, measured once a process."""
    side = _SIDE.get(device.type, _SIDE["cuda"])
    left = torch.randn(side, side, device=device).to(dtype)
    on_cuda = device.type == "cuda"
    wait: Callable[[], None] = functools.partial(torch.cuda.synchronize, device) if on_cuda else lambda: None
    best = math.inf
    for _ in range(_REPEATS):
        wait()
        start = time.perf_counter()
        torch.mm(left, left)
        wait()
        best = min(best, time.perf_counter() - start)
    return float(2.0 * side**3 / best)
