"""A gate on what the heads return, before the output projection mixes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hfpatch.sites import AttentionSite
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method


@method("output_gate")
@dataclass
class OutputGateConfig(MethodConfig):
    r"""Gates what the heads return by a function of the attention's input.

    .. math::
        branch = (A ⊙ 2 σ(x W_g)) W_O                  σ: the logistic function;  W_g: d -> h·k, or d -> h (per head)

    W_g = 0 at init makes every gate 2·1/2 = 1: an exact no-op. Parameters: d·h·k, or d·h, per layer. Source:
    arXiv 2505.06708, *Gated Attention for Large Language Models*, which trains it from scratch without the factor 2.

    Args:
        per_head: one gate for each query head instead of one for each of its columns.
    """

    per_head: bool = field(default=False, metadata={"help": "One gate a head instead of one a column."})

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return W_g, all zero."""
        gate = nn.Linear(site.hidden_size, site.head_count if self.per_head else site.mixed_size or 0, bias=False)
        nn.init.zeros_(gate.weight)
        return nn.ModuleDict({"gate": gate})

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        return "the gate depends on the input"

    def refusal(self, site: AttentionSite) -> str | None:
        """Return why there are no heads to gate one by one, if so."""
        unknown = self.per_head and site.heads is None
        return f"{type(site.attention).__name__} does not say how many query heads it has" if unknown else None

    def mixed(self, parts: Parts, a: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the gated heads ``(batch, seq, heads·size)``."""
        gate: Tensor = 2 * parts["gate"](x).sigmoid()  # (batch, seq, heads·size) or (batch, seq, heads)
        by_gate = torch.unflatten(a, -1, (gate.shape[-1], -1))  # columns of a head share its gate
        return (by_gate * gate[..., None]).reshape(a.shape)
