"""HRM: two stacks of blocks, each run several times in a forward pass."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="hrm_text",
        model_types=("hrm_text",),
        layers=("L_module.layers", "H_module.layers"),
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
    )
)
