"""The language-model head: from a causal model's last hidden states to its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfpatch.sites.modules import base_model, input_device, text_config
from hfpatch.support.modes import evaluating, hooked

CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of configurations that name a soft cap."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
"""Keys that name a factor or a divisor, of the logits or of the head's input: HyperCLOVA X multiplies by the key by
which Granite divides."""

_PROBE_TOKENS = 5
_PROBE_RANGE = 60.0  # of logits: twice the largest cap in use, Gemma's 30, so that each shows


class Tail(NamedTuple):
    """From the head's output z to the logits: cap · tanh(scale · z / cap), without a cap scale · z.

    Attributes:
        scale: Cohere's and Granite's logit scale; 1 in most models.
        cap: Gemma 2's soft cap, or None.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Return the logits, in the shape of ``z``."""
        scaled = z if self.scale == 1.0 else z * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


PLAIN = Tail()
"""Logits are the head's output, as in most models."""


@dataclass(frozen=True)
class LMHead:
    """A causal language model in two steps: logits = tail(head(body(tokens)[0])).

    Attributes:
        body: returns hidden states ``(batch, seq, hidden)`` first.
        head: maps them to ``(batch, seq, vocabulary)``, adapters on it included.
        tail: scale and soft cap of the logits.
    """

    body: nn.Module
    head: Any
    tail: Tail = PLAIN


@torch.no_grad()
def find_lm_head(model: Any) -> LMHead | None:
    """Return the body, the head and the tail of a model; None if they do not give its logits.

    The model runs once on five tokens, in evaluation mode, then body and head separately. Both times the head's output
    is multiplied by one number that makes it large enough for a cap to show. The configuration names the possible
    scales and caps; of these the tail is the one that comes closest to the model's logits.

    Args:
        model: a causal language model, with adapters or without, or a ``PeftModel``.
    """
    causal: Any = base_model(model)
    head, body = causal.get_output_embeddings(), causal.base_model
    if head is None or body is causal:
        return None
    # The tails that the configuration may mean
    config = text_config(causal)
    cap = next((value for name in CAPS if (value := getattr(config, name, None))), None)
    values = [getattr(config, name, None) for name in SCALES]
    numbers = [float(value) for value in values if isinstance(value, int | float) and value > 0]
    scales = dict.fromkeys([1.0, *numbers, *(1 / number for number in numbers)])
    caps = [None, float(cap)] if cap else [None]
    tails = [Tail(scale, candidate) for scale in scales for candidate in caps]

    # The logits, and the head's output z from which one of the tails should compute them
    peak = _PROBE_RANGE / min(tail.scale for tail in tails)
    factors: list[Tensor] = []

    def enlarge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        factors.append(factors[0] if factors else peak / output.abs().max())
        return output * factors[0]

    try:
        with hooked([head.register_forward_hook(enlarge)]), evaluating(model):
            tokens = torch.arange(_PROBE_TOKENS, device=input_device(model))[None] % head.weight.shape[0]
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            z = head(body(input_ids=tokens, use_cache=False)[0]).to(logits.device)
    except (AttributeError, TypeError, RuntimeError, IndexError, KeyError, ValueError):
        return None
    if len(factors) != 2 or z.shape != logits.shape:  # the head is called once, at all positions
        return None
    tail = min(tails, key=lambda candidate: float((candidate(z) - logits).abs().max()))
    return LMHead(body, head, tail) if close(tail(z), logits, z.dtype) else None


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors differ by no more than rounding in ``dtype``, measured by the largest value."""
    if actual.shape != expected.shape:
        return False
    tolerance = max(1e-4, 8 * torch.finfo(dtype).eps)
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
