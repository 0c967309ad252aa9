"""The hash of the code behind functions and classes: the user's own sources, and the versions of packages."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from hfpatch.support.distributions import describe_package
from hfpatch.support.files import sha256_file
from hfpatch.support.provenance import PACKAGES

_FOLDERS = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
_FILE = re.compile(r"[^\0\n]{1,200}\.\w{1,20}")
_IMPORTING = ("import_module", "__import__")
_WRITING = {"write", "writelines", "write_text", "write_bytes", "dump", "save", "savez", "savetxt", "to_csv", "to_json"}
"""A function that calls one of these may write the files that it names, which are then no input."""
_FIXED = (type(None), bool, int, float, str, bytes, tuple, frozenset)
_DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_CODE = (
    type,
    FunctionType,
    MethodType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partial,
)


def hash_code(roots: Iterable[Any]) -> str:
    """Return the SHA-256 of values, in any order, and of the code of the functions and classes in them.

    Of the file of a function or a class count the definitions that it names, at any depth, with the numbers and texts
    of the globals in them, all statements that define nothing, and the files beside it that these name; of each file
    outside installed packages that these import, at the top or in a function, all of it; of a package, all its files.
    Comments, docstrings and formatting do not count. Installed packages count by version, see
    :func:`hfpatch.support.distributions.describe_package`, and the libraries whose versions results record do not
    count. A closure counts with the functions, classes, numbers and texts that it holds.

    Code without a file, such as a cell of a notebook, counts by its bytecode, with the functions, classes and constants
    of its module that it names.

    A source is read at its first hash after each import of its module: it may change while its code is in use. Not seen
    are modules and files whose names are computed, and computed lists and dictionaries.

    Args:
        roots: functions, classes, and values that contain some, such as a partial object or a tuple.
    """
    code = _Code()
    described = sorted(map(code.describe, roots))
    return hashlib.sha256("\n".join([*described, *sorted(code.lines())]).encode()).hexdigest()


class _Code:
    """The files, the packages and the code without a file that functions and classes lead to."""

    def __init__(self) -> None:
        spaces = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        self._spaces = {space["__file__"]: space for space in spaces if space.get("__file__")}  # of loaded files
        self._roots: dict[Path, set[str]] = {}  # and the names of their functions and classes
        self._files: list[Path] = []  # that count whole
        self._packages: set[str] = set()
        self._without_file: dict[int, str] = {}
        self._open: set[int] = set()  # functions and classes that are being described
        self._installed = _installed(tuple(sys.path))

    def lines(self) -> Iterator[str]:
        """Yield a line for each file, for each package, and for each function and class without a file."""
        lines: dict[Path, tuple[set[str], list[str]]] = {}
        while left := [file for file, names in self._roots.items() if file not in lines or lines[file][0] != names]:
            for file in left:  # a constant may lead to a further file, or to another name in one
                names = set(self._roots[file])
                lines[file] = names, list(self._lines_of(file, names))
        for _, described in lines.values():
            yield from described
        for file in self._files:  # as it grows
            source = _read(file, self._spaces.get(str(file), {}).get("__spec__"))
            yield f"{file.name} {[part.tree for part in source.parts]}"
            yield from _files_read(source.parts, file)
            self._follow_all(source, file)
        for package in self._packages:
            yield from describe_package(package, tuple(sys.path))
        yield from self._without_file.values()

    def _lines_of(self, file: Path, names: set[str]) -> Iterator[str]:
        """Yield what names of a file reach in it."""
        space = self._spaces.get(str(file), {})
        source = _read(file, space.get("__spec__"))
        reached = source.reached(names)
        used = {name for part in reached if part.name for name in part.names} - source.assigned
        values = {name: space[name] for name in used if _is_constant(name, space.get(name, ...))}
        yield f"{file.name} {[part.tree for part in reached]} {self.describe(sorted(values.items()))}"
        yield from _files_read(reached, file)
        self._follow_all(source, file)

    def describe(self, value: Any) -> str:
        """Return a value as text that is equal in all processes, and note the code in it."""
        if isinstance(value, type):
            return self._note(value)
        if isinstance(value, FunctionType):
            return f"{self._note(value)} {self._bound(value)}"
        if isinstance(value, MethodType):
            return f"{self.describe(value.__func__)} of {self.describe(value.__self__)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self.describe(value.__func__)}"
        if isinstance(value, functools.cached_property):
            return f"property {self.describe(value.func)}"
        if isinstance(value, property):
            return f"property {self.describe((value.fget, value.fset))}"
        if isinstance(value, functools.partial):
            return f"partial {self.describe((value.func, value.args, value.keywords))}"
        if isinstance(value, Mapping):
            return f"{{{self._all(part for item in value.items() for part in item)}}}"
        if isinstance(value, list | tuple):
            return f"[{self._all(value)}]"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.describe, value)))}}}"
        if isinstance(value, BuiltinFunctionType | ModuleType):
            return value.__name__
        kind = self._note(type(value))
        if (wrapped := getattr(value, "__dict__", {}).get("__wrapped__")) is not None:  # of functools.lru_cache
            return f"{kind} {self.describe(wrapped)}"
        if is_dataclass(value):
            return f"{kind} {self.describe(vars(value))}"
        text = repr(value)
        return kind if " at 0x" in text else f"{kind} {text}"

    def _bound(self, function: FunctionType) -> str:
        """Return the code and constants that a function took from the one around it, such as what a decorator wraps."""
        if id(function) in self._open:  # it calls itself
            return ""
        self._open.add(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        text = self._all(cell for cell in cells if isinstance(cell, (*_CODE, *_FIXED)))
        self._open.discard(id(function))
        return text

    def _all(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.describe, values))

    def _note(self, value: type | FunctionType) -> str:
        """Note where the code of a function or a class is, and return its name."""
        module = str(value.__module__)
        name = f"{Path(module).name}.{value.__qualname__}"  # lm-eval names a task's module by its path
        if isinstance(value, FunctionType):
            space, file = value.__globals__, value.__code__.co_filename
        else:
            space = vars(sys.modules[module]) if module in sys.modules else {}
            file = str(space.get("__file__"))
        if file.startswith(self._installed) or (file == "None" and module in sys.stdlib_module_names):
            self._packages |= _to_describe(module)
        elif Path(file).is_file():
            self._spaces[file] = space
            code = getattr(value, "__code__", None)
            # functools.wraps changes the other name; Python 3.10 has this one alone
            qualname = getattr(code, "co_qualname", value.__qualname__)
            self._roots.setdefault(Path(file), set()).add(qualname.partition(".")[0])
            if isinstance(value, type) and id(value) not in self._open:
                self._open.add(id(value))
                name = f"{name} {self._all(_lent(value))}"
                self._open.discard(id(value))
        elif id(value) not in self._without_file:
            self._without_file[id(value)] = ""  # in case it names itself
            self._without_file[id(value)] = f"{name} {self._content(value)}"
        return name

    def _content(self, value: type | FunctionType) -> str:
        """Return the code and the constants of a function or a class without a file."""
        if isinstance(value, type):
            members = [(name, item) for name, item in sorted(vars(value).items()) if isinstance(item, _CODE)]
            members += [(name, item) for name, item in sorted(vars(value).items()) if _is_constant(name, item)]
            return self._all([value.__mro__[1:], members])
        named = {name: value.__globals__.get(name) for name in sorted(_names(value.__code__))}
        for name in (item.__name__ for item in named.values() if isinstance(item, ModuleType)):
            self._follow(name, Path())
        used = [(name, item) for name, item in named.items() if isinstance(item, _CODE) or _is_constant(name, item)]
        return f"{_text(value.__code__)} {self._all([value.__defaults__, value.__kwdefaults__, used])}"

    def _follow_all(self, source: _Source, file: Path) -> None:
        for name in source.imports:
            self._follow(name, file)

    def _follow(self, name: str, file: Path) -> None:
        """Note the files, or the package, of a module that a file imports; leading dots count from its folder."""
        if name.startswith("."):
            above = list(file.parents)[len(name) - len(name.lstrip(".")) - 1 :]
            files = list(above[0].rglob("*.py")) if above else []
        else:
            top = name.partition(".")[0]
            try:
                spec = importlib.util.find_spec(top)  # to look deeper would import the package
            except (ImportError, ValueError):
                return
            paths = list((spec and spec.submodule_search_locations) or ())
            if spec is not None and spec.has_location and spec.origin and not paths:
                paths = [spec.origin]
            if not paths or f"{paths[0]}{os.sep}".startswith(self._installed):
                self._packages |= _to_describe(top)
                return
            files = [file for path in map(Path, paths) for file in (path.rglob("*.py") if path.is_dir() else [path])]
        self._files += sorted(set(files) - set(self._files))


@functools.cache
def _installed(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return prefixes of the files of the standard library, of installed packages and of hfpatch."""
    # Without editable installs, which `plugins.is_installed` trusts to run: their code changes under one version.
    targets = {str(Path(entry).absolute()) for entry in path if any(Path(entry).glob("*.dist-info"))}  # pip's --target
    return (*(folder + os.sep for folder in sorted(_FOLDERS | targets)), "<frozen")


def _to_describe(module: str) -> set[str]:
    """Return the package of a module, unless it is Python's or its version is in the results."""
    return {module.partition(".")[0]} - set(PACKAGES) - sys.stdlib_module_names


class _Part(NamedTuple):
    """A statement at the top of a file: the name that it defines, if any, its tree, and the names and texts in it."""

    name: str
    tree: str
    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


class _Source(NamedTuple):
    """A file as it was at an import."""

    parts: Sequence[_Part]
    imports: Sequence[str] = ()  # with leading dots where they are relative
    assigned: frozenset[str] = frozenset()  # globals that functions assign, so no constants

    def reached(self, names: Iterable[str]) -> list[_Part]:
        """Return what names use, at any depth, with what defines nothing."""
        left, reached = ["", *names], set[str]()
        for name in left:  # as it grows
            if name not in reached:
                reached.add(name)
                left += [further for part in self.parts if part.name == name for further in part.names]
        return [part for part in self.parts if part.name in reached]


_SOURCES: dict[Path, tuple[Any, _Source]] = {}
"""Each file that was read, and the import that it was read for."""


def _read(file: Path, spec: Any) -> _Source:
    kept, source = _SOURCES.get(file, (None, None))
    if source is None or kept is not spec:
        source = _parsed(file.read_bytes())
        _SOURCES[file] = spec, source
    return source


def _parsed(content: bytes) -> _Source:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # no Python: compiled code
        return _Source([_Part("", hashlib.sha256(content).hexdigest())])
    imports, assigned = list[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | _DEFINITION):
            node.body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _IMPORTING:
            imports += [
                part.value for part in node.args[:1] if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
        elif isinstance(node, ast.Global):
            assigned.update(node.names)
    return _Source(list(map(_part, tree.body)), imports, frozenset(assigned))


def _part(statement: ast.stmt) -> _Part:
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    name = statement.name if isinstance(statement, _DEFINITION) else ""
    return _Part(name, ast.dump(statement), frozenset(names), frozenset(texts))


def _files_read(parts: Iterable[_Part], file: Path) -> Iterator[str]:
    """Yield name and hash of each file beside or below a source that its parts name, but for parts that write."""
    texts = {text for part in parts if not part.names & _WRITING for text in part.texts if _FILE.fullmatch(text)}
    for text in sorted(texts):
        if (file.parent / text).is_file():
            yield f"file {text} {sha256_file(file.parent / text)}"


def _lent(cls: type) -> list[FunctionType | type]:
    """Return the functions and classes that a class was given from outside its statement, and those it inherits."""
    members = [item for item in vars(cls).values() if isinstance(item, FunctionType | type)]
    return [item for item in members if not item.__qualname__.startswith(f"{cls.__qualname__}.")] + [*cls.__mro__[1:]]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_constant(name: str, value: Any) -> bool:
    return isinstance(value, _FIXED) and not name.startswith("__")


def _names(code: CodeType) -> set[str]:
    """Return the global names and the attributes that code uses, that of nested functions included."""
    nested = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*nested)


def _text(code: Any) -> str:
    """Return code without its file and its line numbers, or a constant in it."""
    if isinstance(code, frozenset):
        return f"{sorted(map(repr, code))}"
    if not isinstance(code, CodeType):
        return repr(code)
    constants = ", ".join(map(_text, code.co_consts))
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_flags} [{constants}]"
