"""A catalogue of PEFT's features, tested with hfpatch's methods and PEFT's own on a tiny model.

Each entry uses a configuration as users of PEFT use a LoRA. It returns None if that works, or the one-line message of
the refusal, which must leave the model unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    convert_to_lora,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.error import NoMatchingPeftModuleError
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn

from hfpatch.errors import first_line
from hfpatch.promises.common import NOT_OURS, moved
from hfpatch.promises.inputs import Inputs, example_inputs
from hfpatch.sites import find_sites, survey
from hfpatch.support.modes import keeping_flags
from hfpatch.surgery.budget import attention_modules
from hfpatch.surgery.model_class import other_class
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.config import MethodConfig
from hfpatch.twins import twin

TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
    None: "AutoModel",
}
_NOISE = 0.3  # added to initial values, so that every part changes the outputs
_TOLERANCE = 1e-3  # of a merged model's outputs in fp32, relative to the largest
_EXACT = 1e-6  # of the same computation on tensors at other addresses


class Broken(AssertionError):
    """A broken promise; the text says how."""


@dataclass(frozen=True)
class Base:
    """A tiny model, which every entry copies, and inputs for it."""

    model: Any
    inputs: Inputs

    @property
    def rows(self) -> int:
        """The size of a batch."""
        return len(next(iter(self.inputs.values())))

    def new(self) -> Any:
        """Return a new copy of the model, in evaluation mode."""
        return copy.deepcopy(self.model).eval()

    def wrapped(self, config: PeftConfig, **options: Any) -> Any:
        """Return a new ``PeftModel`` in evaluation mode, with every added tensor moved off its initial value."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return moved(get_peft_model(self.new(), copy.deepcopy(config), **options), _NOISE).eval()


Entry = Callable[[Base, PeftConfig], "str | None"]


@torch.no_grad()
def outputs(model: Any, inputs: Inputs, **options: Any) -> Tensor:
    """Return the first output of a model, with every gradient off: torch picks kernels by these flags."""
    with keeping_flags(model):
        model.requires_grad_(False)
        output: Tensor = model(**inputs, **options)[0]
    return output


def near(output: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Return whether outputs are equal up to rounding, relative to the largest."""
    return float((output - expected).abs().max()) <= tolerance * float(expected.abs().max())


def require(holds: bool, text: str) -> None:
    """Raise :class:`Broken` unless something holds."""
    if not holds:
        raise Broken(text)


def refusal(call: Callable[[], Any]) -> str | None:
    """Return the one line by which a call is refused, None if it is not.

    Raises:
        Broken: if the error is not one line.
    """
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        require(bool(str(error)) and "\n" not in str(error), f"refused in other than one line: {error!r}")
        return str(error)
    return None


def configuration(base: Base, config: PeftConfig) -> str | None:
    """The model keeps the given object, which can be saved, loaded and used again."""
    given = copy.deepcopy(config)
    model = get_peft_model(base.new(), given)
    require(model.peft_config["default"] is given, "peft_config holds another object than the one that was given")
    with tempfile.TemporaryDirectory() as folder:
        given.save_pretrained(folder)
        again = PeftConfig.from_pretrained(folder)
    require(type(again) is type(given) and again.to_dict() == given.to_dict(), "the configuration changes in its file")
    names = adapter_parameters(model).keys()
    require(adapter_parameters(get_peft_model(base.new(), given)).keys() == names, "its next use adds something else")
    return None


def modes(base: Base, config: PeftConfig) -> str | None:
    """New parts are in training mode; loaded ones are in evaluation mode, unless loaded as trainable."""

    def parts(model: Any) -> list[Any]:
        layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
        held = (getattr(layer, name).values() for layer in layers for name in layer.adapter_layer_names)
        return [part for values in held for part in values if isinstance(part, nn.Module)]

    model = get_peft_model(base.new(), copy.deepcopy(config))
    require(all(part.training for part in parts(model)), "injection leaves parts in evaluation mode")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base.new(), folder)
        further = PeftModel.from_pretrained(base.new(), folder, is_trainable=True)
        other = base.new()
        other.load_adapter(folder, is_trainable=True)
    require(not any(m.training for m in loaded.modules()), "a loaded adapter is in training mode")
    require(not any(p.requires_grad for p in loaded.parameters()), "a loaded adapter is trainable by default")
    for both in (further, other):
        require(all(part.training for part in parts(both)), "loading to train leaves parts in evaluation mode")
        require(all(p.requires_grad for p in adapter_parameters(both).values()), "loading to train leaves parts frozen")
    return None


def other_start(base: Base, config: PeftConfig) -> str | None:
    """``init_weights=False`` does not start as the base."""
    field = next((name for name in ("init_weights", "init_lora_weights") if hasattr(config, name)), None)
    require(field is not None, "there is no init_weights")
    options: dict[str, Any] = {str(field): False}
    changed = dataclasses.replace(copy.deepcopy(config), **options)
    model = get_peft_model(base.new(), changed).eval()
    difference = (outputs(model, base.inputs) - outputs(base.new(), base.inputs)).abs().max()
    require(float(difference) > 1e-6, "init_weights=False starts as the base")
    return None


def saving(base: Base, config: PeftConfig) -> str | None:
    """Saved adapters load to equal outputs, by ``PeftModel.from_pretrained`` and both ``load_adapter``."""
    model = base.wrapped(config)
    expected, bare = outputs(model, base.inputs), outputs(base.new(), base.inputs)
    require(not torch.equal(expected, bare), "the adapter changes nothing")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base.new(), folder)
        second = base.wrapped(config)
        second.load_adapter(folder, adapter_name="other")
        second.set_adapter("other")
        by_transformers = base.new()
        by_transformers.load_adapter(folder)
        small = PeftModel.from_pretrained(base.new(), folder, low_cpu_mem_usage=True)
    for loaded_model in (loaded, second, by_transformers, small):
        require(near(outputs(loaded_model, base.inputs), expected, _EXACT), "a loaded adapter computes something else")
    return None


def several(base: Base, config: PeftConfig) -> str | None:
    """Adapters are added, set, disabled and deleted by name; only the active one trains."""
    model = base.wrapped(config)
    first, bare = outputs(model, base.inputs), outputs(base.new(), base.inputs)
    model.add_adapter("second", copy.deepcopy(config))
    model.eval()  # a new part is in training mode
    require(torch.equal(outputs(model, base.inputs), first), "a further adapter acts before it is set")
    model.set_adapter("second")
    moved(model, _NOISE, seed=1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    only_second = bool(trained) and all(".second" in name for name in trained)
    require(only_second, "other tensors than the active adapter's train")
    second = outputs(model, base.inputs)
    with model.disable_adapter():
        require(torch.equal(outputs(model, base.inputs), bare), "a disabled adapter acts")
    require(torch.equal(outputs(model, base.inputs), second), "enabled again it computes something else")
    model.set_adapter("default")
    default = outputs(model, base.inputs)
    model.set_adapter("second")
    model.delete_adapter("second")
    model.set_adapter("default")
    require(torch.equal(outputs(model, base.inputs), default), "deleting an adapter changes the other one")
    require(not any(".second" in name for name in model.state_dict()), "the deleted adapter has tensors left")
    return None


def state_dict(base: Base, config: PeftConfig) -> str | None:
    """``inject_adapter_in_model`` finds the layers in a state dict, which PEFT's functions get and set."""
    source = moved(inject_adapter_in_model(copy.deepcopy(config), base.new()), _NOISE)
    state = get_peft_model_state_dict(source)
    target = inject_adapter_in_model(copy.deepcopy(config), base.new(), state_dict=state)
    result: Any = set_peft_model_state_dict(target, state)
    require(not result.unexpected_keys, "the state dict has unexpected tensors")
    require(adapter_parameters(target).keys() == adapter_parameters(source).keys(), "it is injected elsewhere")
    equal = near(outputs(target.eval(), base.inputs), outputs(source.eval(), base.inputs), _EXACT)
    require(equal, "the state dict makes another model")
    return None


def further_modules(base: Base, config: PeftConfig) -> str | None:
    """``modules_to_save`` are trained, saved and loaded beside the adapter."""
    head = base.model.get_output_embeddings()
    name = next(name for name, module in base.model.named_modules() if module is head)
    return _trained_too(base, config, {"modules_to_save": [name.split(".")[-1]]}, "modules_to_save.default")


def tokens(base: Base, config: PeftConfig) -> str | None:
    """``trainable_token_indices`` are trained, saved and loaded beside the adapter."""
    ids, embedding = base.inputs["input_ids"], base.model.get_input_embeddings()
    name = next(name for name, module in base.model.named_modules() if module is embedding)
    options = {"trainable_token_indices": {name.split(".")[-1]: sorted({*ids[0, :2].tolist()})}}
    return _trained_too(base, config, options, "trainable_tokens_delta")


def _trained_too(base: Base, config: PeftConfig, options: dict[str, Any], part: str) -> str | None:
    require(all(hasattr(config, name) for name in options), f"there is no {min(options)}")
    wider = dataclasses.replace(copy.deepcopy(config), **options)
    model = base.wrapped(wider)
    require(any(p.requires_grad and part in name for name, p in model.named_parameters()), f"{part} is not trained")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base.new(), folder)
    require(near(outputs(loaded, base.inputs), outputs(model, base.inputs), _EXACT), f"{part} is not saved")
    without = base.wrapped(config)
    require(not torch.equal(outputs(without, base.inputs), outputs(model, base.inputs)), f"{part} does not act")
    return None


def chosen(base: Base, config: PeftConfig) -> str | None:
    """``target_modules``, ``exclude_modules``, ``layers_to_transform`` and ``layers_pattern`` select modules."""
    names = get_peft_model(base.new(), copy.deepcopy(config)).targeted_module_names
    last = survey(base.model).blocks[-1]
    *_, pattern, index = last.split(".")
    after = [name for name in names if not name.startswith(survey(base.model).blocks[0])]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"target_modules": after}, after),
        ({"target_modules": "|".join(map(re.escape, after))}, after),
        ({"exclude_modules": names[:1]}, names[1:]),
        ({"exclude_modules": re.escape(names[0])}, names[1:]),
    ]
    if len(after) > 1:  # more layers than one, which some methods need
        layers = [int(index) - 1, int(index)]
        last_two = [name for name in names if any(f".{layer}." in name for layer in layers)]
        cases.append(({"layers_to_transform": layers, "layers_pattern": pattern}, last_two))
    for options, expected in cases:

        def wrap(options: dict[str, Any] = options, expected: list[str] = expected) -> None:
            narrow = dataclasses.replace(copy.deepcopy(config), **options)
            changed = get_peft_model(base.new(), narrow).targeted_module_names
            require(changed == expected, f"{min(options)} changes {changed} instead of {expected}")
            lists = (name for name in ("target_modules", "exclude_modules") if isinstance(options.get(name), list))
            require(all(isinstance(getattr(narrow, name), set) for name in lists), "a list does not become a set")

        if (why := refusal(wrap)) and len(survey(base.model).blocks) > 2:  # some methods need two layers
            return why
    return None


def task_types(base: Base, config: PeftConfig) -> str | None:
    """Models for other tasks, or without a head, are wrapped; their heads are trained, saved and loaded."""
    for task, name in TASKS.items():
        auto: Any = getattr(transformers, name)
        if type(base.model.config) not in auto._model_mapping:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            headed = Base(auto.from_config(base.model.config), base.inputs)
        if task is not None and "input_ids" not in inspect.signature(headed.model.forward).parameters:
            continue  # PEFT's classes of tasks pass them
        try:
            model = headed.wrapped(dataclasses.replace(copy.deepcopy(config), task_type=task))
        except NoMatchingPeftModuleError:  # full names of modules are others in another class
            continue
        trained = [key for key, p in model.named_parameters() if p.requires_grad and "modules_to_save" in key]
        has_head = task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
        require(bool(trained) == has_head, f"{task}: the head is not trained")
        if task is None:
            require(type(model) is PeftModel, f"without a task it is a {type(model).__name__}")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = PeftModel.from_pretrained(headed.new(), folder)
        equal = near(outputs(loaded, base.inputs), outputs(model, base.inputs), _EXACT)
        require(equal, f"{task}: it loads to other outputs")
    return None


def dtypes(base: Base, config: PeftConfig) -> str | None:
    """Parts are in fp32 on a base in bf16; ``autocast_adapter_dtype=False`` uses the dtype of the base."""
    low = Base(base.new().to(torch.bfloat16), base.inputs)
    for autocast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = low.wrapped(config, autocast_adapter_dtype=autocast)
        model.add_adapter("second", copy.deepcopy(config), autocast_adapter_dtype=autocast)
        actual = {p.dtype for p in adapter_parameters(model).values()}
        require(actual == {dtype}, f"autocast_adapter_dtype={autocast} gives {actual}")
        require(bool(outputs(model, base.inputs).isfinite().all()), f"in {dtype} its outputs are not finite")
    return None


def merging(base: Base, config: PeftConfig) -> str | None:
    """Merged weights give the adapter's outputs; unmerging restores the base's, by hfpatch's methods bit for bit."""
    model, bare = base.wrapped(config), outputs(base.new(), base.inputs)
    expected, before = outputs(model, base.inputs), copy.deepcopy(model.state_dict())
    if why := refusal(model.merge_adapter):
        for call in (model.merge_and_unload, lambda: model.merge_and_unload(safe_merge=True)):
            require(refusal(call) is not None, "merge_adapter is refused, and merge_and_unload is not")
        _require_untouched(model, before, expected, base)
        return why
    require(near(outputs(model, base.inputs), expected), "merged it computes something else")
    model.unmerge_adapter()
    same = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    require(same or not isinstance(config, MethodConfig), "unmerged its weights are others")
    require(near(outputs(model, base.inputs), expected), "unmerged it computes something else")
    model.merge_adapter(safe_merge=True)
    with model.disable_adapter():
        require(near(outputs(model, base.inputs), bare), "a disabled merged adapter acts")
    for parameter in adapter_parameters(broken := base.wrapped(config)).values():
        parameter.data.fill_(torch.inf)
    require(refusal(lambda: broken.merge_adapter(safe_merge=True)) is not None, "safe_merge merges infinite weights")
    merged = base.wrapped(config).merge_and_unload(safe_merge=True)
    require(near(outputs(merged, base.inputs), expected), "merged and unloaded it computes otherwise")
    require(list(merged.state_dict()) == list(base.model.state_dict()), "merged and unloaded it is not the stock model")
    return None


def _require_untouched(model: Any, before: dict[str, Tensor], expected: Tensor, base: Base) -> None:
    state = model.state_dict()
    same = state.keys() == before.keys() and all(torch.equal(state[name], tensor) for name, tensor in before.items())
    require(same and torch.equal(outputs(model, base.inputs), expected), "a refused call changes the model")


def unloading(base: Base, config: PeftConfig) -> str | None:
    """``unload`` restores the base bit for bit, also from hfpatch's methods merged; it can be wrapped again."""
    for merged in (False, True) if isinstance(config, MethodConfig) else (False,):  # PEFT's own stay in the weights
        model = base.wrapped(config)
        if merged and refusal(model.merge_adapter):
            break
        plain = model.unload()
        require([n for n, _ in plain.named_modules()] == [n for n, _ in base.model.named_modules()], "modules are left")
        equal = torch.equal(outputs(plain, base.inputs), outputs(base.new(), base.inputs))
        require(equal, "unloaded it computes otherwise")
        weights = base.model.state_dict()
        require(all(torch.equal(w, weights[name]) for name, w in plain.state_dict().items()), "weights are others")
        get_peft_model(plain, copy.deepcopy(config))
    return None


def rows(base: Base, config: PeftConfig) -> str | None:
    """``adapter_names`` selects an adapter for each row of a batch."""
    model = base.wrapped(config)
    before, expected = copy.deepcopy(model.state_dict()), outputs(model, base.inputs)
    names = ["default", *["__base__"] * (base.rows - 1)]
    result: list[Tensor] = []
    if why := refusal(lambda: result.append(outputs(model, base.inputs, adapter_names=names))):
        _require_untouched(model, before, expected, base)
        return why
    by_hand = torch.cat([expected[:1], outputs(base.new(), base.inputs)[1:]])
    require(near(result[0], by_hand), "a row has another adapter than requested")
    return None


def weighted(base: Base, config: PeftConfig) -> str | None:
    """``add_weighted_adapter`` combines several adapters."""
    model = base.wrapped(config)
    model.add_adapter("second", copy.deepcopy(config))
    model.eval()  # a new part is in training mode
    before, expected = copy.deepcopy(model.state_dict()), outputs(model, base.inputs)
    if why := refusal(lambda: model.add_weighted_adapter(["default", "second"], [1.0, 0.0], "both", "cat")):
        _require_untouched(model, before, expected, base)
        return why
    model.set_adapter("both")
    require(near(outputs(model, base.inputs), expected), "the sum is another")
    return None


def mixed_types(base: Base, config: PeftConfig) -> str | None:
    """``PeftMixedModel`` takes it beside adapters of other types, as ``hfpatch.patch`` does for all methods."""
    return refusal(lambda: get_peft_model(base.new(), copy.deepcopy(config), mixed=True))


def as_lora(base: Base, config: PeftConfig) -> str | None:
    """``convert_to_lora`` approximates it by a LoRA."""
    return refusal(lambda: convert_to_lora(base.wrapped(config), rank=2))


def hot_swapping(base: Base, config: PeftConfig) -> str | None:
    """``hotswap_adapter`` puts another adapter's weights in the place of its own."""
    model, other = base.wrapped(config), moved(base.wrapped(config), _NOISE, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        if why := refusal(lambda: hotswap_adapter(model, folder, "default")):
            return why
    equal = near(outputs(model, base.inputs), outputs(other, base.inputs), _EXACT)
    require(equal, "swapped it computes something else")
    return None


CATALOGUE: dict[str, Entry] = {
    "configuration": configuration,
    "modes": modes,
    "init_weights": other_start,
    "save and load": saving,
    "several adapters": several,
    "state dict": state_dict,
    "modules_to_save": further_modules,
    "tokens": tokens,
    "chosen modules": chosen,
    "task types": task_types,
    "dtypes": dtypes,
    "unload": unloading,
    "merge": merging,
    "rows": rows,
    "weights": weighted,
    "mixed types": mixed_types,
    "as LoRA": as_lora,
    "hot swap": hot_swapping,
}
"""The entries by name; their docstrings are the promises."""
REFUSABLE = ("merge", "rows", "weights", "mixed types", "as LoRA", "hot swap")
"""Entries that a tuner may refuse with a reason."""


def kept(base: Base, config: PeftConfig, name: str) -> str | None:
    """Run an entry; return None, or the reason of its refusal.

    Raises:
        Broken: if the promise is broken, or an entry is refused that is not in :data:`REFUSABLE`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice
        why = CATALOGUE[name](base, config)
    require(why is None or name in REFUSABLE, f"{why}")
    return why


def peft_calls(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """PEFT's features work on a tiny random twin of the model."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    small = dataclasses.replace(
        copy.deepcopy(config), layers_to_transform=None, layers_pattern=None, target_modules=None, exclude_modules=None
    )
    try:
        small_model = twin(model.config, other_class(type(model)))
        base = Base(small_model, example_inputs(small_model, find_sites(small_model)))
        outputs(get_peft_model(base.new(), copy.deepcopy(small)), base.inputs)
    except Exception as error:  # a rank as wide as the model, inputs other than tokens, ...
        return True, f"does not apply: not on a tiny twin: {first_line(error, kind=True)}"
    refused = []
    for name in CATALOGUE:
        try:
            if kept(base, small, name):
                refused.append(name)
        except Exception as error:
            with suppress(Exception):  # an entry that a LoRA breaks too, in any way, does not apply
                kept(base, LoraConfig(r=2, target_modules=attention_modules(base.model)), name)
                return False, f"{name}: {first_line(error, kind=True)}"
            refused.append(f"{name} (as for a LoRA on this model)")
    done = f"{len(CATALOGUE) - len(refused)} of {len(CATALOGUE)} on a tiny twin"
    return True, done + (f"; refused, with the reason: {', '.join(refused)}" if refused else "")
