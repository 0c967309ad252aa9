"""The methods' formulas, applied to an unpatched twin without any function of hfpatch."""

import re

import torch
from families import HEADS, HIDDEN, PLACES, make_model, model_type

K = HIDDEN // HEADS  # head size of all families with fused projections here


def span(start, length):
    return torch.arange(start, start + length)


def per_group(groups, queries):
    """The columns of ``groups`` times [q·queries, k, v]."""
    starts = [group * (queries + 2) * K for group in range(groups)]
    return {
        "query": torch.cat([span(s, queries * K) for s in starts]),
        "key": torch.cat([span(s + queries * K, K) for s in starts]),
        "value": torch.cat([span(s + (queries + 1) * K, K) for s in starts]),
    }


def one_after_another(heads, kv_heads):
    """The columns of [q all, k all, v all]."""
    return {
        "query": span(0, heads * K),
        "key": span(heads * K, kv_heads * K),
        "value": span((heads + kv_heads) * K, kv_heads * K),
    }


# Columns of the fused projections, as transformers' modelling source splits them
FUSED = {
    "gpt_neox": per_group(HEADS, 1),
    "gpt_neox_sequential": per_group(HEADS, 1),
    "bloom": per_group(HEADS, 1),
    "bloom_post_norm_residual": per_group(HEADS, 1),
    "falcon_per_head": per_group(HEADS, 1),
    "falcon_new_decoder": per_group(2, 2),
    "falcon_multi_query": one_after_another(HEADS, 1),
    "gpt2": one_after_another(HEADS, HEADS),
    "phi3": one_after_another(HEADS, 2),
}

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
    name = PLACES[model_type(case)][1][0] if case in FUSED else f"{target[0]}_proj"
    module = attention.get_submodule(name)
    forward = module.forward

    def part(what):
        return tensors.get(f"nonlinear_{target}_{what}")

    def project(x):
        out = forward(x).clone()
        columns = FUSED[case][target] if case in FUSED else torch.arange(out.shape[-1])
        inner = ACTIVATIONS[config.activation](NORMS[config.input_norm](x, part("norm_in")) @ part("up").T)
        f = NORMS[config.output_norm](inner @ part("down").T, part("norm_out"))
        anchor = x if config.anchor == "identity" else out[..., columns]
        out[..., columns] = ((2 if config.form == "preserving" else 1) * anchor + f) / 2
        return out

    module.forward = project
