"""A query path as a line of maths."""

from __future__ import annotations

from hfpatch.recipes.models import QuerySettings

_ACTIVATIONS = {"gelu": "GELU", "relu": "ReLU", "relu2": "ReLU²", "silu": "SiLU", "identity": ""}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LN", "none": ""}
_SYMBOLS = {"query": "Q", "key": "K", "value": "V"}


def describe_query(settings: QuerySettings) -> str:
    """Return how queries (keys, values) are computed: ``Q = (x + f(x))/2, f = LN(GELU(RMSNorm(x) W₁) W₂)``.

    x: what the attention module receives; h: the hidden activations of the previous block's MLP.
    """
    symbols = [_SYMBOLS[target] for target in settings.targets]
    left = ", ".join(symbols)
    stock = f"x W_{symbols[0]}" if len(symbols) == 1 else "x W"
    if settings.path == "linear":
        return "Q = x W_Q"
    if settings.path == "identity":
        return f"{left} = x"
    if settings.path == "residual":
        return f"{left} = x + x W"
    anchor = "x" if settings.anchor == "identity" else stock
    return f"{left} = ({anchor} + f(x))/2, f = {_f(settings)}"


def _f(settings: QuerySettings) -> str:
    from_mlp = settings.source == "mlp"
    input_norm = settings.input_norm or ("none" if from_mlp else "rmsnorm")
    output_norm = settings.output_norm or ("none" if from_mlp else "layernorm")
    if from_mlp:
        return _applied(_NORMS[output_norm], f"{_applied(_NORMS[input_norm], 'h[0:d]')} W′")
    inner = _applied(_ACTIVATIONS[settings.activation], f"{_applied(_NORMS[input_norm], 'x')} W₁")
    rank = f", rank {settings.rank}" if settings.rank is not None else ""
    return _applied(_NORMS[output_norm], f"{inner} W₂") + rank


def _applied(function: str, argument: str) -> str:
    return f"{function}({argument})" if function else argument
