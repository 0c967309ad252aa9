"""The source of a method's class without what belongs to PEFT."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

BASE = "Method"
"""What a method is a subclass of in the file that it is copied to."""


def stripped(cls: type, called: Collection[str]) -> tuple[str, set[str]]:
    """Return a method's class without decorators, defaults and checks, and the names of its module that it uses.

    The options stay as annotations. Of its functions, those stay that are ``called`` from outside, or used by these.

    Raises:
        ValueError: if its source cannot be read, or it inherits from another method.
    """
    where = f"{cls.__module__}.{cls.__qualname__}"
    if [base.__name__ for base in cls.__bases__] != ["MethodConfig"]:
        raise ValueError(f"{where} is not directly below hfpatch.MethodConfig, so its source cannot be copied")
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of {where} cannot be read ({error}); put the class into a file") from error
    lines, node = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    functions = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    kept = _reached(functions, called)
    parts = [f"class {cls.__name__}({BASE}):"]
    for index, each in enumerate(node.body):
        if index == 0 and isinstance(each, ast.Expr):
            parts.append("\n".join(lines[each.lineno - 1 : each.end_lineno]) + "\n")
        elif isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation):
            parts.append(f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}")
        elif isinstance(each, ast.FunctionDef) and each.name in kept:
            start = min([each.lineno, *(decorator.lineno for decorator in each.decorator_list)])
            parts.append("\n" + "\n".join(lines[start - 1 : each.end_lineno]))
    used = {name for name in functions if name in kept for name in _names(functions[name])}
    return "\n".join(parts), used


def source_file(module: str) -> Path:
    """Return the file of a module.

    Raises:
        ValueError: if it has none.
    """
    loaded = sys.modules.get(module)
    found = getattr(loaded, "__file__", None)
    if loaded is None:
        spec = importlib.util.find_spec(module)
        found = None if spec is None else spec.origin
    if found is None:
        raise ValueError(f"module {module} is in no file, so it cannot be copied; put the method into a file")
    return Path(found)


def _reached(functions: dict[str, ast.FunctionDef], called: Collection[str]) -> set[str]:
    """Return the functions that are called from outside, and those that they use."""
    found: set[str] = set()
    left = functions.keys() & set(called)
    while left:
        found |= left
        used = {each.attr for name in left for each in ast.walk(functions[name]) if isinstance(each, ast.Attribute)}
        left = (used & functions.keys()) - found
    return found


def _names(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function uses; ``hfpatch`` in an annotation is none."""
    found = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
    body = {each.id for part in function.body for each in ast.walk(part) if isinstance(each, ast.Name)}
    return found - ({"hfpatch"} - body)
