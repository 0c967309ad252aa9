"""BLT (Byte Latent Transformer): three towers of blocks, and cross-attention between them, which is left alone."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="blt",
        model_types=("blt",),
        layers=("local_encoder.layers", "global_transformer.layers", "local_decoder.layers"),
        attention="self_attn",
        qkv=separate(),
        output="o_proj",
    )
)
