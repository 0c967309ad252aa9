"""Methods beside the papers' own: their formulas, applied to an unpatched model without any function of hfpatch.

``FURTHER`` lists them; ``check`` runs what must hold of one on one architecture.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from architectures import sweep
from architectures.catalogue import logits_of, make, settled
from architectures.formulas import on_input, on_output, tensors_of
from architectures.places import Site, sites_of
from families import perturb

import hfpatch
from hfpatch import CanonConfig, HfpatchError, OutputGateConfig


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


def convolved(x, weight):
    """x_t + sum over j of w_j x_{t-j}; x before the start is 0."""
    before = [torch.cat([torch.zeros_like(x[:, :j]), x[:, : x.shape[1] - j]], dim=1) for j in range(len(weight))]
    return x + sum(each * row for each, row in zip(weight, before, strict=True))


def apply_canon(model, site, tensors):
    """What enters the attention, convolved."""
    on_input(model, site, lambda x: convolved(x, tensors["entered"]))


def apply_canon_b(model, site, tensors):
    """Query, key and value, convolved where their projection returns them."""
    for target, (path, columns) in columns_of_all(model, site).items():

        def change(out, weight=tensors[target], columns=columns):
            out = out.clone()
            out[..., columns] = convolved(out[..., columns], weight)
            return out

        on_output(model, path, change)


def columns_of_all(model, site):
    """Return the projection and its columns of query, key and value: of modules of their own, or of a fused one."""
    holder, _, name = site.query.rpartition(".")
    if name in ("q_proj", "query"):
        others = {"key": name.replace("q_proj", "k_proj").replace("query", "key")}
        others["value"] = others["key"].replace("k_proj", "v_proj").replace("key", "value")
        paths = {"query": site.query, **{target: f"{holder}.{path}" for target, path in others.items()}}
        return {target: (path, slice(None)) for target, path in paths.items()}
    width, query = model.get_submodule(site.query)(torch.zeros(1, 1, _inputs(model, site))).shape[-1], site.columns
    rest = [column for column in range(width) if column not in set(query)]
    if rest[0] > query[-1]:  # all queries, all keys, all values
        key, value = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    else:  # query, key and value of a head
        size = rest[0]
        key, value = [column + size for column in query], [column + 2 * size for column in query]
    return {"query": (site.query, query), "key": (site.query, key), "value": (site.query, value)}


def _inputs(model, site):
    weight = model.get_submodule(site.query).weight
    return weight.shape[0] if hasattr(model.get_submodule(site.query), "nf") else weight.shape[1]


FURTHER = {
    "canon": Further(CanonConfig, apply_canon, "canon", takes=lambda site: site.has_one_input),
    "canon behind projections": Further(
        lambda: CanonConfig(at="qkv", width=3), apply_canon_b, "canon", takes=lambda site: "q_b_proj" not in site.query
    ),
    "output gate": Further(OutputGateConfig, apply_output_gate, "output_gate"),
    "output gate per head": Further(
        lambda: OutputGateConfig(per_head=True), apply_output_gate, "output_gate", takes=lambda site: bool(site.query)
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
    """Return the tensors at an attention, or at a module around it."""
    return next(tensors for holder, tensors in added.items() if f"{path}.".startswith(f"{holder}."))
