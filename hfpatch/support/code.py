"""The hash of functions and classes in memory, and of all code of the user's own that they use.

Files may change after their import, and cells of notebooks have none, so the hash is of bytecode with its names and
constants. Comments, docstrings and formatting do not change it; another version of Python does.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from hfpatch.support.provenance import PACKAGES

_SIMPLE = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_FILLING = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear"}
"""Calls that may change a list, a set or a dictionary, which is then a cache and no constant of its module."""
_LIBRARIES = set(PACKAGES) - {"hfpatch"}
_NO_CODE = {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"}
_NO_CODE |= {"__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__", "_abc_impl"}
_FOLDERS = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
_FOLDERS |= {str(Path(path).absolute()) for path in sys.path if any(Path(path).glob("*.dist-info"))}  # pip's --target
_INSTALLED = (*(folder + os.sep for folder in sorted(_FOLDERS)), "<frozen", "<string>")
"""Prefixes of the files of the standard library, of installed packages and of hfpatch."""


def hash_code(roots: Iterable[Any]) -> str:
    """Return the SHA-256 of the code of functions and classes, in any order, and of the code that it uses.

    Helpers, base classes and constants are followed within the roots' own modules and packages, and in all code that is
    not installed. Other installed packages, and the libraries whose versions results record, count by name alone: the
    versions identify them, and their modules change state as they run.

    Args:
        roots: functions, classes, and values that contain some, such as a partial object or a tuple.
    """
    listing = _Listing(list(roots))
    return hashlib.sha256("\n".join(sorted(listing.lines())).encode()).hexdigest()


class _Listing:
    """A line for each reached function, class and constant; the set of lines does not depend on the order."""

    def __init__(self, roots: list[Any]) -> None:
        self._left, self._seen, self._open = list(roots), set[int](), set[int]()
        homes = {module_of(root) for root in roots} - {"builtins"}
        self._homes = {home for home in homes if home.partition(".")[0] not in _LIBRARIES}
        self._packages = {home.partition(".")[0] for home in self._homes} - set(PACKAGES) - sys.stdlib_module_names
        self._constants: dict[tuple[str, str], str] = {}
        self._assigned: set[tuple[str, str]] = set()  # by running functions, so no constants
        self._lines: set[str] = set()

    def lines(self) -> Iterator[str]:
        while self._left:
            value = self._left.pop()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            followed = self._is_followed(value)
            if isinstance(value, type) and followed:
                self._left += [base for base in value.__mro__[1:] if self._is_followed(base)]
                members = {name: self._describe(each) for name, each in vars(value).items() if name not in _NO_CODE}
                described = list(map(_name, value.__mro__)), sorted(members.items())
                self._lines.add(f"{_name(value)} {described!r}")
            elif isinstance(value, FunctionType) and followed:
                self._lines.add(f"{_name(value)} {self._function(value)}")
            else:
                self._lines.add(self._describe(value))
        yield from self._lines
        for name, text in self._constants.items():
            if name not in self._assigned:
                yield f"{'.'.join(name)} = {text}"

    def _function(self, function: FunctionType) -> str:
        code, cells = function.__code__, function.__closure__ or ()
        nested = [code]
        for each in nested:  # as it grows
            nested += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        names = {name for each in nested for name in each.co_names}
        done = [item for each in nested for item in dis.get_instructions(each)]
        changed = {item.argval for item in done if item.opname == "STORE_GLOBAL"}
        if names & _FILLING or any(item.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for item in done):
            changed |= {name for name in names if isinstance(function.__globals__.get(name), list | dict | set)}
        module = module_of(function)
        self._assigned |= {(module, name) for name in changed}
        package = str(function.__globals__.get("__package__") or "")
        for name in names:
            known = [function.__globals__[name]] if name in function.__globals__ else []
            known += [sys.modules[each] for each in (name, f"{package}.{name}") if each in sys.modules]
            for value in known:
                if not isinstance(value, ModuleType):
                    self._constants[module, name] = self._describe(value)
                elif self._is_followed(value):  # the members of a user's module that the function may use
                    for key in names & vars(value).keys():
                        if not isinstance(vars(value)[key], ModuleType):
                            self._constants[module_of(value), key] = self._describe(vars(value)[key])
        bound = []
        for cell in cells:
            with suppress(ValueError):  # of an empty cell
                if cell.cell_contents is not None:
                    bound.append(self._describe(cell.cell_contents))
        defaults = [self._describe(value) for value in function.__defaults__ or ()]
        named = sorted((key, self._describe(value)) for key, value in (function.__kwdefaults__ or {}).items())
        return repr((_text(code, function.__doc__), bound, defaults, named))

    def _describe(self, value: Any) -> str:
        """Return a value as text that is equal in all processes; code in it is followed."""
        if isinstance(value, _SIMPLE) or (isinstance(value, Enum) and isinstance(value.value, _SIMPLE)):
            return repr(value)
        if id(value) in self._open:
            return "itself"
        self._open.add(id(value))
        try:
            return self._content(value)
        finally:
            self._open.discard(id(value))

    def _content(self, value: Any) -> str:
        # Code: its name, or the wrapper around it
        if isinstance(value, type | FunctionType):
            if self._is_followed(value):
                self._left.append(value)
            return _name(value)
        if isinstance(value, MethodType):
            return f"{self._describe(value.__func__)} of {_name(type(value.__self__))}"
        if isinstance(value, functools.partial):
            return f"partial {self._describe((value.func, value.args, value.keywords))}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self._describe(value.__func__)}"
        if isinstance(value, property):
            return f"property {self._describe((value.fget, value.fset))}"
        if isinstance(value, functools.cached_property):
            return f"property {self._describe(value.func)}"
        if isinstance(value, BuiltinFunctionType | ModuleType):
            return _name(value)
        kind = _name(type(value))
        inner = vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None  # functools.lru_cache
        if inner is not None:
            return f"{kind} {self._describe(inner)}"

        # Data: its type and its values
        if isinstance(value, tuple):
            return f"{kind}{[self._describe(each) for each in value]}"
        if type(value) in (list, dict, set, frozenset):
            if not _is_plain(value):
                return kind
            items = [self._describe(each) for each in (value.items() if isinstance(value, dict) else value)]
            return f"{kind}{sorted(items) if isinstance(value, set | frozenset) else items}"
        if isinstance(value, re.Pattern):
            return f"{kind} {value.pattern!r} {value.flags}"
        if isinstance(value, dataclasses.Field):
            return f"{kind} {self._describe((value.default, value.default_factory))}"
        if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
            return repr(value)
        if hasattr(type(value), "tolist"):  # NumPy's and torch's arrays
            return f"{kind} {tuple(value.shape)}" if getattr(value, "is_meta", False) else f"{kind} {value.tolist()}"
        whole = dataclasses.is_dataclass(value)
        if whole or self._is_followed(type(value)):
            self._describe(type(value))
            own = getattr(value, "__dict__", {})
            return f"{kind}{[(key, self._describe(own[key])) for key in own if whole or _is_plain(own[key])]}"
        return kind

    def _is_followed(self, value: Any) -> bool:
        module = module_of(value)
        if module in self._homes or module.partition(".")[0] in self._packages:
            return True
        if isinstance(value, FunctionType):
            file: Any = value.__code__.co_filename
        else:
            home = value if isinstance(value, ModuleType) else sys.modules.get(str(getattr(value, "__module__", "")))
            file = getattr(home, "__file__", None)
        if file is None:  # of a notebook, of no known module, or built in
            functions = vars(value).values() if isinstance(value, type) else ()
            file = next((each.__code__.co_filename for each in functions if isinstance(each, FunctionType)), None)
        return file is not None and not str(file).startswith(_INSTALLED)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, text and code, at any depth."""
    if isinstance(value, dict):
        return all(_is_plain(each) for each in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, (*_SIMPLE, Enum, type, FunctionType, BuiltinFunctionType, functools.partial))


def _text(code: Any, doc: str | None = None) -> str:
    """Return code without its docstring, its file and its line numbers, or a constant in it."""
    if isinstance(code, frozenset):
        return f"frozenset{sorted(map(_text, code))}"
    if isinstance(code, tuple):
        return f"tuple{[_text(each) for each in code]}"
    if not isinstance(code, CodeType):
        return repr(code)
    constants = [_text(each) for each in code.co_consts]
    if doc is not None and code.co_consts[:1] == (doc,):
        constants = constants[1:]
    sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    handlers = getattr(code, "co_exceptiontable", b"")
    return repr((code.co_code.hex(), constants, sizes, names, handlers.hex()))


def module_of(value: Any) -> str:
    """Return the name of the module that a value, or its class, is defined in.

    lm-eval names the module of a task's functions by its path; the file's name remains, the same in every folder.
    """
    while isinstance(value, functools.partial):
        value = value.func
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return Path(str(name or type(value).__module__)).name


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return f"{module_of(value)}.{name}"
