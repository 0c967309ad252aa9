"""GPT and GPT-2: QKV concatenated in a Conv1D, whose weight is stored as (in, out)."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import concatenated

register_family(
    Family(
        name="gpt2",
        model_types=("gpt2", "gpt-sw3", "openai-gpt"),
        layers="h",
        attention="attn",
        qkv=concatenated("c_attn"),
        output="c_proj",
    )
)
