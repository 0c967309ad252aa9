import json

import numpy as np
import pytest
from families import make_model
from peft import IA3Config, LoftQConfig, LoraConfig, LoraRuntimeConfig
from peft.tuners.lora.config import KasaConfig
from transformers import AutoConfig, AutoModelForCausalLM

import hfpatch
import hfpatch.surgery.methods as methods_module
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.surgery.budget import attention_modules, count_added
from hfpatch.surgery.methods import build_method, target_names, validate_methods

METHODS = {
    "baseline": [],
    "pre_projection": [{"type": "pre_projection", "content_skip": True}],
    "nonlinear_query": [{"type": "nonlinear_query", "form": "literal", "targets": ["query", "value"]}],
    "lora": [{"type": "lora", "match": "pre_projection"}],
    "stack": [{"type": "pre_projection"}, {"type": "lora", "r": 4, "target_modules": ["q_proj"]}],
    "ia3": [{"type": "ia3", "target_modules": ["q_proj"], "feedforward_modules": []}],
}


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


def test_whether_a_method_merges_is_that_of_all_its_parts(model):
    methods = METHODS | {"linear": [{"type": "pre_projection", "activation": "identity"}]}
    expected = {"baseline": None, "pre_projection": False, "stack": False, "ia3": True, "linear": True}
    assert {name: build_method(model, methods, name).merges for name in expected} == expected


def test_options_reach_the_configurations_in_their_order(model):
    built = {name: build_method(model, METHODS, name) for name in METHODS}
    baseline = built["baseline"]
    assert (baseline.name, baseline.configs, baseline.match) == ("baseline", [], None)
    (pre,), (query,), (ia3,) = (built[name].configs for name in ("pre_projection", "nonlinear_query", "ia3"))
    assert isinstance(pre, PreProjectionConfig)
    assert pre.content_skip
    assert isinstance(query, NonlinearQueryConfig)
    assert (query.form, query.targets) == ("literal", ("query", "value"))
    assert isinstance(ia3, IA3Config)
    assert set(ia3.target_modules) == {"q_proj"}
    first, second = built["stack"].configs
    assert isinstance(first, PreProjectionConfig)
    assert isinstance(second, LoraConfig)
    assert (second.r, second.lora_alpha, second.lora_dropout) == (4, 8, 0.0)
    assert set(second.target_modules) == {"q_proj"}
    part = {"type": "lora", "r": 2, "lora_alpha": 1, "lora_dropout": 0.1}
    (given,) = build_method(model, {"l": [part]}, "l").configs
    assert (given.lora_alpha, given.lora_dropout) == (1, 0.1)
    assert set(given.target_modules) == set(attention_modules(model))  # PEFT would take q_proj and v_proj


GOOD = [
    {"type": "lora", "r": np.int64(4), "lora_alpha": 0.5, "lora_dropout": np.float32(0.5), "use_dora": np.True_},
    {"type": "lora", "lora_alpha": 16.0, "init_lora_weights": "Gaussian"},
    {"type": "lora", "target_modules": {"q_proj"}, "layers_to_transform": range(1), "layers_pattern": "layers"},
    {"type": "lora", "rank_pattern": {"q_proj": np.int64(2)}, "alpha_pattern": {"q_proj": 0.5}},
    {"type": "lora", "trainable_token_indices": {"embed_tokens": range(2)}, "kasa_config": KasaConfig()},
    {"type": "lora", "init_lora_weights": "eva", "eva_config": {"rho": 2.5}, "runtime_config": LoraRuntimeConfig()},
    {"type": "lora", "loftq_config": LoftQConfig(loftq_bits=4), "megatron_config": None, "layers_to_transform": None},
    {"type": "loha", "target_modules": ("q_proj",), "alpha": 4.5},
    {"type": "delora", "target_modules": r".*\.q_proj", "delora_lambda": 1.5},
]


@pytest.mark.parametrize("part", GOOD, ids=lambda part: str(list(part)[-1]))
def test_a_value_that_peft_works_with_is_taken(part):
    (config,) = build_method(model := make_model("llama"), {"m": [part]}, "m").configs
    for scale in {"lora_alpha", "alpha", "delora_lambda"} & part.keys():
        assert getattr(config, scale) == part[scale]
    hfpatch.patch(model, config)


@pytest.mark.parametrize("init", ["pissa_niter_4", "lora_ga"])
def test_an_initialisation_that_changes_the_base_is_refused_as_such(model, init):
    (config,) = build_method(model, {"m": [{"type": "lora", "init_lora_weights": init}]}, "m").configs
    with pytest.raises(HfpatchError, match="rewrites the weights of the base"):
        hfpatch.patch(make_model("llama"), config)


@pytest.mark.parametrize("count", [2, 8])
def test_building_all_methods_takes_configurations_in_proportion_to_them(model, monkeypatch, count):
    made = []
    plain = methods_module._config
    monkeypatch.setattr(methods_module, "_config", lambda *given: made.append(given) or plain(*given))
    methods = {f"pre_{n}": [{"type": "pre_projection", "expansion": n}] for n in range(1, count + 1)}
    for name in methods:
        build_method(model, methods, name)
    assert len(made) == 2 * count  # one that is checked, one that is returned


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"layers_to_transform": [0]}, [0]),
        ({"layers_to_transform": 1}, [1]),
        ({"layers_to_transform": [1, 0], "layers_pattern": "layers"}, [0, 1]),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, [1]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, [1]),
    ],
)
def test_lora_trains_the_layers_that_it_is_given(options, layers):
    model = make_model("llama")
    hfpatch.patch(model, build_method(model, {"l": [{"type": "lora", "r": 2, **options}]}, "l").configs)
    names = ["q_proj"] if "target_modules" in options else ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert {name.rsplit(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in names
    }


@pytest.mark.parametrize(
    ("options", "per_rank"),
    [
        ({}, 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32))),  # q; k and v; o
        ({"layers_to_transform": [0]}, (32 + 32) + 2 * (32 + 16) + (32 + 32)),
        ({"layers_to_transform": [1], "target_modules": ["q_proj", "v_proj"]}, (32 + 32) + (32 + 16)),
        ({"exclude_modules": ["k_proj"], "target_modules": ["q_proj", "k_proj"]}, 2 * (32 + 32)),
        ({"target_modules": r".*\.1\..*\.(q_proj|v_proj)"}, (32 + 32) + (32 + 16)),
    ],
)
def test_a_matched_lora_is_matched_on_the_modules_that_it_trains(model, options, per_rank):
    methods = {"pre": [{"type": "pre_projection"}], "l": [{"type": "lora", "match": "pre", **options}]}
    method = build_method(model, methods, "l")
    match = method.match
    assert (match.to, match.target_parameters) == ("pre", 2 * 2 * 32 * 40)
    assert match.parameters == match.value * per_rank == count_added(model, method.configs)
    assert abs(match.parameters - match.target_parameters) <= per_rank / 2
    assert (method.configs[0].r, method.configs[0].lora_alpha) == (match.value, 2 * match.value)
    assert json.loads(json.dumps(match.to_json())) == {
        "to": "pre", "rank": match.value, "parameters": match.parameters, "target_parameters": 2 * 2 * 32 * 40,
        "difference": pytest.approx(match.parameters / match.target_parameters - 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers_to_transform": [99]}, r"layers_to_transform: layers \[99\] do not exist; this model has layers 0 to"),
        ({"layers_to_transform": [0, 2]}, r"layers \[2\] do not exist"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern='h': no layer of this model is in a"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 7]}, "layers_to_transform: layer 7 has none of the"),
        (
            {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [1]},
            r"layers_to_transform does not act on target_modules .*\('model.layers.0.self_attn.q_proj'",
        ),
        ({"target_modules": ["q_proj", "queries"]}, "target_modules: no module of this model is called 'queries'"),
        ({"modules_to_save": ["nonsense"]}, "modules_to_save: no module of this model is called 'nonsense'"),
        ({"exclude_modules": ["nonsense"]}, "exclude_modules: no module of this model is called 'nonsense'"),
        ({"rank_pattern": {"nonsense": 3}}, "rank_pattern: no module of this model matches 'nonsense'"),
        ({"alpha_pattern": {"layers.7.*": 3}}, r"alpha_pattern: no module of this model matches 'layers\.7\.\*'"),
    ],
)
def test_what_a_lora_names_must_be_there(options, message):
    model = make_model("llama")
    with pytest.raises(HfpatchError, match=message):
        hfpatch.patch(model, build_method(model, {"l": [{"type": "lora", "r": 2, **options}]}, "l").configs)
    assert not hasattr(model, "peft_config")


BAD = {
    "no such type": ([{"type": "pre_projektion"}], r"m\[0\]\.type: 'pre_projektion' .*did you mean 'pre_projection'"),
    "no type": ([{"content_skip": True}], r"methods\.m\[0\]: a part is a mapping with a 'type'"),
    "no mapping": (["lora"], r"methods\.m\[0\]: a part is a mapping"),
    "unknown option": ([{"type": "pre_projection", "content_skipp": True}], "no option .*did you mean 'content_skip'"),
    "internal option": ([{"type": "pre_projection", "peft_type": "LORA"}], "no option 'peft_type'"),
    "rate": ([{"type": "lora", "lr": 1e-3}], r"lora has no option 'lr'; .* tuning: .* training\.learning_rates"),
    "second part": ([{"type": "lora", "r": 1}, {"type": "lora", "rr": 1}], r"methods\.m\[1\]: lora has no option 'rr'"),
    "bad value": ([{"type": "pre_projection", "activation": "swish"}], r"methods\.m\[0\]: activation='swish'"),
    "rank 0": ([{"type": "lora", "r": 0}], r"methods\.m\[0\]: .*r"),
    "negative rank": ([{"type": "lora", "r": -2}], r"methods\.m\[0\]: .*r"),
    "rank of the wrong type": ([{"type": "lora", "r": "many"}], r"methods\.m\[0\]: r='many' must be of type int"),
    "text for a switch": ([{"type": "lora", "use_dora": "false"}], "use_dora='false' must be of type bool"),
    "fraction of a layer": ([{"type": "lora", "layers_to_transform": 0.5}], "layers_to_transform=0.5 must be of type"),
    "no token": ([{"type": "lora", "trainable_token_indices": [None]}], r"trainable_token_indices=\[None\] must be of"),
    "wrong type in PEFT": ([{"type": "fourierft", "n_frequency": "9"}], "n_frequency='9' must be of type int"),
    "rank 0 of a query": ([{"type": "nonlinear_query", "rank": 0}], r"methods\.m\[0\]: rank=0 must be at least 1"),
    "rank and match": ([{"type": "lora", "r": 4, "match": "other"}], r"methods\.m\[0\] has both r and match"),
    "match to nothing": ([{"type": "lora", "match": "othr"}], r"m\[0\]\.match is 'othr', .*did you mean 'other'"),
    "wrong modules": ([{"type": "lora", "target_modules": 5}], r"^methods\.m\[0\]: target_modules=5 must be of type"),
    "match to a mapping": ([{"type": "lora", "match": {"other": 1}}], r"m\[0\]\.match is {'other': 1}, which is not"),
    "match to itself": ([{"type": "lora", "match": "m"}], "match is 'm'; a method can match neither itself nor"),
    "match to the baseline": ([{"type": "lora", "match": "baseline"}], "match is 'baseline'; a method can match"),
    "match to a matched one": ([{"type": "lora", "match": "matched"}], "match is 'matched', which matches another"),
    "size and match": ([{"type": "c3a", "block_size": 4, "match": "other"}], "has both block_size and match; match"),
    "match without a size": ([{"type": "ia3", "match": "other"}], r"methods\.m\[0\]\.match: ia3 has no size to solve"),
    "kept by layers together": ([{"type": "vera", "target_modules": "mlp"}], "vera keeps tensors that its layers"),
    "match of what is not injected": ([{"type": "vera", "match": "other"}], "vera keeps tensors that its layers share"),
    "not injected": ([{"type": "prompt_tuning", "num_virtual_tokens": 2}], r"methods\.m\[0\]: prompt_tuning puts"),
    "contradiction": ([{"type": "nonlinear_query", "anchor": "identity"}], "cannot preserve the model; set"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_methods(what, model):
    parts, message = BAD[what]
    other = {"other": [{"type": "pre_projection"}], "matched": [{"type": "lora", "match": "other"}]}
    methods = {"baseline": [], **other, "m": parts}
    for act in (lambda: validate_methods(methods), lambda: build_method(model, methods, "m")):
        with pytest.raises(HfpatchError, match=message):
            act()


def test_types_that_cannot_be_read_refuse_nothing(model, monkeypatch):
    def unread(cls):
        raise NameError("name 'Tensor' is not defined")

    monkeypatch.setattr("hfpatch.surgery.methods.option_types", unread)
    assert build_method(model, {"l": [{"type": "lora", "r": 2}]}, "l").configs[0].r == 2


def test_a_method_that_is_not_there(model):
    with pytest.raises(HfpatchError, match=r"'loora' is not in the recipe .*did you mean 'lora'"):
        build_method(model, METHODS, "loora")


@pytest.mark.parametrize(("budget", "asked"), [(3000, 3000), ("5%", None)])
def test_a_method_of_a_budget_has_the_nearest_count_with_all_its_parts(model, budget, asked):
    base = sum(parameter.numel() for parameter in model.parameters())
    asked = asked or round(0.05 * base)
    methods = {"both@any": [{"type": "pre_projection", "match": budget}, {"type": "lora", "r": 2}]}
    method = build_method(model, methods, "both@any")
    lora = count_added(model, method.configs[1:])
    unit = 2 * 2 * 32  # two layers, both matrices, a column of the hidden size
    assert method.match.target_parameters == asked
    assert method.match.parameters == count_added(model, method.configs)
    assert abs(method.match.parameters - asked) <= unit / 2
    assert (method.match.parameters - lora) % unit == 0
    assert method.match.to == {3000: "3k", "5%": "5%"}[budget]


PLACES = {  # read in transformers' modelling source: attention, MLP, and what all-linear has beside them
    "llama": ("model.layers", "self_attn", "q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj"),
    "gpt_neox": ("gpt_neox.layers", "attention", "query_key_value dense", "dense_h_to_4h dense_4h_to_h"),
    "gpt2": ("transformer.h", "attn", "c_attn c_proj", "c_fc c_proj"),
}


def expected(case, where, layers=(0, 1)):
    blocks, branch, attention, mlp = PLACES[case]
    names = [f"{branch}.{name}" for name in attention.split() if where != "mlp"]
    names += [f"mlp.{name}" for name in mlp.split() if where != "attention"]
    return {f"{blocks}.{layer}.{name}" for layer in layers for name in names}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("where", ["attention", "mlp", "all-linear"])
def test_what_the_shorthands_name(case, where):
    model = make_model(case)
    assert set(target_names(model, where)) == expected(case, where)
    assert set(target_names(model, where, layers=[1])) == expected(case, where, layers=[1])


def test_hybrids_have_an_mlp_beside_another_mixer():
    options = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4,
        "expert_layer_offset": 3, "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **options))
    mlps = {f"model.layers.{i}.feed_forward.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")}
    assert set(target_names(model, "mlp")) == mlps
    mamba = {f"model.layers.0.mamba.{n}" for n in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    assert mamba <= set(target_names(model, "all-linear"))


def test_what_cannot_be_named(model):
    with pytest.raises(HfpatchError, match=r"layers \[9\] do not exist"):
        target_names(model, "mlp", layers=[9])
    with pytest.raises(HfpatchError, match="layers_pattern does not go with target_modules=mlp"):
        target_names(model, "mlp", pattern="layers")
