"""A patched model keeps no state between calls: threads, replicas, recomputation and exceptions meet nothing of others.

The families differ in where the skip leaves and what the query reads: the attention itself (GPT-NeoX), a norm behind it
(Gemma 2, OLMo 2), a projection beside it (BERT), a projection of a latent (DeepSeek-V3).
"""

import copy
import pickle
import weakref
from contextlib import contextmanager, suppress

import pytest
import torch
from families import logits_of, make_model, make_tokens, perturb
from in_step import in_step
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, DeepseekV3Config, Olmo2Config

import hfpatch
from hfpatch import NonlinearQueryConfig, OutputGateConfig, PreProjectionConfig, ValueResidualConfig
from hfpatch.twins import random_model, shrink

MODELS = {
    "gpt_neox": lambda: make_model("gpt_neox"),
    "gemma2": lambda: make_model("gemma2"),
    "olmo2": lambda: random_model(shrink(Olmo2Config())),
    "bert": lambda: random_model(shrink(BertConfig(is_decoder=True))),
    "deepseek_v3": lambda: random_model(shrink(DeepseekV3Config())),
}


def patched(case, *, across=True):
    model = MODELS[case]().requires_grad_(False).eval()
    across = [ValueResidualConfig()] if across and case != "deepseek_v3" else []  # its values have no projection
    parts = [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(), OutputGateConfig()]
    hfpatch.patch(model, [*parts, *across])
    perturb(model)
    return model


@contextmanager
def watching(model):
    """Yield a function that returns how many of the tensors that went through the modules since it was called live."""
    tensors = []

    def note(module, *signals):
        tensors.extend(weakref.ref(leaf) for leaf in tree_leaves(signals) if isinstance(leaf, torch.Tensor))

    def living():
        count = sum(tensor() is not None for tensor in tensors)
        tensors.clear()
        return count

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    yield living
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("case", MODELS)
def test_two_threads_in_step(case):
    """Both are between the same two modules at the same time, whatever those are."""
    model, tokens = patched(case).requires_grad_(False), [make_tokens(2, 7, seed=seed) for seed in (0, 1)]
    expected = [logits_of(model, batch) for batch in tokens]
    assert all(map(torch.equal, in_step(model, tokens), expected))


@pytest.mark.parametrize("case", MODELS)
def test_an_exception_leaves_nothing(case):
    model, tokens = patched(case), make_tokens()
    expected = logits_of(model, tokens)

    def stop(*_):
        raise RuntimeError("stopped")

    block = hfpatch.find_sites(model)[0].block
    with watching(model) as living:
        for module in block.modules():
            handle = module.register_forward_hook(stop)
            with suppress(RuntimeError):
                logits_of(model, make_tokens(3, 4))
            handle.remove()
            assert not living(), type(module).__name__
    assert torch.equal(logits_of(model, tokens), expected)


@pytest.mark.parametrize("case", MODELS)
def test_a_projection_that_is_called_by_itself_leaves_nothing(case):
    """As servers call them, which look at one module after the other before they run the model."""
    model = patched(case, across=False)
    site = hfpatch.find_sites(model)[0]
    paths = {path: None for projection in site.projections.values() for path in (projection.source, projection.path)}
    with watching(model) as living:
        for module in (site.inner_module(path) for path in paths if path):
            module(torch.randn(1, 3, next(module.parameters()).shape[-1]))
            assert not living()


@pytest.mark.parametrize("case", ["gemma2", "bert"])
def test_recomputation_that_stops_early_leaves_nothing(case):
    """Checkpointing ends the recomputed forward by an exception as soon as it has what the backward needs."""
    model = patched(case).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with watching(model) as living:
        model(make_tokens(), use_cache=False).logits.sum().backward()
        assert not living()


def replicated(model, values):
    """Return a replica as ``nn.DataParallel`` makes it: the modules' own hooks, other tensors (here: other values)."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for name, module in model.named_modules():
        for child, inner in module._modules.items():
            copies[module]._modules[child] = copies.get(inner)
        for key, parameter in module._parameters.items():
            if parameter is None:
                copies[module]._parameters[key] = None
            else:
                setattr(copies[module], key, values[f"{name}.{key}".lstrip(".")].detach().clone())
    return copies[model]


@pytest.mark.parametrize("case", MODELS)
def test_copies_act_with_their_own_weights(case):
    model, tokens = patched(case), make_tokens()
    before = logits_of(model, tokens)
    other = patched(case)
    perturb(other, std=0.3, seed=1)
    expected = logits_of(other, tokens)
    assert not torch.allclose(expected, before, atol=1e-2)
    values = dict(other.named_parameters(remove_duplicate=False))
    assert torch.equal(logits_of(replicated(model, values), tokens), expected)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made.load_state_dict(other.state_dict())
        assert torch.equal(logits_of(made, tokens), expected)
    assert torch.equal(logits_of(model, tokens), before)
