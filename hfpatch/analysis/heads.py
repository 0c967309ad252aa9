"""The query and key matrices of each head, as one fp64 tensor a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.methods import NonlinearQueryConfig, QueryTemperatureConfig
from hfpatch.nn import MixedProjection
from hfpatch.sites import AttentionSite, features, find_sites, submodule, unwrapped
from hfpatch.sites.heads import query_and_key_norms
from hfpatch.support.modes import evaluating
from hfpatch.tuners.layer import method_layer


@dataclass(frozen=True)
class HeadWeights:
    """W_Q and W_K of every head of one layer, in fp64, for row vectors: q = x W_Q.

    Biases are left out: they add terms that are linear in x, which a bilinear form does not have. ``query`` is
    ``(heads, hidden, head size)``, ``key`` ``(key heads, hidden, head size)``; each key head serves ``heads / key
    heads`` neighbouring query heads.
    """

    layer: int
    query: Tensor
    key: Tensor

    @property
    def key_by_query_head(self) -> Tensor:
        """The key matrix of each query head: ``(heads, hidden, head size)``."""
        return self.key.repeat_interleave(len(self.query) // len(self.key), dim=0)


def head_weights(model: nn.Module, *, patched: bool = True) -> list[HeadWeights]:
    """Return the query and key matrices of every layer.

    They are those with linear adapters (such as LoRA), temperatures, and a nonlinear query with f = 0, or with
    ``patched=False`` the base's.

    Raises:
        HfpatchError: if a layer has no query and key matrix that read the hidden state (latent attention).
    """
    return [layer_weights(site, patched=patched) for site in find_sites(model)]


def layer_weights(site: AttentionSite, *, patched: bool = True) -> HeadWeights:
    """Return the matrices of one layer; see :func:`head_weights`."""
    size = head_size(site)
    with evaluating(site.attention):
        query, key = (split_heads(_matrix(site, target, patched=patched), size) for target in ("query", "key"))
    if len(query) % len(key):
        raise HfpatchError(f"layer {site.layer}: {len(query)} query heads do not share {len(key)} key heads evenly")
    return HeadWeights(site.layer, query, key)


@torch.no_grad()
def norm_gains(site: AttentionSite) -> tuple[Tensor, Tensor] | None:
    """Return the gains of the norms between the projections of queries and keys and RoPE (Qwen 3, Gemma 3).

    With q = g_Q ⊙ (x W_Q) / ‖x W_Q‖, up to a constant, and the same for k, the logit is
    x W_Q diag(g_Q) R diag(g_K) W_Kᵀ yᵀ up to a positive factor of each query and of each key.

    Returns:
        fp64 of ``(1 or heads, 1, head size)`` and ``(1 or key heads, 1, head size)``; None without such norms, or if
        they do more than divide by a size and multiply by a gain.
    """
    gains = []
    for norm in query_and_key_norms(site.attention) or ():
        parameters = list(norm.parameters())
        if len(parameters) != 1:
            return None
        ones = 1e3 * torch.ones_like(parameters[0])  # large relative to eps
        gain, opposite = (norm(x).detach().cpu().double() for x in (ones, -ones))
        if gain.shape != ones.shape or not torch.equal(gain, -opposite) or not bool(gain.abs().sum() > 0):
            return None  # a LayerNorm, a norm with a bias, or one a head
        gains.append(gain.reshape(-1, 1, head_size(site)))
    return (gains[0], gains[1]) if gains else None


def split_heads(matrix: Tensor, size: int) -> Tensor:
    """Split the columns of ``(rows, heads·size)`` into ``(heads, rows, size)``."""
    return matrix.reshape(len(matrix), -1, size).movedim(1, 0)


def head_size(site: AttentionSite) -> int:
    """Return the width of one head; an error if no projection computes the query."""
    if site.heads is None:
        raise HfpatchError(f"layer {site.layer}: no projection computes only the query")
    return site.projections["query"].columns.size // site.heads.count


def weight_matrix(module: nn.Module) -> Tensor:
    """Return the fp64 matrix ``(in, out)`` of a Linear, a Conv1D, or (by the identity's image) a quantised module."""
    if isinstance(module, MixedProjection):  # of a model from scratch: with f = 0, as for a patch
        return module.linear_part(unwrapped)[0].cpu().double()
    weight = getattr(module, "weight", None)
    inputs, outputs = features(module)
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2:
        return (weight if hasattr(module, "nx") else weight.T).detach().cpu().double()
    image = _image(module, inputs)
    return image - _image(module, inputs, zero=True).expand(inputs, outputs)


def _matrix(site: AttentionSite, target: str, *, patched: bool) -> Tensor:
    """Return one target's matrix ``(hidden, out)``."""
    if target not in site.projections:  # some layers read the keys of another one
        raise HfpatchError(f"layer {site.layer}: no projection computes only the {target}")
    module, columns = site.projection_module(target), site.projections[target].columns
    if features(module)[0] != site.hidden_size:
        raise HfpatchError(
            f"layer {site.layer}: the {target} is projected from {features(module)[0]} numbers, not from the hidden "
            f"state of {site.hidden_size} (latent attention), so the layer has no Q-K relation on it"
        )
    matrix = columns.read(weight_matrix(module))
    if not patched:
        return matrix
    if isinstance(module, MixedProjection):  # adapters are around the matrices inside it
        matrix = columns.read(module.linear_part()[0].cpu().double())
    layer = method_layer(site, NonlinearQueryConfig)
    for config, _, _ in [] if layer is None else layer.acting(target):
        if config.form == "literal":  # (A + 0)/2, while the preserving form is (2A + 0)/2
            anchor = torch.eye(len(matrix), dtype=matrix.dtype) if config.anchor == "identity" else matrix
            matrix = anchor / 2
    temperature, factor = method_layer(site, QueryTemperatureConfig), torch.ones(1, dtype=torch.float64)
    if temperature is not None and target == "query":
        for _, parts, _ in temperature.acting("heads"):
            factor = factor * (1 + parts["query"].weight.detach().cpu().double())
    if len(factor) > 1:  # one for each head
        factor = factor.repeat_interleave(head_size(site))
    behind_norm = site.heads is not None and site.heads.norm is not None
    matrix = matrix if behind_norm else matrix * factor
    wrapper = submodule(site.attention, site.projections[target].path, of=site.family)
    if wrapper is not module:  # a linear adapter's matrix: the difference of the images of the identity
        matrix = matrix + columns.read(_image(wrapper, site.hidden_size) - _image(module, site.hidden_size))
    return matrix * factor if behind_norm else matrix


@torch.no_grad()
def _image(module: nn.Module, rows: int, *, zero: bool = False) -> Tensor:
    parameter = next(module.parameters())
    dtype = parameter.dtype if parameter.is_floating_point() else torch.get_default_dtype()
    identity = torch.eye(rows, dtype=dtype, device=parameter.device)
    out: Tensor = module(torch.zeros_like(identity[:1]) if zero else identity)
    return out.cpu().double()
