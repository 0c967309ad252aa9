"""Losses, gradients, measured rounding and temporary patches for the promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from peft import PeftConfig
from torch import Tensor

from hfpatch.errors import first_line
from hfpatch.nn import normal_
from hfpatch.promises.inputs import LENGTH, Inputs, example_tokens, forward, logits, no_random_layers, tokens_alone
from hfpatch.sites import AttentionSite, find_sites, text_config
from hfpatch.support.modes import hooked
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.model import changed_sites

NEW_TOKENS = 6
UNITS = 8  # kernels may differ by as many times the measured rounding
TINY = 1e-12  # keeps divisions by zero away
NOT_OURS = "does not apply: PEFT's own method"

Test = Callable[[Any, PeftConfig, Inputs], tuple[bool, str]]
Result = TypeVar("Result")


class Apart(NamedTuple):
    """How far two results are apart, and how far rounding may move them; relative to the largest value."""

    difference: float
    rounding: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.rounding


def changed_by(model: Any, config: PeftConfig) -> list[AttentionSite]:
    """Return the sites that a configuration changes."""
    return changed_sites(model, config) if isinstance(config, MethodConfig) else find_sites(model)


def loss(model: Any, inputs: Inputs) -> Tensor:
    """Return the mean negative log-likelihood of the next token, without other losses of the model.

    Of a model with other inputs or outputs than tokens: the mean squared distance of its output to fixed random values.
    """
    out, tokens = forward(model, inputs), tokens_alone(inputs)
    if tokens is not None and out.dim() == 3 and out.shape[-1] > int(tokens.max()):
        width = min(tokens.shape[1], out.shape[1])
        flat = out[:, : width - 1].reshape(-1, out.shape[-1]).float()
        return torch.nn.functional.cross_entropy(flat, tokens[:, 1:width].reshape(-1))
    wanted = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
    return (out.float() - wanted).square().mean()


def gradients(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Return the gradients of the added tensors in training; dropout drops the same entries in every call."""
    config, tokens = text_config(model), tokens_alone(inputs)
    if tokens is not None and getattr(config, "axial_pos_embds", False):
        length = math.prod(config.axial_pos_shape)  # these take only one length in training
        inputs = {"input_ids": tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length]}
    model.zero_grad()
    model.train()
    try:
        with no_random_layers(model):
            loss(model, inputs).backward()  # type: ignore[no-untyped-call]  # torch has no type for it
    finally:
        model.eval()
    return {name: p.grad.clone() for name, p in adapter_parameters(model).items() if p.grad is not None}


def moved(model: Any, std: float, seed: int = 0, *, gain: float = math.inf) -> Any:
    """Move every tensor that adapters added off its initial value.

    Args:
        model: the patched model.
        std: the standard deviation of the noise.
        seed: of the noise.
        gain: the most that a matrix's noise may multiply the size of its input by, so that models of any width stay as
            well conditioned.
    """
    for name, parameter in adapter_parameters(model).items():
        most = gain / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else std
        noise = normal_(torch.empty(parameter.shape), std=min(std, most), seed=seed, name=name)
        parameter.data += noise.to(parameter)
    return model


@contextmanager
def perturbed(model: Any, config: PeftConfig) -> Iterator[None]:
    """Patch a model with every added tensor moved off its initial value, and unpatch it again."""
    patch(model, config)
    try:
        moved(model, std=0.1, gain=0.5)
        yield
    finally:
        unpatch(model)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest value of ``a``."""
    return float((a - b).abs().max()) / max(float(a.abs().max()), TINY)


def relative_differences(a: Any, b: Any) -> list[float]:
    """Return :func:`relative` of two tensors, or of all tensors of two dictionaries by name."""
    return [relative(a[name], b[name]) for name in a] if isinstance(a, dict) else [relative(a, b)]


@contextmanager
def rounded_at_random(model: Any) -> Iterator[None]:
    """Let every module without children return values that are off by up to one unit of rounding, at random.

    What this changes, other kernels, shapes or processors may change (Monte Carlo arithmetic, D. S. Parker 1997).
    """
    generator = torch.Generator().manual_seed(0)

    def off(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        units = torch.rand(output.shape, generator=generator) * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * units).to(output)

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    with hooked(leaf.register_forward_hook(off) for leaf in leaves):
        yield


def compared(
    model: Any,
    one: Callable[[], Result],
    *others: Callable[[], Result],
    differences: Callable[[Result, Result], list[float]] = relative_differences,
) -> Apart:
    """Compare ways to compute the same, and measure what rounding explains.

    Args:
        model: the model, whose rounding is measured.
        one: computes the result.
        others: compute it in other ways.
        differences: the relative differences of two results, one for each tensor.

    Returns:
        The difference that is largest in comparison with the rounding of its tensor, and that rounding.
    """
    plain = one()
    with rounded_at_random(model):
        explained = [UNITS * difference for difference in differences(plain, one())]
    pairs = [Apart(*pair) for other in others for pair in zip(differences(plain, other()), explained, strict=True)]
    # What rounding does not explain comes first; NaN compares with no number
    return max(pairs, key=lambda apart: (not apart.is_rounding, apart.difference / max(apart.rounding, TINY)))


def leak(model: Any, inputs: Inputs, name: str) -> Apart:
    """Return how much changed tokens change the logits before them; ``name`` is their argument, see :func:`ordered`."""
    tokens = inputs[name]
    at = max(tokens.shape[1] // 2, tokens.shape[1] - (LENGTH + 1) // 2)  # behind the tokens of an image
    other, last = tokens.clone(), tokens[:, at:].contiguous()
    used = {*last.flatten().tolist()}  # others may stand for an image
    if len(used) == 1:
        used.update(example_tokens(model).flatten().tolist())
    ids = last.new_tensor(sorted(used))
    other[:, at:] = ids[(torch.searchsorted(ids, last) + 1) % len(ids)]  # each token becomes another one
    changed = {**inputs, name: other}
    return compared(model, lambda: logits(model, inputs)[:, :at], lambda: logits(model, changed)[:, :at])


def within(
    model: Any, config: PeftConfig, text: str, patched: Callable[[], Apart], *unpatched: tuple[str, Callable[[], Apart]]
) -> tuple[bool, str]:
    """Return whether rounding explains a difference in the perturbed model, and the text with both numbers.

    If it does not, or an error prevents it, and so it is without hfpatch in one of the ways ``unpatched``, by default
    the same, the promise does not apply; each way has the text for its number.
    """
    try:
        with perturbed(model, config):
            apart = patched()
        problem = f"{text.format(apart.difference)}; rounding explains {apart.rounding:.1g}"
        if apart.is_rounding:
            return True, problem
    except Exception as error:  # a model may raise any
        problem = first_line(error, kind=True)
    for what, measure in unpatched or ((text, patched),):
        try:
            if not (apart := measure()).is_rounding:
                difference = what.format(apart.difference)
                return True, f"does not apply: the model itself does not, without hfpatch: {difference}"
        except Exception as error:
            return True, f"does not apply: the model itself cannot, without hfpatch: {first_line(error, kind=True)}"
    return False, problem


def some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
