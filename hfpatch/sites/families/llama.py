"""Llama and its kin: separate projections; Gemma 2 norms the branch again before it joins the residual."""

from dataclasses import replace

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma"),
    layers="model.layers",
    attention="self_attn",
    qkv=separate(),
    output="o_proj",
)

register_family(LLAMA)
register_family(replace(LLAMA, name="gemma2", model_types=("gemma2",), exit="post_attention_layernorm"))
