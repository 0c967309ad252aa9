"""Content skip: the pre-projected hidden state, past the attention, into the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from hfpatch.nn.initialization import normal_
from hfpatch.nn.preprojection import check_init

PAPER_SKIP_STD = 1e-4


class ContentSkip(nn.Module):
    """A linear path around the attention.

    .. math::
        residual += attention(q, k, v) + x~ W_skip           W_skip: d -> d, no bias

    The skip must reach the residual stream unchanged: after a norm that follows the attention (sandwich norms), and
    not multiplied by a residual multiplier. Source: arXiv 2604.10791.

    Args:
        hidden_size: d, the width of the hidden state.
        init: ``identity`` sets W_skip = 0, an exact no-op; ``paper`` draws W_skip ~ N(0, (1e-4)²).
        seed: seed of the initialisation.
        name: distinguishes the initial values of several such modules of one seed.

    Raises:
        HfpatchError: if ``init`` is unknown.
    """

    def __init__(self, *, hidden_size: int, init: str = "identity", seed: int = 0, name: str = "preproj") -> None:
        super().__init__()
        check_init(init)
        self.skip = nn.Linear(hidden_size, hidden_size, bias=False)
        if init == "identity":
            nn.init.zeros_(self.skip.weight)
        else:
            normal_(self.skip.weight, std=PAPER_SKIP_STD, seed=seed, name=f"{name}_skip")

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return ``branch + x W_skip``; all ``(batch, seq, hidden)``, in the dtype of ``branch``."""
        return add_skip(branch, x, self.skip)


def add_skip(branch: Tensor, x: Tensor, skip: nn.Linear, *, factor: float = 1.0) -> Tensor:
    """Return ``branch + x W_skip / factor`` computed in the dtype of W_skip, returned in that of ``branch``.

    ``factor`` is what the result is multiplied with before it is added to the residual stream.
    """
    added = skip(x.to(skip.weight.dtype))
    changed: Tensor = branch + (added if factor == 1 else added / factor)
    return changed.to(branch.dtype)
