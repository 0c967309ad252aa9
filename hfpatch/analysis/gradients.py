"""The gradient of the loss on given text with respect to the weights of a patch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.analysis.running import Batch, next_token_losses
from hfpatch.errors import HfpatchError
from hfpatch.support.modes import evaluating, keeping_flags
from hfpatch.tuners.adapters import adapter_parameters, block_finder, name_in_block


@dataclass(frozen=True)
class GradientNorm:
    """The norms ‖∂loss/∂w‖ and ‖w‖ of one added tensor, the loss in nats a predicted token over all of the text.

    ``layer`` is the index of the block, -1 outside the blocks, and ``tensor`` the name below it.
    """

    layer: int
    tensor: str
    gradient: float
    weight: float


def gradient_norms(model: Any, batches: Iterable[Batch]) -> list[GradientNorm]:
    """Return the gradient norm of every tensor that adapters added, at the weights as they are, without dropout.

    The model's flags, gradients and mode are left as they were.

    Raises:
        HfpatchError: if the text has no predicted token.
    """
    parameters = adapter_parameters(model)
    if not parameters:
        return []
    count, sums = 0, {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    with evaluating(model), keeping_flags(model), torch.enable_grad():
        model.requires_grad_(False)
        for parameter in parameters.values():
            parameter.requires_grad = True
        for batch in batches:
            nats, _ = next_token_losses(model, batch)
            count += len(nats)
            gradients = torch.autograd.grad(nats.sum(), list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    sums[name] += gradient
    if not count:
        raise HfpatchError("the text has no token to predict; give documents of at least two tokens")
    block_of = block_finder(model)
    return [
        GradientNorm(
            block_of(name), name_in_block(name), float(sums[name].norm()) / count, float(p.detach().double().norm())
        )
        for name, p in parameters.items()
    ]
