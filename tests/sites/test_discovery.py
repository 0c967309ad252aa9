import types
from dataclasses import replace
from operator import attrgetter

import pytest
from families import FEW, make_config, make_model
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import AlbertModel, AutoModelForCausalLM, ElectraForCausalLM, LayoutLMModel, PreTrainedModel

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch, patch_summary
from hfpatch.errors import HfpatchError
from hfpatch.sites import Columns, Family, Projection, find_sites, register_family, select_sites, separate, survey
from hfpatch.sites import family as registry
from hfpatch.twins import twin


def undeclared(case="llama", model_type="made_up"):
    model = make_model(case)
    config = model.config.to_dict()
    made_up = types.SimpleNamespace(**{**config, "model_type": model_type, "num_key_value_heads": 2})
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config = made_up
    return model


def declare(**changes):
    options = {
        "name": "made-up", "model_types": ("made_up",), "layers": "layers", "attention": "self_attn",
        "qkv": separate(), "output": "o_proj",
    }  # fmt: skip
    register_family(Family(**{**options, **changes}))


def facts(site):
    paths = site.path, site.exit_path, site.output_path
    return site.layer, *paths, site.hidden_size, dict(site.refusals), dict(site.projections)


@pytest.mark.parametrize("case", FEW)
def test_sites_are_the_same_with_adapters_and_inside_a_peft_model(case):
    plain = [facts(site) for site in find_sites(make_model(case))]
    lora = LoraConfig(r=2, target_modules=[plain[0][-1]["query"].path])
    wrapped = [
        get_peft_model(make_model(case), lora),
        inject_adapter_in_model(lora, make_model(case)),
        patch(make_model(case), [PreProjectionConfig(), lora]),
    ]
    for model in wrapped:
        assert [facts(site) for site in find_sites(model)] == plain
        query = find_sites(model)[0].projection_module("query")
        assert not hasattr(query, "base_layer")


@pytest.mark.parametrize("kind", [AlbertModel, ElectraForCausalLM, LayoutLMModel])
def test_a_method_is_no_further_projection_of_what_it_changes(kind):
    model = twin(kind.config_class(), kind)
    plain = [facts(site) for site in find_sites(model)]
    patch(model, NonlinearQueryConfig(targets=("query", "value")))
    assert [facts(site) for site in find_sites(model)] == plain
    assert not patch_summary(model).skipped


def test_an_undeclared_type_is_refused_with_what_to_declare():
    with pytest.raises(HfpatchError, match="'made_up' is of no declared family") as error:
        find_sites(undeclared("gpt_neox"))
    for word in ("register_family", "model_types=('made_up',)", "layers", "attention", "qkv", "output", "exit"):
        assert word in str(error.value)
    with pytest.raises(HfpatchError, match="did you mean 'gpt_neox'"):
        find_sites(undeclared("gpt_neox", "gptneox"))
    with pytest.raises(HfpatchError, match=r"Linear is not a transformers model: it has no config\.model_type"):
        find_sites(nn.Linear(2, 2))


def test_a_declared_type_without_blocks_is_not_called_undeclared():
    with pytest.raises(
        HfpatchError, match=r"has no attention that is recognised; family 'gpt2' declares it in the blocks of h$"
    ):
        find_sites(AutoModelForCausalLM.from_config(make_config("gpt2", n_layer=0)))


def test_the_common_structure_needs_no_declaration_and_another_one(declarations):
    model, expected = undeclared(), [facts(site) for site in find_sites(make_model("llama"))]
    assert [facts(site) for site in find_sites(model)] == expected
    declare()
    assert [facts(site) for site in find_sites(model)] == expected
    assert {site.family for site in find_sites(model)} == {"made-up"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "blocks"}, r"family 'made-up': LlamaModel has no module 'blocks' .*'blocks'"),
        ({"attention": "attn"}, "family 'made-up', layer 0: LlamaDecoderLayer has no module 'attn'"),
        ({"output": "out_proj"}, "family 'made-up', layer 0: LlamaAttention has no module 'out_proj'"),
        ({"exit": "post_norm"}, "family 'made-up', layer 0: LlamaDecoderLayer has no module 'post_norm'"),
        ({"qkv": separate(query="query")}, "LlamaAttention has no module 'query'"),
        ({"factor": attrgetter("scale")}, "factor cannot be read: 'LlamaDecoderLayer' object has no attribute 'scale'"),
        ({"host": "box"}, "family 'made-up', layer 0: LlamaDecoderLayer has no module 'box'"),
        ({"entries": ("query",)}, "family 'made-up', layer 0: LlamaAttention has no module 'query'"),
        ({"qkv": separate(key="layer_idx")}, "LlamaAttention has no module 'layer_idx'"),
        (
            {"qkv": lambda attention, config: {"query": Projection("o_proj", Columns(4, 9, 0, 8))}},
            "family 'made-up', layer 0: query: o_proj has 32 columns, not 4 groups of 9",
        ),
        (
            {"qkv": lambda attention, config: {"value": Projection("o_proj", Columns(4, 8, 2, 8))}},
            "family 'made-up', layer 0: value: columns 2 to 10 of 8 in a group of o_proj",
        ),
        (
            {"qkv": lambda attention, config: {"keys": Projection("k_proj", Columns(1, 16, 0, 16))}},
            "family 'made-up', layer 0: the layout names 'keys', not query, key or value",
        ),
        ({"qkv": "qkv_proj"}, "family 'made-up': qkv='qkv_proj' must be a function of the attention and the config"),
        ({"factor": 0.5}, "family 'made-up': factor=0.5 must be a function of the block"),
        (
            {"model_types": "made_up"},
            r"family 'made-up': model_types='made_up' must be a tuple of names: \('made_up',\)",
        ),
    ],
)
def test_a_declaration_that_fits_by_half_names_what_is_missing(declarations, changes, message):
    def use():
        declare(**changes)
        find_sites(undeclared())

    with pytest.raises(HfpatchError, match=message):
        use()


def test_a_type_cannot_be_declared_twice_and_nothing_of_the_second_stays(declarations):
    with pytest.raises(HfpatchError, match="'gpt2' is declared already, by family 'gpt2'"):
        declare(model_types=("made_up", "gpt2"))
    with pytest.raises(HfpatchError, match="'mamba' is declared already: they are pure state-space"):
        declare(model_types=("made_up", "mamba"))
    assert registry.family_of("made_up") is None


def test_refused_sites_are_left_out_unless_they_are_asked_for():
    surveyed = survey(make_model("llama"))
    refusal = {0: "no reason", 1: None}
    assert select_sites(surveyed, None, refusal=lambda site: refusal[site.layer]) == [surveyed.sites[1]]
    with pytest.raises(HfpatchError, match="layer 0 cannot be changed: no reason"):
        select_sites(surveyed, [0], refusal=lambda site: refusal[site.layer])
    with pytest.raises(HfpatchError, match="no layer of this model can be changed: never"):
        select_sites(surveyed, None, refusal=lambda site: "never")
    first, second = (replace(surveyed.sites[0], name=name) for name in ("layer.0", "layer.0.1"))
    both = replace(surveyed, sites=[first, second])
    with pytest.raises(HfpatchError, match="layer 0 cannot be changed: no place"):  # one of two in a block is enough
        select_sites(both, [0], refusal=lambda site: "no place" if site is first else None)


@pytest.mark.parametrize(
    ("kind", "why"), [("rwkv", "recurrent models"), ("xlnet", "raw parameters"), ("gemma4_assistant", "drafters")]
)
def test_what_cannot_be_patched_is_refused_with_the_reason(kind, why):
    with pytest.raises(HfpatchError, match=f"models of type '{kind}' cannot be patched: .*{why}"):
        find_sites(undeclared("llama", kind))
