"""Where an attention branch joins the residual stream, read in the source of the modules' ``forward``.

Names of modules do not tell: ``post_attention_layernorm`` is before the MLP in some blocks and at the branch's end in
others, and a factor stands in no name at all. So the statements between the attention's call and the sum are followed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from hfpatch.sites.modules import is_linear, unwrapped

SAME = ("to", "contiguous", "float", "type", "type_as", "clone")
"""Methods of a tensor that keep its values."""


@dataclass(frozen=True)
class Branch:
    """The attention's output on its way to the residual stream.

    Args:
        end: path, from the block, of the module that returned it last.
        factor: by which it has been multiplied since then.
        scaled: by what else, position by position, it has been multiplied since then; empty for nothing.
        moved: what has rearranged its positions, so that they are no longer those of the attention's input.
        added: what has been added to it, where what a module reads is followed.
    """

    end: str
    factor: float = 1.0
    scaled: str = ""
    moved: str = ""
    added: str = ""

    def returned_by(self, path: str) -> Branch:
        """Return the branch behind the module at a path."""
        return Branch(path, moved=self.moved)

    @property
    def changed(self) -> str:
        """What keeps a sum at its end from arriving in the residual stream; empty for nothing."""
        return self.moved or self.scaled


class Unclear(Exception):
    """The source is not available, or does what is not followed."""


class _Joined(Exception):
    """The branch has been added to something else."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch


class _Returned(Exception):
    """A function has returned."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


Names = dict[str, Any]
"""What a function's names hold: a :class:`Branch`, a tuple of values, or None for anything else."""
Reads = dict[str, list[Branch | None]]
"""What modules are called with, by path; None for anything else than a branch."""


def follow_branch(block: nn.Module, attention: str, output: str | None = None) -> Branch:
    """Return the branch as it is added to the residual stream.

    Args:
        block: the block.
        attention: path of the attention module, from the block.
        output: path of its output projection, from the block, where that is inside the attention. Where the attention
            adds the residual itself, the branch ends there.

    Raises:
        Unclear: with the reason, if that is not found in the source.
    """
    if output is not None:
        try:
            _Reader(block, (output,)).run(attention)
        except _Joined as joined:
            return joined.branch
        except Unclear:
            pass
    try:
        _Reader(block, (attention,)).run("")
    except _Joined as joined:
        return joined.branch
    raise Unclear(f"{type(block).__name__}.forward does not show where the branch joins the residual stream")


def follow_inputs(attention: nn.Module, *projections: str) -> Iterator[Branch | None]:
    """Yield what each projection inside an attention module reads, as the module's first argument on its way there.

    None if it is also called with something else. ``Branch.end`` is empty where no module is between them.

    Raises:
        Unclear: with the reason, if it is not called in the source.
    """
    reads: Reads = {projection: [] for projection in projections}
    forward = _forward(attention)
    first = _first_argument(getattr(forward, "__func__", forward))
    _Reader(attention, projections, reads=reads).call(forward, "", [], {first: Branch("")})
    for projection, seen in reads.items():
        if not seen:
            raise Unclear(f"{type(attention).__name__}.forward does not call {projection}")
        yield next((read for read in seen if read is None or read.end or read.added), seen[0])


@dataclass
class _Reader:
    """Follows the outputs of the modules ``sources`` (paths from the block) through functions.

    With ``reads`` it follows what those modules are called with instead, and adds it there.
    """

    block: nn.Module
    sources: tuple[str, ...]
    depth: int = 0
    reads: Reads | None = None

    def run(self, at: str) -> Any:
        """Follow the ``forward`` of the module at a path, whose arguments are no branch."""
        return self.call(_forward(self.block.get_submodule(at)), at, [], {})

    def call(self, function: Callable[..., Any], at: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """Follow a function: a method of the module at a path, or a plain one; return what it returns."""
        if self.depth > 8:  # a function that calls itself would be followed without end
            raise Unclear("calls are nested too deeply")
        plain = inspect.unwrap(getattr(function, "__func__", function))
        tree = _definition(plain)
        named = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
        if hasattr(function, "__self__"):
            named = named[1:]
        names: Names = {**dict(zip(named, args, strict=False)), **kwargs}
        inner = _Reader(self.block, self.sources, self.depth + 1, self.reads)
        frame = _Frame(inner, at, getattr(function, "__self__", None), getattr(plain, "__globals__", {}), names)
        try:
            frame.statements(tree.body)
        except _Returned as returned:
            return returned.value
        return None


def _forward(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of a module's class, whatever has been put in its place since."""
    module = unwrapped(module)
    return MethodType(type(module).forward, module)


@functools.cache
def _first_argument(method: Callable[..., Any]) -> str:
    """Return the name of the argument after ``self``."""
    return list(inspect.signature(method).parameters)[:2][-1]


@functools.cache
def _definition(function: Any) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise Unclear(f"the source of {getattr(function, '__qualname__', function)} cannot be read") from error
    if not isinstance(tree, ast.FunctionDef):
        raise Unclear(f"{getattr(function, '__qualname__', function)} is no plain function")
    return tree


@functools.cache
def _constant(node: ast.expr) -> CodeType | None:
    """Return the code of an expression of ``self``'s attributes and constants; None for others."""
    parts = list(ast.walk(node))
    if any(isinstance(p, ast.Call | ast.Subscript) or (isinstance(p, ast.Name) and p.id != "self") for p in parts):
        return None
    if not any(isinstance(part, ast.Attribute | ast.Constant) for part in parts):
        return None
    return compile(ast.Expression(node), "<forward>", "eval")


@functools.cache
def _acts(node: ast.expr) -> bool:
    """Return whether an expression calls or combines anything."""
    return any(isinstance(part, ast.Call | ast.BinOp) for part in ast.walk(node))


@dataclass
class _Frame:
    """One call of a function: what its names hold."""

    reader: _Reader
    at: str
    module: Any
    globals: Mapping[str, Any]
    names: Names

    # statements

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self.assign(target, value)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value))
            case ast.AugAssign():
                operands = self.value(node.target), self.value(node.value)
                self.assign(node.target, self.combined(node.op, *operands, node.target, node.value))
            case ast.Expr():
                self.value(node.value)
            case ast.Return():
                raise _Returned(None if node.value is None else self.value(node.value))
            case ast.If():
                self.choice(node)
            case ast.With() | ast.For() | ast.While() | ast.Try():
                self.statements(node.body)
            case _:  # raise, assert, pass, del, ...: nothing that passes a branch on
                pass

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values = value if isinstance(value, tuple) else (value,)  # the first item of an attention's output
            for index, item in enumerate(target.elts):
                self.assign(item, values[index] if index < len(values) else None)

    def choice(self, node: ast.If) -> None:
        decided = self.known(node.test)
        if decided is not None:
            return self.statements(node.body if decided else node.orelse)
        reads: list[Reads] = [{path: [] for path in self.reader.sources} for _ in range(2)]
        ways = [self.way(body, inside) for body, inside in zip((node.body, node.orelse), reads, strict=True)]
        if self.reader.reads is not None:  # one way may be cross-attention's
            for path, seen in self.reader.reads.items():
                both = [read for way in reads for read in way[path]]
                seen += [read for read in both if isinstance(read, Branch)] or both
        ends = [end for end, _ in ways]
        joined = [end.branch for end in ends if isinstance(end, _Joined)]
        if len(joined) == 2 and joined[0] == joined[1]:
            raise _Joined(joined[0])
        if joined:
            raise Unclear(f"the branch joins the residual stream only if {ast.unparse(node.test)}")
        returned = [end.value for end in ends if isinstance(end, _Returned)]
        if len(returned) == 2 or any(isinstance(value, Branch) for value in returned):
            raise _Returned(next((value for value in returned if value is not None), None))
        going_on = [names for end, names in ways if end is None]
        for name in {name for names in going_on for name in names}:
            self.names[name] = _merged([names.get(name) for names in going_on])
        return None

    def way(self, body: list[ast.stmt], reads: Reads) -> tuple[_Joined | _Returned | None, Names]:
        reader = self.reader if self.reader.reads is None else replace(self.reader, reads=reads)
        frame = replace(self, reader=reader, names=dict(self.names))
        try:
            frame.statements(body)
        except (_Joined, _Returned) as end:
            return end, frame.names
        return None, frame.names

    def known(self, test: ast.expr) -> bool | None:
        """Return what a condition is, where attributes of the module decide it."""
        if isinstance(test, ast.BoolOp):
            parts = [self.known(part) for part in test.values]
            decides = isinstance(test.op, ast.Or)
            if decides in parts:
                return decides
            return None if None in parts else not decides
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.known(test.operand)
            return None if inner is None else not inner
        value = self.constant(test)
        return None if value is _UNKNOWN else bool(value)

    def constant(self, node: ast.expr) -> Any:
        """Return the value of an expression of the module's attributes and constants; ``_UNKNOWN`` for others."""
        code = None if self.module is None else _constant(node)
        if code is None:
            return _UNKNOWN
        try:
            return eval(code, {"self": self.module})
        except (AttributeError, TypeError, ArithmeticError):
            return _UNKNOWN

    # expressions

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name():
                return self.names.get(node.id)
            case ast.Tuple() | ast.List():
                return tuple(self.value(item) for item in node.elts)
            case ast.Subscript():
                return self.item(self.value(node.value), node.slice)
            case ast.BinOp():
                return self.combined(node.op, self.value(node.left), self.value(node.right), node.left, node.right)
            case ast.Call():
                return self.called(node)
            case ast.IfExp():
                decided = self.known(node.test)
                ways = [node.body, node.orelse] if decided is None else [node.body if decided else node.orelse]
                return _merged([self.value(way) for way in ways])
            case ast.Starred() | ast.NamedExpr():
                return self.value(node.value)
            case _ if not _acts(node):
                return None
            case _:  # it passes no branch on, but may call something
                for part in ast.iter_child_nodes(node):
                    for inner in [part.iter] if isinstance(part, ast.comprehension) else [part]:
                        if isinstance(inner, ast.expr):
                            self.value(inner)
                return None

    def item(self, value: Any, index: ast.expr) -> Any:
        if isinstance(value, Branch):
            if isinstance(index, ast.Constant):
                return value if index.value == 0 else None
            return None if isinstance(index, ast.Slice) else replace(value, moved="its positions are sliced")
        if isinstance(value, tuple) and isinstance(index, ast.Constant) and isinstance(index.value, int):
            return value[index.value] if -len(value) <= index.value < len(value) else None
        return None

    def combined(self, op: ast.operator, left: Any, right: Any, a: ast.expr, b: ast.expr) -> Any:
        if isinstance(left, tuple) or isinstance(right, tuple):  # of outputs
            return (*(left if isinstance(left, tuple) else (None,)), None)
        if not isinstance(left, Branch) and not isinstance(right, Branch):
            return None
        branch, other, node = (left, right, b) if isinstance(left, Branch) else (right, left, a)
        if isinstance(other, Branch):
            if self.reader.reads is not None:
                return branch
            raise Unclear("the branch is combined with itself")
        constant = self.constant(node)
        if isinstance(op, ast.Add):
            if isinstance(constant, nn.Parameter | int | float):  # a bias
                return branch
            if self.reader.reads is not None:
                return replace(branch, added=ast.unparse(node))
            raise _Joined(branch)
        if isinstance(op, ast.Mult | ast.Div) and isinstance(constant, int | float):
            if isinstance(op, ast.Mult):
                return replace(branch, factor=branch.factor * constant)
            if branch is left and constant:
                return replace(branch, factor=branch.factor / constant)
        return replace(branch, scaled=f"{ast.unparse(node)} multiplies it")

    def called(self, node: ast.Call) -> Any:
        args = [self.value(arg) for arg in node.args]
        kwargs = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        branch = next((v for v in (*args, *kwargs.values()) if isinstance(v, Branch)), None)
        path = self.path(node.func)
        if path is not None and self.module is not None:
            return self.module_called(path, args, kwargs, branch)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, Branch):
                return owner if name in SAME else replace(owner, moved=f"{name}() rearranges it")
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "self" and self.module is not None:
                method = getattr(self.module, name, None)
                if callable(method) and (branch is not None or self.mentions_source(method)):
                    return self.reader.call(method, self.at, args, kwargs)
        if branch is None:
            return None
        if name in ("dropout", "drop_path"):
            return branch
        if name == "add" and len(args) == 2:
            return self.combined(ast.Add(), args[0], args[1], node.args[0], node.args[1])
        function = self.globals.get(name)
        if isinstance(node.func, ast.Name) and isinstance(function, FunctionType):
            return self.reader.call(function, "", args, kwargs)
        return replace(branch, moved=f"{name}() rearranges it")

    def mentions_source(self, method: Any) -> bool:
        """Return whether a method calls the module that is followed, or one around it."""
        if not hasattr(method, "__func__"):
            return False
        inside = {source.removeprefix(self.at).lstrip(".").split(".")[0] for source in self.reader.sources}
        parts = ast.walk(_definition(inspect.unwrap(method.__func__)))
        return any(isinstance(part, ast.Attribute) and part.attr in inside for part in parts)

    def module_called(self, path: str, args: list[Any], kwargs: Mapping[str, Any], branch: Branch | None) -> Any:
        sources = self.reader.sources
        if path in sources:
            if self.reader.reads is not None:
                read = next(iter((*args, *kwargs.values())), None)
                self.reader.reads[path].append(read if isinstance(read, Branch) else None)
            return Branch(path)
        module = unwrapped(self.reader.block.get_submodule(path))
        if branch is None:
            around = any(source.startswith(f"{path}.") for source in sources)
            return self.reader.call(_forward(module), path, args, kwargs) if around else None
        if isinstance(module, nn.Identity) or "drop" in type(module).__name__.lower():
            return branch.returned_by(path) if branch.scaled or branch.factor != 1 else branch
        # torch's quantised layers hold their weight in a module
        if (not any(module.children()) or is_linear(module)) and len(args) + len(kwargs) == 1:
            return branch.returned_by(path)
        if self.reader.reads is not None:
            return Branch(path)
        value = self.reader.call(_forward(module), path, args, kwargs)
        if isinstance(value, tuple):
            value = next((item for item in value if isinstance(item, Branch)), None)
        if not isinstance(value, Branch):
            raise Unclear(f"{type(module).__name__} does not return the branch")
        return value.returned_by(path) if value.scaled or value.factor != 1 else value

    def path(self, node: ast.expr) -> str | None:
        """Return the path, from the block, of a module that an expression names; None if it names none."""
        parts: list[str] = []
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            elif isinstance(node, ast.Subscript) and isinstance(index := self.constant(node.slice), int):
                parts.append(str(index))
                node = node.value
            else:
                return None
        if node.id != "self" or not parts:
            return None
        module = self.module
        names = self.at.split(".") if self.at else []
        for part in reversed(parts):
            if isinstance(module, nn.ModuleList) and part.startswith("-"):
                part = str(len(module) + int(part))
            module = getattr(module, part, None) if not part.isdigit() else module._modules.get(part)
            if not isinstance(module, nn.Module):
                return None
            names.append(part)
        return ".".join(names)


def _merged(values: list[Any]) -> Any:
    """Return one of the values that a name has after several ways: a changed branch before another one."""
    branches = [value for value in values if isinstance(value, Branch)]
    if branches:
        return next((branch for branch in branches if branch.changed or branch.added), branches[0])
    return next((value for value in values if value is not None), None)


_UNKNOWN = object()
