"""The tuner of a method: it finds the sites and attaches the layers; the rest is PEFT's own code."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _ExcludedModule, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.sites import AttentionSite, base_model, count_values, select_sites, survey
from hfpatch.support.modes import hooked
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.contracts import require_adapter_name, require_parts, require_usable
from hfpatch.tuners.layer import ROWS, MethodLayer
from hfpatch.tuners.naming import FILLED_IN, chosen_modules, named_sites, shortest_names, wanted_layers
from hfpatch.tuners.places import method_site, refused_at
from hfpatch.tuners.quantised import keep_unpacked

_LARGE, _LARGE_SHARE = 10_000_000, 0.05  # from both on a size is a warning: a large share of a tiny model is cheap
_logger = logging.getLogger(__name__)
_LOGGED: set[str] = set()  # each message is logged once in a process
_GENERATES = "prepare_inputs_for_generation"
TASK_HEAD = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|Regression|Detection)$")
"""The names of classes whose head is of a task, and random until it is trained."""
_INPUT_GRADIENTS = "_hfpatch_input_gradients"  # on the model, so that they can be taken back


class MethodModel(BaseTuner):
    """Attaches one :class:`MethodLayer` to the attention module of each chosen layer."""

    tuner_layer_cls: type[MethodLayer]

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Find the sites, check the configuration against each before anything is changed, and attach the layers.

        Every way in passes here: ``PeftModel.add_adapter`` skips PEFT's injection hooks for further adapters. With a
        ``state_dict`` it says which attentions are changed, as in PEFT. A configuration that is refused is no longer
        the model's, so that its name can be given again.
        """
        config: MethodConfig = self.peft_config[adapter_name]
        before = config.target_modules
        try:
            self._attach(model, adapter_name, config, autocast_adapter_dtype, low_cpu_mem_usage, state_dict)
        except BaseException:
            config.target_modules = before
            self.peft_config.pop(adapter_name, None)
            raise

    def _attach(
        self,
        model: nn.Module,
        adapter_name: str,
        config: MethodConfig,
        autocast_adapter_dtype: bool,
        low_cpu_mem_usage: bool,
        state_dict: dict[str, Tensor] | None,
    ) -> None:
        adapters = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, BaseTunerLayer))
        base = {
            name: count_values(parameter)
            for name, parameter in model.named_parameters()
            if not name.startswith(adapters) or ".base_layer." in name
        }
        require_usable(config, base)
        if config.task_type == "CAUSAL_LM" and not config.inference_mode and not hasattr(model, _GENERATES):
            raise HfpatchError(
                f"task_type='CAUSAL_LM' applies to models that generate, and {type(model).__name__} does not; give its "
                "own, such as SEQ_CLS, or none"
            )
        sites = changed_sites(model, config) if state_dict is None else _sites_in(state_dict, model, config)
        with torch.device("meta"):
            parts = require_parts(config, [replace(method_site(site), is_first=site is sites[0]) for site in sites])
        held = {config.spec.child, *(config.spec.prefix + part for part in parts)}
        require_adapter_name(adapter_name, base, held)
        keep_unpacked(model, training=not config.inference_mode)
        self._sites = {site.host_path: site for site in sites}
        self._config = copy.deepcopy(config)  # the caller may change theirs
        given = chosen_modules(config)
        config.target_modules = {*self._sites}
        super().inject_adapter(
            model, adapter_name, autocast_adapter_dtype=autocast_adapter_dtype, low_cpu_mem_usage=low_cpu_mem_usage
        )
        # PEFT may have shortened it to common endings meanwhile
        config.target_modules = paths = shortest_names(base_model(model), sites, survey(model).with_others().sites)
        setattr(config, FILLED_IN, (paths, given))
        if any(site.input_gradients for site in sites) and not getattr(model, "_require_grads_hook", None):
            model.enable_input_require_grads()  # type: ignore[operator]  # the frozen embeddings give none
            setattr(model, _INPUT_GRADIENTS, True)
        layers = [layer for layer in self._layers() if adapter_name in layer.configs]
        added = [p for layer in layers for part in layer.parts(adapter_name).values() for p in part.parameters()]
        if any(parameter.is_meta for parameter in added):  # of a trial, or about to be loaded
            return
        for level, line in _remarks(model, config, given, sum(p.numel() for p in added), sum(base.values())):
            if line not in _LOGGED:
                _LOGGED.add(line)
                _logger.log(level, line)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """Return a tensor's name in a file: PEFT looks for the adapter's only right before the last part of a name."""
        spec = cls.tuner_layer_cls.method.spec
        part = rf"(\.{re.escape(spec.child)}\.{re.escape(spec.prefix)}[^.]+)\.{re.escape(adapter_name)}(?=\.)"
        name = re.sub(part, r"\1", key)
        return name if name != key else str(super()._remove_adapter_name_from_key(key, adapter_name))

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:  # type: ignore[override]  # PEFT's is static
        match = check_target_module_exists(peft_config, key)
        return match if isinstance(match, _ExcludedModule) else key in self._sites

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
        if (empty := getattr(target, child, None)) is not None and not empty.configs:  # its adapters were deleted
            empty.unhook()
            delattr(target, child)
        if not hasattr(target, child):  # it acts after the layers that are there
            target.add_module(child, self.tuner_layer_cls(self._sites[current_key]))
        layer: MethodLayer = getattr(target, child)
        if layer.method is not type(peft_config):
            raise HfpatchError(
                f"{peft_config.spec.name}: the model has adapters of an earlier definition of the method; remove them "
                "first, by hfpatch.unpatch or unload"
            )
        is_first = current_key == next(iter(self._sites))
        layer.update_layer(adapter_name, self._config, is_first=is_first, inference_mode=peft_config.inference_mode)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Put an adapter in fp32, or without ``autocast_adapter_dtype`` in the dtype of the base, as PEFT does."""
        for layer in [] if autocast_adapter_dtype else self._layers():
            base = layer.get_base_layer()
            _, dtype = layer._get_base_layer_device_and_dtype(base)  # type: ignore[no-untyped-call]  # PEFT has no type for it
            if dtype is None:  # PEFT knows no such attention
                dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), None)
            if adapter_name in layer.configs and dtype is not None and dtype.is_floating_point:
                for module in layer.parts(adapter_name).values():
                    module.to(dtype)
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Let each row of a batch have the adapter that ``adapter_names`` gives it.

        Raises:
            HfpatchError: (a ``ValueError``) in training, with merged adapters, and for names that there are not.
        """
        names = kwargs.get("adapter_names")
        if names is None:
            yield
            return
        if self.training:
            raise HfpatchError("adapter_names cannot be given in training mode; call model.eval() first")
        layers = self._layers()
        if any(layer.merged for layer in layers):
            raise HfpatchError("adapter_names cannot be given while adapters are merged; call unmerge_adapter() first")
        adapters = {"__base__"}.union(*(layer.configs for layer in layers))
        if unknown := sorted({*names} - adapters):
            raise HfpatchError(f"adapter_names: there is no adapter {unknown[0]!r}{nearest(unknown[0], adapters)}")
        beams = kwargs.get("num_beams")
        rows = [name for name in names for _ in range(beams if isinstance(beams, int) else 1)]
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "adapter_names": rows}), with_kwargs=True
            )
            for module in self.modules()
            if isinstance(module, AuxiliaryTrainingWrapper)  # PEFT's own
        ]
        ROWS.names |= dict.fromkeys(layers, tuple(rows))
        try:
            with hooked(handles):
                yield
        finally:
            for layer in layers:
                ROWS.names.pop(layer, None)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Put adapters into the weights of the base, all that are named or none.

        Raises:
            HfpatchError: (a ``ValueError``) if an adapter cannot be merged; nothing is changed then.
        """
        self._require_mergeable(adapter_names, finite=safe_merge)
        super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def _require_mergeable(self, adapter_names: list[str] | None, *, finite: bool) -> None:
        for layer in self._layers():
            layer.merged_weights(adapter_names, finite=finite)

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        if merge:
            self._require_mergeable(adapter_names, finite=safe_merge)
            for layer in self._layers():  # PEFT merges what it wraps itself
                layer.merge(safe_merge, adapter_names)
        else:  # PEFT leaves what is merged in the weights, and the trained copies of modules_to_save
            for module in self.model.modules():
                if isinstance(module, BaseTunerLayer) and module.merged:
                    module.unmerge()
            restore_wrapped(self.model)
        detach_layers(self.model)
        return super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """Put a module in the place of its wrapper, which is PEFT's own: a method's layer wraps no module."""
        setattr(parent, child_name, new_module)

    def _layers(self) -> list[MethodLayer]:
        return [module for module in self.model.modules() if isinstance(module, self.tuner_layer_cls)]

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to make one adapter of several.

        Raises:
            HfpatchError: always.
        """
        raise HfpatchError(
            f"{self.tuner_layer_cls.method.spec.label}: adapters cannot be added with weights, as the method is no sum "
            "of matrices; base_model.set_adapter([...]) makes several active, one after the other"
        )


def changed_sites(model: nn.Module, config: MethodConfig) -> list[AttentionSite]:
    """Return the sites that a configuration changes.

    Raises:
        HfpatchError: if a layer or module that it names does not exist or does not take the method, or none is left.
    """
    surveyed = survey(model)
    if chosen_modules(config) is not None:  # they may name attentions of any tower
        surveyed = surveyed.with_others()
    sites = named_sites(surveyed.sites, config, body=_body_name(model))
    layers, named = wanted_layers(surveyed.sites, config), {site.name for site in sites}
    refused = _refused(sites, config, sites, layers)
    chosen = select_sites(surveyed, layers, refusal=lambda site: refused.get(site.name))
    if not (chosen := [site for site in chosen if site.name in named]):
        why = refused.get(sites[0].name) if sites else None
        why = why or "target_modules, exclude_modules and modules_to_save leave none"
        raise HfpatchError(f"{config.spec.label}: no layer of this model can be changed: {why}")
    return chosen


def _body_name(model: nn.Module) -> str:
    return str(getattr(base_model(model), "base_model_prefix", ""))


def _sites_in(state_dict: dict[str, Tensor], model: nn.Module, config: MethodConfig) -> list[AttentionSite]:
    """Return the sites whose layers have tensors in a state dict.

    Raises:
        HfpatchError: if there are none, or layers that share tensors are others than the configuration's.
    """
    has = {key.split(f".{config.spec.child}.")[0] for key in state_dict if f".{config.spec.child}." in key}
    sites = [site for site in survey(model).with_others().sites if site.host_path in has]
    if config.spec.shares:  # some of their layers may have no tensors
        chosen = changed_sites(model, config)
        sites = [site for site in chosen if site.host_path in has or site is chosen[0]]
        if len(sites) < max(len(chosen), len(has)):
            raise HfpatchError(f"{config.spec.label}: the state dict has other layers than the configuration")
    why = next((why for site in sites if (why := refused_at(site, config))), None)
    if sites and {site.name for site in sites} != {site.name for site in changed_sites(model, config)}:
        warnings.warn(f"{config.spec.label}: the state dict has other layers than the configuration", stacklevel=4)
    if not sites or why:
        raise HfpatchError(f"{config.spec.label}: {why or 'the state dict has no tensors of it for this model'}")
    return sites


def unreached_layers(model: nn.Module, config: MethodConfig) -> dict[int, str]:
    """Return the blocks that a configuration for all layers leaves out: index of the block -> reason."""
    surveyed = survey(model)
    every = surveyed.with_others() if chosen_modules(config) is not None else surveyed
    named = named_sites(every.sites, config, body=_body_name(model))
    towers = {site.around_path for site in named}
    refused = _refused(every.sites, config, named, wanted_layers(every.sites, config))
    changed = [site for site in every.sites if site.around_path in towers]
    reasons = {site.layer: refused[site.name] for site in changed if site.name in refused}
    return dict(sorted({**surveyed.skipped, **reasons}.items()))


def _remarks(
    model: nn.Module, config: MethodConfig, given: set[str] | str | None, count: int, total: int
) -> list[tuple[int, str]]:
    """Return what to log of a new adapter: its size, what it leaves out, and a head that stays as it is."""
    label, share = config.spec.label, count / max(total, 1)
    is_large = count >= _LARGE and share >= _LARGE_SHARE
    size = f"{label}: {count:,} parameters added, {share:.2%} of the base's {total:,}"
    if is_large:
        size += "; hfpatch.sized(config, model, parameters='1%') returns a configuration of any size"
    remarks = [(logging.WARNING if is_large else logging.INFO, size)]
    if given is None and (others := left_out(model)):  # what is left out was not chosen
        reasons = "; ".join(f"{what}: {why}" for what, why in others.items())
        remarks.append((logging.WARNING, f"{label}: left out: {reasons}"))
    if TASK_HEAD.search(type(model).__name__):
        body, kept = getattr(model, "base_model_prefix", ""), tuple(config.modules_to_save or ())
        heads = {name: head for name, head in model.named_children() if name != body and [*head.parameters()]}
        # PEFT trains modules by the ends of their names; for a task type it adds names of heads, which some models lack
        frozen = [
            name
            for name, head in heads.items()
            if not any(path.endswith(kept) for path, _ in head.named_modules(prefix=name))
        ]
        if frozen:
            advice = f"if it is random, train it: modules_to_save={[*heads]}"
            remarks.append((logging.WARNING, f"{label}: {', '.join(frozen)} stays frozen; {advice}"))
    return remarks


def left_out(model: nn.Module) -> dict[str, str]:
    """Return the attentions that no method of the model's stack changes, by tower or module: what is there, and why.

    Blocks of a tower that is changed are in :func:`unreached_layers`.
    """
    surveyed = survey(model)
    by_tower: dict[str, list[AttentionSite]] = {}
    for site in (*surveyed.sites, *surveyed.others):
        by_tower.setdefault(site.around_path, []).append(site)
    rows = {
        tower or "the model": f"{len(sites)} self-attentions, such as {sites[0].path}, which target_modules can name"
        for tower, sites in by_tower.items()
        if not any(isinstance(child, MethodLayer) for site in sites for child in site.host.children())
    }
    by_kind: dict[str, list[str]] = {}
    for path, kind in surveyed.unknown.items():
        by_kind.setdefault(kind, []).append(path)
    never = "which cannot be changed"
    return rows | {kind: f"{len(paths)}, such as {paths[0]}, {never}" for kind, paths in by_kind.items()}


def _refused(
    sites: Sequence[AttentionSite], config: MethodConfig, named: Sequence[AttentionSite], wanted: set[int] | None
) -> dict[str, str]:
    """Return why sites do not take the method, by their name; by the first one that it changes, too."""
    refused = {site.name: why for site in sites if (why := refused_at(site, config))}
    taking = (site for site in named if site.name not in refused and (wanted is None or site.layer in wanted))
    if (first := next(taking, None)) is not None:
        for site in sites:
            if site is not first and site.name not in refused and (why := config.refusal_after(first, site)):
                refused[site.name] = why
    return refused


def restore_wrapped(model: nn.Module) -> None:
    """Put the modules that PEFT wrapped for ``modules_to_save`` and ``trainable_token_indices`` back, untrained."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, AuxiliaryTrainingWrapper):
                setattr(parent, name, child.original_module)


def detach_layers(model: nn.Module) -> None:
    """Remove every hfpatch layer and its hooks from a model."""
    if getattr(model, _INPUT_GRADIENTS, False):
        delattr(model, _INPUT_GRADIENTS)
        model.disable_input_require_grads()  # type: ignore[operator]  # typed as tensor or module
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, MethodLayer):
                child.unhook()
                delattr(module, name)
