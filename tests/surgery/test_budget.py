import pytest
import torch
from families import FAMILIES, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, ShiraConfig
from transformers import AutoModelForCausalLM, GPTNeoXConfig

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig, match_lora_rank
from hfpatch.recipes.comparison import load_recipe
from hfpatch.surgery.budget import attention_modules, count_added, lora_parameters_per_rank, meta_twin
from hfpatch.surgery.methods import build_method

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
    size, model = pythia
    d, layers = PYTHIA[size]["hidden_size"], PYTHIA[size]["num_hidden_layers"]
    assert count_added(model, [NonlinearQueryConfig()]) == layers * (d * d + 2 * d)


def test_summary_of_a_patched_pythia_on_the_meta_device(pythia):
    size, _ = pythia
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=50304, **PYTHIA[size]))
    summary = hfpatch.patch_summary(hfpatch.patch(model, PreProjectionConfig(content_skip=True)))
    layers = PYTHIA[size]["num_hidden_layers"]
    assert summary.added == summary.trainable == PUBLISHED[size][1]
    assert summary.per_layer == dict.fromkeys(range(layers), PUBLISHED[size][1] // layers)


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


def test_the_twin_has_no_values_and_what_depends_on_them_is_not_counted():
    twin = meta_twin(make_model("gemma2"))
    assert {p.device.type for p in twin.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in make_model("gemma2").named_parameters()}
    assert {name: p.shape for name, p in twin.named_parameters()} == shapes
    config = ShiraConfig(r=2, target_modules=["q_proj"])
    assert count_added(make_model("llama"), [config]) > 0
    with pytest.raises(HfpatchError, match=r"shira .* values of the base's weights, .* load the model's weights"):
        count_added(meta_twin(make_model("llama")), [config])


MODELS = {case: make_model(case) for case in ("gpt2", "gemma2", "falcon_multi_query")}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(1, 40_000))
def test_the_rank_is_the_nearest_by_brute_force(case, budget):
    model = MODELS[case]
    targets = attention_modules(model)
    cost = sum(sum(model.get_submodule(name).weight.shape) for name in targets)  # r (n + m) a module
    best = min(range(1, budget // cost + 3), key=lambda rank: (abs(rank * cost - budget), rank))
    assert match_lora_rank(model, budget=budget, target_modules=targets) == best


@pytest.mark.parametrize("rank", [1, 2, 7])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_count_of_a_rank_is_peft_s_own(case, rank):
    model = make_model(case)
    targets = attention_modules(model)
    assert rank * lora_parameters_per_rank(model, targets) == count_added(model, [lora(model, rank)])


def test_counts_do_not_change_when_the_model_is_patched():
    model = make_model("llama")
    targets = attention_modules(model)
    cost = lora_parameters_per_rank(model, targets)
    hfpatch.patch(model, [lora(model, 2), PreProjectionConfig()])
    assert lora_parameters_per_rank(model, targets) == cost
    assert count_added(model, [lora(model, 2)]) == 2 * cost


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0, "target_modules": ["q_proj"]}, "budget=0 must be a whole number of at least 1"),
        ({"budget": 10.5, "target_modules": ["q_proj"]}, r"budget=10\.5 must be a whole number"),
        ({"budget": float("inf"), "target_modules": ["q_proj"]}, "budget=inf must be a whole number"),
        ({"budget": "1e4", "target_modules": ["q_proj"]}, "budget='1e4' must be a whole number"),
        ({"budget": -5, "target_modules": ["q_proj"]}, "budget=-5 must be"),
        ({"budget": 10, "target_modules": ["q_prj"]}, r"target_modules=\['q_prj'\]: no module"),
        ({"budget": 10, "target_modules": []}, "no module"),
        ({"budget": 10, "target_modules": ["input_layernorm"]}, "LlamaRMSNorm is not a linear projection"),
    ],
)
def test_errors(options, message):
    with pytest.raises(HfpatchError, match=message):
        match_lora_rank(make_model("llama"), **options)


def test_one_target_may_be_given_as_a_string():
    model = make_model("llama")
    assert type(match_lora_rank(model, budget=1e4, target_modules="q_proj")) is int
    assert match_lora_rank(model, budget=1000, target_modules="q_proj") == match_lora_rank(
        model, budget=1000, target_modules=["q_proj"]
    )


def test_the_recipe_s_loras_have_the_parameters_of_the_pre_projection():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=50304, **PYTHIA["160m"]))
    methods = load_recipe("pythia-160m").methods
    matches = {name: build_method(model, methods, name).match for name in ("lora", "lora_all_linear", "dora", "rslora")}
    # 55,296 for each rank on attention, 147,456 on all linear projections; DoRA's magnitudes are 36,864 more
    assert {name: match.rank for name, match in matches.items()} == {
        "lora": 320, "lora_all_linear": 120, "dora": 319, "rslora": 320,
    }  # fmt: skip
    assert matches["dora"].parameters == 319 * 55_296 + 36_864
    assert all(abs(match.difference) < 0.002 for match in matches.values())
