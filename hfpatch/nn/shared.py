"""Linear layers whose products are computed with others, and adapters around them."""

from __future__ import annotations

from torch import Tensor, nn

from hfpatch.nn.calls import CALLS


class SharedLinear(nn.Linear):
    """A linear layer that takes its product from where it was computed with others, if that was for the same x."""

    def keep(self, x: Tensor, product: Tensor) -> None:
        """Keep the product of x, which this layer is called with next in this thread."""
        CALLS.keep(self, "product", (x, product))

    def forward(self, input: Tensor) -> Tensor:
        """Map x ``(batch, seq, in)`` to ``(batch, seq, out)``."""
        kept = CALLS.take(self, "product")
        if kept is None or kept[0] is not input:
            return super().forward(input)
        product: Tensor = kept[1]
        return product


def shared(linear: nn.Linear) -> SharedLinear:
    """Return a linear layer of the same parameters that can take its product from elsewhere."""
    made = SharedLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made.train(linear.training)


def shared_inside(module: nn.Module) -> SharedLinear | None:
    """Return the module itself, or the one inside an adapter; None if that is of another class."""
    if isinstance(module, SharedLinear):
        return module
    return next((inner for inner in module.modules() if isinstance(inner, SharedLinear)), None)


def as_read_by(linear: nn.Module, x: Tensor) -> Tensor:
    """Return x in the dtype of a linear layer's weight, or as it is where that is no float (quantised)."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return x.to(weight.dtype) if weight.is_floating_point() else x
