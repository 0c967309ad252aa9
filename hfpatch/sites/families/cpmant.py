"""CPM-Ant: norm and residual are in a wrapper; the attention takes its input twice, for queries and for keys."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="cpmant",
        model_types=("cpmant",),
        layers="encoder.layers",
        attention="self_att.self_attention",
        qkv=separate(query="project_q", key="project_k", value="project_v"),
        output="attention_out",
    )
)
