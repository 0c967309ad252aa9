"""Rotary position embeddings, read from a model: which columns of a head turn together, and how fast.

R(Δ) is the matrix with which the logit of a query at i and a key at j is q R(i − j) kᵀ, for row vectors: each pair of
columns (a, b) turns by Δ·θ, all others stay. Source: Su et al., *RoFormer* (arXiv 2104.09864).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hfpatch.analysis.heads import head_size
from hfpatch.analysis.running import run
from hfpatch.sites import AttentionSite, base_model, find_sites
from hfpatch.support.modes import hooked
from hfpatch.tuners.hidden_state import argument_names, hidden_argument, replace_hidden

_TURNS = ("rotate_half", "rotate_every_two")
_PROBE_TOKENS = 4
_TRIED: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""The layers with positions of each base; adapters change nothing about them."""


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


def rotary_of(model: nn.Module, site: AttentionSite) -> Rotary | None:
    """Return the rotation of a layer, or None without RoPE.

    Angles are in the model's own buffers (``inv_freq``, or GPT-J's table), with every scaling of RoPE for short texts;
    the pairs of columns come from the model's own function. Which layers turn is tried: Cohere 2, EXAONE 4, SmolLM 3
    and others leave RoPE out of some, each by a rule of its own.
    """
    base: Any = base_model(model)
    turned = _angles(base, site, base.config.get_text_config())
    if turned is None or site.layer not in _layers_with_positions(base):
        return None
    angles, gain = turned
    source = sys.modules.get(type(site.attention).__module__)  # where the class of the attention is defined
    turn = next((getattr(source, name) for name in _TURNS if hasattr(source, name)), None)
    width, size = 2 * len(angles), head_size(site)
    if turn is None or width > size:
        return None
    columns = torch.arange(1, width + 1)
    image = turn(columns.view(1, 1, 1, width)).flatten()
    first = (image < 0).nonzero().flatten()
    return Rotary(size, first, -image[first] - 1, angles, gain)


def _layers_with_positions(base: Any) -> set[int]:
    """Return the layers whose attention depends on position ids, or that position ids do not reach.

    The model runs twice on a few tokens, the second time with twice the distances, and with the inputs that each
    attention had the first time. Some models take no position ids; BLT computes those of its patches itself.
    """
    if base in _TRIED:
        return _TRIED[base]
    sites, inputs = find_sites(base), dict[int, Tensor]()
    calls: dict[int, list[list[Tensor]]] = {site.layer: [] for site in sites}  # the output, the position embeddings

    def enter(layer: int, names: tuple[str, ...], _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return replace_hidden(names, args, kwargs, inputs.setdefault(layer, hidden_argument(args, kwargs)))

    def leave(layer: int, _module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        embeddings = tree_leaves(kwargs.get("position_embeddings"))
        hidden = output if isinstance(output, Tensor) else output[0]
        calls[layer].append([hidden, *(leaf for leaf in embeddings if isinstance(leaf, Tensor))])

    if "position_ids" not in signature(base.base_model.forward).parameters:
        return set(calls)  # nothing can be tried
    tokens = torch.arange(_PROBE_TOKENS)[None]
    # with a mask, distances of two do not begin a document
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    handles = []
    for site in sites:
        entering, leaving = partial(enter, site.layer, argument_names(site.attention)), partial(leave, site.layer)
        handles.append(site.attention.register_forward_pre_hook(entering, with_kwargs=True, prepend=True))
        handles.append(site.attention.register_forward_hook(leaving, with_kwargs=True))
    with hooked(handles):
        run(base, [{**batch, "position_ids": distance * tokens} for distance in (1, 2)], lambda _: None)
    _TRIED[base] = set()
    for layer, (first, *_, last) in calls.items():
        same, *same_embeddings = map(torch.equal, first, last)
        if not same or (same_embeddings and all(same_embeddings)):
            _TRIED[base].add(layer)
    return _TRIED[base]


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
