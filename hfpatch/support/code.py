"""The hash of functions and classes in memory, and of all code of the user's own that they use.

Files may change after their import, and cells of notebooks have none, so the hash is of bytecode with its names and
constants. Comments, docstrings and formatting do not change it; another version of Python does.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from numbers import Number
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from hfpatch.support.distributions import describe_package
from hfpatch.support.files import sha256_file
from hfpatch.support.provenance import PACKAGES

_SIMPLE = (type(None), Number, str, bytes, range, slice, type(Ellipsis))
_CONTAINERS = (list, dict, OrderedDict, MappingProxyType, set, frozenset)
_FILLING = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear"}
"""Calls that may change a list, a set or a dictionary, which is then a cache and no constant of its module."""
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_SUPER_ATTR")
_GLOBAL, _LOCAL = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_FAST", "LOAD_DEREF")
_LIBRARIES = set(PACKAGES) - {"hfpatch"}
_NO_CODE = {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"}
_NO_CODE |= {"__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__", "_abc_impl"}
_FOLDERS = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
_IMPORTING = {"import_module", "__import__"}
_WRITING = {"write", "writelines", "write_text", "write_bytes", "dump", "save", "savez", "savetxt", "to_csv", "to_json"}
"""Calls whose function may write the files that it names, which are then no input."""
_FILE = re.compile(r"[^\0\n]{0,200}\.\w{1,20}")
_FUNCTION = inspect.CO_OPTIMIZED
_ABSENT = object()


def hash_code(roots: Iterable[Any]) -> str:
    """Return the SHA-256 of the code of functions and classes, in any order, and of the code that it uses.

    Helpers, base classes, constants and files that functions name are followed within the roots' own modules and
    packages, and in all code that is not installed. What a function imports as it runs is imported now, so the hash is
    the same before and after. Other installed packages count by the names that are used, and by version, see
    :func:`hfpatch.support.distributions.describe_package`: their modules change state as they run. The libraries whose
    versions results record count by name alone.

    A list, set or dictionary is a cache, and not hashed, where a function fills it by its name: a global of its module,
    a default of an argument, a variable of the function around it, or a member of its class.

    Not seen are modules whose names are computed as a function runs, and files whose names are.

    Args:
        roots: functions, classes, and values that contain some, such as a partial object or a tuple.
    """
    listing = _Listing(list(roots))
    return hashlib.sha256("\n".join(sorted(listing.lines())).encode()).hexdigest()


class _Listing:
    """A line for each reached function, class and constant; the set of lines does not depend on the order."""

    def __init__(self, roots: list[Any]) -> None:
        self._left, self._visited, self._open = list(roots), set[int](), set[int]()
        homes = {module_of(root) for root in roots} - {"builtins"}
        self._homes = {home for home in homes if home.partition(".")[0] not in _LIBRARIES}
        self._packages = {home.partition(".")[0] for home in self._homes} - set(PACKAGES) - sys.stdlib_module_names
        self._constants: dict[tuple[str, str], str] = {}
        self._assigned: set[tuple[str, str]] = set()  # by running functions, so no constants
        self._lines: set[str] = set()
        self._used: set[str] = set()  # packages
        self._scanned: set[str] = set()  # modules

    def lines(self) -> Iterator[str]:
        while self._left:
            value = self._left.pop()
            if id(value) in self._visited:
                continue
            self._visited.add(id(value))
            followed = self._is_followed(value)
            if followed and isinstance(value, type | FunctionType):
                self._scan(value)
            if isinstance(value, type) and followed:
                self._left += [base for base in value.__mro__[1:] if self._is_followed(base)]
                left_out = _NO_CODE | _filled(vars(value), _functions(value), _ATTRIBUTE)
                members = [(key, self._describe(part)) for key, part in vars(value).items() if key not in left_out]
                described = list(map(self._name, value.__mro__)), sorted(members)
                self._lines.add(f"{_name(value)} {described!r}")
            elif isinstance(value, FunctionType) and followed:
                self._lines.add(f"{_name(value)} {self._function(value)}")
            else:
                self._lines.add(self._describe(value))
        yield from self._lines
        for name, text in self._constants.items():
            if name not in self._assigned:
                yield f"{'.'.join(name)} = {text}"
        for package in (self._used | self._packages) - set(PACKAGES) - sys.stdlib_module_names:
            if _is_library(package):
                yield from describe_package(package, tuple(sys.path))

    def _function(self, function: FunctionType) -> str:
        code, cells = function.__code__, function.__closure__ or ()
        nested = _bodies(code)
        names = {name for body in nested for name in body.co_names}
        module, space = module_of(function), function.__globals__
        stored = [step for body in nested for step in _steps(body) if step.opname.startswith("STORE_")]
        changed = {step.argval for step in stored if step.opname == "STORE_GLOBAL"}
        changed |= _filled(space, [function], _GLOBAL)
        self._assigned |= {(module, name) for name in changed}
        texts = {value for body in nested for value in _constants(body) if isinstance(value, str)}
        modules = [value for name in names if isinstance(value := space.get(name), ModuleType)]
        is_own = not code.co_filename.startswith(_installed(tuple(sys.path)))
        modules += [imported for body in nested for imported in self._imported(body, space, is_own=is_own)]
        for name in names & space.keys():
            if not isinstance(space[name], ModuleType):
                self._constants[module, name] = self._describe(space[name])
        wanted = names | texts if names & {"getattr", *_IMPORTING} else names
        self._members(modules, wanted)
        if not names & _WRITING and module.partition(".")[0] not in PACKAGES:
            self._lines |= set(_files(texts, space.get("__file__")))
        captured, replaced = {}, {step.argval for step in stored if step.opname in ("STORE_FAST", "STORE_DEREF")}
        for name, cell in zip(code.co_freevars, cells, strict=True):
            with suppress(ValueError):  # of an empty cell
                captured[name] = cell.cell_contents
        caches = _filled(captured, [function], _LOCAL)
        bound = [self._describe(captured[key]) for key in captured if key not in caches and captured[key] is not None]
        last = function.__defaults__ or ()
        names_of_last = code.co_varnames[code.co_argcount - len(last) : code.co_argcount]
        given = {**dict(zip(names_of_last, last, strict=True)), **(function.__kwdefaults__ or {})}
        caches = _filled(given, [function], _LOCAL) - replaced
        defaults = sorted((key, self._describe(given[key])) for key in given if key not in caches)
        by_type = vars(function).get("registry")  # of functools.singledispatch, whose code is in no cell
        if isinstance(by_type, MappingProxyType):
            bound.append(self._describe(by_type))
        return repr((_text(code, function.__doc__), bound, defaults))

    def _members(self, modules: list[ModuleType], wanted: set[str]) -> None:
        """Describe the members of a user's modules that a function may use, those of submodules included."""
        for module in modules:  # as it grows
            if not self._is_followed(module):
                self._name(module)
                continue
            lazy = "__getattr__" in vars(module)
            for key in sorted(wanted | {"__getattr__"} if lazy else wanted):
                value = vars(module).get(key, _ABSENT)
                if value is _ABSENT and lazy and not key.startswith("__"):
                    with suppress(Exception):  # whatever the user's code raises
                        value = getattr(module, key)
                if isinstance(value, ModuleType):
                    modules += [value] if all(value is not other for other in modules) else []
                elif value is not _ABSENT:
                    self._constants[module_of(module), key] = self._describe(value)

    def _imported(self, code: CodeType, space: dict[str, Any], *, is_own: bool) -> Iterator[ModuleType]:
        """Yield the modules of the user's own that code imports as it runs, and note the installed packages.

        Code of the user's own has them imported now. An installed package may name modules that it does not need.
        """
        package = str(space.get("__package__") or "")
        for name, parts in _imports(code, space):
            try:
                full = importlib.util.resolve_name(name, package)
            except (ImportError, ValueError):  # beyond the top of the package
                continue
            self._used.add(full.partition(".")[0])
            if _is_library(full):
                continue
            for module in (full, *(f"{full}.{part}" for part in parts)):
                if is_own:
                    with suppress(Exception):  # of a part that is no module, or whatever the user's code raises
                        importlib.import_module(module)
                if module in sys.modules:
                    yield sys.modules[module]

    def _scan(self, value: type | FunctionType) -> None:
        """Note the packages that the module of a class or a function imports."""
        space = getattr(value, "__globals__", None) or getattr(sys.modules.get(value.__module__), "__dict__", {})
        spec = space.get("__spec__")
        if spec is None or module_of(value) in self._scanned:
            return
        self._scanned.add(module_of(value))
        codes: list[Any] = []
        with suppress(AttributeError, ImportError, OSError, SyntaxError):  # of a loader without code
            codes = [_module_code(spec.loader, spec.name)]
        for code in codes:  # as it grows by the bodies of classes, which run as the module does
            codes += [
                const for const in code.co_consts if isinstance(const, CodeType) and not const.co_flags & _FUNCTION
            ]
            for name, _ in _imports(code, space):
                if not name.startswith("."):
                    self._used.add(name.partition(".")[0])

    def _name(self, value: Any) -> str:
        self._used.add(module_of(value).partition(".")[0])
        return _name(value)

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
            return self._name(value)
        if isinstance(value, MethodType):
            return f"{self._describe(value.__func__)} of {self._describe(value.__self__)}"
        if isinstance(value, functools.partial | functools.partialmethod):
            return f"partial {self._describe((value.func, value.args, value.keywords))}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self._describe(value.__func__)}"
        if isinstance(value, property):
            return f"property {self._describe((value.fget, value.fset))}"
        if isinstance(value, functools.cached_property):
            return f"property {self._describe(value.func)}"
        if isinstance(value, BuiltinFunctionType | ModuleType):
            return self._name(value)
        kind = self._name(type(value))
        inner = vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None  # functools.lru_cache
        if inner is not None:
            return f"{kind} {self._describe(inner)}"

        # Data: its type and its values
        if isinstance(value, tuple):
            return f"{kind}{[self._describe(item) for item in value]}"
        if type(value) in _CONTAINERS:
            items = [self._describe(item) for item in (value.items() if isinstance(value, Mapping) else value)]
            return f"{kind}{sorted(items) if isinstance(value, set | frozenset) else items}"
        if isinstance(value, PurePath):
            return f"{kind} {_content_of(Path(value)) or value.name}"
        if isinstance(value, re.Pattern):
            return f"{kind} {value.pattern!r} {value.flags}"
        if isinstance(value, dataclasses.Field):
            return f"{kind} {self._describe((value.default, value.default_factory))}"
        if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
            return repr(value)
        if hasattr(type(value), "tolist"):  # NumPy's and torch's arrays
            return f"{kind} {tuple(value.shape)}" if getattr(value, "is_meta", False) else f"{kind} {value.tolist()}"
        if hasattr(type(value), "extra_repr") and not self._is_followed(type(value)):  # torch's modules
            return f"{kind} {value!r}"
        whole = dataclasses.is_dataclass(value)
        if whole or self._is_followed(type(value)):
            self._describe(type(value))
            held = getattr(value, "__dict__", {})
            return f"{kind}{[(key, self._describe(held[key])) for key in held if whole or _is_plain(held[key])]}"
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
        if file is None and isinstance(value, ModuleType):  # a folder without __init__.py
            file = next(iter(getattr(value, "__path__", ())), None)
        if file is None:  # of a notebook, of no known module, or built in
            functions = vars(value).values() if isinstance(value, type) else ()
            file = next((f.__code__.co_filename for f in functions if isinstance(f, FunctionType)), None)
        return file is not None and not str(file).startswith(_installed(tuple(sys.path)))


@functools.cache
def _installed(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return prefixes of the files of the standard library, of installed packages and of hfpatch."""
    # Without editable installs, which `plugins.is_installed` trusts to run: their code changes under one version.
    targets = {str(Path(entry).absolute()) for entry in path if any(Path(entry).glob("*.dist-info"))}  # pip's --target
    return (*(folder + os.sep for folder in sorted(_FOLDERS | targets)), "<frozen", "<string>")


def _is_library(module: str) -> bool:
    """Return whether a module is part of Python, of hfpatch or of an installed package, or is not found."""
    if module in sys.modules:
        loaded: Any = sys.modules[module]
        paths = [getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", ())), None)]
    else:
        try:
            spec = importlib.util.find_spec(module.partition(".")[0])
        except (ImportError, ValueError):
            return True
        if spec is None or spec.origin in ("built-in", "frozen"):
            return True
        paths = [spec.origin if spec.has_location else None, *(spec.submodule_search_locations or ())]
    return all(str(path).startswith(_installed(tuple(sys.path))) for path in paths if path is not None)


def _imports(code: CodeType, space: dict[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules that code imports, with leading dots where they are relative, and the names out of each.

    Of ``importlib.import_module`` and ``__import__`` the first argument is known where it is a constant.
    """
    done = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "PUSH_NULL")]
    for index, item in enumerate(done):
        if item.opname == "IMPORT_NAME":
            level, parts = done[index - 2].argval, done[index - 1].argval
            yield "." * level + item.argval, parts or ()
        elif index and done[index - 1].argval in _IMPORTING:
            named = space.get(item.argval) if item.opname == "LOAD_GLOBAL" else item.argval
            if item.opname in ("LOAD_CONST", "LOAD_GLOBAL") and isinstance(named, str):
                yield named, ()


@functools.cache
def _module_code(loader: Any, name: str) -> CodeType:
    """Return the code of a module as its file was when this was first asked."""
    code: CodeType = loader.get_code(name)
    return code


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions that a class defines or inherits, with their wrappers and without."""
    members: list[Any] = [member for base in cls.__mro__ for member in vars(base).values()]
    for member in members:  # as it grows
        if isinstance(member, FunctionType):
            yield member
        if isinstance(member, property):
            members += [member.fget, member.fset]
        elif isinstance(member, functools.cached_property | functools.partialmethod):
            members.append(member.func)
        elif isinstance(member, staticmethod | classmethod):
            members.append(member.__func__)
        elif (inner := getattr(member, "__dict__", {}).get("__wrapped__")) is not None:
            members.append(inner)


def _bodies(code: CodeType) -> list[CodeType]:
    """Return code, and that of the functions inside it."""
    nested = [code]
    for body in nested:  # as it grows
        nested += [inner for inner in body.co_consts if isinstance(inner, CodeType)]
    return nested


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield what code does, one local variable at a time: Python 3.13 loads and stores two at once."""
    for step in dis.get_instructions(code):
        parts = re.findall("LOAD_FAST|STORE_FAST", step.opname)
        if len(parts) == 2:
            for name, local in zip(parts, step.argval, strict=True):
                yield step._replace(opname=name, opcode=dis.opmap[name], argval=local)
        elif step.opname != "EXTENDED_ARG":
            yield step


def _filled(values: Mapping[str, Any], functions: Iterable[FunctionType], loads: tuple[str, ...]) -> set[str]:
    """Return the names of the lists, sets and dictionaries that functions may change, where these steps load them."""
    loaded = {step for function in functions for step in _filled_by(function.__code__)}
    names = {name for operation, name in loaded if operation.startswith(loads)}
    return {name for name in names & values.keys() if isinstance(values[name], list | dict | set)}


@functools.cache  # a base's functions are asked for once a class and run
def _filled_by(code: CodeType) -> frozenset[tuple[str, str]]:
    """Return operation and name of what loads the lists, sets and dictionaries that code, or code in it, may change."""
    return frozenset((step.opname, step.argval) for body in _bodies(code) for step in _changed(body))


def _changed(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield what loads a value that code may change: ``a`` of ``a[b] = c`` and ``a.add(b)``.

    In bytecode ``b`` is computed right before the store, and ``a`` before ``b``.
    """
    steps = list(_steps(code))
    for index, step in enumerate(steps):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in _FILLING:
            yield from _loaded(steps, index)
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            end = _before(steps, index) if step.opname == "STORE_SLICE" else index  # which has two bounds
            if steps[end - 1].opname in ("SWAP", "ROT_THREE"):  # a[b] += c, which duplicates a and b first
                names = [step.opname for step in steps[:end]]
                while end > 1 and names[end - 1] != "DUP_TOP_TWO" and names[end - 1 : end + 1] != ["COPY", "COPY"]:
                    end -= 1
                end -= 1
            yield from _loaded(steps, _before(steps, end))


def _loaded(steps: list[dis.Instruction], end: int) -> list[dis.Instruction]:
    """Return what loads the value that the steps before ``end`` compute last, if any: the step of ``a`` in ``a[b]``."""
    while end and (steps[end - 1].opname == "BINARY_SUBSCR" or steps[end - 1].argrepr == "[]"):
        end = _before(steps, end - 1)
    return steps[end - 1 : end]


def _before(steps: list[dis.Instruction], end: int) -> int:
    """Return where the steps begin that compute the last value before ``end``; 0 if one step loads two of them."""
    pushed = 0
    while pushed < 1 and end > 0:
        end -= 1
        pushed += dis.stack_effect(steps[end].opcode, steps[end].arg, jump=False)
    return end if pushed == 1 else 0


def _constants(code: CodeType) -> Iterator[Any]:
    """Yield the constants of code, those in tuples and sets too."""
    left = list(code.co_consts)
    for constant in left:  # as it grows
        left += constant if isinstance(constant, tuple | frozenset) else ()
        yield constant


def _files(texts: Iterable[str], module: str | None) -> Iterator[str]:
    """Yield name and hash of each file that texts name: in the working directory, beside a module, or one below."""
    names = sorted(filter(_FILE.fullmatch, texts))
    folders = [Path(), *([Path(module).parent] if module else [])] if names else []
    with suppress(OSError, ValueError):  # of texts that no path can have
        folders += [inside for folder in folders for text in sorted(texts) if (inside := folder / text).is_dir()]
    for name in names:
        for folder in folders:
            with suppress(OSError, ValueError):
                if content := _content_of(folder / name):
                    yield f"file {content}"


def _content_of(path: Path) -> str:
    """Return the name and the hash of a file; an empty string if there is none."""
    if not path.is_file():
        return ""
    stat = path.stat()
    return f"{path.name} {_sha256(path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)}"


@functools.cache
def _sha256(path: Path, *_: int) -> str:
    return sha256_file(path)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, text and code, at any depth."""
    if isinstance(value, dict):
        return all(_is_plain(part) for part in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, (*_SIMPLE, Enum, type, FunctionType, BuiltinFunctionType, functools.partial))


def _text(code: Any, doc: str | None = None) -> str:
    """Return code without its docstring, its file and its line numbers, or a constant in it."""
    if isinstance(code, frozenset):
        return f"frozenset{sorted(map(_text, code))}"
    if isinstance(code, tuple):
        return f"tuple{[_text(part) for part in code]}"
    if not isinstance(code, CodeType):
        return repr(code)
    constants = [_text(const) for const in code.co_consts]
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
