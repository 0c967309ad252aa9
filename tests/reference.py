"""Activations and norms, written out."""

import torch

ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "identity": lambda x: x,
}


def rms_norm(x, gain):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * gain


def layer_norm(x, gain):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * gain


NORMS = {"rmsnorm": rms_norm, "layernorm": layer_norm, "none": lambda x, gain: x}
