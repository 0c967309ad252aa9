"""The places of an attention branch where a method may act, and the hooks that let it.

An export carries this code, so it knows nothing of PEFT. x is what the projections read, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import CALLS
from hfpatch.sites.heads import QueryHeads
from hfpatch.sites.layouts import Columns
from hfpatch.tuners.cross_layer import PASSES, Shared, SharingModule
from hfpatch.tuners.hidden_state import hidden_argument, replace_first, replace_hidden
from hfpatch.tuners.lookback import Row, known_attention, row_of

PROJECTED = ("query", "key", "value")
PLACES = ("entered", *PROJECTED, "heads", "mixed", "output", "left", "stream")
"""Where a method may act, in the order of a forward pass; see :class:`hfpatch.MethodConfig`."""
ENDS = {"branch": "left", "stream": "stream"}
"""The places of methods that change the end of the branch or of the block, by what their option ``at`` calls it."""

Parts = Mapping[str, Any]
"""The modules that a method built at a site, by name."""
Modules = Mapping[str, list[nn.Module]]


@dataclass(frozen=True)
class MethodSite:
    """What a method knows of the attention branch that it acts on. JSON can hold it.

    Args:
        layer: index of the block.
        name: what initial values are drawn by, see :func:`hfpatch.nn.normal_`: different for every layer and adapter.
        hidden_size: d, the width of the hidden state.
        columns: the columns of query, key and value in the output of their projection, for those that have one.
        heads: the query heads; None where the architecture does not say.
        mixed_size: width of what the output projection reads; None where there is none.
        output_size: width of what it returns; None where there is none.
        exit_factor: what the block multiplies the branch with before it adds it to the residual stream.
        adapter: name of the adapter.
        is_first: whether it is the first layer that the adapter changes.
    """

    layer: int
    name: str
    hidden_size: int
    columns: Mapping[str, Columns]
    heads: QueryHeads | None
    mixed_size: int | None
    output_size: int | None
    exit_factor: float
    adapter: str = ""
    is_first: bool = False

    @property
    def shared(self) -> Shared:
        """What the adapter left in earlier layers of this forward pass, and may leave for later ones, by name.

        Only for methods registered with ``shares=True``. A tensor may lie on another device, and have another dtype,
        than where it is read: use ``.to(v)``. A layer leaves new tensors and changes none in place, so that a
        recomputed block finds the same.

        Raises:
            HfpatchError: outside a forward pass, and where what is read was not written.
        """
        if not PASSES.stack:
            raise HfpatchError(
                "site.shared exists while the whole model runs, for a method registered with shares=True; checkpoint "
                "its blocks by gradient_checkpointing_enable() alone"
            )
        return PASSES.stack[-1].shared.setdefault(self.adapter, Shared())

    def earlier(self, value: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Return ``value`` at 1, 2, ..., ``steps`` positions earlier of the same document, each of its own shape.

        Before the start of a document, and where padding is, they are 0. While decoding, the last values of earlier
        calls come from the model's cache, which beam search reorders.

        Args:
            value: what the method was given at its place, or computed of it, ``(batch, seq, width)``.
            steps: how far to look back, at most what the method declares as its ``steps_back()``.

        Raises:
            HfpatchError: if the method declares none, or the cache cannot keep values.
        """
        if steps == 0:
            return ()
        raise HfpatchError("a method that reads earlier positions has to say how many: define steps_back()")

    def width(self, target: str) -> int:
        """Return the width of ``query``, ``key`` or ``value``, all heads together, or of ``output``."""
        return self.stream_size if target == "output" else self.columns[target].size

    @property
    def stream_size(self) -> int:
        """The width of the branch and of the residual stream, which some attentions read several of side by side."""
        return self.output_size or self.hidden_size

    @property
    def head_count(self) -> int:
        """The number of query heads.

        Raises:
            HfpatchError: if the architecture does not say.
        """
        if self.heads is None:
            raise HfpatchError(f"layer {self.layer}: the architecture does not say how many query heads it has")
        return self.heads.count

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> MethodSite:
        """Return the site that :func:`dataclasses.asdict` made these values of."""
        columns = {target: Columns(**each) for target, each in values["columns"].items()}
        heads = None if values["heads"] is None else QueryHeads(**values["heads"])
        return cls(**{**values, "columns": columns, "heads": heads})


@dataclass(frozen=True, kw_only=True)
class SiteInCall(MethodSite):
    """The site during one call of a method that looks back.

    Args:
        row: what the tokens of this call may look back at.
        slot: what the values are kept by in a cache, with the number of the question behind it.
        most: how many steps back the method declares.
        asked: the questions so far.
    """

    row: Row
    slot: str
    most: int
    asked: list[int]

    def earlier(self, value: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Return earlier values, see :meth:`MethodSite.earlier`."""
        if not 0 <= steps <= self.most:
            raise HfpatchError(f"{self.slot}: steps={steps} of the {self.most} that steps_back() declares")
        self.asked.append(steps)
        return self.row.earlier(f"{self.slot}.{len(self.asked)}", value, steps)


class Combined:
    """A method whose result at every place is combined with what it was given: combine(v, act(v))."""

    def __init__(self, method: Any, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.method, self.combine = method, combine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.method, name)
        return partial(self._act, found) if name in PLACES else found

    def _act(self, function: Any, parts: Parts, value: Tensor, *others: Any) -> Tensor:
        return self.combine(value, function(parts, value, *others))


def scaled(method: Any, factor: float) -> Any:
    """Return a method with its change multiplied by a factor."""
    return method if factor == 1 else Combined(method, lambda value, changed: value + factor * (changed - value))


def through(act: Callable[..., Any], parts: Mapping[str, Any], value: Tensor, *others: Any) -> Tensor:
    """Return ``act(parts, value, *others)``, computed in the dtype of the parts at least, in that of ``value``."""
    dtype = computed_in(parts)
    wide = value if dtype is None else value.to(torch.promote_types(dtype, value.dtype))
    changed: Tensor = act(parts, wide, *others)
    return changed.to(value.dtype)


def as_computed_by(parts: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return x in the dtype of the parts."""
    return x.to(computed_in(parts) or x.dtype)


def computed_in(parts: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the parts, that of the first tensor of floats; None where they have none."""
    for module in parts.values():
        for parameter in module._parameters.values() or module.parameters():  # the latter takes microseconds
            if parameter is not None and parameter.is_floating_point():
                dtype: torch.dtype = parameter.dtype
                return dtype
    return None


def on_all_columns(module: nn.Module, output: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``change(output)`` as if all columns of a projection were here, for the columns that are.

    In tensor parallelism each process has some rows of the projection's weight W (out, in), one block after the other,
    and so some columns of its output; what enters the projection is the same everywhere. ``change`` must treat the
    columns of its argument one by one: those of other processes are zeros.

    Args:
        module: the projection.
        output: what it returned here, ``(..., out)`` or ``(..., out / processes)``.
        change: maps ``(..., out)`` to ``(..., out)``.

    Raises:
        HfpatchError: if the columns of a process are not one block.
    """
    weight: Any = getattr(module, "weight", None)
    places = [(dim, place) for dim, place in enumerate(getattr(weight, "placements", ())) if place.is_shard()]
    width = output.shape[-1]
    if not places or width == weight.shape[0]:
        return change(output)
    ((dim, place),) = places
    if hasattr(place, "split_factor"):
        raise HfpatchError(
            "tensor parallelism packs the columns of this model's query projection; evaluate it without --tp"
        )
    start = weight.device_mesh.get_local_rank(dim) * width
    return change(F.pad(output, (start, weight.shape[0] - start - width)))[..., start : start + width]


class ActingModule(SharingModule):
    """A module that lets its methods act at the places of one attention branch.

    What a method changes comes in the dtype of its parts where the model's is lower, and x in that of the parts; what
    it returns goes back to the model's. No call leaves anything behind, see :class:`hfpatch.nn.calls.HookedModule`.

    Below :meth:`act_on`, which registers the hooks, each place has a section, in the order of a forward pass: a method
    that returns what the place makes of its tensor, and the hooks that call it.
    """

    site: MethodSite
    reads_rows = False
    behind_sources: frozenset[str] = frozenset()  # the targets whose projection reads a low-rank image of x

    def acting(self, place: str) -> Iterator[tuple[Any, Parts, MethodSite]]:
        """Yield what acts at a place now, in order: the method with its options, its parts, and the site."""
        raise NotImplementedError

    def acts(self, place: str) -> bool:
        """Return whether anything acts at a place now."""
        return next(self.acting(place), None) is not None

    def looks_back(self) -> bool:
        """Return whether anything that acts now reads earlier positions of the row."""
        raise NotImplementedError

    def in_call(self, site: MethodSite, method: Any, name: str, place: str) -> MethodSite:
        """Return the site as a method sees it that acts at a place now, ``name`` telling its adapters apart."""
        most = method.steps_back()
        if not most:
            return site
        row = CALLS.look(self, "row") or Row()
        slot = f"{site.name}, {type(method).__name__} {name}, {place}"
        return SiteInCall(**vars(site), row=row, slot=slot, most=most, asked=[])

    def act_on(self, modules: Modules) -> None:
        """Register the hooks.

        One module may have several roles, and its hooks act in the order in which they are registered here: what begins
        a call of the attention is first, what ends it last, and places come in the order of :data:`PLACES`.

        Args:
            modules: modules of the base by their role, those alone that the methods need: ``norm`` or ``entries``
                (the hidden state), ``query``, ``key``, ``value`` and their ``..._source`` (the projections),
                ``query_norm``, ``mixed`` and ``reader`` (the output projection, and what is called with x before it),
                ``attention`` where one of the two last is kept, ``output`` (the output projection), ``exit`` and
                ``first`` (the first of several entries) for the branch's end, ``block``, and ``row`` (the attention)
                to look back.
        """
        for module in modules.get("attention", ()):
            self.before(module, ActingModule._begin_attention)
        for module in modules.get("row", ()):
            known_attention(module)
            self.reads_rows = True
            names = tuple(inspect.signature(type(module).forward).parameters)[1:]
            self.before(module, ActingModule._begin_row, names)
        for module in modules.get("norm", ()):
            self.after(module, ActingModule._change_normed)
        for module in modules.get("entries", ()):
            self.before(module, ActingModule._change_input)
        self.behind_sources = frozenset(target for target in PROJECTED if f"{target}_source" in modules)
        by_projection: dict[nn.Module, list[str]] = {}
        for target in (target for target in PROJECTED if target in modules):
            by_projection.setdefault(modules[target][0], []).append(target)
            for source in modules.get(f"{target}_source", ()):
                self.before(source, ActingModule._keep_read, target)
        for module, targets in by_projection.items():
            self.after(module, ActingModule._change_projected, tuple(targets))
        for module in modules.get("query_norm", ()):
            self.after(module, type(self).scale_normed)
        for module in modules.get("mixed", ()):
            self.before(modules["reader"][0], ActingModule._keep_read, "mixed")
            self.before(module, ActingModule._change_mixed)
        for module in modules.get("output", ()):
            self.after(module, ActingModule._change_output)
        for module in modules.get("first", ()):
            self.after(module, ActingModule._keep_entered)
        for module in modules.get("exit", ()):
            self.after(module, ActingModule._change_branch, "first" in modules)
        for module in modules.get("block", ()):
            self.after(module, ActingModule._change_stream)
        for role in ("row", "attention"):
            for module in modules.get(role, ()):
                self.after(module, ActingModule._forget, role, always=True)

    # a call of the attention

    def _begin_attention(self, *call: Any) -> None:
        CALLS.keep(self, "attention", True)

    def _begin_row(
        self, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.looks_back():
            CALLS.keep(self, "row", row_of(names, module, args, kwargs))

    def _keep_read(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the hidden state that a module was called with, for the place ``name``."""
        if self.changes(name) and CALLS.look(self, "attention"):  # a projection may be called by itself
            CALLS.keep(self, name, args[0])

    def _forget(self, role: str, *call: Any) -> None:
        CALLS.take(self, role)

    # entered

    def entered(self, x: Tensor) -> Tensor:
        """Return what enters the attention ``(batch, seq, hidden)`` in the place of x."""
        for method, parts, site in self.acting("entered"):
            x = through(method.entered, parts, x, site)
        return x

    def _change_normed(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return self.entered(output)

    def _change_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.acts("entered"):
            return None
        return replace_hidden(module, args, kwargs, self.entered(hidden_argument(args, kwargs)))

    # query, key and value

    def changes(self, target: str) -> bool:
        """Return whether what is read at a place, such as query, key or value, is changed now."""
        return self.acts(target) or (target == "query" and self._scales_projected())

    def projected(self, target: str, x: Tensor, value: Tensor) -> Tensor:
        """Return query, key or value ``(batch, seq, out)`` for x and what the projection made of it."""
        for method, parts, site in self.acting(target):
            value = self.projected_by(method, target, parts, x, value, site)
        return self._by_head(value) if target == "query" and self._scales_projected() else value

    def projected_by(
        self, method: Any, target: str, parts: Parts, x: Tensor, value: Tensor, site: MethodSite
    ) -> Tensor:
        """Return what one method makes of a query, key, value or output ``(batch, seq, out)``."""
        return through(getattr(method, target), parts, value, as_computed_by(parts, x), site)

    def read_by(self, target: str, x: Tensor) -> Tensor:
        """Return the hidden state that a projection of x reads: x, or what its low-rank image x was made of."""
        kept = CALLS.look(self, target)
        return x if kept is None else kept

    def _change_projected(
        self, targets: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor
    ) -> Tensor:
        read: dict[str, Tensor] = {}
        for target in targets:
            kept = CALLS.take(self, target)
            if kept is not None or target not in self.behind_sources:  # it may be called by itself
                read[target] = args[0] if kept is None else kept

        def change(every: Tensor) -> Tensor:
            for target, x in read.items():
                if self.changes(target):
                    columns = self.site.columns[target]
                    every = columns.write(every, self.projected(target, x, columns.read(every)))
            return every

        return on_all_columns(module, output, change)

    # heads: of the projected query, or behind the norm that it passes

    def _scales_projected(self) -> bool:
        heads = self.site.heads
        return heads is not None and heads.norm is None and self.acts("heads")

    def _by_head(self, query: Tensor) -> Tensor:
        """Change the heads ``(batch, seq, heads, size)`` of a query ``(batch, seq, heads·size)``."""
        by_head = query.reshape(*query.shape[:-1], self.site.head_count, -1)
        for method, parts, site in self.acting("heads"):
            by_head = through(method.heads, parts, by_head, site)
        return by_head.reshape(query.shape)

    def scale_normed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        """Change the heads behind the norm of the query."""
        heads = self.site.heads
        if heads is None or not self.acts("heads"):
            return output
        axis = heads.axis(output, self.site.width("query"), at=f"layer {self.site.layer}")
        if axis == -1:
            return self._by_head(output)
        heads_last = output.movedim(axis, -2)  # (batch, seq, heads, size)
        return self._by_head(heads_last.flatten(-2)).reshape(heads_last.shape).movedim(-2, axis)

    # mixed and output: what the output projection reads and returns

    def _change_mixed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, (mixed, *others) = CALLS.take(self, "mixed"), args
        if x is None:
            return None
        self._require_all_heads(mixed)
        for method, parts, site in self.acting("mixed"):
            mixed = through(method.mixed, parts, mixed, as_computed_by(parts, x), site)
        return (mixed, *others), kwargs

    def _change_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        if self.acts("output"):
            self._require_all_heads(args[0])  # as the projection has read them
            for method, parts, site in self.acting("output"):
                output = self.projected_by(method, "output", parts, args[0], output, site)
        return output

    def _require_all_heads(self, mixed: Tensor) -> None:
        if mixed.shape[-1] != self.site.mixed_size:
            raise HfpatchError(
                f"layer {self.site.layer}: a method that acts at the output projection does not take tensor "
                "parallelism (--tp), in which each process has some heads; leave one of them out"
            )

    # left

    def left(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return what leaves the branch for x, both ``(batch, seq, hidden)``.

        A method sees the branch as it joins the residual stream; what the block multiplies it with is undone.
        """
        factor = self.site.exit_factor
        for method, parts, site in self.acting("left"):
            read = as_computed_by(parts, x)
            if factor == 1:
                branch = through(method.left, parts, branch, read, site)
            else:
                joining = branch * factor
                branch = branch + (through(method.left, parts, joining, read, site) - joining) / factor
        return branch

    def _keep_entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.acts("left"):
            CALLS.keep(self, "left", hidden_argument(args, kwargs))

    def _change_branch(
        self, outside: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Change what an exit returns, which is the attention or a module ``outside`` of it."""
        if not self.acts("left"):
            return output
        # a forward hook sees the arguments that the pre-hooks replaced
        x = CALLS.take(self, "left") if outside else hidden_argument(args, kwargs)
        return output if x is None else replace_first(output, lambda branch: self.left(branch, x))

    # stream

    def _change_stream(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        def change(hidden: Tensor) -> Tensor:
            for method, parts, site in self.acting("stream"):
                hidden = through(method.stream, parts, hidden, site)
            return hidden

        return replace_first(output, change) if self.acts("stream") else output
