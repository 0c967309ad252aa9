"""Methods beside the papers' own: their formulas, applied to an unpatched model without any function of hfpatch.

``FURTHER`` lists them; ``check`` runs what must hold of one on one architecture.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from architectures import sweep
from architectures.catalogue import logits_of, make, settled
from architectures.formulas import on_input, tensors_of
from architectures.places import Site, sites_of
from families import perturb

import hfpatch
from hfpatch import HfpatchError, OutputGateConfig, ValueResidualConfig


@dataclass(frozen=True)
class Further:
    """A method.

    Attributes:
        config: makes its configuration.
        apply: gives an unpatched model the method at a site: ``apply(model, site, tensors)`` with {name: tensor}.
        prefix: of the names of its tensors.
        takes: whether a site can take it.
        std: of the noise that moves its tensors off their initial values.
    """

    config: Callable
    apply: Callable
    prefix: str
    takes: Callable[[Site], bool] = lambda site: True
    std: float = 0.1


def on_argument(model, path, change):
    """Make the module at ``path`` receive ``change(a)`` instead of its first argument a."""
    module = model.get_submodule(path)
    forward = module.forward
    module.forward = lambda a, *args, **kwargs: forward(change(a), *args, **kwargs)


def apply_output_gate(model, site, tensors):
    """(A ⊙ 2 sigmoid(x W_g)) W_O, one gate a column or one a head."""
    received = on_input(model, site, lambda x: x)

    def gated(a):
        gate = 2 / (1 + torch.exp(-(received[-1] @ tensors["gate"].T)))
        return a * gate.repeat_interleave(a.shape[-1] // gate.shape[-1], dim=-1)

    on_argument(model, site.output, gated)


# What computes the values, from the attention, and their columns, from the number of columns there are
VALUES = {
    "gpt_neox": (
        "query_key_value",
        lambda width: [i for i in range(width) if i % (width // 4) >= width // 6],
    ),  # of 4 heads
    "gpt2": ("c_attn", lambda width: range(2 * width // 3, width)),
    "bert": ("value", range),
    "falcon": ("query_key_value", lambda width: range(5 * width // 6, width)),  # of 4 queries, 1 key and 1 value
}


def has_values(site):
    return site.place.query != "q_b_proj"  # latent attention computes the values of all heads from one latent


def first_of(model):
    """What the value residual's first layer leaves for the others, in a model that is run once at a time."""
    return model.__dict__.setdefault("first_values", [])


def apply_value_residual(model, site, tensors):
    """v + λ (v_1 - v), one λ for all heads or one for each."""
    path, columns_of = VALUES.get(model.config.model_type, ("v_proj", range))
    module = model.get_submodule(f"{site.path}.{path}")
    forward = module.forward

    def mixed(x):
        out = forward(x)
        columns = list(columns_of(out.shape[-1]))
        value = out[..., columns]
        if not tensors:
            first_of(model)[:] = [value]
            return out
        share = tensors["mix"].repeat_interleave(len(columns) // len(tensors["mix"]))
        mixture = (1 - share) * value + share * first_of(model)[0]
        return out.index_copy(-1, torch.tensor(columns), mixture)

    module.forward = mixed


FURTHER = {
    "output gate": Further(OutputGateConfig, apply_output_gate, "output_gate"),
    "output gate per head": Further(
        lambda: OutputGateConfig(per_head=True), apply_output_gate, "output_gate", takes=lambda site: bool(site.query)
    ),
    "value residual": Further(ValueResidualConfig, apply_value_residual, "value_residual", takes=has_values),
    "value residual per head": Further(
        lambda: ValueResidualConfig(per_head=True), apply_value_residual, "value_residual", takes=has_values
    ),
}


def check(case, name):
    """The method changes nothing at init, computes its formula with its gradients, and leaves nothing when removed."""
    method, model, twin = FURTHER[name], make(case), settled(make(case))
    before, (base, tokens, plain) = sweep.anatomy(model), sweep.unpatched(case)
    sites = [site for site in sites_of(case, base) if method.takes(site)]
    if not sites:
        with pytest.raises(HfpatchError, match="no layer of this model can be changed"):
            hfpatch.patch(model, method.config())
        assert sweep.anatomy(model) == before
        return
    hfpatch.patch(model, method.config(), names=["a"])
    assert torch.equal(logits_of(model, tokens).view(torch.int32), plain.view(torch.int32)), "changes at init"
    perturb(model, std=method.std)
    added = tensors_of(model, method.prefix, "a")
    held = {site.path: _held(added, site.path) for site in sites}
    assert sum(map(len, held.values())) == sum(map(len, added.values())), "other layers were changed"
    leaves = {p: {n: t.detach().clone().requires_grad_() for n, t in ts.items()} for p, ts in held.items()}
    for site in sites:
        method.apply(twin, site, leaves[site.path])

    outputs = [each(tokens, use_cache=False).logits for each in (model, twin)]
    for output in outputs:
        (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
    found, expected = (output.detach() for output in outputs)
    assert sweep.differ(expected, plain), "the formula does nothing"
    assert sweep.close(found, expected), "another function than the formula"
    for path, parameters in held.items():
        for what, parameter in parameters.items():
            gradient = leaves[path][what].grad
            assert gradient.abs().max() > 0, f"{path}: {what} receives no gradient"
            assert sweep.close(parameter.grad, gradient, rounding=10 * sweep.ROUNDING), f"{path}: gradient of {what}"
    hfpatch.unpatch(model)
    assert torch.equal(logits_of(model, tokens), plain), "unpatch does not restore"
    assert sweep.anatomy(model) == before, "unpatch leaves something"


def _held(added, path):
    """Return the tensors at an attention, or at a module around it, if there are any."""
    return next((tensors for holder, tensors in added.items() if f"{path}.".startswith(f"{holder}.")), {})
