"""The tuner of a method: it finds the sites, attaches the layers and refuses to merge."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite, select_sites, survey
from hfpatch.sites.discovery import Refusal
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.contracts import built, require_own_names, require_places, require_some_parts
from hfpatch.tuners.layer import NOT_MERGEABLE, MethodLayer
from hfpatch.tuners.places import method_site, refused_at

_INPUT_GRADIENTS = "_hfpatch_input_gradients"  # on the model, so that they can be taken back


class MethodModel(BaseTuner):
    """Attaches one :class:`MethodLayer` to the attention module of each chosen layer."""

    tuner_layer_cls: type[MethodLayer]

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Find the sites, check the configuration against each before anything is changed, and attach the layers.

        Every way in passes here: ``PeftModel.add_adapter`` skips PEFT's injection hooks for further adapters.
        """
        config: MethodConfig = copy.deepcopy(self.peft_config[adapter_name])  # the caller may use theirs again
        self.peft_config[adapter_name] = config
        require_places(config)
        require_own_names(config, _names_of_the_base(model))
        sites = changed_sites(model, config)
        with torch.device("meta"):
            described = [replace(method_site(site), is_first=site is sites[0]) for site in sites]
            require_some_parts(config, [built(config, each) for each in described])
        self._sites = {site.host_path: site for site in sites}
        if config.target_modules is not None and set(config.target_modules) != self._sites.keys():
            raise HfpatchError(
                f"{config.spec.label}: target_modules={config.target_modules} cannot be chosen, as it changes whole "
                "attention branches; choose layers with layers_to_transform"
            )
        config.target_modules = list(self._sites)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        config.target_modules = list(self._sites)  # again: PEFT may have shortened it to common endings meanwhile
        if any(site.input_gradients for site in sites) and not getattr(model, "_require_grads_hook", None):
            model.enable_input_require_grads()  # type: ignore[operator]  # the frozen embeddings give none
            setattr(model, _INPUT_GRADIENTS, True)

    def _check_target_module_exists(self, peft_config: Any, key: str) -> bool:  # type: ignore[override]
        return key in self._sites

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        child = peft_config.spec.child
        if not hasattr(target, child):
            target.add_module(child, self.tuner_layer_cls(self._sites[current_key]))
        layer: MethodLayer = getattr(target, child)
        if layer.method is not type(peft_config):
            raise HfpatchError(
                f"{peft_config.spec.name}: the model has adapters of an earlier definition of the method; remove them "
                "first, by hfpatch.unpatch or unload"
            )
        is_first = current_key == next(iter(self._sites))
        layer.update_layer(adapter_name, peft_config, is_first=is_first, inference_mode=peft_config.inference_mode)
        layer.train(target.training)  # a new module is in training mode, so its dropout would act on an evaluated model

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Refuse an adapter for each row, which PEFT would leave out without a word."""
        if kwargs.get("adapter_names") is not None:
            label = self.tuner_layer_cls.method.spec.label
            raise HfpatchError(
                f"{label}: adapter_names cannot be chosen, as its active adapters act in all rows; call the model once "
                "for each adapter, after set_adapter"
            )
        yield

    def _check_merge_allowed(self) -> NoReturn:
        raise ValueError(NOT_MERGEABLE.format(method=self.tuner_layer_cls.method.spec.label))

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        if merge:
            self._check_merge_allowed()
        detach_layers(self.model)
        super()._unload_and_optionally_merge(merge=False, progressbar=progressbar)
        return self.model


def _names_of_the_base(model: nn.Module) -> list[str]:
    """Return the names of the parameters that no adapter added."""
    layers = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if not name.startswith(layers) or ".base_layer." in name]


def changed_sites(model: nn.Module, config: MethodConfig) -> list[AttentionSite]:
    """Return the sites that a configuration changes.

    Raises:
        HfpatchError: if a layer that it names does not exist or does not take the method, or no layer does.
    """
    found = survey(model)
    return select_sites(found, config.layers_to_transform, refusal=_refusal(config, found.sites))


def unreached_layers(model: nn.Module, config: MethodConfig) -> dict[int, str]:
    """Return the blocks that a configuration for all layers leaves out: index of the block -> reason."""
    found = survey(model)
    refusal = _refusal(config, found.sites)
    refused = {site.layer: why for site in found.sites if (why := refusal(site))}
    return dict(sorted({**found.skipped, **refused}.items()))


def _refusal(config: MethodConfig, sites: list[AttentionSite]) -> Refusal:
    """Return what says why a site does not take a method, also because of the first one that the method changes."""
    layers = config.layers_to_transform
    wanted = {layers} if isinstance(layers, int) else None if layers is None else {*layers}
    chosen = [site for site in sites if wanted is None or site.layer in wanted]
    first = next((site for site in chosen if refused_at(site, config) is None), None)

    def refusal(site: AttentionSite) -> str | None:
        why = refused_at(site, config)
        return why if why or first in (None, site) else config.refusal_after(first, site)

    return refusal


def detach_layers(model: nn.Module) -> None:
    """Remove every hfpatch layer and its hooks from a model."""
    if getattr(model, _INPUT_GRADIENTS, False):
        delattr(model, _INPUT_GRADIENTS)
        model.disable_input_require_grads()  # type: ignore[operator]
    for module in list(model.modules()):
        for child in list(module.children()):
            if isinstance(child, MethodLayer):
                child.detach(module)
