"""Configuration of the pre-projection tuner."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfpatch.errors import HfpatchError
from hfpatch.nn import activation
from hfpatch.nn.preprojection import check_expansion, check_init
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.registration import SurgeryType


@dataclass
class PreProjectionConfig(SurgeryConfig):
    """Configuration of :class:`PreProjectionModel`: x~ = x + W_down σ(W_up x), and x~ W_skip into the residual.

    Two controls are configurations of it: ``expansion=0, content_skip=True`` is the skip alone, x~ = x; and
    ``activation="identity"`` is the linear pre-projection, which :func:`hfpatch.fold` puts into the weights.

    Works in every PEFT call: ``get_peft_model``, ``PeftModel.from_pretrained``, ``model.add_adapter`` and so on. See
    :class:`hfpatch.nn.PreProjection` and :class:`hfpatch.nn.ContentSkip` for the mathematics. Source: arXiv 2604.10791.

    Args:
        expansion: inner width as a multiple of the hidden size; 0 leaves W_up and W_down out, and needs the skip.
        activation: σ: silu, gelu, relu, relu2 or identity.
        gated: use x~ = x + W_down (σ(W_gate x) ⊙ W_up x).
        dropout: probability of dropping an inner activation in training.
        content_skip: add x~ W_skip to the residual stream.
        init: ``identity`` is an exact no-op; ``paper`` is near-identity, for reproduction only.

    Raises:
        HfpatchError: (a ``ValueError``) if a value is out of range or unknown.
    """

    expansion: float = field(default=1.25, metadata={"help": "Inner width as a multiple of the hidden size; 0: none."})
    activation: str = field(default="silu", metadata={"help": "silu, gelu, relu, relu2 or identity."})
    gated: bool = field(default=False, metadata={"help": "Gate the inner activations."})
    dropout: float = field(default=0.0, metadata={"help": "Probability of dropping an inner activation."})
    content_skip: bool = field(default=False, metadata={"help": "Add x~ W_skip to the residual stream."})
    init: str = field(default="identity", metadata={"help": "identity (an exact no-op) or paper."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = SurgeryType.PRE_PROJECTION
        activation(self.activation)
        check_init(self.init)
        self._check_expansion()
        if not 0 <= self.dropout < 1:
            raise HfpatchError(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def is_linear(self) -> bool:
        """Whether x~ is a matrix product of x."""
        return self.expansion == 0 or (self.activation == "identity" and not self.gated)

    def _check_expansion(self) -> None:
        if self.expansion:
            check_expansion(self.expansion)
            return
        if not self.content_skip:
            raise HfpatchError(
                f"expansion={self.expansion} must be above 0 without a content skip; with content_skip=True it is the "
                "skip alone"
            )
        for name in ("gated", "dropout"):
            if getattr(self, name):
                raise HfpatchError(
                    f"{name}={getattr(self, name)} has no effect with expansion=0; leave one of them out"
                )
