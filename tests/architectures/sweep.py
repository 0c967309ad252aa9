"""Everything that must hold of one method on one case; each check raises AssertionError."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from architectures.catalogue import logits_of, make, model_type, settled, tokens_for
from architectures.formulas import apply_nonlinear, apply_pre_projection, apply_temperature, tensors_of
from architectures.measurements import first_output, logits_without_attention, residuals, without_sinks
from architectures.places import place_of, sites_of
from families import close, perturb

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.promises import residual
from hfpatch.promises import site as site_promises
from hfpatch.promises.inputs import example_tokens
from hfpatch.sites.discovery import survey

ROUNDING = 1e-4  # of fp32, relative to the largest value
VISIBLE = 1e-3
METHODS = ("pre-projection", "content skip", "nonlinear query", "query temperature")
CONTROLS = ("skip alone", "linear pre-projection")  # of the same modules, so that less has to be shown
PREFIX = {"nonlinear query": "nonlinear", "query temperature": "temperature"}  # the others: preproj
AS = {"query temperature": "nonlinear query", "skip alone": "content skip", "linear pre-projection": "pre-projection"}
NOT_CAUSAL = {"cpmant"}  # its prompt tokens see the whole text


def configuration(method, form="preserving", **options):
    if method == "nonlinear query":
        return NonlinearQueryConfig(form=form, **options)
    if method == "query temperature":
        return QueryTemperatureConfig(**options)
    options |= {"skip alone": {"expansion": 0}, "linear pre-projection": {"activation": "identity"}}.get(method, {})
    return PreProjectionConfig(content_skip=method in ("content skip", "skip alone"), **options)


def refusal(case, method):
    """Why the method cannot be applied to any layer, or an empty string."""
    refused = place_of(case).refused
    return refused.get(method) or refused.get(AS.get(method)) or refused.get("all", "")


def sites_for(case, model, method):
    """Return the sites that can take the method."""
    sites = sites_of(case, model)
    if method == "query temperature":
        return [site for site in sites if site.query and not site.shares_its_norm]
    return [site for site in sites if (site.query if method == "nonlinear query" else site.has_one_input)]


def differ(a, b):
    return bool((a - b).abs().max() > VISIBLE * b.abs().max())


def anatomy(model):
    """Everything about a model that a refused or removed patch must leave as it was, except the weights' values."""
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    ]
    flags = [(name, p.requires_grad, id(p)) for name, p in model.named_parameters()]
    return list(model.state_dict()), hooks, flags, hasattr(model, "peft_config")


@dataclass
class Bench:
    """An unpatched model, a patched one whose added tensors are off their initial values, and what that should be."""

    case: str
    method: str
    base: torch.nn.Module
    model: torch.nn.Module
    tokens: torch.Tensor
    plain: torch.Tensor  # the logits of the base
    build: Callable = make
    before: tuple = ()  # the patched model's anatomy before

    @property
    def sites(self):
        return sites_for(self.case, self.base, self.method)

    def tensors(self):
        """Return {path of the attention: {what: parameter}}; these stand at the attention or at a module around it."""
        added = tensors_of(self.model, PREFIX.get(self.method, "preproj"), "a")
        paths = [site.path for site in self.sites]
        held = {holder: [path for path in paths if f"{path}.".startswith(f"{holder}.")] for holder in added}
        assert sorted(path for ps in held.values() for path in ps) == sorted(paths), "other layers were changed"
        assert all(len(ps) == 1 for ps in held.values()), "other layers were changed"
        return {held[holder][0]: tensors for holder, tensors in added.items()}

    def twin(self, form="preserving"):
        """Return an unpatched model that computes what the patched one should, and two things by the attention's path.

        These are the leaves that it reads, {what: tensor}, and the list of what the attention has received.
        """
        twin = settled(self.build(self.case))
        leaves = {
            path: {what: parameter.detach().clone().requires_grad_() for what, parameter in tensors.items()}
            for path, tensors in self.tensors().items()
        }
        apply = {
            "nonlinear query": functools.partial(apply_nonlinear, form=form),
            "query temperature": apply_temperature,
            "linear pre-projection": functools.partial(apply_pre_projection, activation="identity"),
        }.get(self.method, apply_pre_projection)
        return twin, leaves, {site.path: apply(twin, site, leaves[site.path]) for site in self.sites}


@functools.lru_cache(maxsize=1)
def unpatched(case):
    """Return a base that no test may change, tokens, and its logits; the tests of one case in a row share them."""
    base = settled(make(case))
    tokens = tokens_for(base)
    return base, tokens, logits_of(base, tokens)


def patched(case, method, form="preserving"):
    base, tokens, plain = unpatched(case)
    model = make(case)
    before = anatomy(model)
    hfpatch.patch(model, configuration(method, form), names=["a"])
    if form == "preserving":
        assert torch.equal(logits_of(model, tokens).view(torch.int32), plain.view(torch.int32)), "changes at init"
    perturb(model, std=1.0 if method == "query temperature" else 0.1)
    return Bench(case, method, base, model, tokens, plain, before=before)


def finds_the_sites(case):
    """Compare the attention modules with the places; return ``yes`` where every block has one, or what else."""
    model = make(case)
    paths, expected = [site.path for site in hfpatch.find_sites(model)], [site.path for site in sites_of(case, model)]
    if model_type(case) == "big_bird":  # its inner module is exchanged at run time, so what is around it stands for it
        expected = [path.rpartition(".")[0] for path in expected]
    assert paths == expected
    skipped = survey(model).skipped
    assert all(skipped.values()), "skipped without a reason"
    blocks = {site.block for site in sites_of(case, model)}
    lists = place_of(case).blocks
    assert len(skipped) == sum(len(model.get_submodule(path)) for path in lists) - len(blocks)
    for layer in skipped:
        with pytest.raises(HfpatchError, match=f"layer {layer} "):
            hfpatch.patch(model, PreProjectionConfig(layers_to_transform=[layer]))
    if len(paths) > len(blocks):
        return "several in a block"
    return "in some blocks alone" if skipped else "yes"


def is_right_where_it_is_declared(case):
    """What ``hfpatch check`` measures of the declaration."""
    model = make(case)
    inputs = {"input_ids": example_tokens(model)}
    pre_projection = configuration("pre-projection" if refusal(case, "content skip") else "content skip")
    tests = [(site_promises.anatomy, pre_projection), (site_promises.reach, pre_projection)]
    any_layer = pre_projection if refusal(case, "nonlinear query") else configuration("nonlinear query")
    tests += [(residual.arrival, pre_projection), (site_promises.projections, any_layer)]
    for test, config in tests:
        holds, measured = test(model, config, inputs)
        assert holds, measured


def computes_the_formula(bench, form="preserving"):
    expected = logits_of(bench.twin(form)[0], bench.tokens)
    assert differ(expected, bench.plain), "the formula does nothing"
    logits = logits_of(bench.model, bench.tokens)
    assert close(logits, expected), "another function than the formula"
    return logits


def has_the_gradients_of(twin, leaves, case, model, added, tokens):
    """The logits and the gradient of every added tensor are the twin's; nothing else receives one. Return the logits.

    ``leaves`` and ``added`` are the twin's and the model's tensors, {path of the attention: {what: tensor}}.
    """
    reformer = model_type(case) == "reformer"  # it demands training mode and the full length; dropout is off
    trained, outputs = tokens_for(model, length=64) if reformer else tokens, []
    for net in (model, twin):
        outputs.append(net.train(reformer)(trained, use_cache=False).logits)
        (outputs[-1] * torch.linspace(-1, 1, outputs[-1].numel()).reshape(outputs[-1].shape)).sum().backward()
    model.eval()
    actual, expected = (output.detach() for output in outputs)
    assert close(actual, expected), "another function than the formula"
    for path, parameters in added.items():
        for what, parameter in parameters.items():
            gradient = leaves[path][what].grad
            assert gradient.abs().max() > 0, f"{path}: {what} receives no gradient"
            assert close(parameter.grad, gradient, rounding=10 * ROUNDING), f"{path}: a wrong gradient of {what}"
    assert not [n for n, p in model.named_parameters() if "hfpatch_" not in n and p.grad is not None]
    return logits_of(model, tokens) if reformer else actual


def is_pure(bench):
    """Without the attention's output projections a changed attention input cannot be seen."""
    sites = sites_of(bench.case, bench.base)
    a, b = (logits_without_attention(model, sites, bench.tokens) for model in (bench.base, bench.model))
    assert torch.equal(a, b), "changes something else than the attention branch"


@torch.no_grad()
def arrives(bench):
    """What a skip adds to the residual stream is x~ W_skip. It sets every W_skip to zero."""
    tensors = bench.tensors()
    skips = {path: held["skip"].clone() for path, held in tensors.items()}
    for held in tensors.values():
        held["skip"].zero_()
    twin, _, received = bench.twin()
    logits_of(twin, bench.tokens)
    plain = residuals(bench.model, bench.sites, bench.tokens)
    for site in bench.sites:
        tensors[site.path]["skip"].copy_(skips[site.path])
        arrived = residuals(bench.model, [site], bench.tokens)[site.path] - plain[site.path]
        expected = received[site.path][0] @ skips[site.path].T
        assert close(arrived, expected.reshape(arrived.shape)), f"{site.path}: the skip does not arrive as it is"
        tensors[site.path]["skip"].zero_()


def acts_as_a_query(bench):
    """In the first block that is changed, nothing changes at the first position: over one key the softmax is 1."""
    models = (bench.base, bench.model)
    with without_sinks(bench.base), without_sinks(bench.model):
        a, b = (first_output(model, bench.sites[0], bench.tokens) for model in models)
    moved = (a - b).abs().amax((0, 2))
    assert moved[1:].max() > VISIBLE, "does nothing"
    assert bench.case in NOT_CAUSAL or moved[0] < 1e-5, "over one key alone it changes more than the query"


def is_causal(bench, logits):
    changed = bench.tokens.clone()
    changed[:, 5:] = tokens_for(bench.model, seed=1)[:, 5:]
    other = logits_of(bench.model, changed)
    assert differ(logits[:, 5:], other[:, 5:]), "later tokens change nothing"
    assert bench.case in NOT_CAUSAL or close(logits[:, :5], other[:, :5]), "later tokens act on earlier ones"


def is_counted(bench):
    """The summary names the blocks without attention and those that cannot take the method."""
    unable = {site.block for site in sites_of(bench.case, bench.base)} - {site.block for site in bench.sites}
    skipped = hfpatch.patch_summary(bench.model).skipped
    assert len(skipped) == len(survey(bench.base).skipped) + len(unable), "the summary counts other layers"
    assert all(skipped.values()), "skipped without a reason"


def is_removed(case, model, config, tokens, plain, before):
    """Unpatching leaves the model as it was before: its logits ``plain``, its anatomy ``before``."""
    hfpatch.unpatch(model)
    assert torch.equal(logits_of(model, tokens), plain), "unpatch does not restore"
    if model_type(case) == "big_bird":  # it has exchanged modules of its own meanwhile
        model = settled(make(case))
        before = anatomy(model)
        hfpatch.unpatch(hfpatch.patch(model, config))
    assert anatomy(model) == before, "unpatch leaves something"


def is_refused(case, config):
    """One line says why, and the model is as it was; return the line."""
    model = make(case)
    before, tokens = anatomy(model), tokens_for(model)
    with pytest.raises(HfpatchError) as raised:
        hfpatch.patch(model, config)
    assert anatomy(model) == before, "a refused patch leaves something"
    assert torch.equal(logits_of(model, tokens), logits_of(make(case), tokens)), "a refused patch changes the model"
    assert len(str(raised.value)) > 20
    return str(raised.value)


def check(case, method):
    """Run everything on one case and method; return ``yes``, or ``refused`` or on how many layers it acts, and why."""
    if why := refusal(case, method):
        is_refused(case, configuration(method))
        return f"refused: {why}"
    bench = patched(case, method)
    twin, leaves, _ = bench.twin()
    logits = has_the_gradients_of(twin, leaves, case, bench.model, bench.tensors(), bench.tokens)
    assert differ(logits, bench.plain), "the formula does nothing"
    is_causal(bench, computes_the_formula(bench) if model_type(case) == "reformer" else logits)
    is_counted(bench)
    if method == "content skip":
        arrives(bench)
    else:
        is_pure(bench)
    is_removed(case, bench.model, configuration(method), bench.tokens, bench.plain, bench.before)
    if method == "query temperature":
        acts_as_a_query(patched(case, method))
    if method == "nonlinear query":
        literal = patched(case, method, "literal")
        computes_the_formula(literal, "literal")
        acts_as_a_query(literal)
    return reached(bench)


def failing(work, *args):
    """Return what ``work`` returns, or that it fails."""
    try:
        return work(*args)
    except (Exception, pytest.fail.Exception) as error:  # a cell, so that the other rows are still written
        return f"FAILS: {' '.join(str(error).replace('|', '/').split())}"


def reached(bench):
    possible, layers = len(bench.sites), len(sites_of(bench.case, bench.base))
    (why,) = place_of(bench.case).refused_in_some.values() if possible < layers else ("",)
    return f"{possible} of {layers} layers: {why}" if why else "yes"


def check_control(case, control):
    """Run what is a control's own on one case, its formula and folding; return a word as :func:`check` does."""
    if why := refusal(case, control):
        is_refused(case, configuration(control))
        return f"refused: {why}"
    bench = patched(case, control)
    expected, word = computes_the_formula(bench), reached(bench)
    if control == "skip alone" or folds(bench, expected):
        return word
    return "does not fold" if word == "yes" else f"{word}; does not fold"


def folds(bench, expected):
    """Return whether folded weights compute the formula in a stock model; else the error leaves the patch as it is."""
    with contextlib.suppress(HfpatchError):
        hfpatch.fold(bench.model)
    if hasattr(bench.model, "peft_config"):
        with pytest.raises(HfpatchError, match=r"^[^\n]+$"):
            hfpatch.fold(bench.model)
        assert torch.equal(logits_of(bench.model, bench.tokens), expected), "a refused fold changes the model"
        return False
    assert close(logits_of(bench.model, bench.tokens), expected), "folding changes what the model computes"
    if model_type(bench.case) != "big_bird":  # it exchanges modules of its own
        assert anatomy(bench.model) == bench.before, "fold leaves something"
    return True
