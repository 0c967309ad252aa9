"""Model surgery in one call: an ordered stack of PEFT adapters on a frozen base."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig, PeftModel, inject_adapter_in_model
from torch import nn

from hfpatch.errors import HfpatchError, whole_number
from hfpatch.nn.initialization import seeded_generator
from hfpatch.sites import count_values, find_sites
from hfpatch.surgery.checkpoints import disable_checkpoints, enable_checkpoints
from hfpatch.tuners.adapters import (
    AdapterWrapper,
    Model,
    activate_adapters,
    adapter_parameters,
    base_parameters,
    block_finder,
    has_adapters,
    remove_adapters,
    stack,
    upcast_adapters,
)
from hfpatch.tuners.checks import refusing_wrong_values, require_fitting, require_sound
from hfpatch.tuners.config import MethodConfig, drawn_as, method_name, with_python_values
from hfpatch.tuners.contracts import require_adapter_name
from hfpatch.tuners.model import left_out, unreached_layers
from hfpatch.tuners.quantised import keep_unpacked

_TRAINABLE_BEFORE = "_hfpatch_trainable_before"  # on the model, so that a copy of it can be unpatched too


def patch(
    model: Model,
    config: PeftConfig | Sequence[PeftConfig],
    *,
    names: Sequence[str] | None = None,
    seed: int | None = None,
) -> Model:
    """Freeze a causal language model and stack adapters on it, in place.

    Any PEFT configuration that can be injected is accepted, in any order: ``PreProjectionConfig``, ``LoraConfig``,
    ``NonlinearQueryConfig``, ... Where LoRA and a nonlinear query change the same projection, LoRA's term is added to
    the nonlinear query in either order. All adapters are active, trainable and in fp32. With the default
    initialisations the patched model equals the frozen base bit for bit (with the same ``requires_grad`` flags, threads
    and shapes, by which torch chooses kernels).

    Args:
        model: a transformers causal language model; not a ``PeftModel``.
        config: one configuration or the stack of them; they are copied.
        names: adapter names; by default the method's name (``pre_projection``, ``lora``, ``lora_2``, ...).
        seed: seed of every part's initialisation; None keeps each hfpatch configuration's own and takes 0 for others. A
            part's initial values depend on it and on the part's name (the first of each kind draws by the seed alone).

    Returns:
        The same model.

    Raises:
        HfpatchError: if the model or a configuration is not suitable; the model is then unchanged.
    """
    configs = list(config) if isinstance(config, Iterable) else [config]
    if not configs or not all(isinstance(part, PeftConfig) for part in configs):
        raise HfpatchError("patch takes a PEFT configuration or a list of them; names= gives adapters their names")
    if seed is not None:
        seed = whole_number("seed", seed, at_least=0)
    require_plain(model)
    names = _adapter_names(model, configs, names)
    if has_adapters(model):
        raise HfpatchError("the model has adapters already; call hfpatch.unpatch(model) first, or patch with one list")
    if any(isinstance(part, MethodConfig) for part in configs):
        find_sites(model)  # an unknown architecture is refused before PEFT records the adapter
    configs = [with_python_values(copy.deepcopy(part)) for part in configs]
    keep_unpacked(model, training=not all(part.inference_mode for part in configs))
    setattr(model, _TRAINABLE_BEFORE, {name for name, p in model.named_parameters() if p.requires_grad})
    try:
        require_fitting(model, configs)
        for name, part in zip(names, configs, strict=True):
            _add_part(model, name, part, seed)
        activate_adapters(model, list(stack(model)))
        upcast_adapters(model)
        require_sound(model, names)
    except BaseException as error:
        unpatch(model)
        if isinstance(error, ValueError | TypeError | NotImplementedError):
            raise HfpatchError(" ".join(str(error).split())) from error
        raise
    # PEFT creates modules in training mode, so that a LoRA dropout would act on a model in evaluation mode
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, AdapterWrapper):
                child.train(parent.training)
    enable_checkpoints(model)
    return model


def _add_part(model: Any, name: str, part: PeftConfig, seed: int | None) -> None:
    """Put one adapter on a model, with initial values that the seed and the name decide."""
    if isinstance(part, MethodConfig) and seed is not None:
        part.seed = seed
    drawn = drawn_as(name, part)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seeded_generator(seed or 0, drawn).initial_seed() if drawn else seed or 0)
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # it is intended
        # Some tuners read every configuration of the model as if it were one of their own: they see only those
        before = stack(model)
        model.peft_config = {n: c for n, c in before.items() if c.peft_type == part.peft_type}
        part.base_model_name_or_path = model.name_or_path
        model._hf_peft_config_loaded = True  # transformers' flag
        with refusing_wrong_values(part):
            inject_adapter_in_model(part, model, name)  # add_adapter would then deactivate the other adapters
        model.peft_config = {**before, name: part}
    if name not in stack(model):
        raise HfpatchError(
            f"{method_name(part)}: PEFT changes none of the modules that it is to adapt here (many of its layers take "
            "torch.nn.Linear alone); name others in target_modules"
        )


def unpatch(model: Model) -> Model:
    """Remove every adapter, in place: the original modules and ``requires_grad`` flags are restored, bit for bit.

    Raises:
        HfpatchError: if an adapter is merged into the base weights.
    """
    require_plain(model)
    remove_adapters(model)
    disable_checkpoints(model)
    if hasattr(model, "peft_config"):
        del model.peft_config
    model._hf_peft_config_loaded = False  # type: ignore[assignment]  # transformers' flag
    trainable = getattr(model, _TRAINABLE_BEFORE, None)
    if trainable is not None:
        delattr(model, _TRAINABLE_BEFORE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name in trainable
    return model


@dataclass(frozen=True)
class PatchSummary:
    """Exact parameter counts of a patched model.

    Args:
        trainable: parameters that training would change.
        added: parameters that adapters added.
        base: parameters of the model without adapters.
        per_layer: added parameters by index of the block; -1 for those outside the blocks.
        skipped: blocks that a method for all layers left out: index and reason.
        left_out: the attentions outside the towers that hfpatch's methods change, by tower or kind.
    """

    trainable: int
    added: int
    base: int
    per_layer: dict[int, int]
    skipped: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("layer", "added parameters"), *((str(layer), f"{count:,}") for layer, count in self.per_layer.items())]
        rows += [("added", f"{self.added:,}"), ("trainable", f"{self.trainable:,}"), ("base", f"{self.base:,}")]
        rows.append(("added / base", f"{self.share:.2%}"))
        left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
        by_reason: dict[str, list[str]] = {}
        for layer, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(str(layer))
        left_out = [f"left out: {len(layers)} ({', '.join(layers)}): {why}" for why, layers in by_reason.items()]
        left_out += [f"left out: {what}: {why}" for what, why in self.left_out.items()]
        return "\n".join([*(f"{a:<{left}}  {b:>{right}}" for a, b in rows), *left_out])

    __repr__ = __str__  # as a notebook shows it

    @property
    def share(self) -> float:
        """The added parameters as a share of the base's."""
        return self.added / max(self.base, 1)


def patch_summary(model: nn.Module) -> PatchSummary:
    """Count the base and added parameters of a patched model or a ``PeftModel``."""
    added, block_of = adapter_parameters(model), block_finder(model)
    per_layer = Counter[int]()
    for name, parameter in added.items():
        per_layer[block_of(name)] += parameter.numel()
    skipped: dict[int, str] = {}
    for config in stack(model).values():
        if isinstance(config, MethodConfig) and config.layers_to_transform is None:
            skipped |= unreached_layers(model, config)
    return PatchSummary(
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        added=sum(p.numel() for p in added.values()),
        base=sum(count_values(p) for p in base_parameters(model).values()),
        per_layer=dict(sorted(per_layer.items())),
        skipped=skipped,
        left_out=left_out(model) if any(isinstance(config, MethodConfig) for config in stack(model).values()) else {},
    )


def _adapter_names(model: nn.Module, configs: Sequence[PeftConfig], names: Sequence[str] | None) -> list[str]:
    """Return one name for each configuration that is no part of the model's own names, by which PEFT finds tensors."""
    tensors = [name for name, _ in model.named_parameters()]
    if names is None:
        parts = {part for name in tensors for part in name.split(".")}
        chosen: list[str] = []
        for method in map(method_name, configs):
            candidates = itertools.chain([method], (f"{method}_{number}" for number in itertools.count(2)))
            chosen.append(next(name for name in candidates if name not in parts and name not in chosen))
        return chosen
    if len(names) != len(configs):
        raise HfpatchError(f"{len(names)} adapter names for {len(configs)} configurations; give one name each")
    for name in names:
        if list(names).count(name) > 1 or not re.fullmatch(r"\w+", name):
            raise HfpatchError(f"adapter name {name!r} must be unique, and of letters, digits and underscores")
        require_adapter_name(name, tensors)
    return list(names)


def require_plain(model: nn.Module) -> None:
    """Raise :class:`HfpatchError` unless adapters can be put into the model itself."""
    if isinstance(model, PeftModel):
        raise HfpatchError(
            "the model is wrapped in a PeftModel; pass model.get_base_model(), or use PEFT's own add_adapter / unload"
        )
    if not hasattr(model, "add_adapter"):
        raise HfpatchError(f"{type(model).__name__} is not a transformers model, so it takes no adapters")
