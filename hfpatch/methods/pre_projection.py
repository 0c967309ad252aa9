"""Pre-projection and content skip."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn import ContentSkip, PreProjection, activation, pre_project
from hfpatch.nn.nonlinear import MAX_EXPANSION
from hfpatch.nn.preprojection import add_skip, check_init
from hfpatch.sites import AttentionSite
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite, Parts
from hfpatch.tuners.registration import method


@method("pre_projection", prefix="preproj_", label="pre-projection")
@dataclass
class PreProjectionConfig(MethodConfig):
    """x~ = x + W_down σ(W_up x) enters the attention, and x~ W_skip joins the residual stream.

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
        activation(self.activation)
        check_init(self.init)
        if self.expansion:
            if not 0 < self.expansion <= MAX_EXPANSION:
                raise HfpatchError(f"expansion={self.expansion} must be above 0 and at most {MAX_EXPANSION}")
        elif not self.content_skip:
            raise HfpatchError(
                f"expansion={self.expansion} must be above 0, or content_skip be set, which is then the skip alone"
            )
        elif idle := next((name for name in ("gated", "dropout") if getattr(self, name)), None):
            raise HfpatchError(f"{idle}={getattr(self, idle)} has no effect with expansion=0; leave one of them out")
        if not 0 <= self.dropout < 1:
            raise HfpatchError(f"dropout={self.dropout} must be at least 0 and below 1")

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return W_up and W_down, unless the skip is alone, and where asked for W_gate, dropout and W_skip."""
        drawn: dict[str, Any] = {"init": self.init, "seed": seed, "name": f"{site.name}.preproj"}
        parts = nn.ModuleDict()
        if self.expansion:
            pre = PreProjection(hidden_size=site.hidden_size, expansion=self.expansion, gated=self.gated, **drawn)
            parts.update({"up": pre.up, "down": pre.down} | ({} if pre.gate is None else {"gate": pre.gate}))
            if self.dropout:
                parts["dropout"] = nn.Dropout(self.dropout)  # a module, which TRL's disable_dropout finds
        if self.content_skip:
            parts["skip"] = ContentSkip(hidden_size=site.hidden_size, **drawn).skip
        return parts

    def acts_at(self) -> tuple[str, ...]:
        """Return where the attention is entered, unless the skip is alone, and left, where there is one."""
        return (("entered",) if self.expansion else ()) + (("left",) if self.content_skip else ())

    def takes_autocast(self) -> bool:
        """Return whether the sum with a product is all that is rounded, in the gradient too."""
        return not self.gated

    def entered(self, parts: Parts, x: Tensor, site: MethodSite) -> Tensor:
        """Return x~ ``(batch, seq, hidden)``."""
        return pre_project(
            x,
            up=parts["up"],
            down=parts["down"],
            gate=parts["gate"] if self.gated else None,
            act=activation(self.activation),
            dropout=parts["dropout"] if self.dropout else None,
        )

    def left(self, parts: Parts, branch: Tensor, x: Tensor, site: MethodSite) -> Tensor:
        """Return the branch plus x~ W_skip, with the x~ of all adapters; all ``(batch, seq, hidden)``."""
        return add_skip(branch, x, parts["skip"])

    def refusal(self, site: AttentionSite) -> str | None:
        """Return why the site takes no pre-projection, which also the skip alone belongs to."""
        return site.refusals.get("pre_projection")

    def unmergeable(self) -> str | None:
        """Return why the weights of the base cannot hold it, if so."""
        if self.content_skip:
            return "no matrix of the block leads from x~ to the residual stream, as the content skip does"
        if self.gated:
            return "the gate depends on the input"
        if self.activation != "identity":
            return f"activation={self.activation!r} is not linear (activation='identity' is)"
        return None
