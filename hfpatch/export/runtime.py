"""A patch as modules that are attached to a model by hooks, from the functions of :mod:`hfpatch.nn`.

:mod:`hfpatch.export.source` copies :class:`Hooked`, with all that it uses of hfpatch, into every exported folder. x is
what a module receives, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.nn.activations import ACTIVATIONS
from hfpatch.nn.anchors import anchor_preserving, anchored
from hfpatch.nn.calls import HookedModule
from hfpatch.nn.nonlinear import nonlinear_map
from hfpatch.nn.norms import NORMS
from hfpatch.nn.preprojection import pre_project
from hfpatch.nn.skip import add_skip
from hfpatch.nn.temperature import scale_heads
from hfpatch.sites.columns import Columns
from hfpatch.sites.heads import QueryHeads
from hfpatch.tuners.hidden_state import hidden_argument, replace_first, replace_hidden


class Matrix(nn.Module):
    """A linear map, which quantisers and adapters for linear layers leave alone."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        return F.linear(x, self.weight, self.bias)


class PreProjectionPart(nn.Module):
    """x~ and, where ``skip`` is set, x~ W_skip of one adapter; see :class:`hfpatch.nn.PreProjection`."""

    def __init__(self, hidden: int, inner: int, activation: str, gated: bool, skip: bool) -> None:
        super().__init__()
        self.up: Any = Matrix(hidden, inner) if inner else None
        self.gate: Any = Matrix(hidden, inner) if gated else None
        self.down: Any = Matrix(inner, hidden) if inner else None
        self.skip: Any = Matrix(hidden, hidden) if skip else None
        self.act = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x to x~, both ``(batch, seq, hidden)``; x itself where the skip is alone."""
        return x if self.up is None else pre_project(x, up=self.up, down=self.down, gate=self.gate, act=self.act)


class PreProjections(HookedModule):
    """Replaces the hidden state that enters an attention by x~, and adds x~ W_skip to the branch where it ends.

    ``factor`` is what the block multiplies the branch with before it adds it.
    """

    def __init__(self, parts: list[dict[str, Any]], factor: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PreProjectionPart(**part) for part in parts)
        self.factor = factor

    def register(self, attention: nn.Module, exit: nn.Module) -> None:
        """Hook into an attention, and into the module whose output joins the residual stream."""
        self.before(attention, PreProjections.replace_input)
        if any(part.skip is not None for part in self.parts):
            if exit is not attention:
                self.after(attention, PreProjections.keep_input)
            self.after(exit, PreProjections.add_skips, exit is not attention)

    def replace_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the hidden state by x~."""
        x = hidden_argument(args, kwargs)
        for part in self.parts:
            x = part(x)
        return replace_hidden(module, args, kwargs, x)

    def keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep x~ for the module where the branch ends."""
        self.keep("x", hidden_argument(args, kwargs))

    def add_skips(
        self, kept: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Add the skips where the branch ends."""
        x = self.take("x") if kept else hidden_argument(args, kwargs)
        return output if x is None else replace_first(output, partial(self.skip, x))

    def skip(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return the branch plus x~ W_skip of every part that has one; all ``(batch, seq, hidden)``."""
        for part in self.parts:
            skip: Any = part.skip
            branch = branch if skip is None else add_skip(branch, x, skip, factor=self.factor)
        return branch


class NonlinearQueryPart(nn.Module):
    """The anchored nonlinear query of one adapter; see :class:`hfpatch.nn.NonlinearProjection`.

    ``columns`` (groups, width, start, length) are those of the projection's output that hold the query.
    """

    def __init__(
        self, hidden: int, rank: int, columns: list[int], activation: str, norms: list[str], anchor: str, form: str
    ) -> None:
        super().__init__()
        self.columns = Columns(*columns)
        self.norm_in = NORMS[norms[0]](hidden)
        self.up: Any = Matrix(hidden, rank)
        self.down: Any = Matrix(rank, self.columns.size)
        self.norm_out = NORMS[norms[1]](self.columns.size)
        self.act, self.anchor, self.form = ACTIVATIONS[activation], anchor, form

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Replace the query in a projection's output ``(batch, seq, groups·width)``; x ``(batch, seq, hidden)``."""
        projected = self.columns.read(output)
        f = nonlinear_map(x, norm_in=self.norm_in, up=self.up, act=self.act, down=self.down, norm_out=self.norm_out)
        if self.form == "preserving":
            return self.columns.write(output, anchor_preserving(projected, f))
        return self.columns.write(output, anchored(x if self.anchor == "identity" else projected, f))


class NonlinearQueries(HookedModule):
    """Replaces columns of a projection's output; where that reads a latent, f reads what enters its ``source``."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(NonlinearQueryPart(**part) for part in parts)

    def register(self, projection: nn.Module, source: nn.Module | None = None) -> None:
        """Hook into the projection and into its source."""
        if source is not None:
            self.before(source, NonlinearQueries.remember)
        self.after(projection, NonlinearQueries.change)

    def remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep x for the projection."""
        self.keep("x", args[0])

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Replace the columns of every part."""
        kept = self.take("x")
        for part in self.parts:
            output = part(args[0] if kept is None else kept, output)
        return output


class Temperatures(HookedModule):
    """Scales the query of each head behind its norm, or in its projection's output; see ``QueryTemperature``.

    ``heads`` (number, path of the norm or None, whether heads come before the sequence there) and ``columns`` (groups,
    width, start, length) say where the heads are.
    """

    def __init__(self, count: int, heads: list[Any], columns: list[int]) -> None:
        super().__init__()
        self.heads, self.columns = QueryHeads(*heads), Columns(*columns)
        self.taus = nn.ParameterList(nn.Parameter(torch.empty(self.heads.count)) for _ in range(count))

    def register(self, module: nn.Module) -> None:
        """Hook into the norm or the projection."""
        self.after(module, Temperatures.change)

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Scale the heads by every τ."""
        query, axis = self.columns.read(output) if self.heads.norm is None else output, -1
        if self.heads.norm is not None:
            axis = self.heads.axis(output, self.columns.size, at="query")
        for tau in self.taus:
            query = scale_heads(query, tau, axis)
        return self.columns.write(output, query) if self.heads.norm is None else query


class Lora(HookedModule):
    """y = xW + scaling · (x A) B for every part. Source: arXiv 2106.09685."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.a = nn.ModuleList(Matrix(part["inputs"], part["rank"]) for part in parts)
        self.b = nn.ModuleList(Matrix(part["rank"], part["outputs"], part["bias"]) for part in parts)
        self.scaling = [part["scaling"] for part in parts]

    def register(self, linear: nn.Module) -> None:
        """Hook into the linear projection."""
        self.after(linear, Lora.change)

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Add every part to the projection's output."""
        x, result = args[0], output
        for a, b, scaling in zip(self.a, self.b, self.scaling, strict=True):
            x = x.to(next(a.parameters()).dtype)
            result = result + b(a(x)) * scaling
        return result.to(output.dtype)


MADE: dict[str, Callable[..., HookedModule]] = {
    "hfpatch_pre": PreProjections,
    "hfpatch_queries": NonlinearQueries,
    "hfpatch_temperatures": Temperatures,
    "hfpatch_lora": Lora,
}


class Hooked:
    """A model with the parts of a patch: every item of ``config.hfpatch`` is a child of the module ``host``."""

    hfpatch_prefix = ""  # of the items' paths, where the model is a part of the one that was patched

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        for item in self.hfpatch_items():
            made = MADE[item["kind"]](**item["options"])
            self.get_submodule(item["host"]).add_module(item["name"], made)  # type: ignore[attr-defined]
        self.hfpatch_hook()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does; quantising puts other modules in the place of those that were hooked."""
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        (loaded[0] if isinstance(loaded, tuple) else loaded).hfpatch_hook()
        return loaded

    def hfpatch_items(self) -> Iterator[dict[str, Any]]:
        """Yield the items of the patch that are inside this model, with their paths from here."""
        start = self.hfpatch_prefix + "." if self.hfpatch_prefix else ""
        for item in self.config.hfpatch:  # type: ignore[attr-defined]
            paths = [item["host"], item["block"], *item["at"]]
            if all(path.startswith(start) for path in paths):
                host, block, *at = (path.removeprefix(start) for path in paths)
                yield {**item, "host": host, "block": block, "at": at}

    def hfpatch_hook(self) -> None:
        """Let every item act on the modules that are now in their places."""
        module = self.get_submodule  # type: ignore[attr-defined]
        for item in self.hfpatch_items():
            part = module(f"{item['host']}.{item['name']}".lstrip("."))
            part.unhook()
            path = f"{item['host']}.{item['name']}".removeprefix(item["block"]).lstrip(".")
            part.hook_into(module(item["block"]), path, partial(part.register, *map(module, item["at"])))
