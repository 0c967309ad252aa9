"""4-bit layers of bitsandbytes, which have no gradient once their weights are packed for inference.

On CPUs with avx512_bf16 the first call in evaluation mode packs them (bitsandbytes 0.50), with scales in bfloat16: then
the layer computes other values, and its output is cut off from the graph: training goes on with wrong gradients.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hfpatch.errors import HfpatchError

_PACKS = "support_avx512bf16_for_cpu"


def keep_unpacked(model: nn.Module, *, training: bool) -> None:
    """Keep the 4-bit layers of a model from packing their weights.

    Args:
        model: the model.
        training: whether gradients will go through it.

    Raises:
        HfpatchError: in training, if a layer has packed its weights; nothing is changed then.
    """
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, _PACKS)]
    packed = next((name for name, module in layers if is_packed(module)), None)
    if training and packed is not None:
        raise packed_for_inference(packed)
    for _, module in layers:
        setattr(module, _PACKS, False)


def is_packed(module: nn.Module) -> bool:
    """Return whether a module has packed its weights for inference."""
    state: Any = getattr(module._parameters.get("weight"), "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def packed_for_inference(name: str) -> HfpatchError:
    """Return the refusal to train through a layer."""
    return HfpatchError(
        f"{name}: bitsandbytes has packed the 4-bit weights for inference, and gives no gradients through them; load "
        "the model again, and patch it before its first forward pass"
    )
