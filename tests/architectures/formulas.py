"""The methods' formulas, applied to an unpatched model without any function of hfpatch."""

import re

import torch
from reference import ACTIVATIONS, layer_norm, rms_norm


def tensors_of(model, method, adapter):
    """Return an adapter's parameters as {path of what holds them: {what: parameter}}, read from their names.

    ``method`` is ``preproj``, ``nonlinear_query`` or ``temperature``. A bias is called ``what.bias``.
    """
    pattern = re.compile(rf"^(.*)\.hfpatch_\w+\.{method}_(\w+)\.{adapter}(?:\.weight|(\.bias))$")
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if match := pattern.match(name):
            found.setdefault(match[1], {})[match[2] + (match[3] or "")] = parameter
    return found


def pre_projected(x, tensors, *, linear=False):
    """x~ = x + W_down SiLU(W_up x), or x + W_down W_up x; x itself where there are no tensors for it."""
    if "up" not in tensors:
        return x
    up = x @ tensors["up"].T
    return x + ACTIVATIONS["identity" if linear else "silu"](up) @ tensors["down"].T


def nonlinear(x, tensors):
    """f(x) = LN(GELU(RMSNorm(x) W_1) W_2)"""
    inner = ACTIVATIONS["gelu"](rms_norm(x, tensors["norm_in"]) @ tensors["up"].T)
    return layer_norm(inner @ tensors["down"].T, tensors["norm_out"])


def with_first(output, change):
    """Change a module's output, or the first item of it, and keep its type."""
    if isinstance(output, torch.Tensor):
        return change(output)
    items = [change(output[0]), *output[1:]]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def on_input(model, site, change):
    """Make the attention of a site receive ``change(x)`` instead of x; return the list of what it received."""
    attention = model.get_submodule(site.path)
    forward, received = attention.forward, []

    def attend(*args, **kwargs):
        given = list(args)
        first = site.place.inputs[0]
        x = given[first] if isinstance(first, int) else kwargs[first]
        received.append(change(x))
        for where in site.place.inputs:
            assert (given[where] if isinstance(where, int) else kwargs[where]) is x
            if isinstance(where, int):
                given[where] = received[-1]
            else:
                kwargs[where] = received[-1]
        return forward(*given, **kwargs)

    attention.forward = attend
    return received


def on_output(model, path, change):
    """Change what the module at ``path`` returns."""
    module = model.get_submodule(path)
    forward = module.forward
    module.forward = lambda *args, **kwargs: with_first(forward(*args, **kwargs), change)


def apply_pre_projection(model, site, tensors, *, linear=False):
    """Give a site the pre-projection, and the content skip where there are tensors for it."""
    received = on_input(model, site, lambda x: pre_projected(x, tensors, linear=linear))
    if "skip" in tensors:
        on_output(model, site.exit, lambda out: out + received[-1] @ tensors["skip"].T / site.factor)
    return received


def apply_query(model, site, tensors, *, form):
    """Give a site the anchored query, (2A + f)/2 if preserving, (A + f)/2 if literal; return the list of x."""
    assert len(tensors["norm_out"]) == len(site.columns), "f has another width than the query"
    received = on_input(model, site, lambda x: x)
    weight = {"preserving": 2, "literal": 1}[form]

    def anchored(out):
        out = out.clone()
        out[..., site.columns] = (weight * out[..., site.columns] + nonlinear(received[-1], tensors)) / 2
        return out

    on_output(model, site.query, anchored)
    return received


def apply_temperature(model, site, tensors):
    """Give a site the temperatures, q_h (1 + τ_h), behind the query's norm where it has one; return the list of x."""
    factor, size = 1 + tensors["query"], len(site.columns) // len(tensors["query"])

    def scaled(out):
        if site.norm and out.shape[-1] == size:
            return out * (factor[:, None, None] if site.place.norm_reads == "heads" else factor[:, None])
        columns, out = range(out.shape[-1]) if site.norm else site.columns, out.clone()
        out[..., columns] = out[..., columns] * factor.repeat_interleave(size)
        return out

    on_output(model, site.norm or site.query, scaled)
    return on_input(model, site, lambda x: x)
