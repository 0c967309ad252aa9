"""Update survival: does an optimiser step really change the weights it means to change?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from hfpatch.training.sharding import whole
from hfpatch.tuners.adapters import tensor_group

MEASUREMENTS = 8


def survival_steps(*, steps: int, warmup_steps: int) -> frozenset[int]:
    """Return the steps (from 0) to measure: the first after warm-up, and up to eight spread evenly from there."""
    first = min(warmup_steps, steps - 1)
    stride = max(1, (steps - first) // MEASUREMENTS)
    return frozenset(range(first, steps, stride)[:MEASUREMENTS])


class UpdateSurvival:
    """Counts, over the measured steps, weights with a non-zero gradient and those of them whose value changed.

    A weight survives when it differs, in its own dtype, before and after the step. Low precision rounds small
    updates away: bfloat16 keeps 8 bits, so it loses any below about 1/256 to 1/512 of the weight. Weights without a
    gradient (LoRA's A at the first step, say) are not counted.

    Args:
        counts: group -> (changed, with gradient) of earlier sessions of the run; kept up to date in place.
    """

    def __init__(self, counts: dict[str, tuple[int, int]] | None = None) -> None:
        self.counts: dict[str, tuple[int, int]] = {} if counts is None else counts
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def before(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Remember the weights and where their gradients are not zero; call it just before the optimiser steps."""
        self._before = {
            name: (whole(parameter.detach()).clone(), whole(parameter.grad) != 0)
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }

    def after(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Compare with what was remembered; call it just after the optimiser stepped."""
        for name, (old, moved) in self._before.items():
            changed = int(((whole(parameters[name].detach()) != old) & moved).sum())
            group = tensor_group(name)
            earlier = self.counts.get(group, (0, 0))
            self.counts[group] = (earlier[0] + changed, earlier[1] + int(moved.sum()))
        self._before = {}

    def shares(self) -> dict[str, float]:
        """Return changed / with gradient by group, and for ``all`` together; groups without gradient are left out."""
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for group, (changed, moved) in self.counts.items():
            for name in (group, "all"):
                totals[name][0] += changed
                totals[name][1] += moved
        return {name: changed / moved for name, (changed, moved) in totals.items() if moved}
