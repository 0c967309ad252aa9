"""A query fed from the hidden activations of the MLP before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.calls import CALLS
from hfpatch.nn.initialization import normal_
from hfpatch.nn.norms import make_norm
from hfpatch.nn.shared import as_read_by


class HiddenState:
    """Carries what the down-projection of an MLP reads to the next block's attention in the same call, which clears it.

    Args:
        mlp: the module that holds the down-projection.
        down: its name there. Another module may be put in its place (quantised, or around it) at any time.
    """

    def __init__(self, mlp: nn.Module, down: str) -> None:
        self._down = down
        self._watched: nn.Module | None = None
        mlp.register_forward_pre_hook(self._watch)

    def keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Remember the input of the down-projection, ``(batch, seq, inner)``: a forward pre-hook."""
        CALLS.keep(self, "value", args[0])

    def _watch(self, mlp: nn.Module, args: tuple[Any, ...]) -> None:
        down: nn.Module = getattr(mlp, self._down)
        if not any(module is self._watched for module in down.modules()):
            self._watched = down
            down.register_forward_pre_hook(self.keep)

    def take(self) -> Tensor:
        """Return what was kept.

        Raises:
            HfpatchError: if nothing was, because the block before did not run.
        """
        value: Tensor | None = CALLS.take(self, "value")
        if value is None:
            raise HfpatchError("a query reads the hidden activations of the MLP before it, but that MLP did not run")
        return value


class HiddenProjection(nn.Module):
    """Reuses the first d of the previous MLP's hidden activations h instead of a bottleneck.

    .. math::
        f = norm_out( norm_in(h[0:d]) W' )             h: (batch, seq, inner),  W': d -> d_q

    Parameters: d·d_q and the gains. Source: arXiv 2603.13381, its extension.

    Args:
        hidden_size: d; the MLP has to be at least as wide.
        out_features: d_q.
        source: where h comes from.
        input_norm: norm of h[0:d], a key of :data:`hfpatch.nn.NORMS`.
        output_norm: norm of the product, likewise.
        seed: seed of the initialisation, W' ~ N(0, 1/d).
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        out_features: int,
        source: HiddenState,
        input_norm: str = "none",
        output_norm: str = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source = source
        self.norm_in = make_norm(input_norm, hidden_size)
        self.down = nn.Linear(hidden_size, out_features, bias=False)
        self.norm_out = make_norm(output_norm, out_features)
        normal_(self.down.weight, std=hidden_size**-0.5, seed=seed, name="hidden_down")

    def linear_parts(self) -> list[str]:
        """Return the path of the matrix below this module."""
        return ["down"]

    def forward(self, x: Tensor) -> Tensor:
        """Return f ``(batch, seq, out_features)``; x is what other maps read and is not used here."""
        h = self.source.take()[..., : self.down.in_features]
        f: Tensor = self.norm_out(self.down(self.norm_in(as_read_by(self.down, h))))
        return f
