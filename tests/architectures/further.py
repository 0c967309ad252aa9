"""Methods beside the papers' own: their formulas, applied to an unpatched model without any function of hfpatch.

``FURTHER`` lists them; ``check`` runs what must hold of one on one architecture.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from architectures import sweep
from architectures.catalogue import logits_of, make, model_type, settled
from architectures.formulas import apply_nonlinear, on_argument, on_input, on_output, on_target, tensors_of
from architectures.measurements import first_of, hooked
from architectures.places import Site, sites_of
from families import perturb
from reference import ACTIVATIONS

import hfpatch
from hfpatch import (
    CanonConfig,
    LoReFTConfig,
    NonlinearLoraConfig,
    NonlinearQueryConfig,
    OutputGateConfig,
    ParallelAdapterConfig,
    ValueResidualConfig,
)


@dataclass(frozen=True)
class Further:
    """A method.

    Attributes:
        config: makes its configuration.
        apply: gives an unpatched model the method at a site: ``apply(model, site, tensors)`` with {name: tensor}.
        prefix: of the names of its tensors.
        takes: whether a site can take it, from what is known without hfpatch.
        among: which of the sites that can take it do, knowing them all.
        stream: whether it acts on the residual stream behind the block.
        std: of the noise that moves its tensors off their initial values.
        nowhere: types of models that cannot take it at all.
    """

    config: Callable
    apply: Callable
    prefix: str
    takes: Callable[[Site], bool] = lambda site: True
    std: float = 0.1
    stream: bool = False
    among: Callable[[list[Site]], list[Site]] = lambda sites: sites
    nowhere: Collection[str] = ()


def apply_output_gate(model, site, tensors):
    """(A ⊙ 2 sigmoid(x W_g)) W_O, one gate a column or one a head."""
    received = on_input(model, site, lambda x: x)

    def gated(a):
        gate = 2 / (1 + torch.exp(-(received[-1] @ tensors["gate"].T)))
        return a * gate.repeat_interleave(a.shape[-1] // gate.shape[-1], dim=-1)

    on_argument(model, site.output, gated)


def apply_nonlinear_lora(model, site, tensors):
    """x W + 6/3 B gelu(A x) for the targets that there are tensors for."""
    for target in sorted({name.split("_")[0] for name in tensors}):
        a, b = tensors[f"{target}_down"], tensors[f"{target}_up"]

        def changed(y, x, a=a, b=b):
            return y + 2 * ACTIVATIONS["gelu"](x @ a.T) @ b.T

        if target != "output":
            on_target(model, site, target, changed)
            continue
        read = []
        on_argument(model, site.output, lambda x, read=read: read.append(x) or x)
        on_output(model, site.output, lambda y, changed=changed, read=read: changed(y, read[-1]))


def apply_parallel_adapter(model, site, tensors):
    """Branch + U relu(D x)."""
    received = on_input(model, site, lambda x: x)
    change = lambda x: (x @ tensors["down"].T).clamp(min=0) @ tensors["up"].T  # noqa: E731
    on_output(model, site.exit, lambda out: out + change(received[-1]).reshape(out.shape) / site.factor)


def apply_stream_adapter(model, site, tensors):
    """h + U relu(D h)."""
    on_output(model, site.block, lambda h: h + (h @ tensors["down"].T).clamp(min=0) @ tensors["up"].T)


def edited(h, tensors):
    """h + R^T (W h + b - R h) with the R of M = S R, S lower triangular with a positive diagonal."""
    q, s = torch.linalg.qr(tensors["rows"].T)
    r = (q * s.diagonal().sign()).T
    w = r + tensors["shift"]
    return h + (h @ w.T + tensors["shift.bias"] - h @ r.T) @ r


def apply_branch_loreft(model, site, tensors):
    """The edit of the branch as it joins the residual stream."""
    on_output(model, site.exit, lambda out: edited(out * site.factor, tensors) / site.factor)


def apply_stream_loreft(model, site, tensors):
    """The edit of the residual stream behind the block."""
    on_output(model, site.block, lambda h: edited(h, tensors))


def apply_value_residual(model, site, tensors):
    """(1 - λ) v + λ v_1, one λ for all heads or one for each; the first layer, which has none, leaves its v_1."""
    first = model.__dict__.setdefault("first_values", {})

    def mixed(value, x):
        if not tensors:
            first["latest"] = value
            return value
        share = tensors["mix"].repeat_interleave(value.shape[-1] // len(tensors["mix"]))
        return (1 - share) * value + share * first["latest"]

    on_target(model, site, "value", mixed)


def takes_value(site):
    """Reformer's reversible blocks are recomputed by an autograd function of its own."""
    return bool(site.value) and not site.path.startswith("reformer")


def like_the_first(sites):
    """The sites in the list of blocks of the first one whose values are as wide; none where it is alone."""
    kinds = [(site.block.rpartition(".")[0], len(site.value[1])) for site in sites]
    alike = [site for site, kind in zip(sites, kinds, strict=True) if kind == kinds[0]]
    return alike if len(alike) > 1 else []


def takes_query(site):
    return bool(site.query) and "nonlinear query" not in site.place.refused


def takes_key_and_value(site):
    return bool(site.key and site.value)


def takes_gate(site):
    return site.has_output and site.place.mixed


def takes_skip(site):
    return "content skip" not in site.place.refused


def convolved(x, weight):
    """x_t + sum over j of w_j x_{t-j}; x before the start is 0."""
    before = [torch.cat([torch.zeros_like(x[:, :j]), x[:, : x.shape[1] - j]], dim=1) for j in range(len(weight))]
    return x + sum(values * row for values, row in zip(weight, before, strict=True))


def apply_canon(model, site, tensors):
    """What enters the attention, convolved."""
    on_input(model, site, lambda x: convolved(x, tensors["entered"]))


def apply_canon_b(model, site, tensors):
    """Query, key and value, convolved where their projection returns them."""
    for target, weight in tensors.items():
        on_target(model, site, target, lambda y, x, weight=weight: convolved(y, weight))


BLIND = {  # types whose tokens cannot look back
    "big_bird": "the attention is exchanged at run time",
    "bigbird_pegasus": "not causal",
    "blt": "patches beside bytes",
    "cpmant": "prompt tokens see the whole text",
    **dict.fromkeys(["dory", "hrm_text", "inkling2_loop_text"], "a block runs several times"),
    "llama4": "attends within chunks",
    "llama4_text": "attends within chunks",
    "mpt": "another kind of mask",
    "prophetnet": "streams along the sequence",
    "reformer": "hashes, and an autograd function that recomputes its blocks",
    "xlm": "a mask under another name",
    "zaya": "several masks",
}


VALUE = {"takes": takes_value, "among": like_the_first}
STREAM = {"takes": lambda site: site.place.stream, "stream": True}
LORA = {"rank": 3, "alpha": 6}
FURTHER = {
    "canon": Further(CanonConfig, apply_canon, "canon", takes=lambda site: site.has_one_input, nowhere=BLIND),
    "canon behind projections": Further(
        lambda: CanonConfig(at="qkv", width=3), apply_canon_b, "canon", nowhere=BLIND,
        takes=lambda site: takes_query(site) and takes_key_and_value(site),
    ),
    "output gate": Further(OutputGateConfig, apply_output_gate, "output_gate", takes=takes_gate),
    "output gate per head": Further(
        lambda: OutputGateConfig(per_head=True), apply_output_gate, "output_gate",
        takes=lambda site: takes_gate(site) and bool(site.query),
    ),
    "nonlinear key and value": Further(
        lambda: NonlinearQueryConfig(targets=("key", "value")), apply_nonlinear, "nonlinear", takes_key_and_value
    ),
    "nonlinear LoRA": Further(
        lambda: NonlinearLoraConfig(**LORA, targets=("query", "output")), apply_nonlinear_lora, "nonlinear_lora",
        takes=lambda site: takes_query(site) and site.has_output,
    ),
    "nonlinear LoRA of key and value": Further(
        lambda: NonlinearLoraConfig(**LORA, targets=("key", "value")), apply_nonlinear_lora, "nonlinear_lora",
        takes=takes_key_and_value,
    ),
    "parallel adapter": Further(
        lambda: ParallelAdapterConfig(rank=3), apply_parallel_adapter, "parallel_adapter", takes=takes_skip
    ),
    "parallel adapter on the stream": Further(
        lambda: ParallelAdapterConfig(rank=3, at="stream"), apply_stream_adapter, "parallel_adapter", **STREAM
    ),
    "LoReFT": Further(lambda: LoReFTConfig(rank=3), apply_stream_loreft, "loreft", **STREAM),
    "LoReFT on the branch": Further(
        lambda: LoReFTConfig(rank=3, at="branch"), apply_branch_loreft, "loreft",
        takes=lambda site: takes_skip(site) and site.place.branch,
    ),
    "value residual": Further(ValueResidualConfig, apply_value_residual, "value_residual", **VALUE),
    "value residual per head": Further(
        lambda: ValueResidualConfig(per_head=True), apply_value_residual, "value_residual",
        **VALUE | {"takes": lambda site: takes_value(site) and bool(site.query)},
    ),
}  # fmt: skip


BETWEEN = ("model.local_encoder", "model.local_decoder")  # BLT's cross-attentions change the stream between the blocks
LOOPS = ("dory", "inkling2_loop_text")  # each pass through the blocks in the middle begins with what came before them


def check(case, name):
    """Run what must hold of a method on a case; return ``yes``, on how many layers, or ``refused: `` and why.

    It changes nothing at init, computes its formula with its gradients, and leaves nothing when it is removed.
    """
    method, model, twin = FURTHER[name], make(case), settled(make(case))
    before, (base, tokens, plain) = sweep.anatomy(model), sweep.unpatched(case)
    every = [] if model_type(case) in method.nowhere else sites_of(case, base)
    sites = method.among([site for site in every if "all" not in site.place.refused and method.takes(site)])
    if not sites:
        why = sweep.is_refused(case, method.config()).removeprefix("no layer of this model can be changed: ")
        why = sweep.refusal(case, "all") or re.sub(r"^[A-Z]\w+(?= (has|is|does|takes) )", "the attention", why)
        return f"refused: {why}"
    hfpatch.patch(model, method.config(), names=["a"])
    assert torch.equal(logits_of(model, tokens).view(torch.int32), plain.view(torch.int32)), "changes at init"
    perturb(model, std=method.std)
    added = tensors_of(model, method.prefix, "a")
    held = {site.path: {} for site in sites}  # by attention; the tensors may be at a module around it
    for path in held:
        held[path] |= next((tensors for holder, tensors in added.items() if f"{path}.".startswith(f"{holder}.")), {})
    assert sum(map(len, held.values())) == sum(map(len, added.values())), "other layers were changed"
    leaves = {p: {n: t.detach().clone().requires_grad_() for n, t in ts.items()} for p, ts in held.items()}
    for site in sites:
        method.apply(twin, site, leaves[site.path])
    logits = sweep.has_the_gradients_of(twin, leaves, case, model, held, tokens)
    assert sweep.differ(logits, plain), "the formula does nothing"
    if method.stream and model_type(case) not in LOOPS:
        is_the_stream(base, sites, tokens)
    sweep.is_removed(case, model, method.config(), tokens, plain, before)
    return "yes" if len(sites) == len(every) else f"{len(sites)} of {len(every)} layers"


def is_the_stream(model, sites, tokens):
    """What a block returns is what the next block reads."""
    states = {}

    def entering(path, module, args, kwargs):
        states.setdefault(("in", path), next(iter([*args, *kwargs.values()])).detach())

    def leaving(path, module, args, output):
        states.setdefault(("out", path), first_of(output).detach())

    handles = []
    for path in (site.block for site in sites):
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(partial(entering, path), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leaving, path)))
    with hooked(*handles):
        logits_of(model, tokens)
    for path in (site.block for site in sites):
        blocks, _, index = path.rpartition(".")
        after = ("in", f"{blocks}.{int(index) + 1}")
        if after in states and path.partition(".layers.")[0] not in BETWEEN:
            assert torch.equal(states["out", path], states[after]), f"{path}: the next block reads something else"
