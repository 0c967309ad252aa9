"""Checks of a method's class and of the results of its functions; each mistake is one line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from peft import PeftConfig
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, nearest, one_line
from hfpatch.tuners.config import MethodConfig, MethodSpec, option_types
from hfpatch.tuners.hooks import PLACES, MethodSite
from hfpatch.tuners.options import require_option_type

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ARGUMENTS = {
    "build": "site, seed",
    "entered": "parts, x, site",
    "query": "parts, q, x, site",
    "key": "parts, k, x, site",
    "value": "parts, v, x, site",
    "heads": "parts, q, site",
    "mixed": "parts, a, x, site",
    "output": "parts, o, a, site",
    "left": "parts, branch, x, site",
    "stream": "parts, h, site",
}
_SHARED = {"layers_to_transform", "seed"}  # a method may give these another default
_CHECKED = "_hfpatch_checked"  # on functions that check their results already
_PART_KEYS = {"type", "match"}  # of a part in a recipe


def require_registrable(cls: Any, spec: MethodSpec) -> None:
    """Refuse a class that is no method, or one that PEFT or a recipe would take for something else.

    Raises:
        HfpatchError: naming the method and the fix.
    """
    where = f"method {spec.name!r}"
    if not _NAME.fullmatch(spec.name):
        raise HfpatchError(f"{where}: use lowercase letters, digits and '_', such as output_gate")
    if not (isinstance(cls, type) and issubclass(cls, MethodConfig) and "__dataclass_fields__" in vars(cls)):
        raise HfpatchError(f"{where}: {cls!r} is no dataclass below hfpatch.MethodConfig; put @dataclass under @method")
    if spec.prefix in spec.child:  # transformers takes the first match for the adapter's place
        raise HfpatchError(f"{where}: child={spec.child!r} must not contain the prefix {spec.prefix!r}")
    options = {field.name: field for field in dataclasses.fields(cls)}
    if spec.size is not None and spec.size not in options:
        raise HfpatchError(f"{where}: size={spec.size!r} is not one of its options")

    # Its options: no name may have another meaning, and every type can be checked and saved as JSON
    inherited = set(dir(MethodConfig)) | {field.name for field in dataclasses.fields(PeftConfig)} | {"spec"}
    classes = [kind for kind in cls.__mro__ if kind not in MethodConfig.__mro__]
    declared = {name for kind in classes for name in inspect.get_annotations(kind)}
    for name in sorted(declared):
        meaning = "is a place" if name in PLACES else "is a key of a recipe's part" if name in _PART_KEYS else ""
        if not meaning and name in inherited - _SHARED:
            meaning = "means something to every method"
        if meaning:
            raise HfpatchError(f"{where}: an option cannot be called {name!r}, which {meaning}; choose another name")
    if not_loaded := [name for name, option in options.items() if name in declared and not option.init]:
        raise HfpatchError(
            f"{where}: {not_loaded[0]!r} is a field with init=False, which cannot be loaded again; assign it in "
            "__post_init__ without declaring it"
        )
    if passed := declared & set(inspect.signature(cls).parameters) - options.keys():
        raise HfpatchError(f"{where}: {min(passed)!r} is an InitVar, which cannot be saved; make it an option")
    try:
        for name, hint in option_types(cls).items():
            require_option_type(name, hint)
    except NameError as error:
        raise HfpatchError(f"{where}: the type of an option must be known in its module: {error}") from error
    except HfpatchError as error:
        raise HfpatchError(f"{where}: {error}") from error

    # Its functions
    if not (acts := [place for place in PLACES if hasattr(cls, place)]):
        raise HfpatchError(f"{where} acts nowhere: define one of {', '.join(PLACES)}")
    for name in ("build", *acts):
        function, arguments = getattr(cls, name), _ARGUMENTS[name]
        if not isinstance(function, types.FunctionType):
            raise HfpatchError(f"{where}: {name} must be a function, {name}(self, {arguments})")
        signature = inspect.signature(function)
        try:
            signature.bind("self", *arguments.split(", "))
        except TypeError:
            raise HfpatchError(f"{where}: {name}{signature} must take (self, {arguments})") from None
    for name, function in vars(cls).items():
        hint = "" if name in _ARGUMENTS else nearest(name, PLACES, cutoff=0.8)
        if hint and isinstance(function, types.FunctionType) and "parts" in inspect.signature(function).parameters:
            raise HfpatchError(
                f"{where}: {name} is not a place, so nothing calls it{hint}; a helper needs another name"
            )


def checked(function: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """Return the function of a method's place, which checks the type, shape and device of its results.

    An export, which has the class's own source, checks nothing.
    """
    if hasattr(function, _CHECKED):
        return function

    @functools.wraps(function)
    def call(self: MethodConfig, parts: Any, value: Tensor, *others: Any) -> Tensor:
        result = function(self, parts, value, *others)
        if not isinstance(result, Tensor):
            hint = "; does it lack a return?" if result is None else ""
            raise HfpatchError(f"{name} must return a tensor, not {type(result).__name__}{hint}")
        if result.shape != value.shape:
            raise HfpatchError(f"{name} returned {tuple(result.shape)} where it was given {tuple(value.shape)}")
        if result.device != value.device:
            raise HfpatchError(f"{name} returned a tensor on {result.device} where it was given one on {value.device}")
        if not result.is_floating_point():
            raise HfpatchError(f"{name} returned {result.dtype} where it was given {value.dtype}")
        return result

    setattr(call, _CHECKED, True)
    return call


def require_parts(config: MethodConfig, sites: Sequence[MethodSite]) -> set[str]:
    """Return the names of a method's parts at all of its sites.

    Raises:
        HfpatchError: if it cannot be built, or PEFT cannot keep its parts, naming the method and the mistake.
    """
    where, has_parameters, names = f"{config.spec.name}: build()", False, set[str]()
    for site in sites:
        try:
            parts: Any = config.build(site, config.seed)
        except (HfpatchError, MemoryError):
            raise
        except RuntimeError as error:
            if "meta" not in str(error).lower():  # of the machine
                raise
            raise HfpatchError(
                f"{where} reads the value of a tensor: {one_line(error)}; it is called on the meta device first, where "
                "tensors have shapes alone"
            ) from error
        except Exception as error:  # a mistake in the method
            raise HfpatchError(f"{where} failed at layer {site.layer}: {one_line(error)}") from error
        if not isinstance(parts, nn.ModuleDict):
            raise HfpatchError(f"{where} must return an nn.ModuleDict with parameters, not {type(parts).__name__}")
        parameters = dict(parts.named_parameters())
        if not config.spec.shares and not parameters:
            raise HfpatchError(f"{where} must return an nn.ModuleDict with parameters; {list(parts)} have none")
        if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
            raise HfpatchError(f"{where}: {frozen[0]} requires no gradient, but PEFT trains every one; use a buffer")
        has_parameters |= bool(parameters)
        names.update(parts)
    if not has_parameters:
        layers = "the only layer" if len(sites) == 1 else f"any of the {len(sites)} layers"
        raise HfpatchError(f"{config.spec.name} has no parameters in {layers} that it would change; it needs more")
    return names


def require_adapter_name(name: str, tensors: Iterable[str], parts: Iterable[str] = ()) -> None:
    """Refuse the name of an adapter that is a part of the names of other tensors, for which PEFT takes it.

    Args:
        name: the adapter's name.
        tensors: names of the model's own parameters.
        parts: names of modules that hold the adapter's tensors.

    Raises:
        HfpatchError: naming it.
    """
    of_model = {part for tensor in tensors for part in tensor.split(".")} | {"base_model", "model"}  # a PeftModel's
    for whose, taken in (("the model's own", of_model), ("PEFT's own", {*parts})):
        if name in taken:
            raise HfpatchError(
                f"adapter name {name!r} is a part of {whose} names, from which PEFT would remove it, and lose tensors "
                "when it saves the adapter; choose another"
            )


def require_usable(config: MethodConfig, names: Iterable[str]) -> None:
    """Refuse places where a method has no function, and a prefix of tensors that names of the model contain.

    Raises:
        HfpatchError: naming the method, and the places or a parameter.
    """
    places: Any = config.acts_at()
    defined = [place for place in PLACES if hasattr(config, place)]
    wrong = isinstance(places, str) or not isinstance(places, Collection)  # an iterator would be used up
    if wrong or not places or not set(places) <= set(defined):
        raise HfpatchError(f"{config.spec.name}: acts_at() must return some of {tuple(defined)}, not {places!r}")
    prefix = config.spec.prefix  # PEFT would take such a tensor for the adapter's
    taken = [name for name in names if prefix in name and f".{config.spec.child}." not in f".{name}"]
    if taken:
        raise HfpatchError(
            f"{config.spec.name}: its tensors begin with {prefix!r}, which the model's {taken[0]} contains; give "
            "@hfpatch.method another prefix"
        )
