"""``match`` finds the size that trying every one of them finds, for every tuner that has one."""

import copy
import warnings
from functools import cache

import pytest
from families import make_config, make_model
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hfpatch import (
    CanonConfig,
    HfpatchError,
    NonlinearLoraConfig,
    NonlinearQueryConfig,
    OutputGateConfig,
    PreProjectionConfig,
    methods,
    sized,
)
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.results import ComparisonResults
from hfpatch.surgery.budget import Trial, count_added
from hfpatch.surgery.matching import match_size
from hfpatch.surgery.methods import build_method
from hfpatch.tuners.checks import require_injectable

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
        assert abs(count - budget) == min(abs(each - budget) for each in counts)
        assert count == count_added(small_model(), [build(case, value)])


SIZED = [
    (PreProjectionConfig(), "expansion", 2 * 32 * 2),  # what one unit of the size costs: here of a width of expansion·d
    (PreProjectionConfig(gated=True), "expansion", 3 * 32 * 2),
    (NonlinearQueryConfig(), "rank", 64 * 2),
    (NonlinearLoraConfig(), "rank", ((32 + 32) + (32 + 16)) * 2),
    (LoraConfig(lora_alpha=4), "r", ((32 + 32) + (32 + 16)) * 2),
    (LoraConfig(target_modules="all-linear"), "r", (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)) * 2),
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
        (PromptTuningConfig(num_virtual_tokens=2), 1, "prompt_tuning has no size to solve for: it cannot be injected"),
        (PreProjectionConfig(), 0, "parameters=0 must be a whole number of at least 1"),
        (PreProjectionConfig(), 1.5, r"parameters=1\.5 must be a whole number"),
        (PreProjectionConfig(), "1", "parameters='1' must be a share of the base's above 0, such as '1%'"),
        (PreProjectionConfig(), "-1%", "parameters='-1%' must be a share"),
        (PreProjectionConfig(), "0%", "parameters='0%' must be a share"),
        (PreProjectionConfig(layers_to_transform=[7]), 100, r"layers \[7\] do not exist"),
    ],
)
def test_what_has_no_size_is_said(config, parameters, message):
    with pytest.raises(HfpatchError, match=message) as error:
        sized(config, make_model("llama"), parameters=parameters)
    assert "\n" not in str(error.value)


def test_a_size_that_is_far_away_changes_nothing_or_is_too_large():
    with pytest.warns(UserWarning, match=r"pre_projection: 2,176 parameters, .* are nearest to 100"):
        sized(PreProjectionConfig(content_skip=True), make_model("llama"), parameters=100)
    value, count = match_size(small_model(), SIZES["psoft"], {}, lambda v: build("psoft", v), budget=10**6)
    assert (value, count) == (4, count_added(small_model(), [build("psoft", 4)]))
    parts = {"type": "glora", "config_A_B": "vector", "config_C": "vector", "target_modules": TARGETS, "match": "other"}
    stacks = {"other": [{"type": "pre_projection"}], "x": [parts]}
    with pytest.raises(HfpatchError, match=r"methods\.x\[0\]\.match: no size changes the number of parameters"):
        build_method(small_model(), stacks, "x")


def test_the_match_of_a_method():
    stacks = {"other": [{"type": "pre_projection"}], "x": [{"type": "c3a", "match": "other", "target_modules": "mlp"}]}
    match = build_method(small_model(), stacks, "x").match
    assert (match.to, match.size, match.value, match.rank) == ("other", "block_size", 2, None)
    assert (match.parameters, match.target_parameters) == (3 * 8 * 12 // 2, 2 * 8 * 10)


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


@pytest.mark.parametrize("kind", ["shira", "adamss"])
def test_tuners_whose_tensors_depend_on_the_weights_are_counted(kind):
    model = make_model("llama")
    (config,) = build_method(model, {"x": [{"type": kind, "r": 2, "target_modules": ["q_proj"]}]}, "x").configs
    assert count_added(model, [config]) > 0
    assert not hasattr(model, "peft_config")


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
