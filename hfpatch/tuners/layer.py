"""The layer of a method: a child of the attention module that works through hooks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.initialization import uniform_
from hfpatch.sites import AttentionSite, survey
from hfpatch.tuners.config import MethodConfig, drawn_as
from hfpatch.tuners.cross_layer import CHECKPOINT
from hfpatch.tuners.hooks import PLACES, ActingModule, Combined, MethodSite, Parts, scaled
from hfpatch.tuners.merging import merged_weights
from hfpatch.tuners.places import method_site, modules_at
from hfpatch.tuners.quantised import is_packed, packed_for_inference


@dataclass(eq=False)
class Rows(threading.local):
    """The adapters of the rows of a running call in this thread, by layer; ``__base__`` is none (``adapter_names``)."""

    names: dict[Any, tuple[str, ...]] = field(default_factory=dict)


ROWS = Rows()


def _in_rows(rows: Sequence[bool], value: Tensor, changed: Tensor) -> Tensor:
    """Return ``changed`` in the rows of a batch that are True, ``value`` in the others."""
    if len(value) != len(rows):
        raise HfpatchError(f"adapter_names: {len(rows)} names for {len(value)} rows; give one for each")
    acts = torch.tensor(rows, device=value.device).view(-1, *[1] * (value.dim() - 1))
    return torch.where(acts, changed, value)


class MethodLayer(ActingModule, BaseTunerLayer):
    """A tuner layer that is a child of the attention module (the site's host) and acts by forward hooks around it.

    The attention module is not replaced: base parameters keep their names, other adapters can be injected before or
    after, and code that reads attributes of the attention finds them. Trainable tensors are in ``ModuleDict``s keyed by
    adapter name, as PEFT expects. The hooks do nothing while adapters are disabled or none of this layer's is active.

    Args:
        site: the attention branch to change.
    """

    method: type[MethodConfig]

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()
        self.site = method_site(site)
        self.branch = site
        self.configs: dict[str, MethodConfig] = {}
        self.sites: dict[str, MethodSite] = {}
        self.part_names: dict[str, tuple[str, ...]] = {}
        self.places: dict[str, tuple[str, ...]] = {}
        self.scales: dict[str, float] = {}
        self.adapter_layer_names: tuple[str, ...] = ()
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters: list[str] = []
        self._before_merge: dict[nn.Parameter, Tensor] = {}
        projections = [site.projection_module(target) for target in site.projections]
        with_weights = (module for module in projections if any(True for _ in module.parameters()))
        # In a tuple, so that it is not registered as a child a second time.
        self._base_layer = (next(with_weights, projections[0]),)
        host = site.host_path.removeprefix(site.block_path)
        defined = [place for place in PLACES if hasattr(self.method, place)]
        register = partial(self.act_on, modules_at(site, defined, self.method))
        self.hook_into(site.block, f"{host}.{self.method.spec.child}".lstrip("."), register)
        for module in filter(is_packed, site.block.modules()):  # trained later, although loaded for inference
            self.before(module, MethodLayer._refuse_gradients)
        if site.reads_earlier_keys:
            self.before(site.attention, MethodLayer._refuse_reentrant)
        if self.method.spec.shares:
            self.share_across(site.around, site.block_path.removeprefix(site.around_path).lstrip("."))

    def _refuse_gradients(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and args[0].requires_grad:
            raise packed_for_inference(f"layer {self.site.layer}")

    def _refuse_reentrant(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse checkpoints that compute the keys and values of an earlier block without gradients."""
        block: Any = self.branch.block
        if not (block.training and getattr(block, "gradient_checkpointing", False)):
            return
        function = getattr(block, CHECKPOINT, None)
        options = getattr(getattr(function, "function", function), "keywords", {})
        if options.get("use_reentrant"):
            raise HfpatchError(
                f"layer {self.site.layer} reads keys and values of an earlier layer, through which reentrant gradient "
                'checkpointing passes no gradients: gradient_checkpointing_enable({"use_reentrant": False})'
            )

    def get_base_layer(self) -> nn.Module:
        """Return the module whose device the adapter follows: the first projection with weights."""
        return self._base_layer[0]

    def update_layer(
        self, adapter_name: str, config: MethodConfig, *, is_first: bool = False, inference_mode: bool = False
    ) -> None:
        """Add an adapter to this layer, initialised, in fp32, on the device of the base."""
        name = self.site.name + drawn_as(adapter_name, config)
        site = replace(self.site, name=name, adapter=adapter_name, is_first=is_first)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device(self.device()):
                parts = config.build(site, config.seed)
        finally:
            torch.set_default_dtype(default)
        if not config.init_weights:
            for part, parameter in parts.named_parameters():
                drawn = torch.empty_like(parameter, device="meta" if parameter.is_meta else "cpu")
                bound, at = parameter.shape[-1] ** -0.5, f"{site.name}.{part}.moved"
                parameter.data += uniform_(drawn, bound=bound, seed=config.seed, name=at).to(parameter)
        for name, module in parts.items():
            held = self.method.spec.prefix + name
            if held not in self._modules:
                if hasattr(self, held):
                    raise HfpatchError(
                        f"{config.spec.name}: a part cannot be called {name!r}, as {held!r} means something to every "
                        "layer; choose another name, or give @hfpatch.method another prefix"
                    )
                setattr(self, held, nn.ModuleDict())
                self.adapter_layer_names += (held,)
            getattr(self, held)[adapter_name] = module
        self.configs[adapter_name], self.sites[adapter_name] = config, site
        self.part_names[adapter_name], self.places[adapter_name] = tuple(parts), config.acts_at()
        self.scales[adapter_name] = 1.0
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def parts(self, adapter_name: str) -> dict[str, Any]:
        """Return the modules of an adapter, by name."""
        prefix, modules = self.method.spec.prefix, self._modules
        return {name: modules[prefix + name]._modules[adapter_name] for name in self.part_names[adapter_name]}  # type: ignore[union-attr]  # all of them are there

    def acting(self, place: str) -> Iterator[tuple[Any, Parts, MethodSite]]:
        """Yield configuration and modules of the adapters that act at a place in this forward pass, in order."""
        rows = ROWS.names.get(self)
        for name in self.working_adapters():
            if place in self.places[name]:
                config, site = self.configs[name], self.sites[name]
                method = self.scaled(name)
                if rows is not None:
                    method = Combined(method, partial(_in_rows, [adapter == name for adapter in rows]))
                yield method, self.parts(name), self.in_call(site, config, name, place) if self.reads_rows else site

    def scaled(self, adapter_name: str) -> Any:
        """Return an adapter's configuration, with its change at each place multiplied by its scale."""
        return scaled(self.configs[adapter_name], self.scales[adapter_name])

    def acts(self, place: str) -> bool:
        """Return whether an adapter acts at a place in this forward pass."""
        return any(place in self.places[name] for name in self.working_adapters())

    def reads_earlier_positions(self) -> bool:
        """Return whether an adapter of this forward pass reads earlier positions of the row."""
        return any(self.configs[name].steps_back() for name in self.working_adapters())

    def working_adapters(self) -> list[str]:
        """Return the adapters that act in this forward pass, in the order in which they were added."""
        if self.disable_adapters or self.merged_adapters:
            return []
        chosen = ROWS.names.get(self, self.active_adapters)
        return [name for name in self.configs if name in chosen and self.scales[name]]

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter from this layer."""
        for held in (self.configs, self.sites, self.part_names, self.places, self.scales):
            held.pop(adapter_name, None)
        super().delete_adapter(adapter_name)

    def _all_available_adapter_names(self) -> list[str]:
        """Return the adapters of this layer, those without parts of their own included."""
        return sorted(self.configs)

    def merged_weights(
        self, adapter_names: list[str] | None = None, *, finite: bool = False
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the weights and biases of the base with adapters merged into them, and their values.

        Args:
            adapter_names: the adapters; None takes the active ones. They act in the order in which they were added.
            finite: refuse values that are not finite.

        Raises:
            HfpatchError: (a ``ValueError``) if no weights can compute it.
        """
        named = self.active_adapters if adapter_names is None else adapter_names
        names = [name for name in self.configs if name in (*self.merged_adapters, *named) and self.scales[name]]
        around = {module for root in (self.branch.host, self.branch.attention) for module in root.modules()}
        if any(isinstance(module, BaseTunerLayer) and id(module) != id(self) for module in around):
            raise HfpatchError(
                f"layer {self.site.layer}: other adapters act beside the {self.method.spec.label} on this attention, "
                "so it cannot be merged alone; hfpatch.fold merges a stack of hfpatch's linear methods"
            )
        merged = {parameter: parameter.detach().clone() for parameter in self._before_merge}
        try:
            for parameter, value in self._before_merge.items():  # computed from the base as it was before merging
                parameter.data.copy_(value)
            values = merged_weights(self.branch, [(self.scaled(n), self.parts(n), self.sites[n]) for n in names])
        finally:
            for parameter, value in merged.items():
                parameter.data.copy_(value)
        if finite and not all(value.isfinite().all() for _, value in values):
            raise HfpatchError(
                f"NaNs detected in the merged weights. The adapter {' or '.join(names)} seems to be broken"
            )
        return values

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put adapters into the weights of the base, in fp64 until they are rounded to its dtype.

        Raises:
            HfpatchError: (a ``ValueError``) if they cannot be merged, or with ``safe_merge`` if a weight would not be
                finite; nothing is changed then.
        """
        names = check_adapters_to_merge(self, adapter_names)
        if not (names := [name for name in self.configs if name in names]):
            return
        for parameter, value in self.merged_weights(names, finite=safe_merge):
            self._before_merge.setdefault(parameter, parameter.detach().cpu().clone())
            parameter.data.copy_(value)
        self.merged_adapters += names

    def unmerge(self) -> None:
        """Put the base's weights back as they were, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        for parameter, value in self._before_merge.items():
            parameter.data.copy_(value)
        self._before_merge.clear()
        self.merged_adapters.clear()

    def enable_adapters(self, enabled: bool) -> None:
        """Let adapters act, or not: then they leave the weights that they were merged into."""
        if not enabled and self.merged:
            self.unmerge()
        super().enable_adapters(enabled)

    def device(self) -> torch.device:
        """Return the device on which the base computes; an offloaded module keeps its weights elsewhere meanwhile."""
        base = self.get_base_layer()
        execution = getattr(getattr(base, "_hf_hook", None), "execution_device", None)
        # torch's quantised layers have no parameters
        held = chain(base.parameters(), self.branch.block.parameters())
        return next(held).device if execution is None else torch.device(execution)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to the base's device; unlike PEFT's own layers not to the base's dtype."""
        if adapter_name in self.configs:
            for module in self.parts(adapter_name).values():
                module.to(device or self.device())

    def scale_normed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        """Change the heads behind the norm of the query.

        Raises:
            HfpatchError: in tensor parallelism, in which each process has some heads.
        """
        if self.acts("heads") and hasattr(getattr(self.get_base_layer(), "weight", None), "placements"):
            raise HfpatchError(
                f"layer {self.site.layer}: {self.method.spec.label} acts behind a norm of the query, and does not "
                "take tensor parallelism (--tp), in which each process has some heads; leave one of them out"
            )
        return super().scale_normed(module, args, kwargs, output)


def layers_at(site: AttentionSite) -> list[MethodLayer]:
    """Return the layers of all methods at a site, in the order in which they were injected."""
    return [child for child in site.host.children() if isinstance(child, MethodLayer)]


def layers_by_site(model: nn.Module) -> list[tuple[AttentionSite, list[MethodLayer]]]:
    """Return the sites that have layers of methods, in all towers of a model, each with its layers."""
    sites = survey(model).with_others().sites
    return [(site, layers) for site in sites if (layers := layers_at(site))]


def method_layer(site: AttentionSite, method: type[MethodConfig]) -> MethodLayer | None:
    """Return the layer of a method at a site, or None where nothing was injected."""
    layer = getattr(site.host, method.spec.child, None)
    return layer if isinstance(layer, MethodLayer) else None
