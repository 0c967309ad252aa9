"""Where the time of a call goes: by kind of operator, and at which rate each shape of matrix product runs."""

from __future__ import annotations

import math
from typing import Any

import torch

KINDS = {
    "matrix products": ("linear", "addmm", "aten::mm"),
    "attention": ("scaled_dot_product",),
    "activations": ("gelu", "silu"),
    "logits to probabilities": ("exp_", "amax", "maximum", "sub_", "aten::sum", "aten::log", "gather", "where"),
    "norms": ("norm",),
    "copies": ("cat", "copy_", "index", "clone", "contiguous"),
    "optimiser": ("adam",),
}
OTHERS, BETWEEN = "other operators", "between operators"
PRODUCTS = ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm")


def profiler(*, shapes: bool = False) -> torch.profiler.profile:
    """Return a profiler of the CPU, which is to be entered and left, or started and stopped."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=shapes)


def seconds_by_kind(run: torch.profiler.profile, seconds: float) -> dict[str, float]:
    """Return the seconds of each kind of operator, of other operators, and between operators, of ``seconds`` in all."""
    found = dict.fromkeys((*KINDS, OTHERS), 0.0)
    for event in run.key_averages():
        matching = (kind for kind, names in KINDS.items() if any(name in event.key for name in names))
        found[next(matching, OTHERS)] += event.self_cpu_time_total / 1e6
    return {**found, BETWEEN: max(0.0, seconds - sum(found.values()))}


def products_by_shape(run: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return the seconds and the rate of each shape of matrix product, the longest first; a profile with shapes."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for event in run.key_averages(group_by_input_shape=True):
        if event.key in PRODUCTS:
            left, right = [shape for shape in event.input_shapes if len(shape) > 1][:2]
            rows, inputs = math.prod(left[:-1]), left[-1]
            of_shape = found.setdefault((rows, inputs, math.prod(right) // inputs), [0.0, 0.0])
            of_shape[0] += event.self_cpu_time_total / 1e6
            of_shape[1] += event.count * 2 * rows * math.prod(right)
    return [
        {"rows": rows, "in": inputs, "out": outputs, "seconds": seconds, "gflops": operations / seconds / 1e9}
        for (rows, inputs, outputs), (seconds, operations) in sorted(found.items(), key=lambda item: -item[1][0])
    ]
