"""Types that cannot be patched, with the reason."""

from hfpatch.sites.family import WITHOUT_ATTENTION

RECURRENT = "they are pure state-space or recurrent models without softmax attention"
EINSUM = (
    "its projections are raw parameters inside an einsum, and its attention adds the residual and norms the sum itself"
)
DRAFTERS = "they are drafters, which read another model's states instead of token ids"

WITHOUT_ATTENTION.update(dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "xlstm", "rwkv"), RECURRENT))
WITHOUT_ATTENTION["xlnet"] = EINSUM
WITHOUT_ATTENTION.update(dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTERS))
