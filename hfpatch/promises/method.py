"""Promises about a method's functions: what they return, read, draw and leave behind."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from hfpatch.errors import HfpatchError
from hfpatch.promises.common import NOT_OURS, changed_by, perturbed, some
from hfpatch.promises.inputs import Inputs, logits
from hfpatch.surgery.budget import attention_modules
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite
from hfpatch.tuners.places import method_site

OTHER = "meta"  # as any device but the CPU, it takes no tensor of the CPU, but it needs no hardware
_TORCH_STATE = "torch's random state"
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 3e-2}  # of derivatives; an activation's kink may be within the step
_NUMPY: Any = sys.modules["numpy"]  # which transformers needs
_DRAW = "draw by hfpatch.nn.normal_, with a name that begins with site.name"


class Call(NamedTuple):
    """The first call of one of a method's places.

    Args:
        given: its arguments after the parts, as they were before the call.
        parts: a copy of its parts.
        returned: the dtype of its result.
        narrowest: the dtype of the fewest digits in which it computed.
        in_place: whether it changed an argument.
        left: what the call changed beside its result: settings and random states of the process, the method's
            attributes, its parts' attributes and tensors.
        in_module: the names of the method's module that it bound or filled, which a memo does in its first call.
        made: every tensor that this and all later calls of the place computed.
    """

    given: tuple[Any, ...]
    parts: nn.ModuleDict
    returned: torch.dtype
    narrowest: torch.dtype
    in_place: bool
    left: list[str]
    in_module: list[str]
    made: list[TensorWeakRef]


def results(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each place computes in the dtype that it was given, and returns a new tensor: others may read the given one."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    calls = _calls(model, config, inputs)
    for place, call in calls.items():
        dtype = call.given[0].dtype
        if call.returned != dtype:
            return False, f"{place} returns {call.returned} where it was given {dtype}"
        if call.narrowest != dtype:
            return False, f"{place} computes in {call.narrowest} where it was given {dtype}"
        if call.in_place:
            return False, f"{place} changes its argument in place; return a new tensor"
    return True, f"at {', '.join(calls)}"


def leftovers(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """build() and each place leave nothing behind: no call depends on the calls before it."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    calls, site = _calls(model, config, inputs), method_site(changed_by(model, config)[0])
    again = _calls(model, config, inputs)
    gc.collect()
    for place, call in calls.items():
        if left := call.left + again[place].in_module:
            return False, f"{place} changes {some(left)}; a call keeps nothing for the next one"
        if any(tensor() is not None for tensor in again[place].made):
            return False, f"{place} keeps a tensor alive after the forward pass; a call keeps nothing for the next one"
    drawn: list[Any] = []
    for seed in (0, 1):
        with _seeded(seed):
            before = _process()
            config.build(site, config.seed)
            after = _process()
        drawn.append(after.pop(_TORCH_STATE))
        if changed := [what for what in after if after[what] != before[what]]:
            return False, f"build() changes {some(changed)}; leave it as it was, and {_DRAW}"
    if drawn[0] == drawn[1]:
        return False, f"build() seeds torch's global generator, from which others draw later; {_DRAW}"
    return True, f"by build() and at {', '.join(calls)}"


def devices(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each place takes its parts and tensors on any device, and puts none of another one beside them."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    site, calls = method_site(changed_by(model, config)[0]), _calls(model, config, inputs)
    if fixed := _unregistered(config.build(site, config.seed)):
        return False, f"{some(fixed)} holds a tensor that is not moved, trained or saved; make it a parameter or buffer"
    with torch.device(OTHER):
        parts = config.build(site, config.seed)
    with FakeTensorMode(allow_non_fake_inputs=True):  # computes shapes, dtypes and devices only
        for place, call in calls.items():
            if type(call.given[-1]) is not MethodSite:  # it holds tensors of the forward pass
                continue
            arguments = [torch.empty_like(x, device=OTHER) if isinstance(x, Tensor) else x for x in call.given]
            try:
                getattr(config, place)(parts, *arguments)
            except (RuntimeError, HfpatchError) as error:
                if "device" in str(error) and "cpu" in str(error):
                    return False, f"{place} puts a tensor of the CPU beside its input; create it with device=x.device"
            except Exception:  # such as a decision by a value, which a fake tensor lacks
                continue
    return True, f"at {', '.join(calls)}"


def derivatives(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    r"""The gradients at each place are the derivatives of its result, for every argument and parameter a.

    In fp64, with random u and v, by a central difference at h = eps^(1/3):

    .. math::
        ⟨∂⟨u, y⟩/∂a, v⟩ = (⟨u, y(a + h v)⟩ - ⟨u, y(a - h v)⟩) / 2h
    """
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    tested: list[str] = []
    for place, call in _calls(model, config, inputs).items():
        if type(call.given[-1]) is not MethodSite:  # it holds tensors of the forward pass
            continue
        with _seeded(0), torch.enable_grad():
            try:
                problem = _wrong_derivative(config, place, call)
            except Exception:  # such as an operation that there is not in fp64
                continue
        if problem:
            return False, f"{place}: {problem}"
        tested.append(place)
    return True, f"at {', '.join(tested)}" if tested else "does not apply: no place runs alone in fp64"


def init_independent(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Init depends only on seed, layer and name, and is independent of order and other adapters."""
    if isinstance(config, MethodConfig):
        first, *others = [method_site(site) for site in changed_by(model, config)]
        built = _built(config, first)
        if drawn := _different(built, _built(config, first)):
            return False, f"build() gives {some(drawn)} other values at every call; {_DRAW}"
        if drawn := _different(built, _built(config, first, generator=1)):
            why = f"build() draws {some(drawn)} by a global generator, so values depend on earlier draws"
            return False, f"{why}; {_DRAW}"
        drawn = _different(built, _built(config, first, seed=config.seed + 1))
        layers = [_different(built, _built(config, other)) for other in others]
        if equal := sorted(set.intersection(*(set(drawn) - set(differing) for differing in layers))) if layers else []:
            return False, f"{some(equal)} starts equal in every layer; {_DRAW}"
        random_values = (name for name in built if len({*built[name].flatten()[:99].tolist()}) > 2)
        if equal := sorted(set.intersection(set(random_values), *map(set, layers)) - set(drawn)) if layers else []:
            return False, f"{some(equal)} starts equal with every seed; draw with the seed that build() is given"
    names = ["checked", "other"]
    lora = LoraConfig(r=2, target_modules=attention_modules(model))
    states: list[dict[str, Tensor]] = []
    for order in (1, -1):
        patch(model, [config, lora][::order], names=names[::order])
        added = {name.replace(".base_layer", ""): p for name, p in adapter_parameters(model).items()}
        states.append({name: p.detach().clone() for name, p in added.items() if ".checked." in name})
        unpatch(model)
    equal_names = states[0].keys() == states[1].keys()
    return equal_names and not _different(*states), f"{len(states[0])} tensors, injected before and after a LoRA"


class _Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no type for it
    """Records each tensor that is computed, and the floating-point dtype of the fewest digits in which one is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self.dtype, self.made = dtype, list[TensorWeakRef]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        dtypes = [x.dtype for x in tensors if x.is_floating_point()]
        self.dtype = max([self.dtype, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)
        self.made += map(TensorWeakRef, tensors)
        return out


def _calls(model: Any, config: MethodConfig, inputs: Inputs) -> dict[str, Call]:
    """Run the model with the method and return the first call at each place where the method acts."""
    calls: dict[str, Call] = {}

    def record(self: MethodConfig, place: str, function: Callable[..., Tensor], parts: Any, *arguments: Any) -> Tensor:
        if place in calls:
            with _Computed(arguments[0].dtype) as computed:
                result = function(self, parts, *arguments)
            calls[place].made.extend(computed.made)
            return result
        held, process, copied = _held(self, parts), _process(), copy.deepcopy(nn.ModuleDict(parts))
        given = tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)
        space = inspect.unwrap(function).__globals__
        module = _sized(space)
        with _Computed(arguments[0].dtype) as computed:
            result = function(self, parts, *arguments)
        tensors = [(a, b) for a, b in zip(given, arguments, strict=True) if isinstance(a, Tensor)]
        left = [what for what, value in _process().items() if value != process[what]]
        left += [name for name, value in _held(self, parts).items() if not _is_same(held.get(name), value)]
        in_place = not all(torch.equal(a, b) for a, b in tensors)
        in_module = [name for name, value in _sized(space).items() if not _is_same(module.get(name), value)]
        calls[place] = Call(given, copied, result.dtype, computed.dtype, in_place, left, in_module, computed.made)
        return result

    original = {place: getattr(type(config), place) for place in config.acts_at()}
    with perturbed(model, config):
        for place, function in original.items():
            setattr(type(config), place, partialmethod(record, place, function))
        try:
            logits(model, inputs)
        finally:
            for place, function in original.items():
                setattr(type(config), place, function)
    return calls


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python for a while."""
    ours, numpy_s = random.getstate(), _NUMPY.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _NUMPY.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(ours)
        _NUMPY.random.set_state(numpy_s)


def _process() -> dict[str, Any]:
    """Return random states and settings of the process that a method may change by mistake, by name."""
    kind, keys, *numbers = _NUMPY.random.get_state(legacy=True)
    return {
        _TORCH_STATE: torch.get_rng_state().numpy().tobytes(),
        "numpy's random state": (kind, keys.tobytes(), *numbers),
        "Python's random state": random.getstate(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": torch.is_grad_enabled(),
        "the hooks of all modules": _has_any_global_hook(),  # type: ignore[no-untyped-call]  # torch has no type for it
    }


def _held(config: MethodConfig, parts: Any) -> dict[str, Any]:
    """Return what a configuration and its parts hold, by name: tensors by value, attributes with their sizes."""
    modules = nn.ModuleDict(parts)
    tensors = {name: tensor.clone() for name, tensor in _tensors(modules).items()}
    attributes = {f"self.{name}": value for name, value in vars(config).items()}
    for path, module in parts.items():
        for name, inner in module.named_modules(prefix=path):
            attributes |= {f"{name}.{key}": value for key, value in vars(inner).items()}
    return {**_sized(attributes), **tensors}


def _sized(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with their sizes: a list that was filled is the same object of another size."""
    return {name: (value, len(value) if isinstance(value, Sized) else 0) for name, value in values.items()}


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return isinstance(before, Tensor) and torch.equal(before, after)
    return before is not None and before[0] is after[0] and before[1] == after[1]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, unsaved ones too."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _unregistered(parts: nn.ModuleDict) -> list[str]:
    """Return the names of attributes with tensors or modules that no module of the parts has registered."""
    registered = {id(value) for value in (*parts.modules(), *parts.parameters(), *parts.buffers())}
    return [
        f"{path}.{name}"
        for path, module in parts.named_modules()
        for name, value in vars(module).items()
        if any(id(leaf) not in registered for leaf in tree_leaves(value) if isinstance(leaf, Tensor | nn.Module))
    ]


def _wrong_derivative(config: MethodConfig, place: str, call: Call) -> str | None:
    """Return how the gradient for an argument or a parameter differs from its derivative; None if none does."""
    parts = call.parts.double()
    arguments = [x.double().requires_grad_() if isinstance(x, Tensor) else x for x in call.given]
    called = inspect.signature(getattr(config, place)).bind(parts, *arguments).arguments
    tensors = {name: value for name, value in called.items() if isinstance(value, Tensor)}
    variables = {**tensors, **dict(parts.named_parameters())}

    def value() -> Tensor:
        result: Tensor = getattr(config, place)(dict(parts.items()), *arguments)
        return result

    with _Computed(torch.float64) as computed:
        result = value()
    u, dtype = torch.randn_like(result), computed.dtype
    if dtype not in _TOLERANCES:
        return None  # a defect of its own, see results()
    gradients = torch.autograd.grad((u * result).sum(), list(variables.values()), allow_unused=True)
    step, size = torch.finfo(dtype).eps ** (1 / 3), float((u * result).detach().abs().sum())
    for (name, variable), gradient in zip(variables.items(), gradients, strict=True):
        v = torch.randn_like(variable) * variable.detach().square().mean().sqrt()
        with torch.no_grad():
            plain, sums = variable.clone(), []
            for h in (step, -step):
                variable.copy_(plain + h * v)
                sums.append(float((u * value()).sum()))
            variable.copy_(plain)
        expected, actual = (sums[0] - sums[1]) / (2 * step), 0.0 if gradient is None else float((gradient * v).sum())
        if abs(actual - expected) > _TOLERANCES[dtype] * (max(abs(actual), abs(expected)) + 1e-3 * size):
            return f"the gradient for {name} is {actual:.3g} where the result's derivative is {expected:.3g}"
    return None


def _built(config: MethodConfig, site: MethodSite, *, generator: int = 0, seed: int | None = None) -> dict[str, Tensor]:
    with _seeded(generator):
        return _tensors(config.build(site, config.seed if seed is None else seed))


def _different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if name not in b or a[name].shape != b[name].shape or not torch.equal(a[name], b[name])]
