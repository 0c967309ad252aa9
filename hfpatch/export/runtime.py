"""The parts of a patch in plain torch, attached to a model by hooks.

This file and ``hfpatch/nn/calls.py`` are copied into every exported folder, so they import nothing but torch. The
mathematics is that of ``hfpatch.nn`` and of PEFT's LoRA; x is what a module receives, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.nn.calls import HookedModule

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": torch.relu,
    "relu2": lambda x: torch.square(torch.relu(x)),
    "silu": F.silu,
    "identity": lambda x: x,
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rmsnorm": lambda size: nn.RMSNorm(size, eps=1e-5),
    "layernorm": lambda size: nn.LayerNorm(size, eps=1e-5, bias=False),
    "none": lambda size: nn.Identity(),
}


class Matrix(nn.Module):
    """A linear map, which quantisers and adapters for linear layers leave alone."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        return F.linear(x, self.weight, self.bias)


class PreProjection(nn.Module):
    """x~ = x + W_down σ(W_up x), or x + W_down (σ(W_gate x) ⊙ W_up x); and x~ W_skip. Source: arXiv 2604.10791."""

    def __init__(self, hidden: int, inner: int, activation: str, gated: bool, skip: bool) -> None:
        super().__init__()
        self.up = Matrix(hidden, inner)
        self.gate = Matrix(hidden, inner) if gated else None
        self.down = Matrix(inner, hidden)
        self.skip = Matrix(hidden, hidden) if skip else None
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x to x~, both ``(batch, seq, hidden)``."""
        h = x.to(self.up.weight.dtype)
        inner = self.activation(self.up(h)) if self.gate is None else self.activation(self.gate(h)) * self.up(h)
        changed: Tensor = x + self.down(inner)
        return changed.to(x.dtype)

    def add_skip(self, branch: Tensor, x: Tensor, factor: float) -> Tensor:
        """Return the branch plus x~ W_skip / factor, where there is one; all ``(batch, seq, hidden)``."""
        if self.skip is None:
            return branch
        added = self.skip(x.to(self.skip.weight.dtype))
        changed: Tensor = branch + (added if factor == 1 else added / factor)
        return changed.to(branch.dtype)


class PreProjections(HookedModule):
    """Replaces the hidden state that enters an attention by x~, and adds x~ W_skip to the branch where it ends.

    ``factor`` is what the block multiplies the branch with before it adds it.
    """

    def __init__(self, parts: list[dict[str, Any]], factor: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PreProjection(**part) for part in parts)
        self.factor = factor

    def register(self, attention: nn.Module, exit: nn.Module) -> None:
        """Hook into an attention, and into the module whose output joins the residual stream."""
        self.before(attention, PreProjections.enter)
        if any(part.skip is not None for part in self.parts):
            if exit is attention:
                self.after(attention, PreProjections.leave)
            else:
                self.after(attention, PreProjections.remember)
                self.after(exit, PreProjections.leave_behind)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace every argument that is the hidden state; one called ``residual`` is left alone."""
        old = hidden_of(args, kwargs)
        new = old
        for part in self.parts:
            new = part(new)
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        swapped = (new if v is old and names[i : i + 1] != ["residual"] else v for i, v in enumerate(args))
        return tuple(swapped), {k: new if v is old and k != "residual" else v for k, v in kwargs.items()}

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add the skip to the attention's own output."""
        return self.add(output, hidden_of(args, kwargs))

    def remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep x~ for the module where the branch ends."""
        self.keep("x", hidden_of(args, kwargs))

    def leave_behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add the skip where the branch ends."""
        x = self.take("x")
        return output if x is None else self.add(output, x)

    def add(self, output: Any, x: Tensor) -> Any:
        """Add every skip to a module's output: the tensor itself or the first of a sequence."""
        if not isinstance(output, Tensor):
            first = self.add(output[0], x)
            named = hasattr(output, "_replace")
            return output._replace(**{output._fields[0]: first}) if named else type(output)([first, *output[1:]])
        for part in self.parts:
            output = part.add_skip(output, x, self.factor)  # type: ignore[operator]
        return output


class NonlinearQuery(nn.Module):
    """Q = (2A + f(x))/2 (preserving) or (A + f(x))/2, f(x) = LN(g(RMSNorm(x) W_1) W_2). Source: arXiv 2603.13381.

    ``columns`` (groups, width, start, length) are those of the projection's output that hold the query: in each of
    ``groups`` groups of ``width`` the ``length`` from ``start`` on.
    """

    def __init__(
        self, hidden: int, rank: int, columns: list[int], activation: str, norms: list[str], anchor: str, form: str
    ) -> None:
        super().__init__()
        self.groups, self.width, self.start, self.length = columns
        self.norm_in = NORMS[norms[0]](hidden)
        self.up = Matrix(hidden, rank)
        self.down = Matrix(rank, self.groups * self.length)
        self.norm_out = NORMS[norms[1]](self.groups * self.length)
        self.activation, self.anchor, self.form = ACTIVATIONS[activation], anchor, form

    def change(self, x: Tensor, output: Tensor) -> Tensor:
        """Replace the query's columns of the projection's output."""
        grouped = output.reshape(*output.shape[:-1], self.groups, self.width)
        end = self.start + self.length
        query = self(x, grouped[..., self.start : end].flatten(-2))
        new = query.reshape(*query.shape[:-1], self.groups, self.length)
        return torch.cat([grouped[..., : self.start], new, grouped[..., end:]], dim=-1).flatten(-2)

    def forward(self, x: Tensor, projected: Tensor) -> Tensor:
        """Map x ``(batch, seq, hidden)`` and x W_Q ``(batch, seq, out)`` to Q ``(batch, seq, out)``."""
        f: Tensor = self.norm_out(self.down(self.activation(self.up(self.norm_in(x.to(self.up.weight.dtype))))))
        if self.form == "preserving":
            return (projected + f / 2).to(projected.dtype)
        anchor = x if self.anchor == "identity" else projected
        return ((anchor + f) / 2).to(anchor.dtype)


class NonlinearQueries(HookedModule):
    """Replaces columns of a projection's output; where that reads a latent, f reads what enters its ``source``."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(NonlinearQuery(**part) for part in parts)

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
            output = part.change(args[0] if kept is None else kept, output)  # type: ignore[operator]
        return output


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


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state ``(batch, seq, hidden)``: the keyword ``hidden_states`` or the first argument."""
    hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return hidden


MADE: dict[str, Callable[..., HookedModule]] = {
    "hfpatch_pre": PreProjections,
    "hfpatch_queries": NonlinearQueries,
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
