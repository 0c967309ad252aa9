"""The invariance (X, W_Q, W_K, W_V) -> (XΘ, Θ⁻¹W_Q, Θ⁻¹W_K, Θ⁻¹W_V), and the matrices it can remove.

An attention layer reads its input only through W_Q, W_K and W_V, so for every invertible Θ (d × d) the inputs XΘ and
the matrices Θ⁻¹W give the same queries, keys and values, hence the same output. With Θ = W_Q the query matrix becomes
the identity: Q = X', X' = X W_Q. Sources: arXiv 2510.23912; equation 1 of arXiv 2603.13381.

That removes W_Q exactly if

1. d_q = d (heads · head size = hidden size) and W_Q is invertible; a bias b_Q stays as it is,
2. X is the output of a linear map that can absorb Θ: X = Z E becomes X' = Z (EΘ), an embedding, or an output matrix
   without a norm, activation or residual sum between it and the attention,
3. all other readers of X absorb Θ⁻¹.

Rounding grows with the condition number of W_Q. See :data:`WHY_NOT` for the models at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.analysis.heads import weight_matrix
from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite, features, find_sites
from hfpatch.sites.modules import linear_paths
from hfpatch.support.modes import evaluating, hooked
from hfpatch.tuners.adapters import has_adapters
from hfpatch.tuners.hidden_state import argument_names, hidden_argument, replace_hidden

WHY_NOT = (
    "W_Q cannot be removed this way from a pretrained model with norms and a residual stream. (1) Between the stream "
    "and each attention is a norm, and norm(xΘ) = norm(x)Θ for all x only where Θ keeps every length (and, for a "
    "LayerNorm, the mean), that is where Θ is orthogonal. W_Q is not, so Θ = W_Q cannot be moved through the norm into "
    "what is before it. What can be moved is the orthogonal factor U of W_Q = U P, once the norm's gain has been "
    "folded into the matrices behind it; P remains, and it is not the identity. (2) One residual stream serves every "
    "layer, so even without norms there is one Θ for the whole model: it removes the W_Q of one layer, and the others "
    "keep Θ⁻¹W_Q. A model must be trained without W_Q to have none."
)
"""Why a normed residual model cannot be converted."""


@dataclass(frozen=True)
class LayerReparametrisation:
    """Measurements on the attention module of one layer, in fp64 and relative to the size of the output.

    Attributes:
        layer: index of the block.
        theta_condition: condition number of the random Θ.
        invariance_error: max |attention(XΘ; Θ⁻¹W) − attention(X; W)| / max |attention(X; W)|, where every matrix that
            reads X absorbs Θ⁻¹. None if other modules than matrices read X.
        query_condition: condition number of W_Q, None where it is not square.
        elimination_error: the same error with Θ = W_Q and the query matrix set to the identity, exactly; None where
            that cannot be done.
        obstacle: why it cannot, or an empty string.
        removed: parameters of the removed W_Q.
        norm_error: ‖norm(hΘ) − norm(h)Θ‖ / ‖norm(h)Θ‖ for the block's own norm, its input h, and Θ = W_Q. It prevents
            the conversion of the whole model. None where no norm feeds the attention, or W_Q is not square.
        orthogonal_distance: ‖W_Q/s − U‖ / ‖U‖ for the nearest orthogonal U and best factor s: 0 if W_Q could be moved
            through an RMSNorm without gain, but for the factor. None where W_Q is not square.
    """

    layer: int
    theta_condition: float
    invariance_error: float | None
    query_condition: float | None = None
    elimination_error: float | None = None
    obstacle: str = ""
    removed: int = 0
    norm_error: float | None = None
    orthogonal_distance: float | None = None


def reparametrise(model: nn.Module, tokens: Tensor, *, seed: int = 0) -> list[LayerReparametrisation]:
    """Verify the invariance on every attention module of a model, and remove W_Q from each module separately.

    The model runs once as it is, to record each attention's input. Then fp64 copies of the attentions, one at a time,
    are called with that input. The model is left as it was.

    Args:
        model: without adapters.
        tokens: ``(batch, seq)`` ids that give each attention its real input.
        seed: of the random Θ.

    Raises:
        HfpatchError: if the model has adapters or quantised attention weights.
    """
    if has_adapters(model):
        raise HfpatchError("the reparametrisation is of plain attention; call hfpatch.unpatch(model) first")
    sites = find_sites(model)
    for site in sites:
        if not all(p.is_floating_point() for p in site.attention.parameters()):
            raise HfpatchError(f"{site.path}: its weights are quantised, but the reparametrisation is done in fp64")

    calls: dict[str, _Call] = {}
    normed: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}  # by the output's id, which stays taken while it is kept

    def keep_norm(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            normed.setdefault(id(output), (module, args[0], output))

    def keep_call(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_argument(args, kwargs)
        norm, before, _ = normed.get(id(hidden), (None, None, None))
        calls[name] = _Call(args, kwargs, hidden, norm, before)

    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    handles = [module.register_forward_hook(keep_norm) for module in norms]
    handles += [s.attention.register_forward_pre_hook(partial(keep_call, s.name), with_kwargs=True) for s in sites]
    with evaluating(model), torch.no_grad():
        with hooked(handles):
            model(tokens.to(next(model.parameters()).device), use_cache=False)
        return [
            _layer(replace(site, attention=copy.deepcopy(site.attention).double()), _double(calls[site.name]), seed)
            for site in sites
        ]


def random_theta(hidden: int, seed: int = 0) -> Tensor:
    """Return a random invertible Θ ``(hidden, hidden)`` of condition number 4: U diag(0.5 … 2) V."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(hidden, hidden, generator=generator).double()).Q for _ in range(2))
    theta: Tensor = u * torch.logspace(-1, 1, hidden, base=2, dtype=torch.float64) @ v
    return theta


@dataclass(frozen=True)
class _Call:
    """The arguments of an attention, its input among them, and the norm that computed that, with its own input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    norm: nn.Module | None
    before_norm: Tensor | None


def _double(value: Any) -> Any:
    """Return a call, or any of its arguments, with every float tensor in fp64."""
    if isinstance(value, _Call):
        norm = None if value.norm is None else copy.deepcopy(value.norm).double()
        kwargs = {name: _double(each) for name, each in value.kwargs.items()}
        hidden = value.hidden.double()  # one tensor, however often it was passed
        args = tuple(hidden if each is value.hidden else _double(each) for each in value.args)
        kwargs = {n: hidden if value.kwargs[n] is value.hidden else each for n, each in kwargs.items()}
        return _Call(args, kwargs, hidden, norm, _double(value.before_norm))
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(_double(each) for each in value) if type(value) is tuple else value


def _layer(site: AttentionSite, call: _Call, seed: int) -> LayerReparametrisation:
    theta = random_theta(site.hidden_size, seed).to(call.hidden.device)

    # the innermost modules below the attention that read X, by path
    readers: dict[str, nn.Module] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and args[0] is call.hidden:
            readers[name] = module

    leaves = [(name, m) for name, m in site.attention.named_modules() if not any(True for _ in m.children())]
    with hooked(module.register_forward_pre_hook(partial(keep, name)) for name, module in leaves):
        site.attention(*call.args, **call.kwargs)

    # the invariance, then the elimination
    found: dict[str, Any] = {"layer": site.layer, "theta_condition": float(torch.linalg.cond(theta))}
    if why := _not_matrices(site, readers):
        return LayerReparametrisation(**found, invariance_error=None, obstacle=why)
    found["invariance_error"] = _error(site, call, theta, readers)
    if "query" not in site.projections:
        return LayerReparametrisation(**found, obstacle="the attention has no query projection of its own")
    if site.projections["query"].source:
        return LayerReparametrisation(**found, obstacle="the query is projected from a low-rank latent, not from X")

    query = site.projections["query"].columns.read(weight_matrix(site.projection_module("query")))
    query = query.clone().to(call.hidden.device)  # not a view of what _error writes to
    rows, columns = query.shape
    if rows != columns:
        why = f"d_q = {columns} differs from d = {rows}, so W_Q is not square"
        return LayerReparametrisation(**found, obstacle=why)
    found["query_condition"] = float(torch.linalg.cond(query))
    if call.norm is not None and call.before_norm is not None:
        moved, expected = call.norm(call.before_norm @ query), call.hidden @ query
        found["norm_error"] = float((moved - expected).norm() / expected.norm())
    # ‖W/s − U‖/‖U‖ at its least: W = UP, and over s that is √(1 − (Σσ)²/(d Σσ²))
    sizes = torch.linalg.svdvals(query)
    found["orthogonal_distance"] = float((1 - sizes.sum() ** 2 / (rows * sizes.pow(2).sum())).clamp_min(0).sqrt())
    if (rank := int(torch.linalg.matrix_rank(query))) < rows:
        why = f"W_Q has rank {rank} of {rows}, so it is not invertible"
        return LayerReparametrisation(**found, obstacle=why)
    error = _error(site, call, query, readers, eliminate=True)
    return LayerReparametrisation(**found, elimination_error=error, removed=query.numel())


def _not_matrices(site: AttentionSite, readers: Mapping[str, nn.Module]) -> str:
    """Return a reader of X that is not a matrix, so that it cannot absorb Θ⁻¹; empty if there is none."""
    for target, projection in site.projections.items():
        path = projection.source or projection.path
        inside = linear_paths(site.inner_module(path), path)
        if inside != [path]:
            return f"the {target} is not X times one matrix: the model was pretrained without W, or with f beside it"
    for name, module in readers.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or features(module)[0] != site.hidden_size:
            return f"X is read by {name} ({type(module).__name__}), which is no matrix that could take in the inverse"
    return "" if readers else "no matrix reads X itself"


def _error(
    site: AttentionSite, call: _Call, theta: Tensor, readers: Mapping[str, nn.Module], *, eliminate: bool = False
) -> float:
    """Compare the attention's outputs with X and W and with XΘ and Θ⁻¹W in all readers of X.

    With ``eliminate`` Θ is W_Q, and the query's matrix is the identity, exactly.
    """
    outputs = [site.attention(*call.args, **call.kwargs)]
    args, kwargs = replace_hidden(argument_names(site.attention), call.args, call.kwargs, call.hidden @ theta)
    kept = {name: module.weight.detach().clone() for name, module in readers.items()}  # type: ignore[operator]
    try:
        for module in readers.values():
            _write(module, torch.linalg.solve(theta, _read(module)))
        if eliminate:
            projection = site.projection_module("query")
            identity = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
            _write(projection, site.projections["query"].columns.write(_read(projection), identity))
        outputs.append(site.attention(*args, **kwargs))
    finally:
        for name, module in readers.items():
            module.weight.copy_(kept[name])  # type: ignore[operator]
    expected, found = (output if isinstance(output, Tensor) else output[0] for output in outputs)
    return float((found - expected).abs().max() / expected.abs().max())


def _read(module: Any) -> Tensor:
    """Return the matrix ``(hidden, out)`` of a Linear or a Conv1D."""
    weight: Tensor = module.weight.detach()
    return weight if hasattr(module, "nx") else weight.T


def _write(module: Any, matrix: Tensor) -> None:
    module.weight.copy_(matrix if hasattr(module, "nx") else matrix.T)
