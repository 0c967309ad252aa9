"""Where the time of a call goes: by kind of operator, and at which rate each shape of matrix product runs."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "matrix products": ("linear", "addmm", "aten::mm"),
    "attention": ("scaled_dot_product",),
    "activations": ("gelu", "silu"),
    "logits to probabilities": ("exp_", "amax", "maximum", "sub_", "aten::sum", "aten::log", "gather", "where"),
    "norms": ("norm",),
    "copies": ("cat", "copy_", "index", "clone", "contiguous"),
    "optimiser": ("adam",),
}
KERNELS = {  # parts of a kernel's name, or of an operator's on CPUs
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "linear", "addmm", "aten::mm", "aten::bmm"),
    "optimiser": ("adam", "multi_tensor"),
    "softmax and reductions": ("softmax", "reduce", "cross_entropy", "aten::sum", "amax"),
    "copies": ("memcpy", "memset", "copy", "cat", "index", "gather", "scatter"),
    "compiled": ("triton",),
    "elementwise": ("elementwise", "vectorized", "aten::mul", "aten::add", "norm"),
}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LONGEST = 20
OTHERS, BETWEEN = "other operators", "between operators"
PRODUCTS = ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm")


def profiler() -> torch.profiler.profile:
    """Return a profiler of the CPU.

    Without shapes: the memory that these take makes the heap grow, and a training step of 3.9 s takes 5.3 s.
    """
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def seconds_by_kind(run: torch.profiler.profile, seconds: float) -> dict[str, float]:
    """Return the seconds of each kind of operator that ran, of others, and between operators, of ``seconds`` in all."""
    by_kind = dict.fromkeys((*KINDS, OTHERS), 0.0)
    for event in run.key_averages():
        matching = (kind for kind, names in KINDS.items() if any(name in event.key for name in names))
        by_kind[next(matching, OTHERS)] += event.self_cpu_time_total / 1e6
    between = max(0.0, seconds - sum(by_kind.values()))
    return {**{kind: taken for kind, taken in by_kind.items() if taken}, BETWEEN: between}


def device_profiler() -> torch.profiler.profile:
    """Return a profiler of the CPU and, where there is one, of the GPU."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=kinds)


def device_times(run: torch.profiler.profile, seconds: float) -> dict[str, Any]:
    """Return where the time of a call goes, on a GPU by its kernels, else by the operators of the CPU.

    Args:
        run: the profile.
        seconds: what the call takes without a profiler.

    Returns:
        ``device_share`` is the time of all kernels over ``seconds`` (one stream: they do not overlap),
        ``share_of_device`` each kind's part of that time; ``launches`` counts kernels and copies, ``waits`` how often
        the host waits for the device.
    """
    events = run.key_averages()
    on_device = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    on_device = [event for event in on_device if not getattr(event, "is_user_annotation", False)]  # it spans others
    taken = {event.key: (event.self_device_time_total / 1e6, event.count) for event in on_device}
    if not on_device:
        taken = {event.key: (event.self_cpu_time_total / 1e6, event.count) for event in events}
    kinds: dict[str, float] = {}
    for name, (time_taken, _) in taken.items():
        kind = next((kind for kind, parts in KERNELS.items() if any(part in name.lower() for part in parts)), OTHERS)
        kinds[kind] = kinds.get(kind, 0.0) + time_taken
    total = sum(kinds.values())
    counts = {event.key: event.count for event in events}
    longest = sorted(taken.items(), key=lambda item: -item[1][0])[:LONGEST]
    return {
        "seconds": seconds,
        "device_seconds": total,
        "device_share": total / seconds,
        "share_of_device": {kind: part / total for kind, part in sorted(kinds.items(), key=lambda item: -item[1])},
        "launches": sum(count for name, count in counts.items() if name.startswith(LAUNCHES)),
        "waits": sum(count for name, count in counts.items() if name.startswith(WAITS)),
        "longest": [{"name": name[:120], "seconds": part, "count": count} for name, (part, count) in longest],
    }


class ProductTimes(TorchDispatchMode):
    """Times every matrix product on this thread's clock, by its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, int, int], list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; of a product note the seconds and the operations."""
        if func.name() not in PRODUCTS and func.name().rpartition(".")[0] not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        begin = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - begin
        left, right = [value.shape for value in args if isinstance(value, torch.Tensor) and value.dim() > 1][:2]
        rows, inputs, outputs = math.prod(left[:-1]), left[-1], math.prod(right) // left[-1]
        of_shape = self.found.setdefault((rows, inputs, outputs), [0.0, 0.0])
        of_shape[0] += seconds
        of_shape[1] += 2 * rows * inputs * outputs
        return result

    def by_shape(self) -> list[dict[str, Any]]:
        """Return the seconds and the rate of each shape, the longest first."""
        return [
            {"rows": rows, "in": inputs, "out": outputs, "seconds": seconds, "gflops": operations / seconds / 1e9}
            for (rows, inputs, outputs), (seconds, operations) in sorted(self.found.items(), key=lambda i: -i[1][0])
        ]
