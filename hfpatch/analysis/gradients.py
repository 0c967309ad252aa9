"""What pulls at the weights of a patch: the gradient of the loss on given text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.analysis.running import Batch, evaluating, tokens_of
from hfpatch.errors import HfpatchError
from hfpatch.tuners.adapters import adapter_parameters, block_of, name_in_block


@dataclass(frozen=True)
class GradientNorm:
    """The gradient of one added tensor.

    Attributes:
        layer: index of the block; -1 outside the blocks.
        tensor: the tensor's name below the block.
        gradient: ‖∂loss/∂w‖, the loss in nats a predicted token over all of the text.
        weight: ‖w‖.
    """

    layer: int
    tensor: str
    gradient: float
    weight: float


def gradient_norms(model: Any, batches: Iterable[Batch]) -> list[GradientNorm]:
    """Return the gradient norm of every tensor that adapters added, at the weights as they are, without dropout.

    Args:
        model: a patched model; flags, gradients and mode are left as they were.
        batches: see :data:`hfpatch.analysis.running.Batch`.

    Raises:
        HfpatchError: if there is nothing to predict in the text.
    """
    parameters = adapter_parameters(model)
    if not parameters:
        return []
    count, sums = 0, {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    with evaluating(model), _only_these_require_gradients(model, parameters):
        for batch in batches:
            loss, tokens = _summed_loss(model, batch)
            count += tokens
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    sums[name] += gradient
    if not count:
        raise HfpatchError("the text has no token to predict; give documents of at least two tokens")
    return [
        GradientNorm(
            block_of(name), name_in_block(name), float(sums[name].norm()) / count, float(p.detach().double().norm())
        )
        for name, p in parameters.items()
    ]


def _summed_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
    tokens = tokens_of(inputs)
    predicted = (tokens.counted & (tokens.positions > 0))[:, 1:]
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    loss = nn.functional.cross_entropy(logits[predicted], inputs["input_ids"][:, 1:][predicted], reduction="sum")
    return loss, int(predicted.sum())


@contextmanager
def _only_these_require_gradients(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    wanted = {id(p) for p in parameters.values()}
    before = {p: p.requires_grad for p in model.parameters()}
    for parameter in before:
        parameter.requires_grad = id(parameter) in wanted
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad = flag
