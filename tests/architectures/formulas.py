"""The methods' formulas, applied to an unpatched model without any function of hfpatch."""

import re

import torch
from architectures.places import sites_of
from families import make_model, model_type
from reference import ACTIVATIONS, NORMS

STRUCTURES = {  # cases of `families` by the names of the catalogue, where these are not their model types
    "bloom_post_norm_residual": "bloom/residual_after_norm",
    "falcon_new_decoder": "falcon/new_decoder",
    "falcon_per_head": "falcon/sequential",
    "gpt_neox_sequential": "gpt_neox/sequential",
    "opt_post_norm": "opt/post_norm",
}


def tensors_of(model, method, adapter):
    """Return an adapter's parameters as {path of what holds them: {what: parameter}}, read from their names.

    ``method`` is the prefix of its names, such as ``preproj`` or ``temperature``. A bias is called ``what.bias``.
    """
    pattern = re.compile(rf"^(.*)\.hfpatch_\w+\.{method}_(\w+)\.{adapter}(?:\.weight|(\.bias))$")
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if match := pattern.match(name):
            tensors.setdefault(match[1], {})[match[2] + (match[3] or "")] = parameter
    return tensors


def pre_projected(x, tensors, *, activation="silu"):
    """x~ = x + W_down σ(W_up x), with a gate x + W_down (σ(W_gate x) ⊙ W_up x); x where there are no tensors for it."""
    if "up" not in tensors:
        return x
    up, sigma = x @ tensors["up"].T, ACTIVATIONS[activation]
    inner = sigma(x @ tensors["gate"].T) * up if "gate" in tensors else sigma(up)
    return x + inner @ tensors["down"].T


def nonlinear(x, tensors, *, activation="gelu", input_norm="rmsnorm", output_norm="layernorm"):
    """f(x) = LN(g(RMSNorm(x) W_1) W_2), with other norms, or with none"""
    inner = ACTIVATIONS[activation](NORMS[input_norm](x, tensors.get("norm_in")) @ tensors["up"].T)
    return NORMS[output_norm](inner @ tensors["down"].T, tensors.get("norm_out"))


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


def apply_pre_projection(model, site, tensors, *, activation="silu"):
    """Give a site the pre-projection, and the content skip where there are tensors for it."""
    received = on_input(model, site, lambda x: pre_projected(x, tensors, activation=activation))
    if "skip" in tensors:
        on_output(model, site.exit, lambda out: out + received[-1] @ tensors["skip"].T / site.factor)
    return received


def on_argument(model, path, change):
    """Make the module at ``path`` receive ``change(a)`` instead of its first argument a."""
    module = model.get_submodule(path)
    forward = module.forward
    module.forward = lambda a, *args, **kwargs: forward(change(a), *args, **kwargs)


def on_target(model, site, target, change):
    """Make query, key or value ``change(y, x)``, where y is what its projection returns and x what that reads."""
    if target == "query":  # where a latent comes between, x is what enters the attention
        path, columns, received = site.query, site.columns, on_input(model, site, lambda x: x)
    else:
        (path, columns), received = getattr(site, target), []
        on_argument(model, path, lambda x: received.append(x) or x)

    def changed(out):
        out, y = out.clone(), out[..., columns]
        z = change(y, received[-1])
        assert z.shape == y.shape, f"the {target} has another width"
        out[..., columns] = z
        return out

    on_output(model, path, changed)


def apply_nonlinear(model, site, tensors, *, form="preserving", anchor="weight", **options):
    """(A + f(x)) / 2 with A = x W, twice that if preserving, or A = x, for the targets that there are tensors for."""
    for target in sorted({name.split("_")[0] for name in tensors}):
        parts = {name.removeprefix(f"{target}_"): tensor for name, tensor in tensors.items() if name.startswith(target)}

        def anchored(y, x, parts=parts):
            a = x if anchor == "identity" else y
            return ((2 if form == "preserving" else 1) * a + nonlinear(x, parts, **options)) / 2

        on_target(model, site, target, anchored)


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


def twin_of(model, case, *, pre_projection=None, nonlinear_query=None):
    """Return an unpatched model of `families` that computes what ``model`` should.

    Both are pairs (adapter name, configuration); the tensors are read from ``model``.
    """
    twin = make_model(case, next(model.parameters()).dtype)
    for site in sites_of(STRUCTURES.get(case, model_type(case)), twin):
        if nonlinear_query is not None:
            name, config = nonlinear_query
            tensors = tensors_of(model, "nonlinear", name).get(site.path, {})
            options = ("form", "anchor", "activation", "input_norm", "output_norm")
            apply_nonlinear(twin, site, tensors, **{option: getattr(config, option) for option in options})
        if pre_projection is not None:  # last, so that what it makes of x enters the others
            name, config = pre_projection
            tensors = tensors_of(model, "preproj", name).get(site.path, {})
            apply_pre_projection(twin, site, tensors, activation=config.activation)
    return twin
