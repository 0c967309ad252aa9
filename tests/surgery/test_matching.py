"""``match`` finds the size that trying every one of them finds, for every tuner that has one."""

import warnings
from functools import cache

import pytest
from families import make_config, make_model
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM

from hfpatch import HfpatchError, methods
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


def test_a_size_larger_than_any_is_the_largest():
    value, count = match_size(small_model(), SIZES["psoft"], {}, lambda v: build("psoft", v), budget=10**6)
    assert (value, count) == (4, count_added(small_model(), [build("psoft", 4)]))


def test_a_size_that_changes_nothing_is_refused():
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
