"""Registration of methods with PEFT from outside; the only file that fills PEFT's mappings.

Methods of other packages are entry points of the group ``hfpatch.methods``, and classes named by their module.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

from hfpatch.errors import HfpatchError
from hfpatch.recipes.sizes import register_size
from hfpatch.support import plugins
from hfpatch.tuners.config import MethodConfig, MethodSpec
from hfpatch.tuners.contracts import checked, require_registrable
from hfpatch.tuners.hooks import PLACES
from hfpatch.tuners.layer import MethodLayer
from hfpatch.tuners.model import MethodModel

Method = TypeVar("Method", bound=type[MethodConfig])

GROUP = "hfpatch.methods"
_BROKEN: dict[str, EntryPoint] = {}
_logger = logging.getLogger(__name__)
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
        prefix: of the names of the method's tensors; ``<name>_`` by default.
        child: name of the method's layer, a child of each attention; ``hfpatch_<name>`` by default.
        label: the name in a sentence; by default the name with spaces.

    Raises:
        HfpatchError: if the name or the class cannot be registered.
    """

    def register(cls: Method) -> Method:
        called, inside = label or name.replace("_", " "), child or f"hfpatch_{name}"
        spec = MethodSpec(name, called, _kind(name.upper()), prefix or f"{name}_", inside, size, shares)
        require_registrable(cls, spec)
        held = _CONFIGS.get(spec.kind)
        if held is not None and (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
            raise HfpatchError(f"method {name!r} is {held.__module__}.{held.__qualname__} already; choose another name")
        for theirs in filter(None, (getattr(config, "spec", None) for config in _CONFIGS.values())):
            if theirs.kind != spec.kind and theirs.child == inside:
                raise HfpatchError(
                    f"method {name!r}: its layer would be called {inside!r}, as that of {theirs.name} is; choose "
                    "another name, or give @hfpatch.method another child"
                )
        for place in PLACES:
            if hasattr(cls, place):
                setattr(cls, place, checked(getattr(cls, place), f"{cls.__name__}.{place}"))
        cls.spec = spec
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                is_initialised = cls().peft_type is not None
        except Exception:  # the method's own checks may refuse a default
            is_initialised = True
        if not is_initialised:
            raise HfpatchError(f"method {name!r}: __post_init__ must call super().__post_init__() first")
        _tell_peft(cls, spec)
        register_size(name, size)
        return cls

    return register


def _tell_peft(cls: Any, spec: MethodSpec) -> None:
    """Make the tuner of a method, and write it where PEFT looks for it."""
    home = {"__module__": cls.__module__, "__doc__": f"The part of PEFT's interface that {cls.__name__} fills."}
    layer = type("Layer", (MethodLayer,), {**home, "__qualname__": f"{cls.__qualname__}.Layer", "method": cls})
    tuner = {**home, "__qualname__": f"{cls.__qualname__}.Model", "prefix": spec.prefix, "tuner_layer_cls": layer}
    cls.Layer, cls.Model = layer, type("Model", (MethodModel,), tuner)  # where pickle looks them up
    kind: Any = spec.kind
    _CONFIGS[kind] = cls
    PEFT_TYPE_TO_TUNER_MAPPING[kind] = cls.Model
    PEFT_TYPE_TO_PREFIX_MAPPING[kind] = spec.prefix


def _kind(value: str) -> Any:
    """Return the member that PEFT's mappings know by this value, or a new one."""
    members = (kind for kind in _CONFIGS if isinstance(kind, MethodType) and kind == value)
    return next(members, None) or MethodType("MethodType", {value: value})[value]  # type: ignore[call-overload]  # an enum made at run time


@functools.cache
def load_plugins() -> None:
    """Import the methods of every installed package that declares some; once in a process.

    An entry point is called as the method and names its class. One that cannot be loaded is a warning, and an error
    where its method is asked for: importing PEFT must not fail for a package that has nothing to do with it.
    """
    for entry in sorted(entry_points(group=GROUP)):
        if getattr(getattr(sys.modules.get(entry.module), "__spec__", None), "_initializing", False):
            continue  # its import has led to this one, and registers the method as it goes on
        try:
            require_method(plugins.load(entry), plugins.where(entry), name=entry.name)
        except HfpatchError as error:
            _BROKEN[entry.name] = entry
            _logger.warning("hfpatch: %s", error)


def require_loaded(name: str) -> None:
    """Raise the error of the entry point that declares a method, if it could not be loaded and still cannot be.

    Raises:
        HfpatchError: naming the entry point.
    """
    if (entry := _BROKEN.get(name)) is not None:
        require_method(plugins.load(entry), plugins.where(entry), name=name)
        del _BROKEN[name]


def require_method(cls: object, where: str, *, name: str | None = None) -> type[MethodConfig]:
    """Return ``cls`` if it is a method, with the name ``name`` if that is given.

    Raises:
        HfpatchError: if it is not; the message begins with ``where``.
    """
    if not (isinstance(cls, type) and issubclass(cls, MethodConfig) and "spec" in vars(cls)):
        raise HfpatchError(
            f"{where} is not a method: put @hfpatch.method(...) on a dataclass below hfpatch.MethodConfig"
        )
    if name not in (None, cls.spec.name):
        raise HfpatchError(f"{where} must be called {cls.spec.name!r}, as its method is")
    return cls
