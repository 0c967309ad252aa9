"""Where the query of each head can be scaled: at the projection, or after the norm of the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family
from hfpatch.sites.layouts import Projections
from hfpatch.sites.modules import has_module, submodule

QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "q_b_norm")
KEY_NORMS = {"q_norm": "k_norm", "q_layernorm": "k_layernorm", "query_layernorm": "key_layernorm"}
SHARED_NORM = "qk_norm"
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads")
NORMED_AFTER_ROTATION = {  # attention classes that norm queries and keys after RoPE
    "HunYuanDenseV1Attention",
    "HunYuanMoEV1Attention",
    "NanoChatAttention",
}
NORMED_WITH_HEADS_FIRST = {  # attention classes whose query norm reads (batch, heads, seq, size)
    "Apertus1p5TextAttention",
    "ApertusAttention",
    "DeepseekV4Attention",
    "Exaone4Attention",
    "ExaoneMoeAttention",
    "Gemma3Attention",
    "HYV3Attention",
    "HunYuanDenseV1Attention",
    "HunYuanMoEV1Attention",
    "Kolibri1Attention",
    "NanoChatAttention",
    "PhiAttention",
    "StableLmAttention",
}


@dataclass(frozen=True)
class QueryHeads:
    """The query heads of an attention module.

    A norm of the query removes a scale of its input, so a scale has to be applied after it; a rotation keeps it.

    Args:
        count: number of query heads.
        norm: path, from the attention module, of the query's norm; None without one.
        heads_first: whether that norm reads ``(batch, heads, seq, size)`` instead of ``(batch, seq, heads, size)``;
            norms of all heads together read ``(batch, seq, heads·size)``.
    """

    count: int
    norm: str | None = None
    heads_first: bool = False

    def axis(self, normed: Tensor, width: int, *, at: str) -> int:
        """Return the axis of the heads in the norm's output; -1 if they share the last one.

        Args:
            normed: the norm's output.
            width: columns of all heads together.
            at: path of the attention module, for the message.

        Raises:
            HfpatchError: if there is no such axis.
        """
        if normed.shape[-1] == width:
            return -1
        axis = normed.dim() - (3 if self.heads_first else 2)
        if normed.shape[axis] != self.count:
            raise HfpatchError(
                f"{at}: {self.norm} returns {tuple(normed.shape)}, which has no {self.count} heads at axis {axis}; "
                f"declare heads_first={not self.heads_first} in its family"
            )
        return axis


def query_heads(attention: nn.Module, config: Any, projections: Projections, family: Family) -> QueryHeads | None:
    """Return the query heads of an attention module; None where no projection computes the query of whole heads.

    Their norm is the family's; where it names none, one of a common name.
    """
    width = projections["query"].columns.size if "query" in projections else 0
    sizes = (getattr(attention, name, None) for name in HEAD_SIZES)
    size = next((size for size in sizes if isinstance(size, int) and size and width % size == 0), None)
    named = (getattr(attention, name, None) for name in HEAD_COUNTS)
    listed = next((number for number in named if isinstance(number, int)), None)
    # What the attention module says comes before its config
    count: Any = width // size if size is not None else listed or getattr(config, "num_attention_heads", None)
    if not width or not isinstance(count, int) or not count or width % count:  # a list has a number for each stage
        return None
    norm = family.query_norm or next((name for name in QUERY_NORMS if has_norm(attention, name)), None)
    return QueryHeads(count, norm, family.heads_first or type(attention).__name__ in NORMED_WITH_HEADS_FIRST)


def query_and_key_norms(attention: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the norms between the projections of queries and keys and RoPE; None where not both have one there."""
    for query, key in KEY_NORMS.items():
        if has_norm(attention, query) and has_norm(attention, key):
            if type(attention).__name__ in NORMED_AFTER_ROTATION:
                return None
            return submodule(attention, query, of=query), submodule(attention, key, of=key)
    return None


def normed(attention: nn.Module, heads: QueryHeads | None) -> bool:
    """Return whether an attention module norms its queries or its keys, by common names or as its heads say."""
    declared = [heads.norm] if heads is not None and heads.norm is not None else []
    return any(has_norm(attention, name) for name in (*declared, *QUERY_NORMS, *KEY_NORMS.values(), SHARED_NORM))


def has_norm(attention: nn.Module, name: str) -> bool:
    """Return whether an attention module has a norm of this name, and not an identity in its place."""
    return has_module(attention, name) and not isinstance(submodule(attention, name, of=name), nn.Identity)
