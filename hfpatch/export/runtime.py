"""A patch as modules around those of a stock model, from the functions of :mod:`hfpatch.nn`.

:mod:`hfpatch.export.source` copies :class:`Hooked`, with all that it uses of hfpatch, into every exported folder. x is
what a module receives, ``(batch, seq, hidden)``.
"""

from __future__ import annotations

from collections.abc import Callable
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

    onednn: Any = None  # see use_onednn

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        fast = self.onednn is not None and x.device.type == "cpu" and x.dtype == torch.float32
        result: Tensor = (self.onednn if fast else F.linear)(x, self.weight, self.bias)
        return result


def use_onednn(model: nn.Module) -> None:
    """Compute the larger fp32 products of a model's parts with oneDNN where they are on the CPU, also in compiled code.

    vLLM does so with its own layers. torch takes MKL, which needs twice the time on AMD processors. The operator
    ``hfpatch::linear`` is there because compilers do not take oneDNN's with weights that are no constants.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return
    if not hasattr(torch.ops.hfpatch, "linear"):
        torch.library.define("hfpatch::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
        product = partial(torch.ops.mkldnn._linear_pointwise, attr="none", scalars=[], algorithm="")
        torch.library.impl("hfpatch::linear", "cpu", product)
        torch.library.register_fake("hfpatch::linear", F.linear)
    for part in model.modules():
        if isinstance(part, Matrix) and part.weight.numel() >= 1 << 14:
            part.onednn = torch.ops.hfpatch.linear


class Around(nn.Module):
    """A module of the base, ``base``, in a place where a part acts.

    Tools replace the modules of the base: quantisers and servers every linear layer, servers many norms. What acts on
    this module stays. It shows the tensors and sizes of ``base`` as its own.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module of the base."""
        return self.base(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a module or parameter of this module, or a tensor or plain value of ``base``; no objects or methods.

        Servers call what they find at the linear layers that they put in, such as ``quant_method``, once for each.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = None if name.startswith("_") else getattr(super().__getattr__("base"), name, None)
            if not isinstance(value, Tensor | int | float | str):
                raise
            return value


class PreProjectionPart(nn.Module):
    """The tensors of one adapter's pre-projection and content skip; either may be missing.

    .. math::
        x~ = x + W_down σ(W_up x)                      (plain)
        x~ = x + W_down (σ(W_gate x) ⊙ W_up x)         (gated)
        residual += attention(q, k, v) + x~ W_skip     with q, k, v = x~ W_Q, x~ W_K, x~ W_V

    Source: arXiv 2604.10791.
    """

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

    Several parts act one after the other; each one's skip reads the final x~. ``factor`` is what the block multiplies
    the branch with before it adds it.
    """

    def __init__(self, parts: list[dict[str, Any]], factor: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PreProjectionPart(**part) for part in parts)
        self.factor = factor

    def register(self, entries: list[nn.Module], exit: list[nn.Module], norm: list[nn.Module] | None = None) -> None:
        """Act on the modules that read the hidden state, or on the norm that computes it, and on the branch's end."""
        for module in norm or []:
            self.after(module, PreProjections.replace_output)
        for module in entries if norm is None else []:
            self.before(module, PreProjections.replace_input)
        if any(part.skip is not None for part in self.parts):
            outside = exit[0] is not entries[0]
            if outside:
                self.after(entries[0], PreProjections.keep_input)
            self.after(exit[0], PreProjections.add_skips, outside)

    def project(self, x: Tensor) -> Tensor:
        """Map x to x~, both ``(batch, seq, hidden)``."""
        for part in self.parts:
            x = part(x)
        return x

    def replace_output(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Replace the hidden state, as a norm returns it, by x~."""
        return self.project(output)

    def replace_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the hidden state by x~."""
        return replace_hidden(module, args, kwargs, self.project(hidden_argument(args, kwargs)))

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
    """The anchored nonlinear query of one adapter.

    .. math::
        f(x) = norm_out(g(norm_in(x) W_1) W_2)         W_1: d -> r,  W_2: r -> d_q
        Q = A(x) + f(x) / 2                            (preserving: the anchor counts twice)
        Q = (A(x) + f(x)) / 2                          (literal)

    with the anchor A(x) = x W_Q, the projection of the base, or A(x) = x. Source: arXiv 2603.13381.

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

    def register(self, projection: list[nn.Module], source: list[nn.Module] | None = None) -> None:
        """Act on the projection and on its source."""
        for module in source or []:
            self.before(module, NonlinearQueries.remember)
        self.after(projection[0], NonlinearQueries.change)

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
    """Scales the query of each head behind its norm, or in its projection's output.

    .. math::
        q_h <- q_h (1 + τ_h)                           τ: (heads,)

    ``heads`` (number, path of the norm or None, whether heads come before the sequence there) and ``columns`` (groups,
    width, start, length) say where the heads are.
    """

    def __init__(self, count: int, heads: list[Any], columns: list[int]) -> None:
        super().__init__()
        self.heads, self.columns = QueryHeads(*heads), Columns(*columns)
        self.taus = nn.ParameterList(nn.Parameter(torch.zeros(self.heads.count)) for _ in range(count))

    def register(self, place: list[nn.Module]) -> None:
        """Act on the norm or the projection."""
        self.after(place[0], Temperatures.change)

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Scale the heads by every τ."""
        query, axis = self.columns.read(output) if self.heads.norm is None else output, -1
        if self.heads.norm is not None:
            axis = self.heads.axis(output, self.columns.size, at="query")
        for tau in self.taus:
            query = scale_heads(query, tau, axis)
        return self.columns.write(output, query) if self.heads.norm is None else query


class Lora(HookedModule):
    """Low-rank terms of a linear projection.

    .. math::
        y = x W + scaling · (x A) B                    A: d -> rank,  B: rank -> out

    Source: arXiv 2106.09685.
    """

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.a = nn.ModuleList(Matrix(part["inputs"], part["rank"]) for part in parts)
        self.b = nn.ModuleList(Matrix(part["rank"], part["outputs"], part["bias"]) for part in parts)
        self.scaling = [part["scaling"] for part in parts]

    def register(self, linear: list[nn.Module]) -> None:
        """Act on the linear projection."""
        self.after(linear[0], Lora.change)

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Add every part to the projection's output."""
        x, result = args[0], output
        for a, b, scaling in zip(self.a, self.b, self.scaling, strict=True):
            x = x.to(next(a.parameters()).dtype)
            result = result + b(a(x)) * scaling
        return result.to(output.dtype)


class Rows(HookedModule):
    """Gives an output projection its rows of ``width`` where a server's attention returns them with the heads joined.

    Attention modules that join the last two axes themselves (GPT-2's) then join the sequence: (batch, seq·width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def register(self, projection: list[nn.Module]) -> None:
        """Act on the output projection."""
        self.before(projection[0], Rows.split)

    def split(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with ``(batch, seq, width)`` for ``(batch, seq·width)``."""
        x = args[0]
        return None if x.shape[-1] == self.width else ((x.reshape(*x.shape[:-1], -1, self.width), *args[1:]), kwargs)


MADE: dict[str, Callable[..., HookedModule]] = {
    "hfpatch_pre": PreProjections,
    "hfpatch_queries": NonlinearQueries,
    "hfpatch_temperatures": Temperatures,
    "hfpatch_lora": Lora,
    "hfpatch_rows": Rows,
}


class Hooked:
    """A model with the parts of a patch: every item of ``config.hfpatch`` is a child of the module ``host``.

    An item acts on the modules ``at``. Those that are listed in ``around`` are put into an :class:`Around`.
    """

    hfpatch_prefix = ""  # of the items' paths, where the model is a part of the one that was patched

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        start = f"{self.hfpatch_prefix}." if self.hfpatch_prefix else ""
        for item in config.hfpatch:
            if all(path.startswith(start) for path in paths_of(item)):
                attach(self, item, start)
        model: Any = self  # what is tied has other names now
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
        if config._attn_implementation == "vllm":
            use_onednn(model)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Return what the stock class says, which looks for it in its own file."""
        return bool(cls._stock()._can_set_attn_implementation())

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return what the stock class says, which looks for it in its own file."""
        return bool(cls._stock()._can_set_experts_implementation())

    @classmethod
    def _stock(cls) -> Any:
        return cls.__mro__[cls.__mro__.index(Hooked) + 1]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Tell transformers that weights and buffers are initialised as the stock classes do it."""
        return False


def paths_of(item: dict[str, Any]) -> list[str]:
    """Return every path of an item."""
    return [item["host"], item["block"], *(path for paths in item["at"].values() for path in paths)]


def attach(model: Any, item: dict[str, Any], start: str) -> None:
    """Add the part that an item describes to a model and let it act; ``start`` of every path is not in this model."""

    def module(path: str) -> nn.Module:
        found: nn.Module = model.get_submodule(f"{path}.".removeprefix(start).rstrip("."))
        return found

    for path in item["around"]:
        if not isinstance(module(path), Around):
            parent, _, name = path.rpartition(".")
            setattr(module(parent), name, Around(module(path)))
    part: Any = MADE[item["kind"]](**item["options"])
    module(item["host"]).add_module(item["name"], part)
    places = {role: [module(path) for path in paths] for role, paths in item["at"].items()}
    inside = f"{item['host']}.{item['name']}".removeprefix(item["block"]).lstrip(".")
    part.hook_into(module(item["block"]), inside, partial(part.register, **places))
