"""The parts of a patch in plain torch, attached to a model by hooks.

This file is copied whole into every exported folder, so it imports nothing but torch. The mathematics is that of
``hfpatch.nn`` and of PEFT's LoRA; x is what a module receives, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class PreProjection(nn.Module):
    """x~ = x + W_down σ(W_up x), or x + W_down (σ(W_gate x) ⊙ W_up x); and x~ W_skip. Source: arXiv 2604.10791."""

    def __init__(self, hidden: int, inner: int, activation: str, gated: bool, skip: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False) if gated else None
        self.down = nn.Linear(inner, hidden, bias=False)
        self.skip = nn.Linear(hidden, hidden, bias=False) if skip else None
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x to x~, both ``(batch, seq, hidden)``."""
        h = x.to(self.up.weight.dtype)
        inner = self.activation(self.up(h)) if self.gate is None else self.activation(self.gate(h)) * self.up(h)
        changed: Tensor = x + self.down(inner)
        return changed.to(x.dtype)

    def add_skip(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return the branch plus x~ W_skip, where there is one; all ``(batch, seq, hidden)``."""
        if self.skip is None:
            return branch
        changed: Tensor = branch + self.skip(x.to(self.skip.weight.dtype))
        return changed.to(branch.dtype)


class PreProjections(nn.Module):
    """Replaces the hidden state that enters an attention by x~, and adds x~ W_skip to the branch where it ends."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PreProjection(**part) for part in parts)
        self.pending: Tensor | None = None

    def attach(self, attention: nn.Module, exit: nn.Module) -> None:
        """Hook into an attention, and into the module whose output joins the residual stream."""
        attention.register_forward_pre_hook(self.enter, with_kwargs=True)
        if any(part.skip is not None for part in self.parts):
            if exit is attention:
                attention.register_forward_hook(self.leave, with_kwargs=True)
            else:
                attention.register_forward_hook(self.remember, with_kwargs=True)
                exit.register_forward_hook(self.leave_behind)

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
        self.pending = hidden_of(args, kwargs)

    def leave_behind(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Add the skip where the branch ends."""
        x, self.pending = self.pending, None
        return output if x is None else self.add(output, x)

    def add(self, output: Any, x: Tensor) -> Any:
        """Add every skip to a module's output: the tensor itself or the first of a sequence."""
        if not isinstance(output, Tensor):
            first = self.add(output[0], x)
            named = hasattr(output, "_replace")
            return output._replace(**{output._fields[0]: first}) if named else type(output)([first, *output[1:]])
        for part in self.parts:
            output = part.add_skip(output, x)  # type: ignore[operator]
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
        self.up = nn.Linear(hidden, rank, bias=False)
        self.down = nn.Linear(rank, self.groups * self.length, bias=False)
        self.norm_out = NORMS[norms[1]](self.groups * self.length)
        self.activation, self.anchor, self.form = ACTIVATIONS[activation], anchor, form

    def attach(self, projection: nn.Module) -> None:
        """Hook into the projection."""
        projection.register_forward_hook(self.change)

    def change(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Replace the query's columns of the projection's output."""
        grouped = output.reshape(*output.shape[:-1], self.groups, self.width)
        end = self.start + self.length
        query = self(args[0], grouped[..., self.start : end].flatten(-2))
        new = query.reshape(*query.shape[:-1], self.groups, self.length)
        return torch.cat([grouped[..., : self.start], new, grouped[..., end:]], dim=-1).flatten(-2)

    def forward(self, x: Tensor, projected: Tensor) -> Tensor:
        """Map x ``(batch, seq, hidden)`` and x W_Q ``(batch, seq, out)`` to Q ``(batch, seq, out)``."""
        f: Tensor = self.norm_out(self.down(self.activation(self.up(self.norm_in(x.to(self.up.weight.dtype))))))
        if self.form == "preserving":
            return (projected + f / 2).to(projected.dtype)
        anchor = x if self.anchor == "identity" else projected
        return ((anchor + f) / 2).to(anchor.dtype)


class Lora(nn.Module):
    """y = xW + scaling · (x A) B for every part. Source: arXiv 2106.09685."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(part["inputs"], part["rank"], bias=False) for part in parts)
        self.b = nn.ModuleList(nn.Linear(part["rank"], part["outputs"], bias=part["bias"]) for part in parts)
        self.scaling = [part["scaling"] for part in parts]

    def attach(self, linear: nn.Module) -> None:
        """Hook into the linear projection."""
        linear.register_forward_hook(self.change)

    def change(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
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


def attach(model: nn.Module, patch: dict[str, list[dict[str, Any]]]) -> None:
    """Build the parts that ``patch`` lists and hook them in; a part is a child of the module that it stands at."""
    for item in patch["pre_projections"]:
        attention, exit = model.get_submodule(item["at"]), model.get_submodule(item["exit"])
        attention.hfpatch_pre = PreProjections(item["parts"])
        attention.hfpatch_pre.attach(attention, exit)
    for item in patch["queries"]:
        projection = model.get_submodule(item["at"])
        projection.hfpatch_queries = nn.ModuleList(NonlinearQuery(**part) for part in item["parts"])
        for query in projection.hfpatch_queries:
            query.attach(projection)  # type: ignore[operator]
    for item in patch["loras"]:
        linear = model.get_submodule(item["at"])
        linear.hfpatch_lora = Lora(item["parts"])
        linear.hfpatch_lora.attach(linear)
