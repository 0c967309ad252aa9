"""Folding linear methods into the weights of the base, which is then the stock model again."""

from __future__ import annotations

import torch

from hfpatch.errors import HfpatchError
from hfpatch.surgery.patch import require_plain, unpatch
from hfpatch.tuners.adapters import AdapterWrapper, Model, require_unmerged
from hfpatch.tuners.layer import MethodLayer, layers_by_site
from hfpatch.tuners.merging import merged_weights


@torch.no_grad()
def fold(model: Model) -> Model:
    """Fold linear methods into the base's weights, in place, and remove the adapters.

    .. math::
        x~ W = x W',    W' = (1 + W_up W_down) W          a linear pre-projection, for each W that reads x~

    Other linear methods, alone or stacked: a nonlinear LoRA with ``activation="identity"``, a nonlinear query without
    norms and activation, a query temperature where the query has no norm, LoReFT on the branch, and every method that
    declares itself linear. The result is the stock model, which needs neither hfpatch nor PEFT and equals the patched
    one up to the rounding of W' to the dtype of the base. Computed in fp64.

    Raises:
        HfpatchError: if a part of the patch is not linear, or a weight is not a plain matrix of its own; the model is
            then unchanged.
    """
    require_plain(model)
    require_unmerged(model)
    wrappers = [(name, module) for name, module in model.named_modules() if isinstance(module, AdapterWrapper)]
    if not wrappers:
        raise HfpatchError("the model has no adapter to fold; patch it with PreProjectionConfig(activation='identity')")
    for name, layer in wrappers:
        if not isinstance(layer, MethodLayer):
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            raise HfpatchError(f"{name}: a {kind} cannot be folded; only hfpatch's own methods can")
        if idle := [adapter for adapter in layer.configs if adapter not in layer.active_adapters]:
            raise HfpatchError(f"{name}: {idle[0]!r} is not active, and would be lost; activate it or delete it")
    folded = []
    for site, layers in layers_by_site(model):
        acting = [
            (layer.scaled(name), layer.parts(name), layer.sites[name])
            for layer in layers
            for name in layer.working_adapters()
        ]
        folded += merged_weights(site, acting)
    for parameter, value in folded:
        parameter.copy_(value)
    return unpatch(model)
