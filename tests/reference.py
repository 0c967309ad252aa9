"""The methods' formulas, applied to an unpatched twin without any function of hfpatch."""

import re

import torch
from architectures.columns import QUERY_COLUMNS, rest_of, width_of
from families import PLACES, make_model, model_type

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


def tensors_of(model, adapter):
    """Return an adapter's tensors as {layer: {what: tensor}}, read from the names of the parameters."""
    found = {}
    pattern = re.compile(rf"\.(\d+)\..*\.((?:preproj|nonlinear)_\w+)\.{adapter}\.weight$")
    for name, parameter in model.named_parameters():
        if match := pattern.search(name):
            found.setdefault(int(match[1]), {})[match[2]] = parameter.detach()
    return found


def twin_of(model, case, *, pre_projection=None, nonlinear_query=None):
    """Return an unpatched model that computes what ``model`` should.

    Both are pairs (adapter name, configuration); the tensors are read from ``model``.
    """
    twin = make_model(case, next(model.parameters()).dtype)
    if pre_projection is not None:
        name, config = pre_projection
        for layer, tensors in tensors_of(model, name).items():
            _pre_project(twin, case, layer, tensors, config)
    if nonlinear_query is not None:
        name, config = nonlinear_query
        for layer, tensors in tensors_of(model, name).items():
            for target in config.targets:
                _replace_columns(twin, case, layer, target, tensors, config)
    return twin


def columns_of(fused, case, config):
    """Return the columns of query, key and value in a projection of all three."""
    kinds = {"falcon_per_head": "falcon/per_head", "falcon_new_decoder": "falcon/new_decoder"}
    query = QUERY_COLUMNS[kinds.get(case, model_type(case))](fused, config)
    return dict(zip(("query", "key", "value"), (query, *rest_of(query, width_of(fused))), strict=True))


def _attention(twin, case, layer):
    return twin.get_submodule(PLACES[model_type(case)][0].replace(".0.", f".{layer}."))


def _pre_project(twin, case, layer, tensors, config):
    attention = _attention(twin, case, layer)
    sigma = ACTIVATIONS[config.activation]
    forward = attention.forward
    entered = []

    def changed(x):
        up = x @ tensors["preproj_up"].T
        inner = sigma(x @ tensors["preproj_gate"].T) * up if config.gated else sigma(up)
        return x + inner @ tensors["preproj_down"].T

    def attend(*args, **kwargs):
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = changed(kwargs["hidden_states"])
            entered.append(kwargs["hidden_states"])
        else:
            args = (changed(args[0]), *args[1:])
            entered.append(args[0])
        output = forward(*args, **kwargs)
        if not config.content_skip or case == "gemma2":
            return output
        return (output[0] + entered.pop() @ tensors["preproj_skip"].T, *output[1:])

    attention.forward = attend
    if config.content_skip and case == "gemma2":  # the branch is normed once more before it joins the residual
        norm = twin.model.layers[layer].post_attention_layernorm
        normed = norm.forward
        norm.forward = lambda x: normed(x) + entered.pop() @ tensors["preproj_skip"].T


def _replace_columns(twin, case, layer, target, tensors, config):
    attention = _attention(twin, case, layer)
    names = PLACES[model_type(case)][1]
    fused = len(names) == 1
    module = attention.get_submodule(names[0] if fused else f"{target[0]}_proj")
    columns = columns_of(module, case, twin.config)[target] if fused else list(range(width_of(module)))
    forward = module.forward

    def part(what):
        return tensors.get(f"nonlinear_{target}_{what}")

    def project(x):
        out = forward(x).clone()
        inner = ACTIVATIONS[config.activation](NORMS[config.input_norm](x, part("norm_in")) @ part("up").T)
        f = NORMS[config.output_norm](inner @ part("down").T, part("norm_out"))
        anchor = x if config.anchor == "identity" else out[..., columns]
        out[..., columns] = ((2 if config.form == "preserving" else 1) * anchor + f) / 2
        return out

    module.forward = project
