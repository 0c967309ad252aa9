"""Types that cannot be patched, with the reason."""

from hfpatch.sites.family import register_without_attention

register_without_attention(
    ("mamba", "mamba2", "falcon_mamba", "xlstm", "rwkv"),
    "they are pure state-space or recurrent models without softmax attention",
)
register_without_attention(
    ("xlnet",),
    "its projections are raw parameters inside an einsum, and its attention adds the residual and norms the sum itself",
)
register_without_attention(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "they are drafters, which read another model's states instead of token ids",
)
