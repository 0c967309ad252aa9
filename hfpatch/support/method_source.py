"""The source of a method's class without what belongs to PEFT."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import TypeGuard

BASE = "Method"
"""What a method is a subclass of in the file that it is copied to."""


def standalone_source(cls: type, called: Collection[str]) -> tuple[str, set[str]]:
    """Return a method's class without decorators, defaults and checks, and the names of its module that it uses.

    The options stay as annotations. Of its functions, constants and classes, those stay that are ``called`` from
    outside, or used by these.

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
    options = {ast.unparse(each.target) for each in node.body if _is_option(each)}
    members = {name: each for each in node.body if not _is_option(each) for name in _member_names(each)}

    # The members that are called from outside, and those that they use
    left = members.keys() & set(called)
    if "__post_init__" in members:  # kept where it computes more than the options, which are saved as it left them
        nodes = [each for each in ast.walk(members["__post_init__"]) if isinstance(each, ast.Attribute)]
        if {each.attr for each in nodes if isinstance(each.ctx, ast.Store)} - options:
            left.add("__post_init__")
    kept: set[str] = set()
    while left:
        kept |= left
        used_by = [each for name in left for each in ast.walk(members[name])]
        names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in used_by}
        left = (names & members.keys()) - kept

    parts = [f"class {cls.__name__}({BASE}):"]
    for index, each in enumerate(node.body):
        if index == 0 and isinstance(each, ast.Expr):
            parts.append("\n".join(lines[each.lineno - 1 : each.end_lineno]) + "\n")
        elif _is_option(each):
            parts.append(f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}")
        elif kept & {*_member_names(each)}:
            start = min([each.lineno, *(decorator.lineno for decorator in getattr(each, "decorator_list", ()))])
            blank = "" if isinstance(each, ast.Assign | ast.AnnAssign) else "\n"
            parts.append(blank + "\n".join(lines[start - 1 : each.end_lineno]))
    used = {name for member in kept for name in _names(members[member])}
    return "\n".join(parts), used


def _is_option(node: ast.stmt) -> TypeGuard[ast.AnnAssign]:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


def _member_names(node: ast.stmt) -> list[str]:
    """Return the names of a function, a class or a constant of a class."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


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


def _names(member: ast.stmt) -> set[str]:
    """Return the names that a member uses; ``hfpatch`` in an annotation of a function is none."""
    found = {each.id for each in ast.walk(member) if isinstance(each, ast.Name)}
    parts = member.body if isinstance(member, ast.FunctionDef) else [member]
    body = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
    return found - ({"hfpatch"} - body)
