"""Behaviour of a model at its attention sites, measured without any name of hfpatch."""

from contextlib import ExitStack, contextmanager

import torch
from architectures.catalogue import logits_of
from architectures.formulas import with_first

SINK = -1e4  # of a softmax with a sink, so that over one key it is 1 like any other


@contextmanager
def hooked(*handles):
    """Remove hooks at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def logits_without_attention(model, sites, tokens):
    """The logits where the last projection of every attention returns zero."""

    def zero(module, args, output):
        return with_first(output, torch.zeros_like)

    with hooked(*(model.get_submodule(site.output).register_forward_hook(zero) for site in sites)):
        return logits_of(model, tokens)


@torch.no_grad()
def residuals(model, sites, tokens):
    """Return the residual stream after the addition of each site's branch, (tokens, hidden), at its first call."""
    streams = {}

    def keep(site, tensor):
        streams.setdefault(site.path, tensor.detach().clone().reshape(-1, tensor.shape[-1]))

    def entering(site):
        return lambda module, args, kwargs: keep(site, (*args, *kwargs.values())[site.place.argument])

    def leaving(site):
        return lambda module, args, output: keep(site, first_of(output))

    with ExitStack() as stack:
        for site in sites:
            module = model.get_submodule(site.residual)
            if site.residual == site.block:
                handle = module.register_forward_hook(leaving(site))
            else:
                handle = module.register_forward_pre_hook(entering(site), with_kwargs=True)
            stack.enter_context(hooked(handle))
        logits_of(model, tokens)
    return streams


@torch.no_grad()
def first_output(model, site, tokens):
    """Return what the attention of a site returns at its first call."""
    outputs = []
    attention = model.get_submodule(site.path)
    with hooked(attention.register_forward_hook(lambda module, args, output: outputs.append(first_of(output).clone()))):
        logits_of(model, tokens)
    return outputs[0]


@contextmanager
def without_sinks(model):
    """Take the weight of attention sinks, parameters or projections of that name, away."""
    saved = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] in ("sinks", "sink", "attn_sink")
    }
    handles = [
        module.register_forward_hook(lambda module, args, output: torch.full_like(output, SINK))
        for name, module in model.named_modules()
        if name.endswith("sink_proj")
    ]
    with torch.no_grad():
        for name in saved:
            model.get_parameter(name).fill_(SINK)
    try:
        with hooked(*handles):
            yield
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                model.get_parameter(name).copy_(value)
