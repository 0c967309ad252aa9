"""Every query form against its formula in plain torch, inside whole models of four architectures."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from architectures.formulas import nonlinear
from families import LLAMA, make_config, make_tokens
from reference import ACTIVATIONS
from transformers import AutoConfig, AutoModelForCausalLM

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings

CASES = ["gpt2", "gpt_neox", "llama", "mixtral"]
ATTENTIONS = {
    "gpt2": "transformer.h.{}.attn",
    "gpt_neox": "gpt_neox.layers.{}.attention",
    "llama": "model.layers.{}.self_attn",
    "mixtral": "model.layers.{}.self_attn",
}
HEADS, SIZE = 4, 8


def config_of(case, **changes):
    if case == "mixtral":
        moe = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
        return AutoConfig.for_model("mixtral", **{**LLAMA, **moe, **changes})
    return make_config(case, **changes)


@functools.cache
def _built(case, query, rest):
    model = build_scratch(config_of(case), ScratchSettings(query=dict(query), **dict(rest)), seed=3).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # gains off one, biases off zero
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def build(case, *, rest=(), **query):
    return copy.deepcopy(_built(case, tuple(query.items()), tuple(dict(rest).items())))


def watched(model, name, tokens):
    """Return input and output of a module in a forward."""
    values = {}
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _, args, output: values.update(x=args[0], y=output))
    with torch.no_grad():
        model(tokens, use_cache=False)
    handle.remove()
    return values["x"], values["y"]


def query_of(case, y):
    """Return the query's columns of a projection's output, by transformers' own way to split it."""
    if case == "gpt2":
        return y.chunk(3, dim=-1)[0]
    if case == "gpt_neox":
        return y.view(*y.shape[:-1], HEADS, 3, SIZE)[..., 0, :].flatten(-2)
    return y


def projection(case):
    return {"gpt2": "c_attn", "gpt_neox": "query_key_value"}.get(case, "q_proj")


def f_of(path, x, **options):
    return nonlinear(x, {name.removesuffix(".weight"): p for name, p in path.f.named_parameters()}, **options)


FORMS = {
    "identity": ({"path": "identity"}, lambda path, x: x),
    "residual": ({"path": "residual"}, lambda path, x: x + x @ path.f.weight.T),
    "nonlinear": ({"path": "nonlinear"}, lambda path, x: (x + f_of(path, x)) / 2),
    "weight": (
        {"path": "nonlinear", "anchor": "weight"},
        lambda path, x: (F.linear(x, path.anchor.weight, path.anchor.bias) + f_of(path, x)) / 2,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_the_query_is_its_formula_in_every_layer(case, form):
    settings, formula = FORMS[form]
    model = build(case, **settings)
    for layer in range(2):
        name = f"{ATTENTIONS[case].format(layer)}.{projection(case)}"
        x, y = watched(model, name, make_tokens())
        with torch.no_grad():
            expected = formula(model.get_submodule(name).paths["query"], x)
        torch.testing.assert_close(query_of(case, y), expected, rtol=1e-5, atol=1e-5)


NO_NORMS = {"input_norm": "none", "output_norm": "none"}


@pytest.mark.parametrize("options", [*({"activation": name} for name in ACTIVATIONS), NO_NORMS])
def test_activations_norms_and_the_rank_are_those_that_were_asked_for(options):
    model, name = build("gpt2", rank=5, **options), "transformer.h.1.attn.c_attn"
    x, y = watched(model, name, make_tokens())
    path = model.get_submodule(name).paths["query"]
    assert path.f.up.weight.shape == (5, 32)
    with torch.no_grad():
        torch.testing.assert_close(query_of("gpt2", y), (x + f_of(path, x, **options)) / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_keys_values_and_all_else_start_from_the_stock_models_weights(case):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        stock = AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32)
    made = build_scratch(config_of(case), ScratchSettings(query={"path": "nonlinear"}), seed=3)
    ours, changed = dict(made.named_parameters()), 0
    for name, tensor in stock.named_parameters():
        if f".{projection(case)}." in name:
            changed += 1
        else:
            assert torch.equal(ours[name], tensor), name
    assert changed
    at = f"{ATTENTIONS[case].format(1)}.{projection(case)}"
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        theirs, actual = stock.get_submodule(at)(x), made.get_submodule(at)(x)
    if case == "gpt2":
        torch.testing.assert_close(actual[..., 32:], theirs[..., 32:])
        assert made.get_submodule(at).rest.weight.shape == (64, 32)
    elif case == "gpt_neox":
        split = lambda y: y.view(2, 3, HEADS, 3, SIZE)[..., 1:, :]  # noqa: E731
        torch.testing.assert_close(split(actual), split(theirs))
        assert made.get_submodule(at).rest.weight.shape == (64, 32)
    else:
        assert made.get_submodule(at).rest is None


@pytest.mark.parametrize("anchor", ["identity", "weight"])
@pytest.mark.parametrize("case", CASES)
def test_one_product_gives_the_loss_and_the_gradients_of_two(case, anchor):
    dtype, tight = (torch.float32, 1e-4) if case == "mixtral" else (torch.float64, 1e-7)  # experts are fp32 at most
    unfused, fused = (build(case, anchor=anchor, fused=fused).to(dtype) for fused in (False, True))
    assert {n: p.shape for n, p in unfused.named_parameters()} == {n: p.shape for n, p in fused.named_parameters()}
    fused.load_state_dict(unfused.state_dict())
    tokens = make_tokens()
    losses = [model(tokens, labels=tokens, use_cache=False).loss for model in (unfused, fused)]
    torch.testing.assert_close(losses[1], losses[0], rtol=tight / 100, atol=tight / 100)
    for loss in losses:
        loss.backward()
    others = dict(fused.named_parameters())
    for name, parameter in unfused.named_parameters():
        torch.testing.assert_close(others[name].grad, parameter.grad, rtol=tight, atol=tight / 100, msg=name)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_pre_projection_and_its_skip_are_their_formulas(case, gated):
    settings = ScratchSettings.model_validate({"pre_projection": {"gated": gated, "content_skip": True}})
    stock, model = (build_scratch(config_of(case), chosen, seed=3).eval() for chosen in (ScratchSettings(), settings))
    tokens, states = make_tokens(), {}
    assert torch.equal(model(tokens).logits, stock(tokens).logits)  # W_down and W_skip are 0
    attention = model.get_submodule(ATTENTIONS[case].format(1))
    mlp, skip = attention.preproj_mlp, attention.preproj_skip
    for parameter in (*mlp.parameters(), *skip.parameters()):
        parameter.data.normal_(std=0.3)

    def hear(name, output=False):
        def hook(module, args, kwargs, *outputs):
            values = outputs[0] if output else (args[0] if args else kwargs["hidden_states"])
            states[name] = values[0] if isinstance(values, tuple) else values

        return hook

    attention.register_forward_pre_hook(hear("x"), with_kwargs=True, prepend=True)
    attention.register_forward_hook(hear("without skip", output=True), with_kwargs=True, prepend=True)
    attention.register_forward_hook(hear("with skip", output=True), with_kwargs=True)
    with torch.no_grad():
        read, _ = watched(model, f"{ATTENTIONS[case].format(1)}.{projection(case)}", tokens)
        x = states["x"]
        inner = F.silu(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T) if gated else F.silu(x @ mlp.up.weight.T)
        expected = x + inner @ mlp.down.weight.T
        torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)
        added = states["with skip"] - states["without skip"]
        torch.testing.assert_close(added, expected @ skip.skip.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_under_autocast_query_and_key_have_one_dtype(case, fused):
    model = build(case, fused=fused)
    model.set_attn_implementation("eager")  # which, unlike sdpa, takes no mixture
    with torch.autocast("cpu", torch.bfloat16):
        _, y = watched(model, f"{ATTENTIONS[case].format(1)}.{projection(case)}", make_tokens())
    assert y.dtype == torch.bfloat16


def test_every_parameter_learns_from_the_first_step():
    for case in CASES:
        model = build(case).train()
        tokens = make_tokens()
        model(tokens, labels=tokens).loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == [], case


def test_keys_and_values_can_be_nonlinear_with_a_warning():
    with pytest.warns(UserWarning, match="parameter-free"):
        model = build("gpt2", targets=("query", "key", "value"))
    name = "transformer.h.0.attn.c_attn"
    x, y = watched(model, name, make_tokens())
    paths = model.get_submodule(name).paths
    assert model.get_submodule(name).rest is None
    with torch.no_grad():
        expected = torch.cat([(x + f_of(paths[t], x)) / 2 for t in ("query", "key", "value")], dim=-1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_values_alone_bring_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_scratch(config_of("gpt2"), ScratchSettings(query={"targets": ["value"]}))
    assert list(model.transformer.h[0].attn.c_attn.paths) == ["value"]


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox"])
def test_without_biases_there_are_none_and_what_is_left_computes_the_same(case):
    stock = build_scratch(config_of(case), ScratchSettings(), seed=4).eval()  # biases are zero at the start
    bare = build_scratch(config_of(case), ScratchSettings(biases=False), seed=4).eval()
    assert not [name for name, _ in bare.named_parameters() if name.endswith("bias")]
    with torch.no_grad():
        expected = stock(make_tokens(), use_cache=False).logits
        torch.testing.assert_close(bare(make_tokens(), use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_width_alone_gives_the_stock_class():
    model = build_scratch(config_of("gpt2"), ScratchSettings(mlp_width=3))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.transformer.h[0].mlp.c_fc.nf == 96


@pytest.mark.parametrize(
    ("case", "changes", "settings", "message"),
    [
        (
            "llama",
            {"head_dim": 12},
            {"query": {}},
            "anchor: identity needs .*d_q=48 and d=32; set path: nonl",
        ),
        ("llama", {"head_dim": 12}, {"query": {"path": "identity"}}, "path: identity needs it as wide as the hidden"),
        ("llama", {}, {"query": {"targets": ["key"]}}, "d_q=16 and d=32"),
        ("gpt2", {"n_embd": 33, "n_head": 3}, {"query": {}}, "hidden size 33 is odd"),
        ("gpt2", {}, {"query": {"targets": ["query", "key", "value"], "fused": True}}, "fused"),
        ("gpt2", {}, {"pre_projection": {"expansion": 0.01}}, "pre_projection: expansion=0.01 gives an inner width"),
        ("gemma2", {}, {"pre_projection": {"content_skip": True}}, "normed or scaled before it is added"),
        ("gpt2", {"n_head": 0}, {}, r"cannot be built \(ZeroDivisionError: "),
        ("llama", {"hidden_act": "nope"}, {}, r"cannot be built \(KeyError: 'nope'\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:architecture.query.targets")
def test_what_cannot_be_built_is_one_clear_line(case, changes, settings, message):
    with pytest.raises(HfpatchError, match=message) as caught:
        build_scratch(config_of(case, **changes), ScratchSettings(**settings))
    assert str(caught.value).startswith("architecture")
