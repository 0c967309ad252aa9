"""Inputs, repeatable forward passes and temporary patches for the promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor

from hfpatch.errors import HfpatchError
from hfpatch.nn import normal_
from hfpatch.sites import AttentionSite, find_sites, text_config
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.model import changed_sites

BATCH, LENGTH, NEW_TOKENS = 2, 9, 6
ROUNDING = 1e-4  # relative to the largest logit or gradient, fp32
COARSE = 0.05  # the same in half precision
NOT_OURS = "does not apply: PEFT's own method"

Test = Callable[[Any, PeftConfig, Tensor], tuple[bool, str]]


def example_tokens(model: Any) -> Tensor:
    """Return token ids ``(batch, seq)``; models of several codebooks take one row for each codebook."""
    rows = BATCH * int(getattr(model.config, "num_codebooks", 1) if "musicgen" in model.config.model_type else 1)
    config = text_config(model)
    chunks = [getattr(config, name, None) or 1 for name in ("local_attn_chunk_length", "lsh_attn_chunk_length")]
    length = math.lcm(*chunks) if max(chunks) > 1 else LENGTH  # Reformer trains on whole chunks only
    generator = torch.Generator().manual_seed(0)
    highest = config.vocab_size
    return torch.randint(min(3, highest - 1), highest, (rows, length), generator=generator).to(model.device)


def changed_by(model: Any, config: PeftConfig) -> list[AttentionSite]:
    """Return the sites that a configuration changes."""
    return changed_sites(model, config) if isinstance(config, MethodConfig) else find_sites(model)


def rounding(model: Any) -> float:
    """Return the relative difference that rounding explains in the model's dtype."""
    return ROUNDING if model.dtype in (torch.float32, torch.float64) else COARSE


@torch.no_grad()
def logits(model: Any, tokens: Tensor, **kwargs: Any) -> Tensor:
    """Return the logits; a model that draws random numbers in evaluation draws the same ones in every call."""
    torch.manual_seed(0)
    out: Tensor = model(tokens, use_cache=False, **kwargs).logits
    return out


def loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the next token, without other losses of the model."""
    torch.manual_seed(0)
    out = model(tokens, use_cache=False).logits
    width = min(tokens.shape[1], out.shape[1])
    flat = out[:, : width - 1].reshape(-1, out.shape[-1]).float()
    return torch.nn.functional.cross_entropy(flat, tokens[:, 1:width].reshape(-1))


def gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the added tensors in training; dropout drops the same entries in every call."""
    config = text_config(model)
    if getattr(config, "axial_pos_embds", False):  # these take only one length in training
        length = math.prod(config.axial_pos_shape)
        tokens = tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length]
    model.zero_grad()
    model.train()
    try:
        loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    finally:
        model.eval()
    return {name: p.grad.clone() for name, p in adapter_parameters(model).items() if p.grad is not None}


def moved(model: Any, std: float, seed: int = 0) -> Any:
    """Move every tensor that adapters added off its initial value."""
    for name, parameter in adapter_parameters(model).items():
        parameter.data += normal_(torch.empty(parameter.shape), std=std, seed=seed, name=name).to(parameter)
    return model


@contextmanager
def perturbed(model: Any, config: PeftConfig) -> Iterator[None]:
    """Patch a model with every added tensor moved off its initial value, and unpatch it again."""
    patch(model, config)
    try:
        moved(model, std=0.1)
        yield
    finally:
        unpatch(model)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest value of ``a``."""
    return float((a - b).abs().max()) / max(float(a.abs().max()), 1e-12)


def leak(model: Any, tokens: Tensor) -> float:
    """Return how much a changed token changes the logits before it, relative to the largest."""
    at = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, at:] = tokens[:, at:].flip(-1).roll(1, -1)
    return relative(logits(model, tokens)[:, :at], logits(model, other)[:, :at])


def within(
    model: Any, config: PeftConfig, text: str, patched: Callable[[], float], *unpatched: Callable[[], float]
) -> tuple[bool, str]:
    """Return whether a measure of the perturbed model is within rounding, and the text with the number in it.

    If it is not, or an error prevents it, and the same holds for the model without hfpatch, the promise does not apply.
    """
    try:
        with perturbed(model, config):
            found = patched()
        if found <= rounding(model):
            return True, text.format(found)
        problem = text.format(found)
    except HfpatchError:
        raise
    except Exception as error:  # a model may raise any
        problem = in_one_line(error)
    for measure in unpatched:
        try:
            if not measure() <= rounding(model):
                return True, "does not apply: the model itself does not, without hfpatch"
        except Exception as error:
            return True, f"does not apply: the model itself cannot, without hfpatch: {in_one_line(error)}"
    return False, problem


def in_one_line(error: Exception) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
