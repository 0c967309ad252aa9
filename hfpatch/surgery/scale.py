"""Scaling the change of a patch, from the base at 0 to the patch at 1, without training."""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.tuners.adapters import AdapterWrapper, Model, require_unmerged, stack_to_save
from hfpatch.tuners.layer import MethodLayer

_SCALED = "_hfpatch_scaled"  # of a LoRA layer: by adapter its factor at scale 1, and the one that was put in its place


def scale_patch(model: Model, scale: float) -> Model:
    """Multiply the change that each active adapter makes, in place.

    .. math::
        v + scale · (act(v) - v)                  at each place where a method acts on v
        x W + scale · (alpha / rank) (x A) B      for LoRA

    At 0 the model equals the base and at 1 the patched model, bit for bit. Gates and temperatures move towards 1, x~
    and queries towards the base's. Each call replaces the scale of the previous one, except where PEFT has set the
    factor of a LoRA since (``hotswap_adapter``, ``set_scale``, another adapter of the same name): that is scale 1 then.
    Smaller scales trade learning for less forgetting, see arXiv 2605.28819.

    Args:
        model: a patched model, or a PEFT model.
        scale: a finite number; above 1 the change is larger than it was trained.

    Raises:
        HfpatchError: if the model has no adapters, one is merged, or the change of one cannot be scaled (DoRA, IA3,
            modules that are saved beside an adapter); the model is then unchanged.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise HfpatchError(f"scale={scale!r} must be a finite number, such as 0.5")
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, AdapterWrapper)]
    if not layers:
        raise HfpatchError("the model has no adapters to scale; call hfpatch.patch(model, config) first")
    require_unmerged(model)
    for name, layer in layers if scale != 1 else ():
        variants = {*getattr(layer, "active_adapters", ())} & {*getattr(layer, "lora_variant", ())}  # DoRA and others
        if not isinstance(layer, MethodLayer | LoraLayer) or variants:
            kind = f"the variant of LoRA at {name}" if variants else f"{type(layer).__name__} at {name}"
            raise HfpatchError(f"{kind} has no factor; scale_patch takes hfpatch's methods and plain LoRA")
    for _, layer in layers:
        if isinstance(layer, MethodLayer):
            layer.scales |= {name: float(scale) for name in layer.active_adapters if name in layer.scales}
        elif isinstance(layer, LoraLayer):
            factors = {name: _own_factor(layer, name) for name in layer.scaling}
            for adapter in {*layer.active_adapters} & factors.keys():
                _set_factor(layer, adapter, factors[adapter], scale)
    return model


def require_as_trained(model: nn.Module) -> None:
    """Raise :class:`HfpatchError` if a saved patch would not compute what the model does: merged, scaled, reordered."""
    require_unmerged(model)  # a patch names the base by its weights
    stack_to_save(model)  # there is an order to save them in
    if is_scaled(model):
        raise HfpatchError(
            "the patch is scaled, but a folder stores it as trained; call hfpatch.scale_patch(model, 1) before, "
            "and hfpatch.load_patch(model, directory, scale=...) later"
        )


def is_scaled(model: nn.Module) -> bool:
    """Return whether an adapter has a scale other than 1."""
    return any(
        any(factor != 1 for factor in module.scales.values())
        if isinstance(module, MethodLayer)
        else any(_own_factor(module, name) != float(factor) for name, factor in module.scaling.items())
        for module in model.modules()
        if isinstance(module, MethodLayer | LoraLayer)
    )


def _own_factor(layer: Any, adapter: str) -> float:
    """Return the factor of a LoRA at scale 1: the one before it was scaled, unless PEFT has set another one since."""
    now = layer.scaling[adapter]
    factor, scaled = getattr(layer, _SCALED, {}).get(adapter, (now, now))
    # prepare_model_for_compiled_hotswap makes a tensor of a number, which rounds it
    if now == scaled or (isinstance(now, Tensor) and now == torch.tensor(scaled).to(now)):
        return float(factor)
    return float(now)


def _set_factor(layer: Any, adapter: str, factor: float, scale: float) -> None:
    """Multiply the factor of a LoRA by a scale.

    The product is off by its last bit, so that it is no alpha / rank: ``hotswap_adapter`` sets no factor where the one
    of the new adapter is equal, and then nothing would tell the two adapters apart.
    """
    now, scaled = layer.scaling[adapter], factor * scale
    if isinstance(now, Tensor):  # made by prepare_model_for_compiled_hotswap; compiled code reads this very tensor
        now.fill_(scaled)
        if scale not in (0, 1):
            now.copy_(now.nextafter(torch.full_like(now, math.inf)))
        scaled = float(now)
    else:
        layer.scaling[adapter] = scaled = scaled if scale in (0, 1) else math.nextafter(scaled, math.inf)
    setattr(layer, _SCALED, {**getattr(layer, _SCALED, {}), adapter: (factor, scaled)})
