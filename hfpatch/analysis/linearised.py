"""The Q-K relation of a patched layer with a nonlinear query, and the share of its logits that it explains.

With a pre-projection or a nonlinear query, q(x) is not a matrix product. Its best linear approximation on text is the W
that minimises E‖q(x) − xW − b‖² over the tokens' x, the attention's input before any patch. (For a Gaussian x that is
also the mean Jacobian E[∂q/∂x], by Stein's lemma; the fit does not assume it.) Only the rest is fitted:
q(x) − xW_0, where W_0 is the base's matrix with linear adapters added and the anchor of a nonlinear query at its weight
in f = 0. So a linear patch, or a no-op, gives W_0 itself.

The fit is ridge regression on centred data, W = W_0 + (XᵀX + λI)⁻¹XᵀR, where λ minimises the generalised
cross-validation score RSS(λ) / (1 − df(λ)/n)² (Golub, Heath and Wahba, 1979) on the tokens of the fit. The logits are
compared on other tokens. Softmax ignores a constant over the keys of a query, so the variance is that within the rows
of the (causal) logit matrix, RoPE applied:

    explained = 1 − Σ (L − L^)² / Σ L²,    both less their row's mean over the keys that the query sees,

and ``explained_change`` is the same for L − L_base in place of L: the linear share of the patch's change. If a
model norms q and k after the projection (Qwen 3), L is the product before that norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.analysis.heads import HeadWeights, head_size, layer_weights, split_heads
from hfpatch.analysis.rotary import Rotary, rotary_of
from hfpatch.analysis.running import Batch, Tokens, run
from hfpatch.errors import HfpatchError
from hfpatch.methods import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.nn import MixedProjection
from hfpatch.sites import AttentionSite, find_sites, submodule, unwrapped
from hfpatch.support.modes import hooked
from hfpatch.tuners.hidden_state import hidden_argument
from hfpatch.tuners.layer import method_layer

RIDGES = tuple(10.0**power for power in range(-9, 4))
"""The λ that are tried, in units of the mean eigenvalue of XᵀX."""


@dataclass(frozen=True)
class Linearised:
    """The linear approximation of one patched layer.

    Attributes:
        layer: index of the block.
        weights: its query and key matrices, for :func:`hfpatch.analysis.relation.head_relations`.
        explained: by head, the share of the logits' within-row variance that it explains on other tokens.
        explained_change: by head, the share of the patch's change of the logits; None without a change.
        fit_tokens: tokens that it was fitted on.
    """

    layer: int
    weights: HeadWeights
    explained: tuple[float, ...]
    explained_change: tuple[float | None, ...]
    fit_tokens: int


def linearise(model: nn.Module, fit: Iterable[Batch], held_out: Iterable[Batch]) -> list[Linearised]:
    """Fit the linear approximation of every layer with a nonlinear patch on some batches, and measure it on others.

    The model's mode and hooks are left as they were. ``fit`` must have more tokens than the hidden state is wide.

    Raises:
        HfpatchError: if there are too few tokens to fit.
    """
    moments = []
    for site in filter(is_nonlinear, find_sites(model)):
        base, linear = (layer_weights(site, patched=patched) for patched in (False, True))
        size, biases = head_size(site), []
        for target in ("query", "key"):
            module, columns = site.projection_module(target), site.projections[target].columns
            bias = getattr(module, "bias", None)
            if isinstance(module, MixedProjection):
                bias = module.linear_part(unwrapped)[1]
            column_bias = columns.read(bias.detach().cpu()) if isinstance(bias, Tensor) else torch.zeros(columns.size)
            biases.append(split_heads(column_bias.double()[None], size))
        layer = _Layer(site, rotary_of(model, site), size, _Affine(base, (biases[0], biases[1])), linear)
        moments.append(_Moments(layer))
    _observe(model, fit, moments)
    scores = [_Explained(moment.layer, moment.fitted(), moment.count) for moment in moments]
    _observe(model, held_out, scores)
    return [score.result() for score in scores]


def is_nonlinear(site: AttentionSite) -> bool:
    """Return whether a working patch makes the layer's query or key nonlinear in the attention's input."""
    pre, query = method_layer(site, PreProjectionConfig), method_layer(site, NonlinearQueryConfig)
    return (pre is not None and pre.acts("entered")) or (
        query is not None and (query.acts("query") or query.acts("key"))
    )


@dataclass(frozen=True)
class _Affine:
    """Linear queries and keys by head, x W + b."""

    weights: HeadWeights
    bias: tuple[Tensor, Tensor]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys ``(batch, heads, seq, head size)`` for x ``(batch, seq, hidden)``."""
        return x[:, None] @ self.weights.query + self.bias[0], x[:, None] @ self.weights.key + self.bias[1]


@dataclass(frozen=True)
class _Layer:
    """A layer's site and rotation, the base's map, and the matrices of the patched map's linear part (W_0)."""

    site: AttentionSite
    rotary: Rotary | None
    head_size: int
    base: _Affine
    linear: HeadWeights


def _observe(model: nn.Module, batches: Iterable[Batch], observers: Sequence[_Moments | _Explained]) -> None:
    """Give each observer, in every batch, its layer's input before the patch and the projections after it."""
    begun: list[Tokens] = []  # of each batch
    kept: dict[tuple[int, str], Tensor] = {}

    def enter(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[index, "x"] = hidden_argument(args, kwargs).detach().cpu().double()

    def project(index: int, target: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        columns = observers[index].layer.site.projections[target].columns
        kept[index, target] = columns.read(output).detach().cpu().double()

    def leave(index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        observers[index].add(begun[-1], *(kept.pop((index, name)) for name in ("x", "query", "key")))

    handles = []
    for index, site in enumerate(observer.layer.site for observer in observers):
        entering = partial(enter, index)
        handles.append(site.attention.register_forward_pre_hook(entering, prepend=True, with_kwargs=True))
        for target in ("query", "key"):
            outer = submodule(site.attention, site.projections[target].path, of=site.family)
            handles.append(outer.register_forward_hook(partial(project, index, target)))
        handles.append(site.attention.register_forward_hook(partial(leave, index)))
    with hooked(handles):
        run(model, batches, begun.append)


class _Moments:
    """Moments for the regression of the nonlinear part on x, in fp64; their size is independent of the tokens."""

    def __init__(self, layer: _Layer) -> None:
        self.layer, self.count = layer, 0
        sides = (layer.linear.query, layer.linear.key)
        self.linear = torch.cat([side.movedim(0, 1).flatten(1) for side in sides], dim=1)  # (hidden, columns of both)
        hidden, width = self.linear.shape
        self.x, self.r = torch.zeros(hidden).double(), torch.zeros(width).double()
        self.xx, self.xr = torch.zeros(hidden, hidden).double(), torch.zeros(hidden, width).double()
        self.rr = torch.zeros(width).double()

    def add(self, tokens: Tokens, x: Tensor, query: Tensor, key: Tensor) -> None:
        x = tokens.of(x)
        r = tokens.of(torch.cat([query, key], dim=-1)) - x @ self.linear
        self.count += len(x)
        self.x += x.sum(0)
        self.r += r.sum(0)
        self.xx += x.T @ x
        self.xr += x.T @ r
        self.rr += r.pow(2).sum(0)

    def fitted(self) -> _Affine:
        """Return the linear part plus a ridge regression of the rest, query and key each with its λ."""
        hidden, count = len(self.x), self.count
        if count <= hidden:
            raise HfpatchError(
                f"{count} tokens are too few to fit a relation on a hidden state of {hidden}; give more text"
            )
        x, r = self.x / count, self.r / count
        xx, xr = self.xx - count * x[:, None] * x, self.xr - count * x[:, None] * r
        rr = self.rr - count * r.pow(2)
        linear, size = self.layer.linear, self.layer.head_size
        columns = len(linear.query) * size
        parts = (slice(None, columns), slice(columns, None))

        # (XᵀX + λI)⁻¹XᵀR for the λ of least generalised cross-validation score.
        values, vectors = torch.linalg.eigh(xx)
        values = values.clamp_min(0)
        mean, solved = max(float(values.mean()), torch.finfo(torch.float64).tiny), []
        for part in parts:
            turned, scores = vectors.T @ xr[:, part], {}
            energy = turned.pow(2).sum(1)
            for ridge in (ridge * mean for ridge in reversed(RIDGES)):
                kept = values + ridge
                rss = float(rr[part].sum()) - float((energy * (values + 2 * ridge) / kept.pow(2)).sum())
                freedom = float((values / kept).sum())
                scores[ridge] = max(rss, 0.0) / (1 - freedom / count) ** 2
            best = min(scores, key=scores.__getitem__)
            solved.append(vectors @ (turned / (values + best)[:, None]))
        change = torch.cat(solved, dim=1)

        query, key = (split_heads(change[:, part], size) for part in parts)
        query_bias, key_bias = (split_heads((r - x @ change)[None, part], size) for part in parts)
        weights = HeadWeights(linear.layer, linear.query + query, linear.key + key)
        return _Affine(weights, (query_bias, key_bias))


class _Explained:
    """Sums of squares within the rows of the logit matrix, of the logits, their change, and the residual."""

    def __init__(self, layer: _Layer, fitted: _Affine, fit_tokens: int) -> None:
        self.layer, self.fitted, self.fit_tokens = layer, fitted, fit_tokens
        self.logits, self.change, self.left = (torch.zeros(len(fitted.weights.query)).double() for _ in range(3))

    def add(self, tokens: Tokens, x: Tensor, query: Tensor, key: Tensor) -> None:
        # unscaled logits (batch, heads, seq, seq) of the model, of its base, and of the linear approximation
        by_head = [side.reshape(*x.shape[:2], -1, self.layer.head_size).movedim(2, 1) for side in (query, key)]
        logits, rotary, positions = [], self.layer.rotary, tokens.positions.cpu()
        for queries, keys in (by_head, self.layer.base(x), self.fitted(x)):
            if rotary is not None:
                queries, keys = rotary.turn(queries, positions), rotary.turn(keys, positions)
            logits.append(queries @ keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1).mT)
        true, base, fitted = logits
        # by head, the sum of squares around each row's mean over its allowed keys
        pairs = tokens.pairs.cpu()[:, None]
        for total, values in ((self.logits, true), (self.change, true - base), (self.left, true - fitted)):
            kept = values.masked_fill(~pairs, 0.0)
            mean = kept.sum(-1, keepdim=True) / pairs.sum(-1, keepdim=True).clamp_min(1)
            total += (values - mean).masked_fill(~pairs, 0.0).pow(2).sum((0, 2, 3))

    def result(self) -> Linearised:
        site = self.layer.site
        computed = next((p.dtype for p in site.projection_module("query").parameters() if p.is_floating_point()), None)
        eps = torch.finfo(computed or torch.float32).eps
        noise = max(1e-10, 4 * eps**2) * self.logits  # rounding does not count as a change
        explained = torch.where(self.logits > noise, 1 - self.left / self.logits, 1.0).tolist()
        shares = zip((1 - self.left / self.change).tolist(), self.change > noise, strict=True)
        change = tuple(share if changed else None for share, changed in shares)
        return Linearised(site.layer, self.fitted.weights, tuple(explained), change, self.fit_tokens)
