"""The Q-K relation of a patched layer whose query is not linear, and how much of its logits that relation explains.

With a pre-projection or a nonlinear query q(x) is no matrix product. Its best linear stand-in on real text is the W
that minimises E‖q(x) − xW − b‖² over the tokens' x, the attention's input before any patch. (For a Gaussian x that is
the mean Jacobian E[∂q/∂x] too, by Stein's lemma; the fit needs no such assumption, and it is what variance explained
speaks of.) Only what is not known is fitted: q(x) − xW_0, where W_0 is the base's matrix with linear adapters added and
the anchor of a nonlinear query at its weight in f = 0. So a patch that is linear, or does nothing, gives W_0 itself.

The fit is ridge regression on centred data, W = W_0 + (XᵀX + λI)⁻¹XᵀR, where λ minimises the generalised
cross-validation score RSS(λ) / (1 − df(λ)/n)² (Golub, Heath and Wahba, 1979) on the tokens of the fit. The logits are
compared on other tokens. Softmax ignores what is the same for all keys of a query, so the variance is that within the
rows of the (causal) logit matrix, RoPE applied:

    explained = 1 − Σ (L − L^)² / Σ L²,    both less their row's mean over the keys that the query sees,

and ``explained_change`` is the same for L − L_base in place of L: how much of what the patch changed is linear. Where a
model norms q and k after the projection (Qwen 3), L is the product before that norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.analysis.heads import HeadWeights, head_size, layer_weights, split_heads
from hfpatch.analysis.rotary import Rotary, rotary_of
from hfpatch.analysis.running import Batch, Tokens, evaluating, run, tokens_of
from hfpatch.errors import HfpatchError
from hfpatch.nn import MixedProjection
from hfpatch.sites import AttentionSite, find_sites, submodule, unwrapped
from hfpatch.tuners.hidden_state import hidden_argument
from hfpatch.tuners.layer import surgery_layer
from hfpatch.tuners.nonlinear_query.layer import NonlinearQueryLayer
from hfpatch.tuners.pre_projection.layer import PreProjectionLayer

RIDGES = tuple(10.0**power for power in range(-9, 4))
"""The λ that are tried, in units of the mean eigenvalue of XᵀX."""

Seen = Callable[["_Watched", Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Linearised:
    """The linear stand-in of one patched layer.

    Attributes:
        layer: index of the block.
        weights: its query and key matrices, for :func:`hfpatch.analysis.relation.head_relations`.
        explained: by head, the share of the logits' within-row variance that it explains on other tokens.
        explained_change: by head, the share of what the patch changed in the logits; None where it changed nothing.
        fit_tokens: tokens that it was fitted on.
    """

    layer: int
    weights: HeadWeights
    explained: tuple[float, ...]
    explained_change: tuple[float | None, ...]
    fit_tokens: int


def linearise(model: nn.Module, fit: Iterable[Batch], held_out: Iterable[Batch]) -> list[Linearised]:
    """Fit the linear stand-in of every layer with a nonlinear patch; none where there is no such patch.

    Args:
        model: a patched model; its mode and hooks are left as they were.
        fit: batches to fit on, with more tokens than the hidden state is wide.
        held_out: other batches, to measure on.

    Raises:
        HfpatchError: if there are too few tokens to fit.
    """
    watched = [_Watched.of(model, site) for site in find_sites(model) if is_nonlinear(site)]
    sums = {layer.site.layer: _Sums(layer) for layer in watched}
    _watch(model, watched, fit, lambda layer, *seen: sums[layer.site.layer].add(layer, *seen))
    fitted = [_fitted(layer, sums[layer.site.layer]) for layer in watched]
    scores = {layer.site.layer: _Explained(len(layer.known.query)) for layer in fitted}
    _watch(model, fitted, held_out, lambda layer, *seen: scores[layer.site.layer].add(layer, *seen))
    return [_result(layer, scores[layer.site.layer], sums[layer.site.layer].count) for layer in fitted]


@dataclass(frozen=True)
class _Watched:
    """A layer, its known linear part (matrices only), the base's map, and, once fitted, the stand-in."""

    site: AttentionSite
    rotary: Rotary | None
    base: HeadWeights
    known: HeadWeights
    base_bias: tuple[Tensor, Tensor]
    bias: tuple[Tensor, Tensor]
    tokens: Tokens | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes its projections in."""
        found = self.site.projection_module("query").parameters()
        return next((p.dtype for p in found if p.is_floating_point()), torch.float32)

    @staticmethod
    def of(model: nn.Module, site: AttentionSite) -> _Watched:
        with evaluating(model):
            base, known = (layer_weights(model, site, patched=patched) for patched in (False, True))
        size = head_size(model, site)
        biases = tuple(split_heads(_bias(site, target)[None], size) for target in ("query", "key"))
        pair = (biases[0], biases[1])
        return _Watched(site, rotary_of(model, site, size), base, known, pair, pair)


def _bias(site: AttentionSite, target: str) -> Tensor:
    module, columns = site.projection_module(target), site.projections[target].columns
    if isinstance(module, MixedProjection):
        return columns.read(module.linear_part(unwrapped)[1].cpu().double())
    bias = getattr(module, "bias", None)
    if not isinstance(bias, Tensor):
        return torch.zeros(columns.size, dtype=torch.float64)
    return columns.read(bias.detach().cpu().double())


def is_nonlinear(site: AttentionSite) -> bool:
    """Return whether a working patch makes the layer's query or key other than linear in the attention's input."""
    pre, query = surgery_layer(site, PreProjectionLayer), surgery_layer(site, NonlinearQueryLayer)
    if pre is not None and pre.working_adapters():
        return True
    return query is not None and any({"query", "key"} & {*query.configs[a].targets} for a in query.working_adapters())


def _watch(model: nn.Module, layers: list[_Watched], batches: Iterable[Batch], seen: Seen) -> None:
    """Call ``seen(layer, x, q, k)`` in every batch: the input before the patch and the projections after it."""
    now: dict[str, Tokens] = {}

    def begin(batch: Batch) -> None:
        now["tokens"] = tokens_of(batch)

    with ExitStack() as hooks:
        for layer in layers:
            _listen(hooks, layer, lambda layer, *rest: seen(replace(layer, tokens=now["tokens"]), *rest))
        run(model, batches, begin)


def _listen(hooks: ExitStack, layer: _Watched, seen: Seen) -> None:
    site, kept = layer.site, dict[str, Tensor]()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept["x"] = hidden_argument(args, kwargs).detach().cpu().double()

    def project(target: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            kept[target] = site.projections[target].columns.read(output).detach().cpu().double()

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen(layer, *(kept.pop(name) for name in ("x", "query", "key")))

    hooks.callback(site.attention.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
    for target in ("query", "key"):
        wrapper = submodule(site.attention, site.projections[target].path, of=site.family)
        hooks.callback(wrapper.register_forward_hook(project(target)).remove)
    hooks.callback(site.attention.register_forward_hook(leave).remove)


class _Sums:
    """What a regression of what is not known on x needs: moments, in fp64, whatever the number of tokens."""

    def __init__(self, layer: _Watched) -> None:
        hidden = layer.known.query.shape[1]
        width = _joined(layer.known).shape[1]
        self.count = 0
        self.x, self.r = torch.zeros(hidden).double(), torch.zeros(width).double()
        self.xx, self.xr = torch.zeros(hidden, hidden).double(), torch.zeros(hidden, width).double()
        self.rr = torch.zeros(width).double()

    def add(self, layer: _Watched, x: Tensor, query: Tensor, key: Tensor) -> None:
        assert layer.tokens is not None
        counted = layer.tokens.counted.cpu()
        x = x[counted]
        r = torch.cat([query, key], dim=-1)[counted] - x @ _joined(layer.known)
        self.count += len(x)
        self.x += x.sum(0)
        self.r += r.sum(0)
        self.xx += x.T @ x
        self.xr += x.T @ r
        self.rr += r.pow(2).sum(0)


def _joined(weights: HeadWeights) -> Tensor:
    """Return the query and key matrices side by side: ``(hidden, query columns + key columns)``."""
    return torch.cat([side.movedim(0, 1).flatten(1) for side in (weights.query, weights.key)], dim=1)


def _fitted(layer: _Watched, sums: _Sums) -> _Watched:
    hidden = len(sums.x)
    if sums.count <= hidden:
        raise HfpatchError(
            f"{sums.count} tokens are too few to fit a relation on a hidden state of {hidden}; give more text"
        )
    x, r = sums.x / sums.count, sums.r / sums.count
    xx, xr = sums.xx - sums.count * x[:, None] * x, sums.xr - sums.count * x[:, None] * r
    columns = layer.known.query.shape[0] * layer.known.query.shape[2]
    rr = sums.rr - sums.count * r.pow(2)
    parts = (slice(None, columns), slice(columns, None))
    change = torch.cat([_ridge(xx, xr[:, part], float(rr[part].sum()), sums.count) for part in parts], dim=1)
    size = layer.known.query.shape[2]
    query, key = (split_heads(change[:, part], size) for part in parts)
    biases = (split_heads((r - x @ change)[None, part], size) for part in parts)
    known = HeadWeights(layer.site.layer, layer.known.query + query, layer.known.key + key)
    query_bias, key_bias = biases
    return replace(layer, known=known, bias=(query_bias, key_bias))


def _ridge(xx: Tensor, xr: Tensor, rr: float, count: int) -> Tensor:
    """Return (XᵀX + λI)⁻¹XᵀR for the λ of least generalised cross-validation score."""
    values, vectors = torch.linalg.eigh(xx)
    values = values.clamp_min(0)
    turned = vectors.T @ xr
    energy = turned.pow(2).sum(1)

    def score(ridge: float) -> float:
        kept = values + ridge
        rss = rr - float((energy * (values + 2 * ridge) / kept.pow(2)).sum())
        freedom = float((values / kept).sum())
        return max(rss, 0.0) / (1 - freedom / count) ** 2

    mean = max(float(values.mean()), torch.finfo(torch.float64).tiny)
    best = min((ridge * mean for ridge in reversed(RIDGES)), key=score)
    solved: Tensor = vectors @ (turned / (values + best)[:, None])
    return solved


class _Explained:
    """Sums of squares within the rows of the logit matrix: of the logits, their change, and what the fit leaves."""

    def __init__(self, heads: int) -> None:
        self.logits, self.change, self.left = (torch.zeros(heads).double() for _ in range(3))

    def add(self, layer: _Watched, x: Tensor, query: Tensor, key: Tensor) -> None:
        size = layer.known.query.shape[2]
        true = _logits(layer, *(side.reshape(*x.shape[:2], -1, size).movedim(2, 1) for side in (query, key)))
        base = _logits(layer, *_projected(x, layer.base, layer.base_bias))
        fitted = _logits(layer, *_projected(x, layer.known, layer.bias))
        assert layer.tokens is not None
        pairs = layer.tokens.pairs.cpu()[:, None]
        self.logits += _within_rows(true, pairs)
        self.change += _within_rows(true - base, pairs)
        self.left += _within_rows(true - fitted, pairs)


def _projected(x: Tensor, weights: HeadWeights, bias: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return linear queries and keys by head, ``(batch, heads, seq, head size)``."""
    return x[:, None] @ weights.query + bias[0], x[:, None] @ weights.key + bias[1]


def _logits(layer: _Watched, query: Tensor, key: Tensor) -> Tensor:
    """Return unscaled logits ``(batch, heads, seq, seq)``."""
    assert layer.tokens is not None
    if layer.rotary is not None:
        positions = layer.tokens.positions.cpu()
        query, key = layer.rotary.turn(query, positions), layer.rotary.turn(key, positions)
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT


def _within_rows(values: Tensor, pairs: Tensor) -> Tensor:
    """Return, by head, the sum of squares around each row's mean over its allowed keys."""
    kept = values.masked_fill(~pairs, 0.0)
    mean = kept.sum(-1, keepdim=True) / pairs.sum(-1, keepdim=True).clamp_min(1)
    total: Tensor = (values - mean).masked_fill(~pairs, 0.0).pow(2).sum((0, 2, 3))
    return total


def _result(layer: _Watched, scores: _Explained, count: int) -> Linearised:
    def shares(whole: Tensor) -> list[float | None]:
        noise = max(1e-10, 4 * torch.finfo(layer.dtype).eps ** 2) * scores.logits  # a change of rounding alone is none
        left = (scores.left / whole).tolist()
        return [1 - part if total > least else None for part, total, least in zip(left, whole, noise, strict=True)]

    explained = tuple(1.0 if share is None else share for share in shares(scores.logits))
    return Linearised(layer.site.layer, layer.known, explained, tuple(shares(scores.change)), count)
