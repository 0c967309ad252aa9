"""Whether a nonlinear query still acts once other adapters stand around its projection."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.sites.modules import features, submodule
from hfpatch.tuners.nonlinear_query.layer import NonlinearQueryLayer


def require_effect(model: nn.Module) -> None:
    """Refuse adapters that compute with a projection's weight instead of calling it: they would bypass the query.

    Each wrapped projection is called on one token with two queries, whose difference has to come through.

    Raises:
        HfpatchError: naming the projection and the adapter around it.
    """
    for site in find_sites(model):
        for layer in model.get_submodule(site.host_path).children():
            if isinstance(layer, NonlinearQueryLayer):
                for target in {target for name in layer.working_adapters() for target in layer.configs[name].targets}:
                    _require_effect(site, layer, target)


@torch.no_grad()
def _require_effect(site: AttentionSite, layer: NonlinearQueryLayer, target: str) -> None:
    path, inner = site.projections[target].path, site.projection_module(target)
    outer = submodule(site.attention, path, of=site.family)
    device = layer._device()
    if outer is inner or device.type == "meta":
        return
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), torch.get_default_dtype())

    x, outputs = torch.zeros(1, 1, features(inner)[0], dtype=dtype, device=device), list[Tensor]()
    try:
        for shift in (0.0, 1.0):
            layer.query = partial(_shifted, shift)  # type: ignore[method-assign]
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                outputs.append(outer(x))
    finally:
        del layer.query
    if (outputs[1] - outputs[0]).abs().max() < 0.01:
        method = type(outer).__module__.split(".")[-2]
        raise HfpatchError(
            f"{site.path}.{path}: {method} does not call the projection that it adapts, so the nonlinear {target} "
            "would not act; leave this projection out of one of the two"
        )


def _shifted(shift: float, adapter_name: str, target: str, x: Tensor, projected: Tensor) -> Tensor:
    return projected + shift
