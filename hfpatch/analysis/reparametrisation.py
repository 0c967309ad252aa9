"""The invariance (X, W_Q, W_K, W_V) -> (XΘ, Θ⁻¹W_Q, Θ⁻¹W_K, Θ⁻¹W_V), and what can be removed by it.

An attention layer reads its input through W_Q, W_K and W_V alone, so for every invertible Θ (d × d) the inputs XΘ and
the matrices Θ⁻¹W give the same queries, keys and values, hence the same output. With Θ = W_Q the query matrix becomes
the identity: Q = X', X' = X W_Q. Sources: arXiv 2510.23912; equation 1 of arXiv 2603.13381.

That removes W_Q exactly where all of these hold:

1. d_q = d (heads · head size = hidden size) and W_Q is invertible; a bias b_Q stays as it is.
2. What produces X ends in a linear map that can take Θ in: X = Z E becomes X' = Z (EΘ). An embedding does, or an output
   matrix, if no norm, activation or residual sum stands between it and the attention.
3. Whatever else reads the same X takes Θ⁻¹ in.

Rounding grows with the condition number of W_Q; nothing else is lost. See :data:`WHY_NOT` for the models at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.analysis.heads import weight_matrix
from hfpatch.analysis.running import evaluating
from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.tuners.adapters import has_adapters
from hfpatch.tuners.hidden_state import hidden_argument, replace_hidden

WHY_NOT = (
    "A pretrained model with norms and a residual stream cannot be rid of W_Q this way. (1) Between the stream and "
    "each attention stands a norm, and norm(xΘ) = norm(x)Θ for all x only where Θ keeps every length (and, for a "
    "LayerNorm, the mean), that is where Θ is orthogonal. W_Q is not, so Θ = W_Q cannot be moved through the norm into "
    "what lies before it. What can be moved is the orthogonal factor U of W_Q = U P, once the norm's gain has been "
    "folded into the matrices behind it; P remains, and it is not the identity. (2) One residual stream serves every "
    "layer, so even without norms there is one Θ for the whole model: it removes the W_Q of one layer, and the others "
    "keep Θ⁻¹W_Q. A model must be trained without W_Q to have none."
)
"""Why a normed residual model cannot be converted."""


@dataclass(frozen=True)
class LayerReparametrisation:
    """What was measured on the attention module of one layer, all in fp64 and relative to the size of the output.

    Attributes:
        layer: index of the block.
        theta_condition: condition number of the random Θ.
        invariance_error: max |attention(XΘ; Θ⁻¹W) − attention(X; W)| / max |attention(X; W)|.
        query_condition: condition number of W_Q, None where it is not square.
        elimination_error: the same error with Θ = W_Q and the query matrix set to the identity, exactly; None where
            that cannot be done.
        obstacle: why it cannot, or an empty string.
        removed: parameters of W_Q, which are gone then.
        norm_error: ‖norm(hΘ) − norm(h)Θ‖ / ‖norm(h)Θ‖ for the block's own norm, the h that it saw, and Θ = W_Q: what
            forbids the conversion of the whole model. None where no norm feeds the attention, or W_Q is not square.
        orthogonal_distance: ‖W_Q/s − U‖ / ‖U‖ for the nearest orthogonal U and best factor s: 0 if W_Q could be moved
            through an RMSNorm without gain, but for the factor. None where W_Q is not square.
    """

    layer: int
    theta_condition: float
    invariance_error: float
    query_condition: float | None
    elimination_error: float | None
    obstacle: str
    removed: int
    norm_error: float | None
    orthogonal_distance: float | None


def reparametrise(model: nn.Module, tokens: Tensor, *, seed: int = 0) -> list[LayerReparametrisation]:
    """Verify the invariance on every attention module of a model, and remove W_Q from each module taken by itself.

    Everything is done on an fp64 copy of the model, which is left as it was.

    Args:
        model: without adapters.
        tokens: ``(batch, seq)`` ids that give each attention its real input.
        seed: of the random Θ.

    Raises:
        HfpatchError: if the model has adapters.
    """
    if has_adapters(model):
        raise HfpatchError("the reparametrisation is of plain attention; call hfpatch.unpatch(model) first")
    twin = copy.deepcopy(model).double()
    sites = find_sites(twin)
    with evaluating(twin), torch.no_grad():
        calls = _recorded(twin, sites, tokens)
        return [_layer(site, calls[site.layer], seed) for site in sites]


def random_theta(hidden: int, seed: int = 0) -> Tensor:
    """Return a random invertible Θ ``(hidden, hidden)`` of condition number 4: U diag(0.5 … 2) V."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(hidden, hidden, generator=generator).double()).Q for _ in range(2))
    theta: Tensor = u * torch.logspace(-1, 1, hidden, base=2, dtype=torch.float64) @ v
    return theta


def without_query(weights: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Θ = W_Q and the matrices Θ⁻¹W, in which the query's is the identity.

    Args:
        weights: ``query`` ``(hidden, hidden)``, ``key`` and ``value`` ``(hidden, any)``.

    Returns:
        Θ, which what produces X must take in, and the new ``query``, ``key`` and ``value``.

    Raises:
        HfpatchError: if W_Q is not square or not invertible.
    """
    theta = weights["query"].double()
    if obstacle := _obstacle(theta):
        raise HfpatchError(f"W_Q cannot be removed: {obstacle}")
    others = {name: torch.linalg.solve(theta, w.double()) for name, w in weights.items() if name != "query"}
    return theta, {"query": torch.eye(len(theta), dtype=torch.float64, device=theta.device), **others}


@dataclass(frozen=True)
class _Call:
    """How an attention was called, and the norm whose output it was given, with that norm's input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    norm: nn.Module | None
    before_norm: Tensor | None

    @property
    def hidden(self) -> Tensor:
        return hidden_argument(self.args, self.kwargs)


def _recorded(model: nn.Module, sites: list[AttentionSite], tokens: Tensor) -> dict[int, _Call]:
    """Run the model and keep each attention's arguments, by layer."""
    calls: dict[int, _Call] = {}
    made: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}  # by the id of the output; the tensors keep their ids taken

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            made.setdefault(id(output), (module, args[0], output))

    def called(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            norm, before, _ = made.get(id(hidden_argument(args, kwargs)), (None, None, None))
            calls[layer] = _Call(args, kwargs, norm, before)

        return hook

    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    handles = [module.register_forward_hook(keep) for module in norms]
    handles += [s.attention.register_forward_pre_hook(called(s.layer), with_kwargs=True) for s in sites]
    try:
        model(tokens.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _layer(site: AttentionSite, call: _Call, seed: int) -> LayerReparametrisation:
    theta = random_theta(site.hidden_size, seed).to(call.hidden.device)
    weights = {target: _matrix(site, target) for target in site.projections}
    moved = {target: torch.linalg.solve(theta, weight) for target, weight in weights.items()}
    query = weights["query"]
    obstacle = _obstacle(query)
    square = query.shape[0] == query.shape[1]
    return LayerReparametrisation(
        layer=site.layer,
        theta_condition=float(torch.linalg.cond(theta)),
        invariance_error=_error(site, call, theta, moved),
        query_condition=float(torch.linalg.cond(query)) if square else None,
        elimination_error=None if obstacle else _error(site, call, *without_query(weights)),
        obstacle=obstacle,
        removed=0 if obstacle else query.numel(),
        norm_error=_norm_error(call, query) if square else None,
        orthogonal_distance=_orthogonal_distance(query) if square else None,
    )


def _matrix(site: AttentionSite, target: str) -> Tensor:
    columns = site.projections[target].columns
    return columns.read(weight_matrix(site.projection_module(target))).to(next(site.attention.parameters()).device)


def _obstacle(query: Tensor) -> str:
    rows, columns = query.shape
    if rows != columns:
        return f"d_q = {columns} differs from d = {rows}, so W_Q is not square"
    rank = int(torch.linalg.matrix_rank(query))
    return f"W_Q has rank {rank} of {rows}, so it is not invertible" if rank < rows else ""


def _error(site: AttentionSite, call: _Call, theta: Tensor, weights: Mapping[str, Tensor]) -> float:
    """Run the attention with X and its own weights and with XΘ and these, and compare."""
    expected = _first(site.attention(*call.args, **call.kwargs))
    args, kwargs = replace_hidden(site.attention, call.args, call.kwargs, call.hidden @ theta)
    kept = {target: site.projection_module(target).weight.detach().clone() for target in weights}  # type: ignore[operator]
    try:
        for target, weight in weights.items():
            _write(site, target, weight)
        found = _first(site.attention(*args, **kwargs))
    finally:
        for target, weight in kept.items():
            site.projection_module(target).weight.copy_(weight)  # type: ignore[operator]
    return float((found - expected).abs().max() / expected.abs().max())


def _write(site: AttentionSite, target: str, matrix: Tensor) -> None:
    """Put ``(hidden, out)`` in the target's columns of the projection that computes it."""
    module: Any = site.projection_module(target)
    columns = site.projections[target].columns
    conv1d = hasattr(module, "nx")
    whole = columns.write(module.weight.detach() if conv1d else module.weight.detach().T, matrix)
    module.weight.copy_(whole if conv1d else whole.T)


def _norm_error(call: _Call, theta: Tensor) -> float | None:
    if call.norm is None or call.before_norm is None:
        return None
    moved, expected = call.norm(call.before_norm @ theta), call.hidden @ theta
    return float((moved - expected).norm() / expected.norm())


def _orthogonal_distance(query: Tensor) -> float:
    """Return ‖W/s − U‖/‖U‖ at its least: W = UP, and over s that is √(1 − (Σσ)²/(d Σσ²))."""
    sizes = torch.linalg.svdvals(query)
    return float((1 - sizes.sum() ** 2 / (len(sizes) * sizes.pow(2).sum())).clamp_min(0).sqrt())


def _first(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first
