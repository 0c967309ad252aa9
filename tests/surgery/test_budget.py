"""Counts against the published ones and PEFT's own; ``match`` against trying every size of every tuner."""

import copy
import warnings
from functools import cache

import pytest
import torch
from families import FAMILIES, make_config, make_model
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import hfpatch
from hfpatch import (
    CanonConfig,
    HfpatchError,
    NonlinearLoraConfig,
    NonlinearQueryConfig,
    OutputGateConfig,
    PreProjectionConfig,
    QueryTemperatureConfig,
    match_lora_rank,
    methods,
    sized,
)
from hfpatch.recipes.comparison import load_recipe
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.results import ComparisonResults
from hfpatch.surgery.budget import (
    Trial,
    attention_modules,
    count_added,
    match_size,
    parameter_count,
)
from hfpatch.surgery.methods import build_method
from hfpatch.tuners.checks import require_injectable

PYTHIA = {
    "160m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "410m": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
PUBLISHED = {  # pre-projection, + skip, LoRA on QKV and output at the published rank, pre-projection + LoRA r = 64
    "160m": (17_694_720, 24_772_608, (480, 26_542_080), 21_233_664),
    "410m": (62_914_560, 88_080_384, (640, 94_371_840), 72_351_744),
}
MATCHED = {"160m": 320, "410m": 427}


@pytest.fixture(scope="module", params=PYTHIA)
def pythia(request):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=50304, **PYTHIA[request.param]))
    return request.param, model


def lora(model, rank):
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=attention_modules(model))


def test_published_counts(pythia):
    size, model = pythia
    pre, skip, (rank, lora_count), both = PUBLISHED[size]
    assert count_added(model, [PreProjectionConfig()]) == pre
    assert count_added(model, [PreProjectionConfig(content_skip=True)]) == skip
    assert count_added(model, [PreProjectionConfig(activation="identity")]) == pre
    assert count_added(model, [PreProjectionConfig(expansion=0, content_skip=True)]) == skip - pre
    config = model.config
    heads = config.num_hidden_layers * config.num_attention_heads
    assert count_added(model, [QueryTemperatureConfig()]) == heads == {"160m": 144, "410m": 384}[size]
    assert count_added(model, [lora(model, rank)]) == lora_count
    assert count_added(model, [PreProjectionConfig(), lora(model, 64)]) == both
    assert count_added(model, [lora(model, 64), PreProjectionConfig()]) == both


def test_matched_ranks_and_the_cost_of_a_nonlinear_query(pythia):
    size, model = pythia
    targets = attention_modules(model)
    assert match_lora_rank(model, budget=PUBLISHED[size][0], target_modules=targets) == MATCHED[size]
    named = ["query_key_value", "attention.dense"]
    assert match_lora_rank(model, budget=PUBLISHED[size][0], target_modules=named) == MATCHED[size]
    d, layers = PYTHIA[size]["hidden_size"], PYTHIA[size]["num_hidden_layers"]
    assert count_added(model, [NonlinearQueryConfig()]) == layers * (d * d + 2 * d)


@pytest.mark.parametrize("case", FAMILIES)
def test_counting_leaves_the_model_alone_and_agrees_with_the_patched_model(case):
    model = make_model(case)
    configs = [PreProjectionConfig(gated=True), lora(model, 3), NonlinearQueryConfig(rank=5)]
    names = list(model.state_dict())
    counted = count_added(model, configs)
    assert list(model.state_dict()) == names
    assert configs[0].target_modules is None
    assert counted == sum(p.numel() for p in hfpatch.patch(model, configs).parameters() if p.requires_grad)
    assert count_added(model, []) == 0


@pytest.mark.parametrize("kind", ["shira", "adamss"])
def test_the_twin_has_no_values_and_what_depends_on_them_is_counted_in_the_model(kind):
    twin = Trial(make_model("gemma2")).twin
    assert {p.device.type for p in twin.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in make_model("gemma2").named_parameters()}
    assert {name: p.shape for name, p in twin.named_parameters()} == shapes
    model = make_model("llama")
    (config,) = build_method(model, {"x": [{"type": kind, "r": 2, "target_modules": ["q_proj"]}]}, "x").configs
    assert count_added(model, [config]) > 0
    assert not hasattr(model, "peft_config")
    with pytest.raises(HfpatchError, match=rf"{kind} .* values of the base's weights"):
        count_added(Trial(model).twin, [config])


@pytest.mark.parametrize("rank", [1, 2, 7])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_count_of_a_rank_is_peft_s_own(case, rank):
    model = make_model(case)
    targets = attention_modules(model)
    cost = sum(sum(model.get_submodule(name).weight.shape) for name in targets)
    for parts in ([], [lora(model, 2), PreProjectionConfig()]):
        if parts:
            hfpatch.patch(model, parts)
        assert rank * cost == count_added(model, [lora(model, rank)])
        for more, nearest in ((0, rank), (1, rank + 1)):  # up to half way between two ranks, and beyond
            budget = rank * cost + cost // 2 + more
            assert match_lora_rank(model, budget=budget, target_modules=targets) == nearest


def test_a_rank_is_matched_on_the_modules_that_are_there_whatever_the_configuration_says():
    model, budget = make_model("llama"), 2 * 8 * (32 + 32)
    assert match_lora_rank(model, budget=budget, target_modules=["q_proj"]) == 8
    del model.model.layers[1:]
    assert match_lora_rank(model, budget=budget, target_modules=["q_proj"]) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0, "target_modules": ["q_proj"]}, "budget=0 must be a whole number of at least 1"),
        ({"budget": 10, "target_modules": ["q_prj"]}, r"target_modules=\['q_prj'\]: no module"),
        ({"budget": 10, "target_modules": []}, "no module"),
        ({"budget": 10, "target_modules": ["input_layernorm"]}, "LlamaRMSNorm is not a linear projection"),
    ],
)
def test_errors(options, message):
    with pytest.raises(HfpatchError, match=message):
        match_lora_rank(make_model("llama"), **options)


def test_the_recipe_s_loras_have_the_parameters_of_the_pre_projection():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=50304, **PYTHIA["160m"]))
    stacks = load_recipe("pythia-160m").methods
    matches = {name: build_method(model, stacks, name).match for name in ("lora", "lora_all_linear", "dora", "rslora")}
    # 55,296 for each rank on attention, 147,456 on all linear projections; DoRA's magnitudes are 36,864 more
    assert {name: match.value for name, match in matches.items()} == {
        "lora": 320, "lora_all_linear": 120, "dora": 319, "rslora": 320,
    }  # fmt: skip
    assert matches["dora"].parameters == 319 * 55_296 + 36_864
    assert all(abs(match.difference) < 0.002 for match in matches.values())


OURS = {getattr(methods, name).spec.name for name in methods.__all__}
TARGETS = ["q_proj", "v_proj", "down_proj"]  # 8 -> 8, 8 -> 4, 12 -> 8
SMALL = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
OPTIONS = {  # beside the modules
    "adamss": {"num_subspaces": 2, "r": 3},
    "boft": {"boft_n_butterfly_factor": 2},
    "gralora": {"gralora_k": 4},
    "lokr, decompose_factor": {"decompose_factor": 2},
    "lokr, decompose_both": {"decompose_both": True},
    "lora, use_dora": {"use_dora": True},
    "lora, exclude_modules": {"exclude_modules": ["v_proj"]},
    "miss, bat": {"init_weights": "bat"},
    "oft, block_share": {"block_share": True},
    "pre_projection": {"gated": True},
    "waveft, proportional_parameters": {"proportional_parameters": True},
}
CASES = [*SIZES, *(case for case in OPTIONS if "," in case)]


@cache
def small_model():
    return AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=1, **SMALL)).eval()


def sizes_to_try(kind):
    """Return more values than the budgets need; those that the tuner refuses are no sizes."""
    if kind == "supertuning":
        return [step / 10_000 for step in range(0, 10_000, 50)]  # a matrix has at most 96 weights
    if kind == "pre_projection":
        return [width / 8 for width in range(1, 13)]
    return range(1, {"fourierft": 40, "waveft": 70, "randlora": 9}.get(kind, 14))  # 8: a rank that covers a matrix


def build(case, value):
    kind = case.partition(",")[0]
    part = {"type": kind, **OPTIONS.get(case, {}), **({} if kind in OURS else {"target_modules": TARGETS})}
    return build_method(small_model(), {"x": [{**part, SIZES[kind].key: value}]}, "x").configs[0]


def count_every_size(case):
    trial, counts = Trial(small_model()), []
    for value in sizes_to_try(case.partition(",")[0]):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Invalid `oft_block_size`")  # PEFT would take another one
            try:
                counts.append(trial([build(case, value)]).added)
            except (HfpatchError, UserWarning):
                continue
    return {count for count in counts if count}


@pytest.mark.parametrize("case", CASES)
def test_the_solver_equals_brute_force(case):
    counts = sorted(count_every_size(case))
    size, middle = SIZES[case.partition(",")[0]], len(counts) // 2
    for budget in {1, counts[0] + 1, (counts[middle] + counts[middle - 1]) // 2, counts[middle] + 1}:
        value, count = match_size(small_model(), size, OPTIONS.get(case, {}), lambda v: build(case, v), budget=budget)
        assert count == min(counts, key=lambda possible: (abs(possible - budget), possible))
        assert count == count_added(small_model(), [build(case, value)])


SIZED = [
    (PreProjectionConfig(), "expansion", 2 * 32 * 2),  # what one unit of the size costs: here of a width of expansion·d
    (PreProjectionConfig(gated=True), "expansion", 3 * 32 * 2),
    (NonlinearQueryConfig(), "rank", 64 * 2),
    (NonlinearLoraConfig(), "rank", ((32 + 32) + (32 + 16)) * 2),
    (LoraConfig(lora_alpha=4), "r", ((32 + 32) + (32 + 16)) * 2),
    (LoraConfig(target_modules="all-linear"), "r", (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)) * 2),
    (LoraConfig(target_modules=r".*\.1\..*_proj"), "r", 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)),
    (CanonConfig(), "width", 32 * 2),
]


@pytest.mark.parametrize(("config", "key", "unit"), SIZED)
def test_a_configuration_of_a_given_size(config, key, unit):
    model = make_model("llama")
    base = sum(p.numel() for p in model.parameters())
    norms = 2 * (32 + 32) if isinstance(config, NonlinearQueryConfig) else 0
    targets = [(7001, 7001), ("22.5%", 0.225 * base), (LoraConfig(r=8), 8 * ((32 + 32) + (32 + 16)) * 2)]
    for parameters, budget in targets:
        made = sized(config, model, parameters=parameters)
        value = getattr(made, key) * (32 if key == "expansion" else 1)
        assert value == pytest.approx(round((budget - norms) / unit))
        assert count_added(model, [made]) == value * unit + norms
        same = {name: item for name, item in made.to_dict().items() if name not in (key, "target_modules")}
        assert same == {name: config.to_dict()[name] for name in same}
    assert config.to_dict() == copy.deepcopy(config).to_dict()
    assert not hasattr(model, "peft_config")
    stack = [LoraConfig(r=8), LoraConfig(r=2)]
    assert count_added(model, [sized(config, model, parameters=stack)]) == pytest.approx(2240, abs=unit / 2)


def test_a_configuration_that_was_injected_is_sized_for_another_model():
    config = PreProjectionConfig()
    get_peft_model(make_model("llama"), config)
    assert count_added(make_model("gpt2"), [sized(config, make_model("gpt2"), parameters=1280)]) == 1280


@pytest.mark.parametrize(
    ("config", "parameters", "message"),
    [
        (OutputGateConfig(), 1, "output_gate has no size to solve for: it declares none"),
        (IA3Config(), 1, "ia3 has no size to solve for: it trains one vector"),
        (PromptTuningConfig(num_virtual_tokens=2), 1, "prompt_tuning puts virtual tokens .* so it cannot be injected"),
        (AdaLoraConfig(total_step=10), 1, "adalora prunes its ranks .* so it cannot be injected"),
        (LoraConfig, 1, "sized takes one PEFT configuration, not <class"),
        ([LoraConfig()], 1, "sized takes one PEFT configuration, not \\["),
        (PreProjectionConfig(), 0, "parameters=0 must be a whole number of at least 1"),
        (PreProjectionConfig(), "1", "parameters='1' must be a share of the base's above 0, such as '1%'"),
        (PreProjectionConfig(), "0%", "parameters='0%' must be a share"),
        (PreProjectionConfig(), f"{'9' * 400}%", "must be a share"),
        (PreProjectionConfig(), 10**15, "1,000,000,000,000,000 parameters are more than 100 times the base's"),
        (LoraConfig(target_modules=["q_proj"]), "2000000%", "parameters are more than 100 times the base's"),
        (PreProjectionConfig(layers_to_transform=[7]), 100, r"layers \[7\] do not exist"),
    ],
)
def test_what_has_no_size_is_said(config, parameters, message):
    with pytest.raises(HfpatchError, match=message):
        sized(config, make_model("llama"), parameters=parameters)


def test_a_size_that_is_far_away_changes_nothing_or_is_too_large():
    with pytest.warns(UserWarning, match=r"pre_projection: 2,176 parameters, .* are nearest to 100"):
        sized(PreProjectionConfig(content_skip=True), make_model("llama"), parameters=100)
    assert parameter_count(make_model("llama"), "0.000001%") == 1
    value, count = match_size(small_model(), SIZES["psoft"], {}, lambda v: build("psoft", v), budget=10**6)
    assert (value, count) == (4, count_added(small_model(), [build("psoft", 4)]))
    parts = {"type": "glora", "config_A_B": "vector", "config_C": "vector", "target_modules": TARGETS, "match": "other"}
    stacks = {"other": [{"type": "pre_projection"}], "x": [parts]}
    with pytest.raises(HfpatchError, match=r"methods\.x\[0\]\.match: no size changes the number of parameters"):
        build_method(small_model(), stacks, "x")


def test_every_tuner_that_can_be_injected_is_listed():
    listed = set(SIZES) | set(NO_SIZE)
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        name = str(kind.value).lower()
        try:
            require_injectable(config(**({"total_step": 10} if name == "adalora" else {})))
        except (HfpatchError, TypeError, ValueError):
            assert name not in listed
        else:
            assert name in listed


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"rank": 40}, "rank 40"),
        ({"size": "block_size", "value": 64}, "block size 64"),
        ({"size": "expansion", "value": 1.25}, "expansion 1.25"),
    ],
)
def test_matches_in_results_old_and_new(stored, words):
    match = {"to": "p", "parameters": 8, "target_parameters": 8, **stored}
    method = {"parameters": {"trainable": 8, "added": 8, "base": 8}, "match": match}
    results = ComparisonResults.model_validate({"schema": 2, "name": "x", "methods": {"m": method}})
    assert results.methods["m"].match.words == words
