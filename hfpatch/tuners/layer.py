"""The layer that all hfpatch tuners share: a child of the attention module that works through hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hfpatch.nn.calls import HookedModule
from hfpatch.sites import AttentionSite
from hfpatch.tuners.config import drawn_as

Layer = TypeVar("Layer", bound="SurgeryLayer")

NOT_MERGEABLE = (
    "a nonlinear branch cannot be folded into the weights of a linear projection, so {method} cannot be merged; "
    "keep the adapter, or call unload() to get the base model back"
)


class SurgeryLayer(HookedModule, BaseTunerLayer):
    """A tuner layer registered as a child of the attention module (the site's host), acting by forward hooks around it.

    The attention module is not replaced: names of base parameters stay as they were, other adapters can be injected
    before or after, and code that reads attributes of the attention finds them. Trainable tensors live in
    ``ModuleDict``s keyed by adapter name, as PEFT expects. The hooks step aside when adapters are disabled or none of
    this layer's adapters is active.

    No call leaves anything on a layer: see :class:`hfpatch.nn.calls.HookedModule`.

    Args:
        site: the attention branch to change.
    """

    method: str
    child_name: str  # must not contain the tuner's prefix: transformers takes the first match for the adapter's place
    adapter_layer_names: tuple[str, ...]

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()
        self.site_name = site.name
        self.hidden_size = site.hidden_size
        self.configs: dict[str, Any] = {}
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters: list[str] = []
        projections = [site.projection_module(target) for target in site.projections]
        with_weights = (module for module in projections if any(True for _ in module.parameters()))
        # In a tuple, so that it is not registered as a child a second time.
        self._base_layer = (next(with_weights, projections[0]),)
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ModuleDict())
        host = site.host_path.removeprefix(site.block_path)
        self.hook_into(site.block, f"{host}.{self.child_name}".lstrip("."), partial(self.register, site))

    @abstractmethod
    def register(self, site: AttentionSite) -> None:
        """Register this layer's hooks on the modules of a site."""

    def get_base_layer(self) -> nn.Module:
        """Return the module whose device the adapter follows: the first projection with weights."""
        return self._base_layer[0]

    def update_layer(self, adapter_name: str, config: Any, *, inference_mode: bool = False) -> None:
        """Add an adapter to this layer, initialised, in fp32, on the device of the base."""
        with torch.device(self._device()), _default_dtype(torch.float32):
            for what, module in self.build(config, self.site_name + drawn_as(adapter_name, config)).items():
                self.held(what)[adapter_name] = module
        self.configs[adapter_name] = config
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def held(self, what: str) -> nn.ModuleDict:
        """Return the modules called ``what``, by adapter name."""
        return cast("nn.ModuleDict", getattr(self, what))

    def linear(self, what: str, adapter_name: str) -> nn.Linear:
        """Return the matrix called ``what`` of an adapter."""
        return cast("nn.Linear", self.held(what)[adapter_name])

    @abstractmethod
    def build(self, config: Any, name: str) -> dict[str, nn.Module]:
        """Return the initialised modules of one adapter, by the name of their ``ModuleDict``.

        Args:
            config: the adapter's configuration.
            name: what initial values are drawn by, together with the seed and the tensor's name.
        """

    def working_adapters(self) -> list[str]:
        """Return the adapters that act in this forward pass, in the order in which they were added."""
        if self.disable_adapters:
            return []
        return [name for name in self.configs if name in self.active_adapters]

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter from this layer."""
        super().delete_adapter(adapter_name)
        self.configs.pop(adapter_name, None)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        """Refuse to merge.

        Raises:
            ValueError: always, with the reason.
        """
        raise ValueError(NOT_MERGEABLE.format(method=self.method))

    def detach(self, host: nn.Module) -> None:
        """Remove every hook, and this layer from its parent module."""
        self.unhook()
        delattr(host, self.child_name)

    def _device(self) -> torch.device:
        """Return the device on which the base computes; an offloaded module keeps its weights elsewhere meanwhile."""
        base = self.get_base_layer()
        execution = getattr(getattr(base, "_hf_hook", None), "execution_device", None)
        return next(base.parameters()).device if execution is None else torch.device(execution)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to the base's device; unlike PEFT's own layers never to the base's dtype."""
        for name in self.adapter_layer_names:
            if adapter_name in self.held(name):
                self.held(name)[adapter_name].to(device or self._device())


def surgery_layer(site: AttentionSite, kind: type[Layer]) -> Layer | None:
    """Return the tuner layer of a kind at a site, or None where nothing was injected."""
    layer = getattr(site.host, kind.child_name, None)
    return layer if isinstance(layer, kind) else None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
