"""A causal language model as a body, which gives features of every position, and a head, which gives logits of some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hfpatch.nn.matmul import active_library, has_own_forward, linear

_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_SMALLEST_SLICE = 256


class Parts(Protocol):
    """A model in two steps."""

    def features(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        """Return the features (batch, seq, width) of tokens (batch, seq)."""

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (n, vocabulary) in fp32 of features (n, width), as a tensor that may be overwritten."""


@dataclass(frozen=True)
class BodyAndHead:
    """A model whose logits are ``cap · tanh(scale · head(body(x)) / cap)``, most often without scale and cap.

    Attributes:
        body: gives hidden states (batch, seq, hidden).
        head: gives unscaled logits.
        scale: factor of the logits.
        cap: bound of the logits; None is no bound.
    """

    body: nn.Module
    head: Any
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocabulary(self) -> int:
        """The number of logits of a position."""
        return int(self.head.weight.shape[0])

    def features(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        """Return the last hidden states."""
        hidden: Tensor = self.body(tokens, use_cache=False, **inputs)[0]
        return hidden

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of hidden states, in the head's dtype up to the last step."""
        return self._finished(self.head(features))

    def sliceable(self, features: Tensor) -> bool:
        """Return whether the head is a matrix and nothing else, so that parts of its rows give parts of the logits."""
        head = self.head
        plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
        plain = plain and not has_own_forward(head) and head.weight.device == features.device
        return plain and head.weight.dtype == features.dtype and not torch.is_autocast_enabled(features.device.type)

    def slices(self, features: Tensor, numbers: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token and the logits (n, tokens) in fp32 of each slice of the vocabulary.

        A slice may be overwritten, and is when the next one is asked for.

        Args:
            features: (n, hidden).
            numbers: how many logits a slice may hold, roughly.
        """
        weight, bias = self.head.weight, self.head.bias
        step = max(_SMALLEST_SLICE, numbers // max(1, len(features)))
        memory = features.new_empty(len(features) * min(step, len(weight)))
        for start in range(0, len(weight), step):
            part = weight[start : start + step]
            if active_library() == "onednn":
                logits = linear(features, part)
            else:
                logits = memory[: len(features) * len(part)].view(len(features), len(part))
                torch.mm(features, part.t(), out=logits)
            yield start, self._finished(logits if bias is None else logits.add_(bias[start : start + step]))

    def _finished(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits.float()


@dataclass(frozen=True)
class WholeModel:
    """A model that cannot be told apart: its features are its logits of every position."""

    model: nn.Module

    def features(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        """Return all logits; those of virtual tokens, which prompt tuning puts in front, are left out."""
        logits: Tensor = self.model(tokens, **inputs).logits
        return logits[:, -tokens.shape[1] :]

    def logits(self, features: Tensor) -> Tensor:
        """Return the features, which are logits, in fp32."""
        return features.to(torch.float32, copy=True)


def tell_apart(model: Any, probe: Tensor) -> Parts:
    """Return a model's body and head if together they give its logits on a probe, else the model as a whole.

    Args:
        model: a causal language model, with adapters or without.
        probe: tokens (1, seq).
    """
    whole = WholeModel(model)
    try:
        parts = _body_and_head(model)
        found = parts.logits(parts.features(probe)[0])
    except (AttributeError, TypeError, RuntimeError, IndexError, KeyError, ValueError):
        return whole
    expected = whole.features(probe)[0].float()
    return parts if close(found, expected, model.dtype) else whole


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors differ by no more than rounding in ``dtype``, measured by the largest value."""
    if found.shape != expected.shape:
        return False
    tolerance = max(1e-4, 8 * torch.finfo(dtype).eps)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _body_and_head(model: Any) -> BodyAndHead:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    scaling = getattr(config, "logits_scaling", None)
    scale = 1.0 / scaling if scaling else getattr(config, "logit_scale", None)
    head = inner.get_output_embeddings()
    if head is None or inner.base_model is inner:
        raise AttributeError("no head")
    cap = next((value for name in _CAPS if (value := getattr(config, name, None))), None)
    return BodyAndHead(inner.base_model, head, 1.0 if scale is None else float(scale), cap)
