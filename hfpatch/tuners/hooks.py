"""The places of an attention branch where a method may act, and the hooks that let it.

An export carries this code, so it does not use PEFT. x is the input of the projections, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import CALLS, quantised_later
from hfpatch.nn.functions import autocast_dtype
from hfpatch.sites.heads import QueryHeads
from hfpatch.sites.layouts import Columns
from hfpatch.tuners.cross_layer import PASSES, Shared, SharingModule
from hfpatch.tuners.hidden_state import argument_names, hidden_argument, replace_first, replace_hidden
from hfpatch.tuners.lookback import Row, known_attention, row_of

PROJECTED = ("query", "key", "value")
PLACES = ("entered", *PROJECTED, "heads", "mixed", "output", "left", "stream")
"""Where a method may act, in the order of a forward pass; see :class:`hfpatch.MethodConfig`."""
ENDS = {"branch": "left", "stream": "stream"}
"""The places at the end of the branch and of the block, by the value of the option ``at`` of methods that use them."""

Parts = Mapping[str, Any]
"""The modules that a method built at a site, by name."""
Modules = Mapping[str, list[nn.Module]]


@dataclass(frozen=True)
class MethodSite:
    """The attention branch that a method acts on, in values that JSON can hold.

    Args:
        layer: index of the block.
        name: that initial values are drawn by, see :func:`hfpatch.nn.normal_`: different for every layer and adapter.
        hidden_size: d, the width of the hidden state.
        columns: the columns of query, key and value in the output of their projection, where they have one.
        heads: the query heads; None where the architecture does not say.
        mixed_size: input width of the output projection; None where there is none.
        output_size: its output width; None where there is none.
        exit_factor: the factor of the branch where the block adds it to the residual stream.
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
        """Values that the adapter shares between the layers of this forward pass, by name.

        Only for methods registered with ``shares=True``. A tensor may lie on another device, and have another dtype,
        than where it is read: use ``.to(v)``. A layer leaves new tensors and changes none in place, so that a
        recomputed block finds the same.

        Raises:
            HfpatchError: outside a forward pass, and on reading a name that no earlier layer wrote.
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
            value: the tensor of the place, or one computed from it, ``(batch, seq, width)``.
            steps: how far to look back, at most the method's ``steps_back()``.

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
        columns = {target: Columns(**numbers) for target, numbers in values["columns"].items()}
        heads = None if values["heads"] is None else QueryHeads(**values["heads"])
        return cls(**{**values, "columns": columns, "heads": heads})


_OF_SITE = tuple(field.name for field in fields(MethodSite))


@dataclass(frozen=True, kw_only=True)
class SiteInCall(MethodSite):
    """The site during one call of a method that looks back.

    Args:
        row: the positions that the tokens of this call may look back at.
        slot: the key of the values in a cache, followed by the number of the question.
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


@dataclass(eq=False)
class Combined:
    """A method whose result at every place is combined with its input: combine(v, act(v))."""

    method: Any
    combine: Callable[[Tensor, Tensor], Tensor]

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.method, name)
        if name not in PLACES:
            return member
        return lambda parts, value, *others: self.combine(value, member(parts, value, *others))

    def takes_autocast(self) -> bool:
        """Return False: what combines may round again."""
        return False


def scaled(method: Any, factor: float) -> Any:
    """Return a method with its change multiplied by a factor."""
    return method if factor == 1 else Combined(method, lambda value, changed: value + factor * (changed - value))


def apply_method(method: Any, place: str, parts: Parts, value: Tensor, *read: Tensor, site: MethodSite) -> Tensor:
    """Return the result of a method for the tensor of a place, in that tensor's dtype.

    It computes in the dtype of its parts at least, or under autocast in autocast's where the tensor and the method
    allow that. Hidden states that it reads beside the tensor come in that dtype.

    Raises:
        HfpatchError: if the linear layers of its parts were quantised.
    """
    # _parameters where a part has some, as parameters() takes longer
    held = [p for part in parts.values() for p in part._parameters.values() or part.parameters() if p is not None]
    if not held and any("quantized" in type(m).__module__ for part in parts.values() for m in part.modules()):
        raise quantised_later()
    dtype = next((p.dtype for p in held if p.is_floating_point()), None)
    is_narrow = autocast_dtype(value.device.type) == value.dtype
    is_offloaded = not value.is_meta and any(p.is_meta for p in held)
    with _onloaded(parts, site.layer) if is_offloaded else nullcontext():
        if dtype is None or (is_narrow and method.takes_autocast()):
            changed: Tensor = getattr(method, place)(parts, value, *read, site)
        else:
            wide = value.to(torch.promote_types(dtype, value.dtype))
            changed = getattr(method, place)(parts, wide, *(x.to(dtype) for x in read), site)
    return changed.to(value.dtype)


@contextmanager
def _onloaded(parts: Parts, layer: int) -> Iterator[None]:
    """Load the weights that accelerate keeps elsewhere: its hooks act when a module is called, and methods read too.

    Raises:
        HfpatchError: if weights are nowhere; torch would compute arbitrary values from them.
    """
    offloaded: list[Any] = [
        module
        for module in nn.ModuleList(parts.values()).modules()
        if hasattr(module, "_hf_hook") and any(p is not None and p.is_meta for p in module._parameters.values())
    ]
    hooked = [module.forward for module in offloaded]
    for module in offloaded:
        module._hf_hook.pre_forward(module)
        module.forward = module._old_forward  # a call would put the weights away
    try:
        if any(parameter.is_meta for part in parts.values() for parameter in part.parameters()):
            raise HfpatchError(
                f"layer {layer}: the adapter's weights have no values; transformers' load_adapter loads none into an "
                "offloaded model: use hfpatch.load_patch or peft.PeftModel.from_pretrained, or load before offloading"
            )
        yield
    finally:
        for module, forward in zip(offloaded, hooked, strict=True):
            module.forward = forward
            module._hf_hook.post_forward(module, None)


class ActingModule(SharingModule):
    """A module that lets its methods act at the places of one attention branch.

    No call leaves anything behind, see :class:`hfpatch.nn.calls.HookedModule`. The hooks of each place follow
    :meth:`act_on`, which registers them, in the order of a forward pass.
    """

    site: MethodSite
    reads_rows = False
    heads_as_projected: bool  # whether the heads are those of the projected query, which passes no norm
    behind_sources: frozenset[str] = frozenset()  # the targets whose projection reads a low-rank image of x

    def acting(self, place: str) -> Iterator[tuple[Any, Parts, MethodSite]]:
        """Yield each method that acts at a place now, in order, with its parts and the site."""
        raise NotImplementedError

    def reads_earlier_positions(self) -> bool:
        """Return whether anything that acts now reads earlier positions of the row."""
        raise NotImplementedError

    def acts(self, place: str) -> bool:
        """Return whether anything acts at a place now."""
        return next(self.acting(place), None) is not None

    def apply_at(self, place: str, value: Tensor, *read: Tensor) -> Tensor:
        """Return the tensor of a place after the methods that act there now, one after the other.

        Args:
            place: one of :data:`PLACES`.
            value: the tensor of the place, as :class:`hfpatch.MethodConfig` describes it.
            read: the hidden state that methods read beside it at this place, if any.
        """
        # A method sees the branch as it joins the residual stream; the block's factor is undone afterwards
        factor = self.site.exit_factor if place == "left" else 1
        for method, parts, site in self.acting(place):
            as_added = value if factor == 1 else value * factor
            changed = apply_method(method, place, parts, as_added, *read, site=site)
            value = changed if factor == 1 else value + (changed - as_added) / factor
        return value

    def in_call(self, site: MethodSite, method: Any, name: str, place: str) -> MethodSite:
        """Return the site for a method that acts at a place now; ``name`` distinguishes the adapters of the method."""
        most = method.steps_back()
        if not most:
            return site
        row = CALLS.look(self, "row") or Row()
        slot = f"{site.name}, {type(method).__name__} {name}, {place}"
        values = {name: getattr(site, name) for name in _OF_SITE}  # torch 2.11 does not compile vars()
        return SiteInCall(**values, row=row, slot=slot, most=most, asked=[])

    def act_on(self, modules: Modules) -> None:
        """Register the hooks.

        One module may have several roles. Its hooks act in the order in which they are registered here: the hook that
        begins a call of the attention first, places in the order of :data:`PLACES`, the hook that ends the call last.

        Args:
            modules: modules of the base by their role, those alone that the methods need: ``norm`` or ``entries``
                (the hidden state), ``query``, ``key``, ``value`` and their ``..._source`` (the projections),
                ``query_norm``, ``mixed`` and ``reader`` (the output projection, and a module called with x before it),
                ``attention`` where one of the two last is kept, ``output`` (the output projection), ``exit`` and
                ``first`` (the first of several entries) for the branch's end, ``block``, and ``row`` (the attention)
                to look back.
        """
        for module in modules.get("row", ()):
            known_attention(module)
            self.reads_rows = True
        calls = modules.get("row") or modules.get("attention") or []
        for module in calls:
            self.before(module, ActingModule._begin_call, argument_names(module))
        for module in modules.get("norm", ()):
            self.after(module, ActingModule._change_returned, "entered")
        for module in modules.get("entries", ()):
            self.before(module, ActingModule._change_input, argument_names(module))
        self.heads_as_projected = self.site.heads is not None and self.site.heads.norm is None
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
            self.after(module, ActingModule._change_returned, "stream")
        for module in calls:
            self.after(module, ActingModule._end_call, always=True)

    # a call of the attention

    def _begin_call(
        self, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        CALLS.keep(self, "attention", True)
        if self.reads_rows and self.reads_earlier_positions():
            CALLS.keep(self, "row", row_of(names, module, args, kwargs))

    def _keep_read(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the hidden state that a module was called with, for the place ``name``."""
        if self.changes(name) and CALLS.look(self, "attention"):  # a projection may be called alone
            CALLS.keep(self, name, args[0])

    def _end_call(self, *call: Any) -> None:
        for role in ("row", "attention"):
            CALLS.take(self, role)

    # entered, at the modules that read the hidden state or at the norm before them; stream, at the block

    def _change_input(
        self, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.acts("entered"):
            return None
        return replace_hidden(names, args, kwargs, self.apply_at("entered", hidden_argument(args, kwargs)))

    def _change_returned(self, place: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        return replace_first(output, partial(self.apply_at, place)) if self.acts(place) else output

    # query, key and value

    def changes(self, target: str) -> bool:
        """Return whether a place, such as query, key or value, is changed now."""
        return self.acts(target) or (target == "query" and self.heads_as_projected and self.acts("heads"))

    def _change_projected(
        self, targets: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor
    ) -> Tensor:
        """Change a projection's output, ``(..., out)``, or in tensor parallelism ``(..., out / processes)``.

        There each process has some rows of the projection's weight W (out, in), one block after the other, and so some
        columns of its output; the input is the same everywhere. Methods treat the columns one by one, so those of other
        processes are zeros here.

        Raises:
            HfpatchError: if the columns of a process are not one block.
        """
        read: dict[str, Tensor] = {}
        for target in targets:
            kept = CALLS.take(self, target)
            if kept is not None or target not in self.behind_sources:  # it may be called alone
                read[target] = args[0] if kept is None else kept

        # Of the columns of all processes, those of others zero
        weight: Any = getattr(module, "weight", None)
        sharded = {dim: shard for dim, shard in enumerate(getattr(weight, "placements", ())) if shard.is_shard()}
        start, width = 0, output.shape[-1]
        if sharded and width != weight.shape[0]:
            ((dim, placement),) = sharded.items()
            if hasattr(placement, "split_factor"):
                raise HfpatchError("tensor parallelism packs the columns of this model's query; run it without --tp")
            start = weight.device_mesh.get_local_rank(dim) * width
            output = F.pad(output, (start, weight.shape[0] - start - width))

        for target, x in read.items():
            if self.changes(target):
                columns = self.site.columns[target]
                value = self.apply_at(target, columns.read(output), x)
                by_head = target == "query" and self.heads_as_projected and self.acts("heads")
                output = columns.write(output, self._by_head(value) if by_head else value)
        return output if output.shape[-1] == width else output[..., start : start + width]

    # heads: of the projected query, or behind the norm that it passes

    def _by_head(self, query: Tensor) -> Tensor:
        """Change the heads ``(batch, seq, heads, size)`` of a query ``(batch, seq, heads·size)``."""
        by_head = query.reshape(*query.shape[:-1], self.site.head_count, -1)
        return self.apply_at("heads", by_head).reshape(query.shape)

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

    # mixed and output: the input and the output of the output projection

    def _change_mixed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, (mixed, *others) = CALLS.take(self, "mixed"), args
        if x is None:
            return None
        self._require_all_heads(mixed)
        return (self.apply_at("mixed", mixed, x), *others), kwargs

    def _change_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        if not self.acts("output"):
            return output
        self._require_all_heads(args[0])  # as the projection has read them
        return self.apply_at("output", output, args[0])

    def _require_all_heads(self, mixed: Tensor) -> None:
        if mixed.shape[-1] != self.site.mixed_size:
            raise HfpatchError(
                f"layer {self.site.layer}: a method that acts at the output projection does not take tensor "
                "parallelism (--tp), in which each process has some heads; leave one of them out"
            )

    # left

    def _keep_entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.acts("left"):
            CALLS.keep(self, "left", hidden_argument(args, kwargs))

    def _change_branch(
        self, outside: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Change the output of an exit, which is the attention or a module ``outside`` of it."""
        if not self.acts("left"):
            return output
        # a forward hook sees the arguments that the pre-hooks replaced
        x = CALLS.take(self, "left") if outside else hidden_argument(args, kwargs)
        return output if x is None else replace_first(output, lambda branch: self.apply_at("left", branch, x))
