"""A projection of which some columns come from elsewhere than a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.anchors import IdentityAnchoredQuery, WeightAnchoredQuery
from hfpatch.nn.nonlinear import NonlinearProjection, require_joinable

Span = tuple[int, int]


class SharedLinear(nn.Linear):
    """A linear layer that takes its product from where it was computed with others, if that was for the same x."""

    kept: tuple[Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map x ``(batch, seq, in)`` to ``(batch, seq, out)``."""
        kept, self.kept = self.kept, None
        return kept[1] if kept is not None and kept[0] is input else super().forward(input)


class MixedProjection(nn.Module):
    """Stands where a model's own projection stood and has its output columns, but less of its matrix.

    The columns are ``groups`` groups of ``width``; in each group, every path fills the ``length`` columns from
    ``start`` on, and one smaller matrix fills the rest. So [q all, k all, v all] is one group, [q, k, v] per head is
    one group a head, and a projection of the query alone is one group that a path fills, with no matrix left.

    With ``fused`` the W_1 of every nonlinear path joins the matrix in one product, which is then scaled,

    .. math::
        RMSNorm(x) W_1 = (x·(g ⊙ W_1)) / rms(x)

    exact to rounding, with the same parameters under the same names.

    Args:
        inputs: d.
        groups: number of groups.
        width: columns in a group.
        paths: path by name; each maps ``(batch, seq, inputs)`` to ``(batch, seq, groups·length)``.
        spans: (start, length) in a group, by name.
        bias: whether the matrix has a bias.
        fused: compute W_1 and the matrix in one product.
        partners: where keys and values have projections of their own, those that W_1 joins; they take their products
            when they are called with the same x.

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
        self.rest = nn.Linear(inputs, left, bias=bias) if left else None
        self.fused = fused
        self._partners = list(partners)  # a plain list: they stay children of the attention
        if fused:
            self._require_fusable()

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``(batch, seq, inputs)`` to ``(batch, seq, groups·width)``."""
        rest, values = self._one_product(x) if self.fused else self._products(x)
        if rest is None and len(values) == 1:
            (value,) = values.values()
            return value.to(product_dtype(x))
        return self._placed(rest, values, product_dtype(x))

    def rest_columns(self) -> list[int]:
        """Return which columns of a group the matrix fills."""
        taken = {start + i for start, length in self.spans.values() for i in range(length)}
        return [column for column in range(self.width) if column not in taken]

    @torch.no_grad()
    def linear_part(self) -> Tensor:
        """Return the matrix ``(inputs, groups·width)`` of this projection with every nonlinear f at 0, without bias."""
        parameter = next(self.parameters(), torch.empty(0))
        x = torch.eye(self.in_features, dtype=parameter.dtype, device=parameter.device)
        values = {name: path.linear_part(x) for name, path in self.paths.items()}  # type: ignore[operator]
        return self._placed(None if self.rest is None else x @ self.rest.weight.T, values, x.dtype)

    def _products(self, x: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        values = {name: path(x) for name, path in self.paths.items()}
        return (None if self.rest is None else self.rest(x)), values

    def _one_product(self, x: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        matrices = [self.rest] if self.rest is not None else self._partners
        maps = {name: path.f for name, path in self.paths.items()}
        ups = [f.joined_weight() for f in maps.values()]  # type: ignore[operator, union-attr]
        weights = [*(matrix.weight for matrix in matrices), *ups]
        joint = F.linear(x, torch.cat(weights), _joined_bias(matrices, sum(up.shape[0] for up in ups)))
        parts = list(torch.split(joint, [weight.shape[0] for weight in weights], dim=-1))
        for partner, part in zip(self._partners, parts, strict=False):
            partner.kept = (x, part)
        products = parts[len(matrices) :]
        values = {
            name: path.around(x, maps[name].from_joined(x, product))  # type: ignore[operator, union-attr]
            for (name, path), product in zip(self.paths.items(), products, strict=True)
        }
        return (None if self.rest is None else parts[0]), values

    def _placed(self, rest: Tensor | None, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Put values and rest where they belong: (batch, seq, groups, width), then flat."""
        pieces, at, used = [], 0, 0
        grouped = None if rest is None else rest.reshape(*rest.shape[:-1], self.groups, -1)
        for name, (start, length) in [*self.spans.items(), ("", (self.width, 0))]:
            if start > at and grouped is not None:
                pieces.append(grouped[..., used : used + start - at])
                used += start - at
            if length:
                value = values[name]
                pieces.append(value.reshape(*value.shape[:-1], self.groups, length).to(dtype))
            at = start + length
        return torch.cat(pieces, dim=-1).flatten(-2)

    def _require_fusable(self) -> None:
        if self.rest is None and not self._partners:
            raise HfpatchError(
                "fused=true needs keys and values that are computed from the same x; there are none, so leave it out"
            )
        for path in self.paths.values():
            f = path.f if isinstance(path, IdentityAnchoredQuery | WeightAnchoredQuery) else None
            if not isinstance(f, NonlinearProjection):
                raise HfpatchError("fused=true needs a nonlinear f with a W_1 of its own in every layer")
            require_joinable(f.norm_in)


def _joined_bias(matrices: Sequence[nn.Linear], more: int) -> Tensor | None:
    """Return the biases of several linear layers and ``more`` zeros; None where no layer has one."""
    if all(matrix.bias is None for matrix in matrices):
        return None
    biases: list[Tensor] = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in matrices]
    return F.pad(torch.cat(biases), (0, more))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer would give for x: that of autocast where it is on, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
