"""Models of several residual streams: each takes its own, data-dependent share of the branch's output.

Nothing that is added at the branch's end reaches a stream unchanged, so there is no content skip; and no stream behind
the block is the residual stream.
"""

from dataclasses import replace

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import gated, latent

REFUSALS = {
    "content_skip": "each residual stream takes its own data-dependent share of the branch",
    "stream": "the blocks pass several residual streams on",
}

HYPER = Family(
    name="hyper-connections",
    model_types=("hy_v4",),
    layers="layers",
    attention="self_attn",
    qkv=latent,
    output="o_proj",
    refusals=REFUSALS,
)

register_family(HYPER)
register_family(replace(HYPER, name="deepseek_v4", model_types=("deepseek_v4",), output="o_b_proj"))
register_family(
    replace(
        HYPER,
        name="qwen4_exp",
        model_types=("qwen4_exp", "qwen4_exp_text"),
        qkv=gated(),
        attention_classes=("Qwen4ExpTextAttention",),
    )
)
