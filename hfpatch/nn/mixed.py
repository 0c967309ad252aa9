"""A projection some of whose output columns come from another module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.anchors import IdentityAnchoredQuery, WeightAnchoredQuery
from hfpatch.nn.calls import CALLS, SharedLinear, shared, shared_inside
from hfpatch.nn.functions import autocast_dtype
from hfpatch.nn.nonlinear import NonlinearProjection

Span = tuple[int, int]


class MixedProjection(nn.Module):
    """Replaces a model's projection: it has the same output columns, but only a part of the matrix.

    The columns are ``groups`` groups of ``width``; in each group, every path fills the ``length`` columns from
    ``start`` on, and one smaller matrix fills the rest. So [q all, k all, v all] is one group, [q, k, v] per head is
    one group a head, and a projection of the query alone is one group that a path fills, with no matrix left.

    With ``fused`` the W_1 of every nonlinear path joins the matrix in one product, which is then scaled,

    .. math::
        RMSNorm(x) W_1 = (x·(g ⊙ W_1)) / rms(x)

    exact to rounding, with the same parameters under the same names. Terms that adapters add to one of these matrices
    are added to its part of the product. If another layer replaced one (quantised), each is computed separately.

    Args:
        inputs: d.
        groups: number of groups.
        width: columns in a group.
        paths: path by name; each maps ``(batch, seq, inputs)`` to ``(batch, seq, groups·length)``.
        spans: (start, length) in a group, by name.
        bias: whether the matrix has a bias.
        fused: compute W_1 and the matrix in one product.
        partners: the separate projections of keys and values that W_1 joins, if there are any; they take their
            products when they are called with the same x.

    Raises:
        HfpatchError: if ``fused`` is impossible.
    """

    def __init__(
        self,
        *,
        inputs: int,
        groups: int,
        width: int,
        paths: Mapping[str, nn.Module],
        spans: Mapping[str, Span],
        bias: bool = False,
        fused: bool = False,
        partners: Sequence[SharedLinear] = (),
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, groups * width
        self.groups, self.width = groups, width
        self.paths = nn.ModuleDict(paths)
        self.spans = {name: spans[name] for name in sorted(spans, key=lambda name: spans[name][0])}
        left = groups * (width - sum(length for _, length in spans.values()))
        self.rest: nn.Linear | None = nn.Linear(inputs, left, bias=bias) if left else None
        inside = [f"paths.{name}" for name, module in self.paths.named_modules() if isinstance(module, nn.Linear)]
        self.matrices = ["rest", *inside] if left else inside  # as built: an adapter may be put around each
        self.fused = fused
        self._partners = list(partners)  # a plain list: they stay children of the attention
        if fused:
            if self.rest is None and not partners:
                raise HfpatchError(
                    "fused=true needs keys and values that are computed from the same x; there are none, so leave it "
                    "out"
                )
            self.rest = None if self.rest is None else shared(self.rest)
            for path in paths.values():
                f = path.f if isinstance(path, IdentityAnchoredQuery | WeightAnchoredQuery) else None
                if not isinstance(f, NonlinearProjection):
                    raise HfpatchError("fused=true needs a nonlinear f with its own W_1 in every layer")
                if not isinstance(f.norm_in, nn.RMSNorm | nn.Identity):
                    raise HfpatchError(
                        "fused=true needs input_norm='rmsnorm' or 'none', which commute with W_1; "
                        f"{type(f.norm_in).__name__} does not"
                    )
                f.up = shared(f.up)  # an adapter may be put around it then

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``(batch, seq, inputs)`` to ``(batch, seq, groups·width)``."""
        values = self._joined(x) if self.fused else None
        if values is None:
            values = {name: path(x) for name, path in self.paths.items()}
        rest = None if self.rest is None else self.rest(x)
        dtype = autocast_dtype(x.device.type) or x.dtype  # which a linear layer would give
        if rest is None and len(values) == 1:
            (value,) = values.values()
            return value.to(dtype)
        return self._placed(rest, values, dtype)

    def rest_columns(self) -> list[int]:
        """Return which columns of a group the matrix fills."""
        taken = {start + i for start, length in self.spans.values() for i in range(length)}
        return [column for column in range(self.width) if column not in taken]

    def linear_parts(self) -> list[str]:
        """Return the paths, below this module, of the matrices that it holds; there may be none."""
        return self.matrices

    @torch.no_grad()
    def linear_part(self, module_of: Callable[[nn.Module], nn.Module] = lambda module: module) -> tuple[Tensor, Tensor]:
        """Return this projection with every nonlinear f at 0: x M + b.

        A query is then x, x + xW, x/2 or (x W_Q + b_Q)/2.

        Args:
            module_of: maps a linear layer to the one to use: itself, or the one inside an adapter.

        Returns:
            M ``(inputs, groups·width)`` and b ``(groups·width,)``.
        """
        example = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(0))
        identity = torch.eye(self.in_features, dtype=example.dtype, device=example.device)
        images = []
        for x in (torch.zeros_like(identity[:1]), identity):
            values: dict[str, Tensor] = {}
            for name in self.paths:
                path: Any = self.paths[name]
                if isinstance(path, WeightAnchoredQuery):
                    values[name] = module_of(path.anchor)(x) / 2
                elif path.f is None:
                    values[name] = x
                else:
                    values[name] = x + module_of(path.f)(x) if path.is_linear else x / 2
            rest = None if self.rest is None else module_of(self.rest)(x)
            images.append(self._placed(rest, values, x.dtype))
        bias, image = images
        return image - bias, bias[0]

    def _joined(self, x: Tensor) -> dict[str, Tensor] | None:
        """Return the value of every path, with W_1 and the matrices in one product; None where one has no weight."""
        maps: dict[str, Any] = {name: path.f for name, path in self.paths.items()}
        matrices = [shared_inside(self.rest)] if self.rest is not None else self._partners
        wanted = [*matrices, *(shared_inside(f.up) for f in maps.values())]
        present = [partner for partner in wanted if partner is not None and partner.weight.device == x.device]
        if len(present) < len(wanted):
            return None
        joined = present[: len(matrices)]
        ups: list[Tensor] = [  # g ⊙ W_1, (rank, inputs)
            f.up.weight * f.norm_in.weight if isinstance(f.norm_in, nn.RMSNorm) else f.up.weight for f in maps.values()
        ]
        weights = [*(matrix.weight for matrix in joined), *ups]
        bias = None
        if any(matrix.bias is not None for matrix in joined):
            biases: list[Tensor] = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in joined]
            bias = F.pad(torch.cat(biases), (0, sum(map(len, ups))))
        joint = F.linear(x, torch.cat(weights), bias)
        parts = list(torch.split(joint, [len(weight) for weight in weights], dim=-1))
        for matrix, part in zip(joined, parts[: len(joined)], strict=True):
            CALLS.keep(matrix, "product", (x, part))
        return {
            name: path.forward(x, maps[name].from_joined(x, part))
            for (name, path), part in zip(self.paths.items(), parts[len(joined) :], strict=True)
        }

    def _placed(self, rest: Tensor | None, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Put values and rest where they belong: (batch, seq, groups, width), then flat."""
        pieces, at, used = [], 0, 0
        grouped = None if rest is None else torch.unflatten(rest, -1, (self.groups, -1))
        for name, (start, length) in [*self.spans.items(), ("", (self.width, 0))]:
            if start > at and grouped is not None:
                pieces.append(grouped[..., used : used + start - at])
                used += start - at
            if length:
                value = values[name]
                pieces.append(torch.unflatten(value, -1, (self.groups, length)).to(dtype))
            at = start + length
        return torch.cat(pieces, dim=-1).flatten(-2)
