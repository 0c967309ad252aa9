import contextlib

import pytest
import torch
from families import make_config
from peft import HRAConfig, LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from training_blocks import metrics_of, same, trainables
from training_blocks import run_probe as run
from transformers import AutoModelForCausalLM

from hfpatch import PreProjectionConfig, patch
from hfpatch.models.attention import fast_attention
from hfpatch.nn.matmul import fast_matmul
from hfpatch.training.activations import CheapRecomputation
from hfpatch.training.head import loss_in_forward

TOKENS = torch.arange(24).view(2, 12) % 90 + 3


def patched(case, dtype=torch.float32, layers=2, lora="all-linear"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(case, num_hidden_layers=layers), dtype=dtype)
    patch(model, [PreProjectionConfig(content_skip=True), *([LoraConfig(r=2, target_modules=lora)] if lora else [])])
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        if value.requires_grad:
            value.data.normal_(std=0.1, generator=generator)
    return model.train()


def gradients(model, context, autocast=False):
    model.zero_grad()
    torch.manual_seed(5)
    with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(("dtype", "autocast"), [("float32", False), ("float32", True), ("bfloat16", True)])
@pytest.mark.parametrize("case", ["llama", "gpt_neox", "gpt2", "gemma2", "phi3", "bloom"])
def test_gradients_have_the_same_bits(case, dtype, autocast):
    model = patched(case, getattr(torch, dtype))
    with loss_in_forward(model):
        expected = gradients(model, contextlib.nullcontext(), autocast)
        actual = gradients(model, CheapRecomputation(model), autocast)
    assert same(actual, expected)
    assert len(actual) > 4


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_layers_may_be_given_arguments_by_name(autocast):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama"))
    model = get_peft_model(model, HRAConfig(r=2, target_modules=["q_proj"])).train()
    expected = gradients(model, contextlib.nullcontext(), autocast)
    assert same(gradients(model, CheapRecomputation(model), autocast), expected)


VIEWS = {
    "complex_view_of_a_cast": lambda x, z: (view := torch.view_as_complex(x.float().view(3, 2, 2))) * view,
    "conjugate": lambda x, z: z.conj() * z.flip(0),
    "conjugate_of_a_cheap_result": lambda x, z: (2.0 * z).conj() * z.flip(0),
    "negative": lambda x, z: z.conj().imag * z.real,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_read_memory_as_before(view):
    generator, gradients_of = torch.Generator().manual_seed(0), []
    drawn = torch.randn(3, 4, 2, generator=generator)
    for context in (contextlib.nullcontext(), CheapRecomputation(torch.nn.Module())):
        x = drawn[..., 0].bfloat16().requires_grad_()
        z = torch.view_as_complex(drawn).clone().requires_grad_()
        with context:
            result = VIEWS[view](x, z)
        result.abs().sum().backward()
        gradients_of.append((z if x.grad is None else x).grad)
    assert torch.equal(*gradients_of)


@pytest.mark.parametrize("trained", ["patch", "all"])
def test_dropout_is_kept(trained):
    model = patched("gpt2")
    if trained == "all":
        model.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    expected = gradients(model, contextlib.nullcontext())
    assert same(gradients(model, CheapRecomputation(model)), expected)
    torch.nn.Module.eval(model)
    assert not same(gradients(model, contextlib.nullcontext()), expected)


def kept_bytes(case, layers, *, recompute):
    """Return the bytes of the storages that autograd holds after a forward pass, parameters left out."""
    model = patched(case, layers=layers, lora=None)
    cheap, held = CheapRecomputation(model), {}
    plain = saved_tensors_hooks(lambda value: held.setdefault(value.untyped_storage(), value), lambda value: value)
    with fast_matmul(model, library="onednn"), loss_in_forward(model), fast_attention(), cheap if recompute else plain:
        model(TOKENS, labels=TOKENS, use_cache=False)
    parameters = {value.untyped_storage() for value in model.parameters()}
    return cheap.kept_bytes if recompute else sum(storage.nbytes() for storage in held.keys() - parameters)


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_a_layer_keeps_what_takes_products_to_compute(case):
    d, inner, mlp, keys, heads = 32, 40, 48, {"llama": 16, "gpt_neox": 32}[case], 4
    attention = d + 2 * keys + d + heads  # q, k, v, result, logarithms of sums
    patch_keeps = inner + d  # W_up x and x~
    # gate and up, the residual stream, statistics of norms
    rest = {"llama": 2 * mlp + 2 * (d + 1), "gpt_neox": mlp + d + 2 * 2}[case]
    kept = 4 * (attention + patch_keeps + rest)
    recomputed = 4 * (inner + d + {"llama": mlp, "gpt_neox": 0}[case])  # σ, norm, silu(gate)
    for recompute, expected in ((True, kept), (False, kept + recomputed)):
        a_layer = kept_bytes(case, 3, recompute=recompute) - kept_bytes(case, 2, recompute=recompute)
        assert a_layer == expected * TOKENS.numel()
    # in all of two layers, of which the first one's norm has no gradient, as it reads frozen embeddings
    saved = kept_bytes(case, 2, recompute=False) - kept_bytes(case, 2, recompute=True)
    assert saved == (2 * recomputed - 4 * d) * TOKENS.numel()


@pytest.mark.parametrize(
    ("options", "fewest", "on"),
    [
        ({}, 1, True),
        ({}, 1 << 20, False),
        ({"autocast": "bfloat16"}, 1, True),
        ({"gradient_checkpointing": True}, 1, False),
    ],
)
def test_a_run_has_the_same_bits(blocks, tmp_path, monkeypatch, options, fewest, on):
    monkeypatch.setattr("hfpatch.training.activations.FEWEST_VALUES", fewest)
    entered, models = [], [patched("llama", lora=None) for _ in range(2)]
    enter = CheapRecomputation.__enter__
    monkeypatch.setattr(CheapRecomputation, "__enter__", lambda self: entered.append(self) or enter(self))
    run(models[0], blocks, tmp_path / "cheap", micro_batch_size=2, **options)
    assert bool(entered) is on
    monkeypatch.setattr("hfpatch.training.loop.CheapRecomputation", lambda model: contextlib.nullcontext())
    run(models[1], blocks, tmp_path / "plain", micro_batch_size=2, **options)
    assert same(trainables(models[0]), trainables(models[1]))
    first, second = ([line["loss"] for line in metrics_of(tmp_path / name)] for name in ("cheap", "plain"))
    assert first == second


@pytest.mark.parametrize("kept", [True, False])
def test_a_value_changed_in_place_afterwards_does_not_change_the_gradient(kept):
    weight, x = torch.ones(4, 3, requires_grad=True), torch.arange(12.0).view(3, 4).requires_grad_()
    with CheapRecomputation(torch.nn.Module()):
        y = torch.exp(x) if kept else x * 1.5
        result = ((y if kept else torch.nn.functional.silu(y)) @ weight).sum()
    expected = torch.autograd.grad(result, weight, retain_graph=True)[0].clone()
    with torch.no_grad():
        y.mul_(2)
    assert torch.equal(torch.autograd.grad(result, weight)[0], expected)


def test_memory_is_used_again_once_no_tensor_in_it_is_alive():
    x, cheap = torch.ones(1 << 12, requires_grad=True), CheapRecomputation(torch.nn.Module())
    alive, addresses = [], []
    for is_first in (True, False, False):
        with cheap:
            result = x.exp()
        saved = result.grad_fn._saved_result
        assert torch.equal(saved, result)
        addresses.append(saved.untyped_storage().data_ptr())
        alive += [saved] * is_first
        del saved, result
    assert addresses[0] != addresses[1] == addresses[2]
    assert torch.equal(alive[0], x.exp())
