"""ProphetNet: the main stream and those that predict further ahead are concatenated along the sequence."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="prophetnet",
        model_types=("prophetnet",),
        layers="layers",
        attention="self_attn",
        qkv=separate(query="query_proj", key="key_proj", value="value_proj", query_beside=("relative_pos_embeddings",)),
        output="out_proj",
    )
)
