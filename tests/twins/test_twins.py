"""Tiny twins keep what the structure of a model depends on, and nothing of its size."""

import dataclasses

import pytest
import torch
import transformers
from families import FAMILIES, make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CONFIG_MAPPING,
    DeepseekV3Config,
    Gemma3nTextConfig,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    NemotronHConfig,
    Qwen3NextConfig,
    T5Config,
)

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.sites import find_sites
from hfpatch.surgery.model_class import own_class
from hfpatch.twins import random_model, shrink, twin

PARAMETERS = 1_000_000


def size(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", FAMILIES)
def test_a_twin_has_the_class_and_the_switches(case):
    config = make_config(case)
    small = shrink(config)
    assert type(small) is type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if isinstance(value, bool) or (isinstance(value, str) and field.name not in ("name_or_path",)):
            assert getattr(small, field.name) == value, field.name
    assert size(twin(config)) < PARAMETERS


@given(
    heads=st.sampled_from([8, 16, 64]), sharing=st.sampled_from([1, 2, 8]), layers=st.integers(1, 100),
    tied=st.booleans(), biased=st.booleans(),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_heads_and_their_sharing_stay_what_they_were(heads, sharing, layers, tied, biased):
    config = LlamaConfig(
        hidden_size=128 * heads, num_attention_heads=heads, num_key_value_heads=heads // sharing,
        num_hidden_layers=layers, tie_word_embeddings=tied, attention_bias=biased,
    )  # fmt: skip
    small = shrink(config)
    assert (small.num_key_value_heads == small.num_attention_heads) == (sharing == 1)
    assert (small.num_key_value_heads == 1) == (heads // sharing == 1)
    assert small.num_attention_heads % small.num_key_value_heads == 0
    assert small.head_dim * small.num_attention_heads == small.hidden_size
    assert small.num_hidden_layers <= 2
    assert (small.tie_word_embeddings, small.attention_bias) == (tied, biased)
    small = shrink(LlamaConfig(hidden_size=128 * heads, num_attention_heads=heads, head_dim=256))
    assert small.head_dim * small.num_attention_heads != small.hidden_size


@pytest.mark.parametrize("config", [JambaConfig(), NemotronHConfig(), Qwen3NextConfig(num_hidden_layers=48)])
def test_hybrids_keep_every_kind_of_layer(config):
    key = "layers_block_type" if hasattr(config, "layers_block_type") else "layer_types"
    made = shrink(config)
    assert set(getattr(made, key)) == set(getattr(config, key))
    assert find_sites(random_model(made))


def test_a_latent_query_and_shared_keys_and_values_stay():
    for rank in (1536, None):
        query = find_sites(twin(DeepseekV3Config(q_lora_rank=rank)))[0].projections["query"]
        assert (query.source is None) == (rank is None)
    targets = [set(site.projections) for site in find_sites(twin(Gemma3nTextConfig()))]
    assert {"query"} in targets
    assert {"query", "key", "value"} in targets


BIG, ROPE = {"hidden_size": 2048, "num_attention_heads": 16}, {"rope_type": "default", "rope_theta": 1e6}
SECTIONED = [  # times, rows and columns turn some of the rotary frequencies each
    "ernie4_5_vl_moe", "glm4v", "glm4v_moe", "glm_image", "glm_ocr", "paddleocr_vl", "qwen2_5_omni_thinker",
    "qwen2_5_vl", "qwen2_vl",
]  # fmt: skip
LISTED = {
    "cohere_compass_text": {**BIG, "rope_parameters": {"full_attention": {**ROPE, "mrope_section": [24, 20, 20]}}},
    "cosmos3_edge": {},
    "glm4v_moe_text": {**BIG, "rope_parameters": {**ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}},
    "hunyuan_vl_text": {"head_dim": 128, "rope_parameters": {**ROPE, "mrope_section": [16, 16, 16, 16]}},
    "paddleocr_vl_text": {"head_dim": 128, "rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]}},
    "qwen3_5_text": {"head_dim": 256, "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]}},
    "qwen3_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [24, 20, 20]}},
}


def configured(case, options):
    if case not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {case}")
    return CONFIG_MAPPING[case](**options)


@pytest.mark.parametrize("case", [*SECTIONED, *LISTED])
def test_the_sections_of_the_rotary_frequencies_fit_the_heads(case):
    config = configured(case, LISTED.get(case, {}))
    made = shrink(config).get_text_config(decoder=True)
    rope = made.rope_parameters.get("full_attention", made.rope_parameters)
    turned = (getattr(made, "head_dim", None) or 16) * rope.get("partial_rotary_factor", 1)
    assert 2 * sum(rope["mrope_section"]) == turned
    assert max(rope["mrope_section"]) - min(rope["mrope_section"]) <= 1
    unlisted = {  # in the mappings of older versions
        "paddleocr_vl": transformers.PaddleOCRVLForConditionalGeneration,
        "paddleocr_vl_text": transformers.PaddleOCRTextModel,
        "qwen2_5_omni_thinker": transformers.Qwen2_5OmniThinkerForConditionalGeneration,
    }
    model = twin(config, unlisted.get(case) or own_class(config))
    assert model(input_ids=torch.arange(3, 21).reshape(2, 9))[0].isfinite().all()


@pytest.mark.parametrize(
    ("case", "count", "partial", "options"),
    [
        ("llama", 64, 1.0, {}), ("phi3", 48, 1.0, {"num_attention_heads": 32}), ("minicpm3", 16, 1.0, {}),
        ("phi3", 48, 0.75, {"num_attention_heads": 24}),
    ],
)  # fmt: skip
def test_factors_of_the_rotary_frequencies_fit_the_heads(case, count, partial, options):
    factors = {"short_factor": [1.0] * count, "long_factor": [1.0 + index for index in range(count)]}
    rope = {**ROPE, "rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096, **factors}
    rope |= {"partial_rotary_factor": partial}
    config = configured(case, {**options, "max_position_embeddings": 131072, "rope_parameters": rope})
    assert twin(config)(torch.arange(3, 12)[None]).logits.isfinite().all()
    assert len(config.rope_parameters["long_factor"]) == count


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("mistral4", {}), ("glm5_next_text", {}), ("inkling2", {}), ("embedding_gemma2_text", {}),
        ("gemma4_text", {"num_attention_heads": 32, "num_global_key_value_heads": 4, "attention_k_eq_v": True}),
    ],
)  # fmt: skip
def test_sizes_that_depend_on_each_other_fit(case, options):
    config = configured(case, options)
    assert twin(config, own_class(config))(input_ids=torch.arange(3, 12)[None])[0].isfinite().all()


def test_the_same_seed_gives_the_same_weights_none_of_them_zero_or_one_throughout():
    state = torch.get_rng_state()
    first, second, other = (twin(GPTNeoXConfig(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)
    for name, parameter in twin(GPTNeoXConfig()).named_parameters():
        assert parameter.std() > 1e-2, name


def test_what_cannot_be_built_is_one_line():
    with pytest.raises(HfpatchError, match="type 't5' cannot be built: ValueError: ") as caught:
        random_model(T5Config())  # transformers' error lists every causal model that it has
    assert len(str(caught.value)) < 400
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config.model_type = "llama"
    config.hidden_act = "no_such_activation"
    with pytest.raises(HfpatchError, match=r"type .llama. cannot be built: .*no_such_activation"):
        twin(config)


QUERIES = [
    {"query": {"path": "identity"}},
    {"query": {"path": "nonlinear", "rank": 300, "fused": True}, "mlp_width": 3},
    {"query": {"path": "nonlinear", "anchor": "weight", "output_norm": "none"}},
    {"query": {"path": "nonlinear", "targets": ["value"], "activation": "relu2"}},
]


@pytest.mark.parametrize("settings", QUERIES)
@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "mistral"])
def test_the_twin_of_a_model_from_scratch_has_its_query_paths(case, settings):
    if case == "mistral" and settings["query"].get("targets"):
        settings = {"query": {**settings["query"], "anchor": "weight"}}
    wide = {"gpt2": {"n_embd": 320}, "gpt_neox": {"hidden_size": 320}, "mistral": {"hidden_size": 320, "head_dim": 80}}
    with torch.device("meta"):
        model = build_scratch(make_config(case, **wide[case]), ScratchSettings(**settings))
    made = twin(model.config)
    assert type(made) is type(model)
    full, small = (m.config.hfpatch_scratch["settings"] for m in (model, made))
    assert {**small, "query": {**small["query"], "rank": 0}} == {**full, "query": {**full["query"], "rank": 0}}
    assert size(made) < PARAMETERS
    paths = [[(n, type(p)) for n, p in m.named_modules() if ".paths." in n] for m in (model, made)]
    assert paths[0] == paths[1]
    assert made(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_a_configuration_that_refuses_small_sizes_is_one_line(monkeypatch):
    config = make_config("llama")

    def refuse(*_, **values):
        raise RuntimeError(f"{values['num_hidden_layers']} layers\nare too few")

    monkeypatch.setattr(type(config), "__init__", refuse)
    with pytest.raises(HfpatchError, match=r"of type 'llama' cannot be built: RuntimeError: 2 layers are too few$"):
        shrink(config)
