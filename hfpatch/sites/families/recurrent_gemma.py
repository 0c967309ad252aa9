"""RecurrentGemma: every third block holds attention where the others hold a linear recurrence."""

from hfpatch.sites.family import Family, register_family
from hfpatch.sites.layouts import separate

register_family(
    Family(
        name="recurrent_gemma",
        model_types=("recurrent_gemma",),
        layers="layers",
        attention="temporal_block",
        qkv=separate(),
        output="o_proj",
        attention_classes=("RecurrentGemmaAttention",),
    )
)
