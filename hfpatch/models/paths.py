"""Observing f of each query path, and its anchor, while a model from scratch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hfpatch.nn.anchors import IdentityAnchoredQuery, WeightAnchoredQuery
from hfpatch.nn.mixed import MixedProjection


@dataclass(frozen=True)
class PathOutput:
    """What one path of one layer computed in a forward pass.

    Attributes:
        at: where its projection is in the model.
        target: ``query``, ``key`` or ``value``.
        x: the input of the projection, ``(batch, seq, hidden)``.
        f: f(x), or xW of a residual path, ``(batch, seq, out)``.
        anchor: A(x), to which f is added: x itself, or x W_Q with its bias, ``(batch, seq, out)``.
    """

    at: str
    target: str
    x: Tensor
    f: Tensor
    anchor: Tensor


@dataclass(frozen=True)
class QueryPath:
    """One query path with an f.

    Attributes:
        at: where its projection is in the model.
        target: ``query``, ``key`` or ``value``.
        projection: the projection that holds it.
        path: the path.
    """

    at: str
    target: str
    projection: MixedProjection
    path: IdentityAnchoredQuery | WeightAnchoredQuery


def query_paths_with_f(model: nn.Module) -> list[QueryPath]:
    """Return the query paths of a model from :func:`hfpatch.models.build_scratch` that have an f; others have none."""
    return [
        QueryPath(name, target, module, path)
        for name, module in model.named_modules()
        if isinstance(module, MixedProjection)
        for target, path in module.paths.items()
        if isinstance(path, IdentityAnchoredQuery | WeightAnchoredQuery) and path.f is not None
    ]


@contextmanager
def observed(model: nn.Module, observe: Callable[[PathOutput], None]) -> Iterator[None]:
    """Call ``observe`` with the outputs of every path in every forward pass, fused or not.

    Args:
        model: see :func:`query_paths_with_f`; left without hooks afterwards.
        observe: called once for each path and forward pass.
    """

    def remember(outputs: dict[str, Tensor], name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[name] = output

    def report(outputs: dict[str, Tensor], query: QueryPath, module: nn.Module, args: Any, output: Tensor) -> None:
        x = args[0]
        observe(PathOutput(query.at, query.target, x, outputs.pop("f"), outputs.pop("anchor", x)))

    with ExitStack() as hooks:
        for query in query_paths_with_f(model):
            f: Any = query.path.f
            is_matrix = isinstance(query.path, IdentityAnchoredQuery) and query.path.is_linear
            last: nn.Module = f if is_matrix else f.norm_out  # whose output is f(x), whether W_1 is fused or not
            outputs = dict[str, Tensor]()
            hooks.callback(last.register_forward_hook(partial(remember, outputs, "f")).remove)
            if isinstance(query.path, WeightAnchoredQuery):
                hooks.callback(query.path.anchor.register_forward_hook(partial(remember, outputs, "anchor")).remove)
            hooks.callback(query.projection.register_forward_hook(partial(report, outputs, query)).remove)
        yield
