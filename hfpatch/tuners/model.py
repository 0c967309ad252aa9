"""The base class of hfpatch's tuners: it finds the sites, attaches the layers and refuses to merge."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, cast

from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite, select_sites, survey
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.layer import NOT_MERGEABLE, SurgeryLayer

_INPUT_GRADIENTS = "_hfpatch_input_gradients"  # on the model, so that they can be taken back


class SurgeryTuner(BaseTuner):
    """Attaches one :class:`SurgeryLayer` to the attention module of each chosen layer."""

    tuner_layer_cls: type[SurgeryLayer]

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Find the sites, check the configuration against each before anything is changed, and attach the layers.

        Every way in passes here: ``PeftModel.add_adapter`` skips PEFT's injection hooks for further adapters.
        """
        config: SurgeryConfig = copy.deepcopy(self.peft_config[adapter_name])  # the caller may use theirs again
        self.peft_config[adapter_name] = config
        sites = changed_sites(model, config)
        for site in sites:
            self.check_site(site, config)
        self._sites = {site.host_path: site for site in sites}
        if config.target_modules is not None and set(config.target_modules) != self._sites.keys():
            raise HfpatchError(
                f"target_modules={config.target_modules} cannot be chosen for a {self.tuner_layer_cls.method}, which "
                "changes whole attention branches; choose layers with layers_to_transform"
            )
        config.target_modules = list(self._sites)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        config.target_modules = list(self._sites)  # again: PEFT may have shortened it to common endings meanwhile
        if any(site.input_gradients for site in sites) and not getattr(model, "_require_grads_hook", None):
            model.enable_input_require_grads()  # type: ignore[operator]  # the frozen embeddings give none
            setattr(model, _INPUT_GRADIENTS, True)

    @staticmethod
    def refusal(site: AttentionSite, config: Any) -> str | None:
        """Return why the architecture does not allow the method at this site, or None if it does."""
        return None

    def check_site(self, site: AttentionSite, config: Any) -> None:
        """Raise :class:`hfpatch.errors.HfpatchError` if the method cannot be applied at this site."""

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
        child = self.tuner_layer_cls.child_name
        if not hasattr(target, child):
            target.add_module(child, self.tuner_layer_cls(self._sites[current_key]))
        layer: SurgeryLayer = getattr(target, child)
        layer.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
        layer.train(target.training)  # a new module is in training mode, so its dropout would act on an evaluated model

    def _check_merge_allowed(self) -> NoReturn:
        raise ValueError(NOT_MERGEABLE.format(method=self.tuner_layer_cls.method))

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


def changed_sites(model: nn.Module, config: SurgeryConfig) -> list[AttentionSite]:
    """Return the sites that a configuration changes.

    Raises:
        HfpatchError: if a layer that it names does not exist or does not take the method, or no layer does.
    """
    refusal = _tuner_of(config).refusal
    return select_sites(survey(model), config.layers_to_transform, refusal=lambda site: refusal(site, config))


def unreached_layers(model: nn.Module, config: SurgeryConfig) -> dict[int, str]:
    """Return the blocks that a configuration for all layers leaves out: index of the block -> reason."""
    found, refusal = survey(model), _tuner_of(config).refusal
    refused = {site.layer: why for site in found.sites if (why := refusal(site, config))}
    return dict(sorted({**found.skipped, **refused}.items()))


def _tuner_of(config: SurgeryConfig) -> type[SurgeryTuner]:
    return cast("type[SurgeryTuner]", PEFT_TYPE_TO_TUNER_MAPPING[cast("Any", config.peft_type)])


def detach_layers(model: nn.Module) -> None:
    """Remove every hfpatch layer and its hooks from a model."""
    if getattr(model, _INPUT_GRADIENTS, False):
        delattr(model, _INPUT_GRADIENTS)
        model.disable_input_require_grads()  # type: ignore[operator]
    for module in list(model.modules()):
        for child in list(module.children()):
            if isinstance(child, SurgeryLayer):
                child.detach(module)
