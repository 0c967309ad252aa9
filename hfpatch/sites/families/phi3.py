"""Phi-3: QKV concatenated in one Linear, with grouped queries."""

from dataclasses import replace

from hfpatch.sites.families.llama import LLAMA
from hfpatch.sites.family import register_family
from hfpatch.sites.layouts import concatenated

register_family(replace(LLAMA, name="phi3", model_types=("phi3",), qkv=concatenated("qkv_proj")))
