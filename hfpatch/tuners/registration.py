"""Registration of methods with PEFT from outside; the only file that fills PEFT's mappings."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

from hfpatch.errors import HfpatchError
from hfpatch.recipes.sizes import register_size
from hfpatch.tuners.config import MethodConfig, MethodSpec
from hfpatch.tuners.contracts import check_results, require_initialised, require_registrable
from hfpatch.tuners.layer import MethodLayer
from hfpatch.tuners.model import MethodModel

Method = TypeVar("Method", bound=type[MethodConfig])

_CONFIGS: dict[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING  # keyed by members of PEFT's own, closed enumeration


class MethodType(str, enum.Enum):
    """The ``peft_type`` of a method: an enumeration of one member for each method.

    PEFT's own enumeration is closed, but its mappings take any ``str`` enumeration whose members' names equal their
    values: a member hashes and compares as the string in ``adapter_config.json``.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _kind, (self.value,)


def method(
    name: str,
    *,
    size: str | None = None,
    shares: bool = False,
    prefix: str | None = None,
    child: str | None = None,
    label: str | None = None,
) -> Callable[[Method], Method]:
    """Register a :class:`hfpatch.MethodConfig` as a method, for PEFT, recipes and everything else in hfpatch.

    Use it above ``@dataclass``. A class of the same name and module is replaced, so that a notebook's cell can run
    again.

    Args:
        name: the method's name in recipes and reports, in lower case; in capitals it is the ``peft_type``.
        size: the option that ``match: NAME`` solves for: a whole number from 1 on with which the parameter count grows.
        shares: whether its layers share tensors within a forward pass, by ``site.shared``. Some of them may then have
            no parameters.
        prefix: what the names of the method's tensors begin with; ``<name>_`` by default.
        child: name of the method's layer, a child of each attention; ``hfpatch_<name>`` by default.
        label: the name in a sentence; by default the name with spaces.

    Raises:
        HfpatchError: if the name or the class cannot be registered.
    """

    def register(cls: Method) -> Method:
        called, inside = label or name.replace("_", " "), child or f"hfpatch_{name}"
        spec = MethodSpec(name, called, _kind(name.upper()), prefix or f"{name}_", inside, size, shares)
        require_registrable(cls, spec)
        _require_free(cls, spec)
        check_results(cls)
        cls.spec = spec
        require_initialised(cls)
        home = {"__module__": cls.__module__, "__doc__": f"The part of PEFT's interface that {cls.__name__} fills."}
        layer = type("Layer", (MethodLayer,), {**home, "__qualname__": f"{cls.__qualname__}.Layer", "method": cls})
        tuner = {**home, "__qualname__": f"{cls.__qualname__}.Model", "prefix": spec.prefix, "tuner_layer_cls": layer}
        made: Any = cls
        made.Layer, made.Model = layer, type("Model", (MethodModel,), tuner)  # where pickle looks them up
        kind: Any = spec.kind
        _CONFIGS[kind] = cls
        PEFT_TYPE_TO_TUNER_MAPPING[kind] = made.Model
        PEFT_TYPE_TO_PREFIX_MAPPING[kind] = spec.prefix
        register_size(name, size)
        return cls

    return register


def _kind(value: str) -> Any:
    """Return the member that PEFT's mappings know by this value, or a new one."""
    known = (kind for kind in _CONFIGS if isinstance(kind, MethodType) and kind == value)
    return next(known, None) or MethodType("MethodType", {value: value})[value]  # type: ignore[call-overload]


def _require_free(cls: Any, spec: MethodSpec) -> None:
    """Refuse a name that PEFT or another method has, for the method or for its layer."""
    other = _CONFIGS.get(spec.kind)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise HfpatchError(
            f"method {spec.name!r} is {other.__module__}.{other.__qualname__} already; choose another name"
        )
    for known in _CONFIGS.values():
        theirs = getattr(known, "spec", None)
        if theirs is not None and theirs.kind != spec.kind and theirs.child == spec.child:
            raise HfpatchError(
                f"method {spec.name!r}: its layer would be called {spec.child!r}, as that of {theirs.name} is; choose "
                "another name, or give @hfpatch.method another child"
            )
