"""Merging linear methods into the weights of the base, for PEFT's merging and :func:`hfpatch.fold`.

At each place a linear method returns an affine function of what it is given, so its matrices are read by calling the
method itself with zeros and with unit vectors. All of it is computed in fp64.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite
from hfpatch.sites.modules import unwrapped
from hfpatch.sites.site import joined
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import PROJECTED, MethodSite, Parts
from hfpatch.tuners.places import output_projection

Acting = tuple[MethodConfig, Parts, MethodSite]
"""An adapter at a site: its method, its parts, and the site."""
_ROWS = 3  # of a probe: whether a module computes the product with its matrix alone
_AFFINE = 1e-5  # of the largest value; far above fp64's rounding, and of parts that compute in fp32
_ROUNDING = 1e-12  # of fp64; a matrix that is read smaller is zero


@torch.no_grad()
def merged_weights(site: AttentionSite, acting: Sequence[Acting]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return weights and biases of the base, with the values by which they compute the adapters of a site.

    Args:
        site: the attention branch.
        acting: the adapters, in the order in which they act.

    Raises:
        HfpatchError: if one is not linear, or a place has no plain matrix of its own.
    """
    for config, _, _ in acting:
        if why := config.unmergeable():
            raise _cannot(config, site, why)
    merge = _Merge(site, Counter(id(p) for _, p in site.around.named_parameters(remove_duplicate=False)))
    double = [
        (config, {name: copy.deepcopy(part).double().eval() for name, part in parts.items()}, method)
        for config, parts, method in acting
    ]
    for target in PROJECTED:
        for adapter in double:
            merge.projected(target, *adapter)
    for place in ("output", "left"):
        for adapter in double:
            merge.at_output(place, *adapter)
    for adapter in reversed(double):  # the last adapter stands right before the matrix
        merge.at_output("mixed", *adapter)
    for adapter in reversed(double):
        merge.entered(*adapter)
    values: list[tuple[nn.Parameter, Tensor]] = []
    for matrix in merge.matrices.values():
        module = matrix.module
        weight = matrix.weight if hasattr(module, "nx") else matrix.weight.T
        values.append((module.weight, weight.to(module.weight.dtype)))
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            values.append((module.bias, matrix.bias.to(module.bias.dtype)))
        elif matrix.bias.isfinite().all() and matrix.bias.any():
            raise HfpatchError(f"{matrix.path} has no bias, which the adapter's constant term would be merged into")
    return values


def _cannot(config: MethodConfig, site: AttentionSite, why: str) -> HfpatchError:
    return HfpatchError(
        f"{site.host_path}: the {config.spec.label} cannot be merged into the weights: {why}; keep the adapter, or "
        "export base and adapter as one model (hfpatch export); unload() gives the base back"
    )


@dataclass
class _Matrix:
    """A linear projection as y = x W + b.

    Args:
        path: path of the module, from the model.
        module: the module.
        weight: W, ``(in, out)``.
        bias: b, ``(out,)``; zeros where the module has none.
    """

    path: str
    module: Any
    weight: Tensor
    bias: Tensor


@dataclass
class _Merge:
    """The projections of a site, while adapters are put into them.

    Args:
        site: the attention branch.
        uses: how often each parameter is used, by id.
        matrices: the matrices with the adapters that are merged so far, by module.
    """

    site: AttentionSite
    uses: Counter[int]
    matrices: dict[nn.Module, _Matrix] = field(default_factory=dict)

    def projected(self, target: str, config: Any, parts: Parts, method: MethodSite) -> None:
        """Merge the changes of query, key or value, and of the heads of a query without a norm."""
        site, places, heads = self.site, config.acts_at(), self.site.heads
        changes: dict[str, Callable[..., Tensor]] = {}
        if target in places:
            changes[target] = lambda y, x: getattr(config, target)(parts, y, x, method)
        if target == "query" and "heads" in places and heads is not None:
            by_head = (1, -1, heads.count, site.projections["query"].columns.size // heads.count)
            changes["heads"] = lambda q, x: config.heads(parts, q.reshape(by_head), method).reshape(q.shape)
        for place, change in changes.items():
            if place == "heads" and heads is not None and heads.norm is not None:
                raise _cannot(config, site, f"it acts behind {heads.norm}, whose weight all heads share")
            projection, columns = site.projections[target], site.projections[target].columns
            matrix = self._matrix(joined(site.path, projection.path), site.projection_module(target))
            (by_value, by_read), constant = _affine(change, columns.size, site.hidden_size, like=matrix)
            if by_read.any() and projection.source is not None:
                why = f"it reads what enters the attention, and {projection.path} a low-rank image of it"
                raise _cannot(config, site, why)
            weight = _times(columns.read(matrix.weight), by_value)
            matrix.weight = columns.write(matrix.weight, weight + by_read if by_read.any() else weight)
            matrix.bias = columns.write(matrix.bias, columns.read(matrix.bias) @ by_value + constant)

    def at_output(self, place: str, config: Any, parts: Parts, method: MethodSite) -> None:
        """Merge the change of the output projection's result (``output``), or input (``mixed``), or of the branch.

        The branch (``left``) can be merged where the output projection is its last module.
        """
        site = self.site
        if place == "left" and "stream" in config.acts_at():
            raise _cannot(config, site, "there is no matrix behind the block")
        if place not in config.acts_at():
            return
        if (module := output_projection(site)) is None:
            raise _cannot(config, site, "the attention has no output projection of its own")
        matrix = self._matrix(site.output_path, module)
        if place == "left" and site.exit is not site.attention and unwrapped(site.exit) is not module:
            raise _cannot(config, site, f"{site.exit_path} comes between the output projection and the residual stream")
        function: Callable[..., Tensor] = getattr(config, place)

        def act(value: Tensor, read: Tensor) -> Tensor:
            if place != "left":
                return function(parts, value, read, method)
            as_added = value * site.exit_factor
            return value + (function(parts, as_added, read, method) - as_added) / site.exit_factor

        inputs, outputs = matrix.weight.shape
        widths = inputs if place == "mixed" else outputs, inputs if place == "output" else site.hidden_size
        (by_value, by_read), constant = _affine(act, *widths, like=matrix)
        if place != "output" and by_read.any():
            raise _cannot(config, site, "no matrix leads from what enters the attention to where it acts")
        if place == "mixed":
            matrix.bias = matrix.bias + constant @ matrix.weight
            matrix.weight = by_value @ matrix.weight
        else:
            weight = _times(matrix.weight, by_value)
            matrix.weight = weight + by_read if place == "output" else weight
            matrix.bias = matrix.bias @ by_value + constant

    def entered(self, config: Any, parts: Parts, method: MethodSite) -> None:
        """Merge the change of the attention's input into all projections that read it.

        Raises:
            HfpatchError: if something else may read it too, which would then get x instead of x~.
        """
        if "entered" not in config.acts_at():
            return
        site = self.site
        added = tuple(n for n, module in site.attention.named_modules() if isinstance(module, BaseTunerLayer))
        readers = {
            joined(site.path, projection.path): site.inner_module(projection.path)
            for projection in site.projections.values()
            if projection.source is None
        }
        for name, module in site.attention.named_modules() if {*site.entries} != {*readers.values()} else ():
            if (
                not name.startswith(added)
                and module not in readers.values()
                and joined(site.path, name) != site.output_path
                and any(  # packed matrices have any shape
                    p is not None and p.dim() >= 2 and (site.hidden_size in p.shape or not p.is_floating_point())
                    for p in module._parameters.values()
                )
            ):
                raise HfpatchError(
                    f"{site.path}: {name or 'the attention itself'} may read the hidden state besides query, key and "
                    "value, so what enters the attention cannot be changed by their weights"
                )
        matrices = [self._matrix(path, module) for path, module in readers.items()]
        (by_value,), constant = _affine(lambda x: config.entered(parts, x, method), site.hidden_size, like=matrices[0])
        for matrix in matrices:
            matrix.bias = matrix.bias + constant @ matrix.weight
            matrix.weight = by_value @ matrix.weight

    def _matrix(self, path: str, module: nn.Module) -> _Matrix:
        """Return the matrix of a linear projection, as far as adapters are merged.

        Raises:
            HfpatchError: if it is quantised, sharded, offloaded or shared, or not used as a matrix alone.
        """
        if module in self.matrices:
            return self.matrices[module]
        weight: Any = module._parameters.get("weight")
        bias: Any = getattr(module, "bias", None)
        if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.dim() != 2:
            why = "is not a plain matrix (quantised, sharded or composed)"
        elif weight.is_meta:
            why = "has no values here (offloaded)"
        elif self.uses[id(weight)] > 1:
            why = "is tied to another parameter"
        else:
            # The module must map x to x W + b; without hooks, as the patch may have one here
            rows = weight if hasattr(module, "nx") else weight.T
            x = torch.linspace(-1, 1, _ROWS * len(rows), dtype=weight.dtype, device=weight.device)
            x = x.reshape(1, _ROWS, len(rows))
            expected = x @ rows if bias is None else x @ rows + bias
            error = (module.forward(x) - expected).abs().max()
            if error <= 100 * torch.finfo(weight.dtype).eps * expected.abs().max():
                rows = rows.double()
                bias = rows.new_zeros(rows.shape[1]) if bias is None else bias.detach().double()
                self.matrices[module] = _Matrix(path, module, rows, bias)
                return self.matrices[module]
            why = f"is not used as a matrix alone by {type(module).__name__}"
        raise HfpatchError(f"{path}: the weight {why}, so nothing can be merged into it")


def _affine(act: Callable[..., Tensor], *widths: int, like: _Matrix) -> tuple[list[Tensor], Tensor]:
    """Return the matrices ``(width, out)`` and the constant ``(out,)`` of an affine function of vectors.

    Raises:
        HfpatchError: if it is not affine.
    """
    zeros = [like.weight.new_zeros(1, 1, width) for width in widths]
    constant = act(*zeros)[0, 0]
    matrices = []
    for index, width in enumerate(widths):
        vectors = [zero.expand(1, width, -1) for zero in zeros]
        vectors[index] = torch.eye(width, dtype=torch.float64, device=constant.device)[None]
        matrix = act(*vectors)[0] - constant
        is_zero = matrix.abs().max() <= _ROUNDING * max(1.0, float(constant.abs().max()))
        matrices.append(torch.zeros_like(matrix) if is_zero else matrix)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(zero.shape, generator=generator, dtype=zero.dtype).to(zero.device) for zero in zeros]
    value = act(*vectors)[0, 0]
    expected = constant + sum(x[0, 0] @ matrix for x, matrix in zip(vectors, matrices, strict=True))
    if (value - expected).abs().max() > _AFFINE * value.abs().max():  # False where an adapter is not finite
        raise HfpatchError(f"{like.path}: the method is not affine, although unmergeable() returns None")
    return matrices, constant


def _times(weight: Tensor, matrix: Tensor) -> Tensor:
    """Return ``weight @ matrix``, which most often is the unit matrix or a diagonal."""
    diagonal = matrix.diagonal()
    return weight * diagonal if torch.equal(matrix, torch.diag(diagonal)) else weight @ matrix
