import contextlib
import copy
import dataclasses
import functools
import itertools
import re

import pytest
import torch
from families import (
    FAMILIES,
    FEW,
    assert_as_it_was,
    logits_of,
    make_model,
    make_tokens,
    perturb,
    state_of,
    train,
    unchanged,
)  # fmt: skip
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, IA3Config, LNTuningConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from peft_methods import OPTIONS
from torch import nn

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.surgery.budget import attention_modules
from hfpatch.tuners.adapters import stack


def lora(model, **options):
    return LoraConfig(r=3, lora_alpha=6, target_modules=attention_modules(model), **options)


def ia3(model):
    return IA3Config(target_modules=attention_modules(model), feedforward_modules=[])


METHODS = {
    "pre": lambda model: PreProjectionConfig(),
    "gated_skip": lambda model: PreProjectionConfig(gated=True, content_skip=True),
    "query": lambda model: NonlinearQueryConfig(),
    "literal": lambda model: NonlinearQueryConfig(form="literal"),
    "lora": lora,
    "ia3": ia3,
}
PAIRS = [*itertools.permutations(METHODS, 2), ("lora", "lora"), ("gated_skip", "gated_skip"), ("query", "query")]


def configs_for(model, pair):
    return [METHODS[name](model) for name in pair]


EACH = [  # each pair on one of these families, and on the others where time is no matter
    pytest.param(case, pair, marks=[pytest.mark.slow] if (i + j) % len(FEW) else [])
    for i, case in enumerate(FEW)
    for j, pair in enumerate(PAIRS)
]


@pytest.mark.parametrize(
    ("case", "pair"),
    [*EACH, *((case, ("lora", "gated_skip", "query")) for case in FAMILIES)],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_every_pair_in_every_order_and_a_stack_on_every_family(case, pair, tmp_path):
    """No-op at init, trains, saves, loads, unpatches."""
    model, tokens = make_model(case), make_tokens(4, 10)
    before, base = state_of(model), logits_of(model, tokens)
    assert hfpatch.patch(model, configs_for(model, pair)) is model
    assert torch.equal(logits_of(model, tokens), base) == ("literal" not in pair)

    added = {name for name, p in model.named_parameters() if p.requires_grad}
    assert added == {n for n, _ in model.named_parameters() if n.replace(".base_layer", "") not in before["state"]}
    losses = train(model, tokens)
    assert losses[-1] < losses[0] - 1e-3
    trained = logits_of(model, tokens)

    hfpatch.save_patch(model, tmp_path / "patch")
    fresh = hfpatch.load_patch(make_model(case), tmp_path / "patch")
    assert list(stack(fresh)) == list(stack(model))
    assert torch.equal(logits_of(fresh, tokens), trained)

    for patched in (model, fresh):
        hfpatch.unpatch(patched)
        assert torch.equal(logits_of(patched, tokens), base)
    assert_as_it_was(model, before)
    assert_as_it_was(fresh, before)


@pytest.mark.parametrize("form", ["preserving", "literal"])
@pytest.mark.parametrize("case", [*FEW, "llama", "phi3", "falcon_new_decoder"])  # every layout of a projection
def test_nonlinear_query_and_lora_give_the_same_in_either_order(case, form):
    results = []
    tokens = make_tokens(4, 10)
    for order in (1, -1):
        model = make_model(case)
        parts = [("query", NonlinearQueryConfig(form=form)), ("lora", lora(model))][::order]
        hfpatch.patch(model, [config for _, config in parts], names=[name for name, _ in parts], seed=5)
        noise = torch.Generator().manual_seed(0)
        named = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if p.requires_grad}
        for name in sorted(named):
            named[name].data += 0.2 * torch.randn(named[name].shape, generator=noise)
        results.append((logits_of(model, tokens), train(model, tokens), logits_of(model, tokens)))
    (first, losses, trained), (other_first, other_losses, other_trained) = results
    assert torch.equal(first, other_first)
    assert losses == other_losses
    assert torch.equal(trained, other_trained)


def test_names():
    model = make_model("llama")
    hfpatch.patch(model, [lora(model), PreProjectionConfig(), lora(model)])
    assert list(stack(model)) == ["lora", "pre_projection", "lora_2"]
    assert set(model.active_adapters()) == {"lora", "pre_projection", "lora_2"}
    hfpatch.unpatch(model)
    hfpatch.patch(model, [lora(model), PreProjectionConfig()], names=["x", "y"])
    assert list(stack(model)) == ["x", "y"]


def initial_values(config, **options):
    """The trainable values of a patched Llama; the random state stays."""
    model, state = make_model("llama"), torch.get_rng_state()
    hfpatch.patch(model, config, **options)
    assert torch.equal(state, torch.get_rng_state())
    torch.randn(3)
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("method", ["literal", "lora"])
def test_the_seed_decides_every_part_and_without_one_the_configuration_keeps_its_own(method):
    config = METHODS[method](make_model("llama"))
    assert torch.equal(initial_values(config, seed=1), initial_values(config, seed=1))
    assert torch.equal(initial_values(config, seed=0), initial_values(config))
    assert not torch.equal(initial_values(config, seed=1), initial_values(config, seed=2))
    seeded = NonlinearQueryConfig(seed=4)
    assert torch.equal(initial_values(seeded), initial_values(NonlinearQueryConfig(), seed=4))
    assert not torch.equal(initial_values(seeded), initial_values(seeded, seed=5))
    assert (seeded.seed, seeded.target_modules) == (4, None)  # a copy of it was changed


@pytest.mark.parametrize("training", [False, True])
def test_patching_keeps_the_mode(training):
    model = make_model("llama").train(training)
    hfpatch.patch(model, configs_for(model, ["lora", "gated_skip", "query"]))
    assert {m.training for m in model.modules()} == {training}


def test_flags_are_restored_even_where_some_were_frozen_and_a_plain_model_stays():
    model = make_model("llama")
    model.model.embed_tokens.weight.requires_grad = False
    with unchanged(model):
        hfpatch.unpatch(hfpatch.patch(model, PreProjectionConfig()))
    with unchanged(model):
        hfpatch.unpatch(model)


def test_a_copy_of_a_patched_model_can_be_unpatched_too():
    model = make_model("llama")
    before = state_of(model)
    hfpatch.patch(model, configs_for(model, ["lora", "gated_skip"]))
    twin = copy.deepcopy(model)
    hfpatch.unpatch(twin)
    assert_as_it_was(twin, before)
    tokens = make_tokens()
    perturb(model, std=0.3)
    assert not torch.equal(logits_of(model, tokens), logits_of(twin, tokens))
    hfpatch.unpatch(model)
    assert_as_it_was(model, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: [lora(m, modules_to_save=["lm_head"])],
        lambda m: [LNTuningConfig(target_modules=["input_layernorm"])],
        lambda m: [LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]), ia3(m), lora(m)],
    ],
    ids=["modules to save", "norms", "embedding and nested"],
)
def test_other_wrappers_are_taken_out_as_well(make):
    model, tokens = make_model("llama"), make_tokens()
    base = logits_of(model, tokens)
    with unchanged(model):
        hfpatch.patch(model, make(model))
        assert torch.equal(logits_of(model, tokens), base)
        losses = train(model, tokens)
        assert losses[-1] < losses[0]
        hfpatch.unpatch(model)
    assert torch.equal(logits_of(model, tokens), base)


def test_two_trained_copies_of_one_module_are_refused_and_the_model_stays():
    model = make_model("llama")
    parts = [lora(model, modules_to_save=["lm_head"]), PreProjectionConfig(), lora(model, modules_to_save=["lm_head"])]
    message = "lm_head: lora and lora_2 both replace this module; leave it to one"
    with unchanged(model), pytest.raises(HfpatchError, match=message):
        hfpatch.patch(model, parts)


OF_THE_BASE = ("bias", "init_lora_weights", "init_weights", "init_ia3_weights")


def variants(kind):
    """Every value that a configuration names for its biases and for its initial values."""
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    options = dict(OPTIONS.get(kind.value, {}))
    if "target_modules" in fields and not issubclass(cls, PreProjectionConfig | NonlinearQueryConfig):
        options["target_modules"] = ["q_proj", "v_proj"]
    yield lambda: cls(**options)
    for name in OF_THE_BASE:
        values = {"all", f"{kind.value.lower()}_only"} if name == "bias" else {True, False}
        for value in values | set(re.findall(r"'(\w+)'", str(fields[name].type))) if name in fields else ():
            yield functools.partial(cls, **{**options, name: value})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PEFT_TYPE_TO_CONFIG_MAPPING, ids=lambda kind: kind.value)
def test_no_method_of_peft_changes_the_base(kind):
    """Nor where it is refused."""
    for make in variants(kind):
        model = make_model("qwen2")  # it has biases
        with unchanged(model), contextlib.suppress(ValueError):
            hfpatch.unpatch(hfpatch.patch(model, make()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pissa_niter_2"}, "init_lora_weights='pissa_niter_2' rewrites the weights of the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' rewrites .* use True or 'gaussian'"),
        ({"bias": "all"}, "bias='all' trains the biases of the base, .* use bias='none'"),
        ({"bias": "lora_only"}, "bias='lora_only' trains the biases of the base"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication repeats the layers of the base"),
    ],
)
def test_a_lora_that_changes_the_base_is_refused(options, message, tmp_path):
    model = make_model("qwen2")
    with unchanged(model), pytest.raises(HfpatchError, match=message):
        hfpatch.patch(model, [PreProjectionConfig(), lora(model, **options)])
    if "bias" in options:  # saving refuses it too, where PEFT injected it
        with pytest.raises(HfpatchError, match=message):
            hfpatch.save_patch(get_peft_model(model, lora(model, **options)), tmp_path / "patch")


def train_the_head(inject, config, model, name):
    inject(config, model, name)
    model.lm_head.weight.requires_grad = True


def fail_at_the_second(inject, config, model, name):
    if isinstance(config, NonlinearQueryConfig):
        raise RuntimeError("out of memory")
    inject(config, model, name)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (train_the_head, HfpatchError, r"trains 1 parameters of the base, such as lm_head\.weight"),
        (fail_at_the_second, RuntimeError, "out of memory"),
    ],
)
def test_a_failing_injection_leaves_the_model_as_it_was(monkeypatch, act, error, message):
    model, inject = make_model("llama"), hfpatch.surgery.patch.inject_adapter_in_model
    monkeypatch.setattr("hfpatch.surgery.patch.inject_adapter_in_model", functools.partial(act, inject))
    with unchanged(model), pytest.raises(error, match=message):
        hfpatch.patch(model, [lora(model), NonlinearQueryConfig()])


UNFIT = {
    "layer out of range": (lambda m: PreProjectionConfig(layers_to_transform=[9]), r"layers \[9\] do .* layers 0 to 1"),
    "no layer": (lambda m: PreProjectionConfig(layers_to_transform=[]), "no layer is given"),
    "no width": (lambda m: PreProjectionConfig(expansion=0.01), "gives an inner width of 0 at hidden size 32"),
    "no such LoRA target": (lambda m: LoraConfig(target_modules=["nothing"]), "nothing"),
    "prompts": (
        lambda m: PrefixTuningConfig(num_virtual_tokens=2),
        "prefix_tuning puts virtual tokens before the input",
    ),
    **{
        f"no pattern in {next(reversed(options))}": (
            lambda m, options=options: LoraConfig(**{"target_modules": ["q_proj"], **options}),
            rf"lora: {next(reversed(options))}='\(' is not a regular expression: missing \)",
        )
        for options in (
            {"target_modules": "("},
            {"exclude_modules": "("},
            {"layers_to_transform": [0], "layers_pattern": "("},
            {"rank_pattern": {"(": 3}},
            {"alpha_pattern": {"(": 3}},
        )
    },
    "width that does not fit": (
        lambda m: NonlinearQueryConfig(anchor="identity", form="literal", targets=("value",)),
        "d_q=16 and d=32; use anchor='weight'",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("first", [None, "lora", "gated_skip"])
def test_a_part_that_does_not_fit_leaves_the_model_as_it_was(what, first):
    model, (make, message) = make_model("llama"), UNFIT[what]
    parts = [METHODS[first](model)] if first else []
    with unchanged(model), pytest.raises(HfpatchError, match=message):
        hfpatch.patch(model, [*parts, make(model)])
    hfpatch.patch(model, PreProjectionConfig())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "1 adapter names for 2 configurations"),
        (["a", "a"], "adapter name 'a' must be unique"),
        (["a", "b.c"], r"adapter name 'b\.c' must be"),
        (["a", ""], "adapter name '' must be"),
        (["a", "layers"], "adapter name 'layers' is a part of the model's own names"),
        (["a", "0"], "adapter name '0' is a part of the model's own names"),
        (["a", "preproj_up"], "adapter name 'preproj_up' is a part of .* names"),
        (["lora_A", "b"], "adapter name 'lora_A' is a part of .* names"),
        (["base_layer", "b"], "adapter name 'base_layer' is a part of .* names"),
    ],
)
def test_unfit_names_are_refused(names, message):
    model = make_model("llama")
    with pytest.raises(HfpatchError, match=message):
        hfpatch.patch(model, [PreProjectionConfig(), lora(model)], names=names)
    assert not stack(model)


def test_models_that_cannot_be_patched_are_refused():
    model = hfpatch.patch(make_model("llama"), PreProjectionConfig())
    with pytest.raises(HfpatchError, match=r"has adapters already; call .*unpatch"):
        hfpatch.patch(model, NonlinearQueryConfig())
    assert list(stack(model)) == ["pre_projection"]
    with pytest.raises(HfpatchError, match="Linear is not a transformers model"):
        hfpatch.patch(nn.Linear(2, 2), PreProjectionConfig())
    with pytest.raises(HfpatchError, match=r"wrapped in a PeftModel; pass model.get_base_model"):
        hfpatch.patch(get_peft_model(make_model("llama"), PreProjectionConfig()), NonlinearQueryConfig())


@pytest.mark.parametrize("case", FAMILIES)
def test_summary(case):
    model = make_model(case)
    before = sum(p.numel() for p in model.parameters())
    hfpatch.patch(model, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(layers_to_transform=[1])])
    d_q = 48 if case in ("gemma", "gemma2") else 32
    pre, query = 2 * 32 * 40 + 32 * 32, 32 * 16 + 16 * d_q + 32 + d_q
    summary = hfpatch.patch_summary(model)
    assert (summary.base, summary.added, summary.trainable) == (before, 2 * pre + query, 2 * pre + query)
    assert summary.per_layer == {0: pre, 1: pre + query}
    for value in ("layer", "added", "trainable", "base", f"{2 * pre + query:,}", f"{before:,}"):
        assert value in str(summary)
    assert hfpatch.patch_summary(hfpatch.unpatch(model)).added == 0


def test_summary_of_a_peft_model_and_of_parameters_outside_the_blocks():
    model = get_peft_model(make_model("llama"), LoraConfig(r=1, target_modules=["q_proj", "lm_head"]))
    summary = hfpatch.patch_summary(model)
    assert summary.per_layer == {-1: 32 + 96, 0: 64, 1: 64}
    assert summary.added == summary.trainable == 256


@pytest.mark.parametrize(
    "config", [{"mine": PreProjectionConfig()}, ["pre_projection"], "pre_projection", [], None, PreProjectionConfig]
)
def test_what_is_no_configuration_is_one_line(config):
    with pytest.raises(HfpatchError, match="patch takes a PEFT configuration or a list of them"):
        hfpatch.patch(make_model("gpt_neox"), config)
