"""Rotary position embeddings, read from a model: which columns of a head turn together, and how fast.

R(Δ) is the matrix with which the logit of a query at i and a key at j is q R(i − j) kᵀ, for row vectors: each pair of
columns (a, b) turns by Δ·θ, all others stay. Source: Su et al., *RoFormer* (arXiv 2104.09864).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.sites import AttentionSite, base_model

_TURNS = ("rotate_half", "rotate_every_two")


@dataclass(frozen=True)
class Rotary:
    """The rotation of one layer's heads.

    Attributes:
        head_size: columns of a head.
        first, second: ``(pairs,)`` the columns a and b.
        angles: ``(pairs,)`` fp64, θ in radians a position.
        gain: factor on the turned columns of query and of key (YaRN's and LongRoPE's attention scaling).
    """

    head_size: int
    first: Tensor
    second: Tensor
    angles: Tensor
    gain: float = 1.0

    def matrix(self, offset: int) -> Tensor:
        """Return R(Δ) ``(head size, head size)`` for Δ = position of the query − position of the key."""
        cos, sin = (self.angles * offset).cos(), (self.angles * offset).sin()
        rotation = torch.eye(self.head_size, dtype=torch.float64)
        rotation[self.first, self.first] = rotation[self.second, self.second] = cos * self.gain**2
        rotation[self.first, self.second] = sin * self.gain**2
        rotation[self.second, self.first] = -sin * self.gain**2
        return rotation

    def turn(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Turn ``(batch, heads, seq, head size)`` vectors by their ``(batch, seq)`` positions."""
        angle = positions[:, None, :, None].double() * self.angles
        cos, sin = angle.cos() * self.gain, angle.sin() * self.gain
        a, b = vectors[..., self.first], vectors[..., self.second]
        turned = vectors.clone()
        turned[..., self.first] = a * cos - b * sin
        turned[..., self.second] = b * cos + a * sin
        return turned


def rotary_of(model: nn.Module, site: AttentionSite, head_size: int) -> Rotary | None:
    """Return the rotation of a layer, or None without RoPE (ALiBi, or ``use_rope`` is False).

    Angles are in the model's own buffers (``inv_freq``, or GPT-J's table), with every scaling of RoPE for short texts;
    the pairs of columns come from the model's own function.
    """
    base: Any = base_model(model)
    config = base.config.get_text_config()
    turns = getattr(site.attention, "use_rope", True) and not getattr(config, "alibi", False)
    turned = _angles(base, site, config) if turns else None
    if turned is None:
        return None
    angles, gain = turned
    source = sys.modules.get(type(site.attention).__module__)  # where the class of the attention is defined
    turn = next((getattr(source, name) for name in _TURNS if hasattr(source, name)), None)
    width = 2 * len(angles)
    if turn is None or width > head_size:
        return None
    columns = torch.arange(1, width + 1)
    image = turn(columns.view(1, 1, 1, width)).flatten()
    first = (image < 0).nonzero().flatten()
    return Rotary(head_size, first, -image[first] - 1, angles, gain)


def _angles(base: nn.Module, site: AttentionSite, config: Any) -> tuple[Tensor, float] | None:
    for module in (site.attention, *(m for m in base.modules() if "Rotary" in type(m).__name__)):
        table = getattr(module, "embed_positions", None)  # GPT-J's
        if isinstance(table, Tensor) and len(table) > 1:  # a row a position: all sines, then all cosines
            sin, cos = table[1].cpu().double().chunk(2)
            return torch.atan2(sin, cos), 1.0
    types = getattr(config, "layer_types", None)
    kind = f"{types[site.layer]}_" if types and site.layer < len(types) else ""
    for module in (*site.attention.modules(), *base.modules()):
        for prefix in (kind, ""):
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(frequencies, Tensor):
                gain = getattr(module, f"{prefix}attention_scaling", 1.0)
                return frequencies.detach().cpu().double(), float(gain if gain is not None else 1.0)
    return None
