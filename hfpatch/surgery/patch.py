"""Model surgery in one call: an ordered stack of PEFT adapters on a frozen base."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from peft import PeftConfig, PeftModel, inject_adapter_in_model
from torch import nn

from hfpatch.errors import HfpatchError, whole_number
from hfpatch.nn.initialization import seeded_generator
from hfpatch.sites import find_sites, survey
from hfpatch.surgery.checkpoints import disable_checkpoints, enable_checkpoints
from hfpatch.tuners.adapters import (
    activate_adapters,
    adapter_parameters,
    base_parameters,
    changes_base,
    has_adapters,
    keep_mode,
    remove_adapters,
    require_distinct_names,
    require_injectable,
    require_matches,
    require_matrices,
    upcast_adapters,
)
from hfpatch.tuners.config import SurgeryConfig, drawn_as, method_name, with_python_values
from hfpatch.tuners.model import unreached_layers
from hfpatch.tuners.nonlinear_query.config import NonlinearQueryConfig
from hfpatch.tuners.nonlinear_query.effect import require_effect

Model = TypeVar("Model", bound=nn.Module)

_LAYER = re.compile(r"\.(\d+)\.")
_TRAINABLE_BEFORE = "_hfpatch_trainable_before"  # on the model, so that a copy of it can be unpatched too


def patch(
    model: Model,
    config: PeftConfig | Sequence[PeftConfig],
    *,
    names: Sequence[str] | None = None,
    seed: int | None = None,
) -> Model:
    """Freeze a causal language model and stack adapters on it, in place.

    Any PEFT configuration that can be injected goes, in any order: ``PreProjectionConfig``, ``NonlinearQueryConfig``,
    ``LoraConfig``, ... Where LoRA and a nonlinear query change the same projection, LoRA's term is added to the
    nonlinear query whichever was injected first. All adapters are active and trainable, in fp32 whatever the dtype of
    the base. With the default initialisations the patched model computes what the frozen base computes, bit for bit
    (same ``requires_grad`` flags, threads and shapes: torch picks kernels by them).

    Args:
        model: a transformers causal language model; not a ``PeftModel``.
        config: one configuration or the stack of them; they are copied.
        names: adapter names; by default the method's name (``pre_projection``, ``lora``, ``lora_2``, ...).
        seed: seed of every part's initialisation; None keeps each hfpatch configuration's own and takes 0 for others. A
            part's initial values depend on it and on the part's name (the first of each kind draws by the seed alone).

    Returns:
        The same model.

    Raises:
        HfpatchError: if the model or a configuration is unfit; the model is then as it was.
    """
    configs = [config] if isinstance(config, PeftConfig) else list(config)
    if seed is not None:
        seed = whole_number("seed", seed, at_least=0)
    _require_plain(model)
    names = _adapter_names(model, configs, names)
    _require_free_names(model, names)
    if has_adapters(model):
        raise HfpatchError("the model has adapters already; call hfpatch.unpatch(model) first, or patch with one list")
    if any(isinstance(part, SurgeryConfig) for part in configs):
        find_sites(model)  # an unknown architecture is refused before PEFT records the adapter
    configs = [with_python_values(copy.deepcopy(part)) for part in configs]
    require_untouched_base(configs)
    for part in configs:
        require_injectable(part, alone=len(configs) == 1)
        require_matches(model, part)
        require_matrices(model, part)
    setattr(model, _TRAINABLE_BEFORE, {name for name, p in model.named_parameters() if p.requires_grad})
    try:
        for name, part in zip(names, configs, strict=True):
            _inject(model, part, name, seed)
        require_distinct_names(model, names)
        activate(model)
        _require_frozen_base(model)
        _require_values(model)
        if any(isinstance(part, NonlinearQueryConfig) for part in configs):
            require_effect(model)
    except BaseException as error:
        unpatch(model)
        if isinstance(error, ValueError | TypeError | NotImplementedError):
            raise HfpatchError(" ".join(str(error).split())) from error
        raise
    keep_mode(model)
    enable_checkpoints(model)
    return model


def unpatch(model: Model) -> Model:
    """Take every adapter out, in place: the original modules and ``requires_grad`` flags are back, bit for bit.

    Raises:
        HfpatchError: if an adapter is merged into the base weights.
    """
    _require_plain(model)
    remove_adapters(model)
    disable_checkpoints(model)
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False  # type: ignore[assignment]
    trainable = getattr(model, _TRAINABLE_BEFORE, None)
    if trainable is not None:
        delattr(model, _TRAINABLE_BEFORE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name in trainable
    return model


def stack(model: nn.Module) -> dict[str, PeftConfig]:
    """Return the configurations of a model's adapters by name, in the order of injection."""
    return dict(getattr(model, "peft_config", None) or {})


def activate(
    model: nn.Module, names: Sequence[str] | None = None, *, trainable: bool = True, upcast: bool = True
) -> None:
    """Make adapters of the stack active, trainable or not, and (``upcast``) in fp32 whatever the base's dtype.

    Args:
        model: a patched model.
        names: the adapters; None means all. Others are neither active nor trainable.
        trainable: whether the active ones are trained.
        upcast: give adapters in half precision fp32.
    """
    activate_adapters(model, list(stack(model) if names is None else names))
    if upcast:
        upcast_adapters(model)
    if not trainable:
        for parameter in adapter_parameters(model).values():
            parameter.requires_grad = False


@dataclass(frozen=True)
class PatchSummary:
    """Exact parameter counts of a patched model.

    Args:
        trainable: parameters that training would change.
        added: parameters that adapters added.
        base: parameters of the model without adapters.
        per_layer: added parameters by index of the block; -1 for those outside the blocks.
        skipped: blocks that a method for all layers left out, by index, with the reason.
    """

    trainable: int
    added: int
    base: int
    per_layer: dict[int, int]
    skipped: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("layer", "added parameters"), *((str(k), f"{n:,}") for k, n in self.per_layer.items())]
        rows += [("added", f"{self.added:,}"), ("trainable", f"{self.trainable:,}"), ("base", f"{self.base:,}")]
        rows.append(("added / base", f"{self.added / max(self.base, 1):.2%}"))
        left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{a:<{left}}  {b:>{right}}" for a, b in rows]
        return "\n".join([*lines, *self._left_out()])

    def _left_out(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for layer, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(str(layer))
        return [f"left out: {len(layers)} ({', '.join(layers)}): {why}" for why, layers in by_reason.items()]


def patch_summary(model: nn.Module) -> PatchSummary:
    """Count the parameters of a model and of what was added to it; also for a ``PeftModel``."""
    added = adapter_parameters(model)
    per_layer: dict[int, int] = {}
    layer_of = _layers_by_name(model)
    for name, parameter in added.items():
        layer = layer_of(name)
        per_layer[layer] = per_layer.get(layer, 0) + parameter.numel()
    return PatchSummary(
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        added=sum(p.numel() for p in added.values()),
        base=sum(p.numel() for p in base_parameters(model).values()),
        per_layer=dict(sorted(per_layer.items())),
        skipped=_skipped(model),
    )


def _layers_by_name(model: nn.Module) -> Callable[[str], int]:
    """Return a function from a parameter's name to the index of its block; -1 outside the blocks."""
    try:
        places = {f".{path}.": layer for layer, path in enumerate(survey(model).blocks)}
    except HfpatchError:  # LoRA and its like also go into models whose attention is not declared
        return lambda name: int(match[1]) if (match := _LAYER.search(name)) else -1
    return lambda name: next((layer for place, layer in places.items() if place in f".{name}"), -1)


def _skipped(model: nn.Module) -> dict[int, str]:
    for_all = [c for c in stack(model).values() if isinstance(c, SurgeryConfig) and c.layers_to_transform is None]
    return {layer: reason for config in for_all for layer, reason in unreached_layers(model, config).items()}


def _inject(model: nn.Module, config: PeftConfig, name: str, seed: int | None) -> None:
    if isinstance(config, SurgeryConfig) and seed is not None:
        config.seed = seed
    drawn = drawn_as(name, config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seeded_generator(seed or 0, drawn).initial_seed() if drawn else seed or 0)
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # a stack is intended
        # Some tuners read every configuration of the model as if it were one of their own, so they see only those.
        before = stack(model)
        model.peft_config = {n: c for n, c in before.items() if c.peft_type == config.peft_type}  # type: ignore[assignment]
        config.base_model_name_or_path = model.name_or_path  # type: ignore[assignment]
        model._hf_peft_config_loaded = True  # type: ignore[assignment]
        inject_adapter_in_model(config, model, name)  # add_adapter would then deactivate the other adapters
        model.peft_config = {**before, name: config}  # type: ignore[assignment]


def _adapter_names(model: nn.Module, configs: Sequence[PeftConfig], names: Sequence[str] | None) -> list[str]:
    if names is None:
        own, chosen = _name_parts(model), list[str]()
        for config in configs:
            chosen.append(_free_name(method_name(config), {*own, *chosen}))
        return chosen
    if len(names) != len(configs):
        raise HfpatchError(f"{len(names)} adapter names for {len(configs)} configurations; give one name each")
    for name in names:
        if list(names).count(name) > 1 or not re.fullmatch(r"\w+", name):
            raise HfpatchError(f"adapter name {name!r} must be unique, and of letters, digits and underscores")
    return list(names)


def _free_name(name: str, taken: Collection[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _require_free_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse a name such as ``layers``, by which PEFT could not tell the adapter's tensors from others."""
    taken = _name_parts(model)
    for name in names:
        if name in taken:
            raise HfpatchError(f"adapter name {name!r} is a part of the model's own names; choose another")


def _name_parts(model: nn.Module) -> set[str]:
    return {part for name, _ in model.named_parameters() for part in name.split(".")}


def require_untouched_base(configs: Iterable[PeftConfig]) -> None:
    """Refuse configurations that change the base: its weights, which parameters are trained, or its layers.

    Raises:
        HfpatchError: naming the option.
    """
    for config in configs:
        if why := changes_base(config):
            raise HfpatchError(why)


def _require_frozen_base(model: nn.Module) -> None:
    trained = [name for name, parameter in base_parameters(model).items() if parameter.requires_grad]
    if trained:
        raise HfpatchError(
            f"a configuration trains {len(trained)} parameters of the base, such as {trained[0]}, which a patch must "
            "leave as they are"
        )


def _require_values(model: nn.Module) -> None:
    """Refuse adapters without values on a model whose weights accelerate keeps elsewhere; a model on meta has none."""
    empty = [name for name, parameter in adapter_parameters(model).items() if parameter.is_meta]
    if empty and any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise HfpatchError(
            f"{empty[0]}: the module that it adapts is offloaded, and PEFT gives its adapter no values there; load the "
            "model without offloading, or adapt other modules (pre_projection and nonlinear_query work offloaded)"
        )


def _require_plain(model: nn.Module) -> None:
    if isinstance(model, PeftModel):
        raise HfpatchError(
            "the model is wrapped in a PeftModel; pass model.get_base_model(), or use PEFT's own add_adapter / unload"
        )
    if not hasattr(model, "add_adapter"):
        raise HfpatchError(
            f"{type(model).__name__} is not a transformers model, so adapters cannot be injected into it"
        )
