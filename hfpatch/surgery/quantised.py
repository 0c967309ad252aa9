"""Bases in 8 and 4 bits, by bitsandbytes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from hfpatch.errors import HfpatchError

_REPACKS = "support_avx512bf16_for_cpu"
"""A 4-bit layer of bitsandbytes with this set packs its weights again when it first computes without a gradient,
with scales in bfloat16. It then computes other values, has none for gradients, and the base's weights have changed."""


def bits_config(dtype: str, *, load_in_8bit: bool, quant_type: str, double: bool) -> Any:
    """Return transformers' configuration of bitsandbytes.

    Raises:
        HfpatchError: if bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        bits = 8 if load_in_8bit else 4
        raise HfpatchError(f"model.load_in_{bits}bit needs bitsandbytes; pip install 'hfpatch[quantized]'")
    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def keep_packing(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights again when they are first used."""
    for module in model.modules():
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, False)
