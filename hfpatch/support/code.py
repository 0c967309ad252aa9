"""The hash of the code behind functions and classes: the user's own sources, and the versions of packages."""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from hfpatch.support.distributions import describe_package, module_paths, python_files
from hfpatch.support.files import sha256_file
from hfpatch.support.provenance import PACKAGES

_FOLDERS = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
_IMPORTING = ("import_module", "__import__")
_WRITING = {"write", "writelines", "write_text", "write_bytes", "dump", "save", "savez", "savetxt", "to_csv", "to_json"}
"""A function that calls one of these may write the files that it names, which are then no input."""
_DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_HOLDERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
}
"""What holds a function, and its attributes that say which."""
_CODE = (type, FunctionType, *_HOLDERS)
_FIXED = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, enum.Enum, re.Pattern)


def hash_code(roots: Iterable[Any]) -> str:
    """Return the SHA-256 of values, in any order, and of the code of the functions and classes in them.

    What counts:

    - A function or a class counts with the file of its source. Of this file count the definitions that it names, at any
      depth, and all statements that run at import: any but definitions, and definitions with a decorator from the
      user's code, which may register them. Comments, docstrings, formatting and the order of definitions and imports
      do not count.
    - A name in these definitions counts with the number, text, function or class that it is bound to now, and a
      function with those in its closure and its defaults; lists, dictionaries and other values that code may fill do
      not count, nor does what functions assign, nor where a folder is.
    - Files that these definitions name count, if they are beside or below the source and not written by them; so do
      absolute paths, except in /proc.
    - Files that a source imports, at the top or in a function, count whole; of a package, all its files.
    - Installed packages count by version, see :func:`hfpatch.support.distributions.describe_package`, and the libraries
      whose versions results record do not count.
    - Code without a file, such as a cell of a notebook, counts by its bytecode, with the values that it names.

    A source is read at its first hash after each import of its module: it may change while its code is in use. Not seen
    are modules and files whose names are computed, and computed lists and dictionaries.

    Args:
        roots: functions, classes, and values that contain some, such as a partial object or a tuple.
    """
    code = _Code()
    described = sorted(map(code.describe, roots))
    return hashlib.sha256("\n".join([*described, *sorted(code.lines())]).encode()).hexdigest()


class _Code:
    """The definitions, files and packages that functions and classes lead to."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[str, Any]] = {}  # of the files that were noted
        self._installed = _installed(tuple(sys.path))
        self._named: list[tuple[Path, str]] = []  # files, and names that are defined at the top of them
        self._whole: list[Path] = []  # files that are imported
        self._followed: set[Path] = set()  # and what they are in
        self._packages: set[str] = set()
        self._lines: dict[int, str] = {}  # of classes, and of functions without a file
        self._open: set[int] = set()  # functions that are being described

    @functools.cached_property
    def _loaded(self) -> dict[str, dict[str, Any]]:
        """The namespaces of all files that are loaded, of which there are thousands."""
        spaces = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        return {space["__file__"]: space for space in spaces if space.get("__file__")}

    def describe(self, value: Any) -> str:
        """Return a value as text that is equal in all processes, and note the code in it."""
        if isinstance(value, type):
            return self._describe_class(value)
        if isinstance(value, FunctionType):
            return self._describe_function(value)
        for kind, attributes in _HOLDERS.items():
            if isinstance(value, kind):
                return f"{kind.__name__} {self._all(getattr(value, name) for name in attributes)}"
        if isinstance(value, Mapping):
            return f"{{{self._all(part for item in value.items() for part in item)}}}"
        if isinstance(value, list | tuple):
            return f"[{self._all(value)}]"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.describe, value)))}}}"
        if isinstance(value, BuiltinFunctionType | ModuleType):
            return value.__name__
        kind_name = self.describe(type(value))
        if (wrapped := getattr(value, "__dict__", {}).get("__wrapped__")) is not None:  # of functools.lru_cache
            return f"{kind_name} {self.describe(wrapped)}"
        if is_dataclass(value):
            return f"{kind_name} {self._all((item.name, getattr(value, item.name, None)) for item in fields(value))}"
        text = repr(value)
        return kind_name if " at 0x" in text else f"{kind_name} {text}"

    def _all(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.describe, values))

    def _describe_class(self, cls: type) -> str:
        """Return the name of a class; what it was given counts in a line."""
        space = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        name, file = _full_name(cls), str(space.get("__file__"))
        if file.startswith(self._installed) or (file == "None" and cls.__module__ in sys.stdlib_module_names):
            self._packages |= _to_describe(cls.__module__)
        elif id(cls) not in self._lines:
            self._lines[id(cls)] = ""  # in case it leads to itself
            members = _constants(sorted(vars(cls).items()))
            if Path(file).is_file():
                self._note(Path(file), space, cls.__qualname__)
                # Its constants count as they are written: a class may count its instances
                members = [(key, item) for key, item in members if isinstance(item, _CODE)]
            self._lines[id(cls)] = f"{name} {self.describe([cls.__mro__[1:], members])}"
        return name

    def _describe_function(self, function: FunctionType) -> str:
        """Return the name of a function, with what it took from the code around it and what it wraps."""
        name, code, space = _full_name(function), function.__code__, function.__globals__
        if id(function) in self._open:  # it leads to itself
            return name
        assigned: Set[str] = set()
        if code.co_filename.startswith(self._installed):
            self._packages |= _to_describe(str(space.get("__name__")))  # functools.wraps changes __module__
        elif (file := Path(code.co_filename)).is_file():
            if hasattr(code, "co_qualname") or "__wrapped__" not in vars(function):
                self._note(file, space, getattr(code, "co_qualname", function.__qualname__))
            elif file not in self._whole:  # Python 3.10 does not say which definition made it
                self._whole.append(file)
            assigned = self._read(file).assigned
        else:
            name = f"{name} {_text(code)}"
            if id(function) not in self._lines:
                self._lines[id(function)] = ""  # in case it leads to itself
                named = [(key, space[key]) for key in sorted(_names(code)) if key in space]
                self._lines[id(function)] = f"{name} {self.describe(_constants(named))}"
                for module in (item for _, item in named if isinstance(item, ModuleType)):
                    self._follow(module.__name__, Path())
        held = list(zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        held += [("default", item) for item in function.__defaults__ or ()]
        held += (function.__kwdefaults__ or {}).items()
        wrapped = [vars(function).get(key) for key in ("__wrapped__", "registry")]  # of wraps and singledispatch
        self._open.add(id(function))
        text = self.describe([_constants(held, assigned), wrapped])
        self._open.discard(id(function))
        return f"{name} {text}"

    def _note(self, file: Path, space: dict[str, Any], name: str) -> None:
        """Note a name at the top of a file, and what runs at its import, which has none."""
        self._spaces[str(file)] = space
        self._named += [pair for pair in ((file, ""), (file, name.partition(".")[0])) if pair not in self._named]

    def lines(self) -> Iterator[str]:
        """Yield a line for each definition, for each file and package, and for each class and code without a file."""
        for file, name in self._named:  # as it grows
            source, space = self._read(file), self._spaces[str(file)]
            parts = [part for part in source.parts if part.name == name]
            used = sorted({key for part in parts for key in part.used if key in space})
            values = _constants([(key, space[key]) for key in used], source.assigned)
            yield f"{file.name} {name} {[part.tree for part in parts]} {self.describe(values)}"
            yield from _files_read(parts, file)
            for further in sorted({key for part in parts for key in part.words} & {part.name for part in source.parts}):
                self._note(file, space, further)
            for module in source.imports if not name else ():
                self._follow(module, file)
        for file in self._whole:  # as it grows
            source = self._read(file)
            yield f"{file.name} {[part.tree for part in sorted(source.parts, key=lambda part: part.name)]}"
            yield from _files_read(source.parts, file)
            for module in source.imports:
                self._follow(module, file)
        for package in self._packages:
            yield from describe_package(package, tuple(sys.path))
        yield from self._lines.values()

    def _read(self, file: Path) -> _Source:
        spec = (self._spaces.get(str(file)) or self._loaded.get(str(file), {})).get("__spec__")
        kept, source = _SOURCES.get(file, (None, None))
        if source is None or kept is not spec:
            source = _parsed(file)
            _SOURCES[file] = spec, source
        return source

    def _follow(self, module: str, file: Path) -> None:
        """Note the files, or the package, of a module that a file imports."""
        paths = _own_paths(module, file)
        files = {file for path in set(paths) - self._followed for file in python_files(path)}
        self._followed.update(paths)
        self._whole += sorted(files.difference(self._whole))
        if not paths:
            self._packages |= _to_describe(module)


@functools.cache
def _installed(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return prefixes of the files of the standard library, of installed packages and of hfpatch."""
    # Without editable installs, which `plugins.is_installed` trusts to run: their code changes under one version.
    targets = {str(Path(entry).absolute()) for entry in path if any(Path(entry).glob("*.dist-info"))}  # pip's --target
    return (*(folder + os.sep for folder in sorted(_FOLDERS | targets)), "<frozen")


def _to_describe(module: str) -> set[str]:
    """Return the package of a module, unless it is Python's or its version is in the results."""
    return {module.partition(".")[0]} - set(PACKAGES) - sys.stdlib_module_names


def _own_paths(module: str, file: Path) -> list[Path]:
    """Return the files and folders that a file's import may run; none if no such module exists or it is installed."""
    if module.startswith("."):  # leading dots count from the file's folder
        return list(file.parents)[len(module) - len(module.lstrip(".")) - 1 :][:1]
    paths = module_paths(module.partition(".")[0])  # to look deeper would import the package
    return [] if paths and f"{paths[0]}{os.sep}".startswith(_installed(tuple(sys.path))) else paths


class _Part(NamedTuple):
    """A statement at the top of a file.

    Attributes:
        name: what it defines or imports; empty for what runs at import, which counts without being named.
        tree: the statement without docstrings.
        used: the names in a definition, whose values count.
        words: the names, attributes and texts in the statement, which may name further definitions.
        files: the texts that may name files that it reads.
    """

    name: str
    tree: str
    used: Set[str] = frozenset()
    words: Set[str] = frozenset()
    files: Set[str] = frozenset()


class _Source(NamedTuple):
    """A file as it was at an import."""

    parts: Sequence[_Part]
    imports: Sequence[str] = ()  # with leading dots where they are relative
    assigned: Set[str] = frozenset()  # by functions outside themselves, so no constants


_SOURCES: dict[Path, tuple[Any, _Source]] = {}
"""Each file that was read, and the import that it was read for."""


class _Computing(ast.NodeTransformer):
    """Leaves out docstrings, other constants that stand alone and ``pass``, and imports one name a statement."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        return None

    def visit_Import(self, node: ast.Import) -> list[ast.Import]:
        return [ast.Import([alias]) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.ImportFrom]:
        return [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]


def _parsed(file: Path) -> _Source:
    content = file.read_bytes()
    try:
        tree = _Computing().visit(ast.parse(content))
    except (SyntaxError, ValueError):  # no Python: compiled code
        return _Source([_Part("", hashlib.sha256(content).hexdigest())])
    imports: dict[str, None] = {}
    modules: dict[str, str] = {}  # of the names that are imported
    assigned = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            alias = node.names[0]
            module = alias.name if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
            imports[module] = None
            modules[_bound(alias)] = module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _IMPORTING:
            texts = [part.value for part in node.args[:1] if isinstance(part, ast.Constant)]
            imports |= dict.fromkeys(text for text in texts if isinstance(text, str))
        elif isinstance(node, ast.Global | ast.Nonlocal):
            assigned.update(node.names)
    parts = list[_Part]()
    for statement in tree.body:
        name = ""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            name = _bound(statement.names[0])
        elif isinstance(statement, _DEFINITION):
            decorators = [re.split(r"\W", ast.unparse(decorator))[0] for decorator in statement.decorator_list]
            is_own = [head not in modules or bool(_own_paths(modules[head], file)) for head in decorators]
            name = "" if any(is_own) else statement.name  # its own decorator may register it
        parts.append(_part(name, statement))
    times = Counter(part.name for part in parts)
    parts = [part if times[part.name] == 1 else part._replace(name="") for part in parts]  # their order decides
    return _Source(parts, list(imports), assigned)


def _bound(alias: ast.alias) -> str:
    """Return the name that an import binds; none for ``*``."""
    return alias.asname or alias.name.partition(".")[0].strip("*")


def _part(name: str, statement: ast.stmt) -> _Part:
    names, texts = _words(statement)
    functions = [node for node in ast.walk(statement) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    words_of_each = [_words(node) for node in functions] or [(names, texts)]
    written = {text for called, named in words_of_each if called & _WRITING for text in named}
    used = names if isinstance(statement, _DEFINITION) else set()
    return _Part(name, ast.dump(statement), used, names | texts, texts - written)


def _words(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names and attributes in a statement, and the texts in it."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names, {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _files_read(parts: Iterable[_Part], file: Path) -> Iterator[str]:
    """Yield name and hash of each readable file that the parts of a source name, but for the system's own state."""
    texts = sorted({text for part in parts for text in part.files if 0 < len(text.encode(errors="replace")) < 200})
    folders = [text for text in texts if os.path.isdir(file.parent / text)]  # noqa: PTH112  not is_dir, which raises
    for path in (Path(folder, text) for folder in ("", *folders) for text in texts):
        is_file = os.path.isfile(file.parent / path) and os.access(file.parent / path, os.R_OK)  # noqa: PTH113
        if is_file and not path.is_relative_to("/proc"):
            yield f"file {path.as_posix()} {sha256_file(file.parent / path)}"


def _full_name(value: type | FunctionType) -> str:
    return f"{Path(str(value.__module__)).name}.{value.__qualname__}"  # lm-eval names a task's module by its path


def _content(cell: CellType) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ...


def _constants(items: Iterable[tuple[str, Any]], assigned: Set[str] = frozenset()) -> list[tuple[str, Any]]:
    """Return the names that stay bound to the same code or constant, on every machine: no folders."""
    return [
        (name, item)
        for name, item in items
        if isinstance(item, (*_CODE, *_FIXED)) and name not in assigned and not name.startswith("__")
        if not (isinstance(item, str) and Path(item).is_absolute())
    ]


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
