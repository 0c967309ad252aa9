"""A causal language model as a body, which gives features of every position, and a head, which gives logits of some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.nn.matmul import has_own_forward, is_stock, linear
from hfpatch.sites.lm_head import LMHead

_SMALLEST_SLICE = 256  # tokens; thinner slices cost more in calls than they save in memory


class BodyAndHead(LMHead):
    """A model whose logits are those of its head, split in steps so that scoring computes only the steps it needs."""

    def features(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        """Return the last hidden states, on the device of the tokens wherever the last block is."""
        hidden: Tensor = self.body(tokens, use_cache=False, **inputs)[0]
        return hidden.to(tokens.device)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of hidden states, in the head's dtype up to the last step."""
        return self.tail(self.head(features)).float()

    def sliceable(self, features: Tensor) -> bool:
        """Return whether the head is a plain matrix, so that parts of its rows give parts of the logits."""
        head = self.head
        plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
        plain = plain and not has_own_forward(head) and head.weight.device == features.device
        return plain and head.weight.dtype == features.dtype and not torch.is_autocast_enabled(features.device.type)

    def slices(self, features: Tensor, numbers: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first token and the logits (n, tokens) in fp32 of each slice of the vocabulary.

        A slice may be overwritten, and is when the next one is asked for. ``features`` are (n, hidden); ``numbers`` is
        how many logits a slice may hold, roughly.
        """
        weight, bias = self.head.weight, self.head.bias
        step = max(_SMALLEST_SLICE, numbers // max(1, len(features)))
        memory = features.new_empty(len(features) * min(step, len(weight)))
        for start in range(0, len(weight), step):
            part = weight[start : start + step]
            if is_stock(features, part):
                logits = memory[: len(features) * len(part)].view(len(features), len(part))
                torch.mm(features, part.t(), out=logits)
            else:
                logits = linear(features, part)
            yield start, self.tail(logits if bias is None else logits.add_(bias[start : start + step])).float()


@dataclass(frozen=True)
class WholeModel:
    """A model whose body and head do not give its logits: its features are its logits.

    It computes the ``last`` positions of a row, as generation asks it to by its own argument ``logits_to_keep``; None
    is every position.
    """

    model: nn.Module
    last: int | None = None

    def features(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        """Return the logits; those of virtual tokens, which prompt tuning puts in front, are left out."""
        asked: dict[str, Any] = {} if self.last is None else {"logits_to_keep": self.last}
        logits: Tensor = self.model(tokens, **asked, **inputs).logits
        return logits[:, -min(self.last or tokens.shape[1], tokens.shape[1]) :]

    def logits(self, features: Tensor) -> Tensor:
        """Return the features, which are logits, in fp32."""
        return features.to(torch.float32, copy=True)


Parts = BodyAndHead | WholeModel
"""A model in two steps: ``features`` (batch, seq, width) of tokens (batch, seq), and ``logits`` (n, vocabulary) in fp32
of features (n, width), as a tensor that may be overwritten."""
