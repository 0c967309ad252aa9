"""Putting a linear pre-projection into the weights of the base, where it is one matrix among others."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.methods.pre_projection import PreProjectionConfig, linear_map
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.sites.site import joined
from hfpatch.surgery.patch import require_plain, unpatch
from hfpatch.tuners.adapters import AdapterWrapper
from hfpatch.tuners.layer import MethodLayer, method_layer

Model = TypeVar("Model", bound=nn.Module)
_ROWS = 3


@torch.no_grad()
def fold(model: Model) -> Model:
    """Put linear pre-projections into the base's weights, in place, and remove the adapters.

    .. math::
        x~ W = x W',    W' = (1 + W_up W_down) W           W: of each projection that reads x~; row vectors

    The result is the stock model, which needs neither hfpatch nor PEFT, and computes what the patched one computed, up
    to the rounding of W' to the dtype of the base. Biases stay. Computed in fp64.

    Args:
        model: what :func:`hfpatch.patch` made of ``PreProjectionConfig(activation="identity")``, one or several of it.

    Returns:
        The same model without adapters.

    Raises:
        HfpatchError: if any part of the patch is no matrix product in front of the projections alone, or a projection's
            weight is not a plain matrix of its own; the model is then unchanged.
    """
    require_plain(model)
    _require_foldable_adapters(model)
    layers = [(site, method_layer(site, PreProjectionConfig)) for site in find_sites(model)]
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    folded: list[tuple[nn.Parameter, Tensor]] = []
    for site, layer in layers:
        if layer is not None:
            matrix = linear_map(layer)
            for path, module in _readers(site).items():
                weight = _plain_weight(module, f"{site.path}.{path}", uses)
                product = matrix @ weight.double() if hasattr(module, "nx") else weight.double() @ matrix.T
                folded.append((weight, product.to(weight.dtype)))
    for weight, value in folded:
        weight.copy_(value)
    return unpatch(model)


def _require_foldable_adapters(model: nn.Module) -> None:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, AdapterWrapper)]
    if not found:
        raise HfpatchError("the model has no adapter to fold; patch it with PreProjectionConfig(activation='identity')")
    for name, layer in found:
        if not isinstance(layer, MethodLayer) or layer.method is not PreProjectionConfig:
            kind = layer.method.spec.label if isinstance(layer, MethodLayer) else type(layer).__name__
            raise HfpatchError(f"{name}: a {kind} cannot be folded; only linear pre-projections alone can")
        _require_foldable(name, layer)


def _require_foldable(name: str, layer: MethodLayer) -> None:
    for adapter, config in cast("dict[str, PreProjectionConfig]", layer.configs).items():
        if config.content_skip:
            why = "a content skip goes past the projections"
        elif not config.is_linear:
            form = "gated" if config.gated else f"activation={config.activation!r}"
            why = f"it is not linear ({form}; activation='identity' without a gate is)"
        elif adapter not in layer.working_adapters():
            why = "it is not active, and would be lost; activate it or delete it"
        else:
            continue
        raise HfpatchError(f"{name}: the pre-projection {adapter!r} cannot be folded: {why}")


def _readers(site: AttentionSite) -> dict[str, nn.Module]:
    """Return the projections that read the hidden state, by path from the attention.

    Raises:
        HfpatchError: if something else may read it too, which would then get x instead of x~.
    """
    projections = {
        projection.path: site.inner_module(projection.path)
        for projection in site.projections.values()
        if projection.source is None
    }
    if set(site.entries) == set(projections.values()):
        return projections
    for name, module in site.attention.named_modules():
        if (
            not name.startswith(PreProjectionConfig.spec.child)
            and module not in projections.values()
            and joined(site.path, name) != site.output_path
            and any(_could_read(p, site.hidden_size) for p in module._parameters.values())
        ):
            raise HfpatchError(
                f"{site.path}: {name or 'the attention itself'} may read the hidden state besides query, key and "
                "value, so the pre-projection cannot be folded"
            )
    return projections


def _could_read(parameter: Tensor | None, hidden_size: int) -> bool:
    """Return whether a parameter may be a matrix that hidden states are multiplied with; packed ones have any shape."""
    if parameter is None or parameter.dim() < 2:
        return False
    return hidden_size in parameter.shape or not parameter.is_floating_point()


def _plain_weight(module: nn.Module, at: str, uses: Counter[int]) -> nn.Parameter:
    """Return the weight of a linear projection.

    Raises:
        HfpatchError: if it is quantised, sharded, offloaded or shared, or the module computes something else with it.
    """
    weight: Any = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.dim() != 2:
        why = "is no plain matrix (quantised, sharded or composed)"
    elif weight.is_meta:
        why = "has no values here (offloaded)"
    elif uses[id(weight)] > 1:
        why = "is tied to another parameter"
    elif not _is_product(module, weight):
        why = f"is not used as a matrix alone by {type(module).__name__}"
    else:
        found: nn.Parameter = weight
        return found
    raise HfpatchError(f"{at}: the weight {why}, so the pre-projection cannot be folded")


def _is_product(module: nn.Module, weight: Tensor) -> bool:
    """Return whether the module maps x to xW + b, on a few rows."""
    inputs = weight.shape[0] if hasattr(module, "nx") else weight.shape[1]
    x = torch.linspace(-1, 1, _ROWS * inputs, dtype=weight.dtype, device=weight.device).reshape(1, _ROWS, inputs)
    expected = x @ (weight if hasattr(module, "nx") else weight.T)
    bias: Any = getattr(module, "bias", None)
    expected = expected if bias is None else expected + bias
    found = module.forward(x)  # without hooks: the patch may have one here
    return bool((found - expected).abs().max() <= 100 * torch.finfo(weight.dtype).eps * expected.abs().max())
