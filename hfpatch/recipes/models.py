"""The section ``architecture`` of a model pretrained from scratch, beyond the keys of its configuration class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import Section, validate

Norm = Literal["rmsnorm", "layernorm", "none"]

MLP_WIDTHS = ("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", "d_inner", "decoder_ffn_dim")
"""Keys of configurations that name the inner width of an MLP."""

GPT2_SMALL: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 50304,  # GPT-2's 50257, up to a multiple of 64
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
    "biases": False,
}
"""The default architecture: GPT-2 small, no biases, tied head."""


class QuerySettings(Section):
    """Where the query of every attention comes from. x: the normed hidden state, d: its width. arXiv 2603.13381."""

    path: Literal["linear", "identity", "residual", "nonlinear"] = "nonlinear"
    """``linear``: x W_Q; ``identity``: x; ``residual``: x + xW; ``nonlinear``: (A + f(x))/2, A the anchor."""
    anchor: Literal["identity", "weight"] = "identity"
    """``identity``: A = x and W_Q is gone, which needs d_q = d; ``weight``: A = x W_Q, trained too."""
    activation: Literal["gelu", "relu", "relu2", "silu", "identity"] = "gelu"
    """g; ``identity`` makes f linear, the capacity-matched control."""
    input_norm: Norm = "rmsnorm"
    """The norm before f's first matrix."""
    output_norm: Norm = "layernorm"
    """The norm after f's last matrix."""
    rank: PositiveInt | None = None
    """Width of f's bottleneck; None takes d/2, which makes f as large as W_Q."""
    targets: tuple[Literal["query", "key", "value"], ...] = ("query",)
    """Which projections become so; keys and values need as many heads as queries with an identity anchor."""
    fused: bool = False
    """Compute f's first matrix in one product with keys and values; exact to rounding, a matter of speed alone.
    Quantised loading leaves these matrices as they are."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> QuerySettings:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={list(self.targets)} must name query, key or value, each at most once")
        idle = ["anchor", "activation", "input_norm", "output_norm", "rank", "fused"]
        idle += ["targets"] if self.path == "linear" else []
        if self.path != "nonlinear" and (idle := self.changed(idle)):
            raise ValueError(f"{idle[0]} has no effect with path: {self.path}; leave it out or set path: nonlinear")
        if self.fused and self.input_norm == "layernorm":
            raise ValueError("fused: true needs input_norm: rmsnorm or none, which commute with the matrix behind them")
        return self


class PreProjectionSettings(Section):
    """A residual MLP before the projections of every attention: x~ = x + W_down σ(W_up x). arXiv 2604.10791.

    W_down and W_skip are 0 at first, so that a variant starts as the model without them.
    """

    expansion: PositiveFloat = 1.25
    """The inner width of W_up as a multiple of d."""
    activation: Literal["gelu", "relu", "relu2", "silu", "identity"] = "silu"
    """σ; ``identity`` makes it linear."""
    gated: bool = False
    """x~ = x + W_down(σ(W_gate x) ⊙ W_up x) instead."""
    content_skip: bool = False
    """Add x~ W_skip to the residual stream, beside the attention's output."""


class ScratchSettings(Section):
    """The keys of an architecture section beside those of the configuration class."""

    query: QuerySettings = QuerySettings(path="linear")
    """The query path; left out, the linear W_Q."""
    pre_projection: PreProjectionSettings | None = None
    """The MLP before query, key and value; left out, there is none."""
    biases: bool = True
    """Whether linear layers and norms keep the biases that the architecture gives them."""
    mlp_width: PositiveFloat | None = None
    """Inner width of the MLP as a multiple of d, rounded to a whole number; None leaves it to the configuration."""


def split_architecture(architecture: Mapping[str, Any]) -> tuple[ScratchSettings, dict[str, Any]]:
    """Return hfpatch's settings in an architecture section, and the keys of its configuration class.

    Raises:
        HfpatchError: if a value is unknown or of the wrong type, or two contradict each other.
    """
    given = {key: value for key, value in architecture.items() if key in ScratchSettings.model_fields}
    left = {key: value for key, value in architecture.items() if key not in given}
    if given.get("query", {}) is None:
        raise HfpatchError("architecture.query is empty; leave it out or write query: {path: nonlinear}")
    settings = validate(given, ScratchSettings, "architecture")
    both = [key for key in MLP_WIDTHS if left.get(key) is not None]
    if settings.mlp_width is not None and both:
        raise HfpatchError(f"architecture: mlp_width and {both[0]} mean the same; leave one of them out")
    return settings, left
