import json
import math
import warnings

import numpy as np
import pytest
from families import make_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from hfpatch import (
    CanonConfig,
    HfpatchError,
    LoReFTConfig,
    NonlinearLoraConfig,
    NonlinearQueryConfig,
    ParallelAdapterConfig,
    PreProjectionConfig,
    QueryTemperatureConfig,
    patch,
    save_patch,
)


def test_defaults_are_those_of_the_design():
    pre, query = PreProjectionConfig(), NonlinearQueryConfig()
    assert (pre.expansion, pre.activation, pre.gated, pre.dropout, pre.content_skip, pre.init) == (
        1.25, "silu", False, 0.0, False, "identity",
    )  # fmt: skip
    assert (query.rank, query.activation, query.input_norm, query.output_norm, query.anchor, query.form) == (
        None, "gelu", "rmsnorm", "layernorm", "weight", "preserving",
    )  # fmt: skip
    assert query.targets == ("query",)
    assert pre.layers_to_transform is None
    assert pre.task_type is query.task_type is None  # as in PEFT


LAYERS = st.none() | st.integers(0, 99) | st.lists(st.integers(0, 99))
SHARED = {"layers_to_transform": LAYERS, "seed": st.integers(-(2**40), 2**40)}
ACTIVATION = st.sampled_from(["silu", "gelu", "relu", "relu2", "identity"])
OPTIONS = {
    PreProjectionConfig: SHARED
    | {
        "expansion": st.floats(0.01, 8) | st.integers(1, 8),
        "activation": ACTIVATION,
        "gated": st.booleans(),
        "dropout": st.floats(0, 0.9),
        "content_skip": st.booleans(),
        "init": st.sampled_from(["identity", "paper"]),
    },
    NonlinearQueryConfig: SHARED
    | {
        "rank": st.none() | st.integers(1, 4096),
        "activation": ACTIVATION,
        "input_norm": st.sampled_from(["rmsnorm", "layernorm", "none"]),
        "output_norm": st.sampled_from(["rmsnorm", "layernorm", "none"]),
        "anchor": st.just("weight"),
        "form": st.sampled_from(["preserving", "literal"]),
        "targets": st.sampled_from(["query", ("value",), ["key", "value"]]),
    },
    QueryTemperatureConfig: SHARED,
}
WRONG = ["false", "0", "1.5", "x", 1.5, 3, True, b"x", {}, {"a": 1}, [True], ["a"], [1.5], [None]]
WRONG += [math.inf, math.nan, 1j]


@pytest.mark.parametrize("cls", OPTIONS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_options_survive_json_in_pythons_or_numpys_types_and_wrong_types_are_one_line(cls, data):
    options = data.draw(st.fixed_dictionaries({}, optional=OPTIONS[cls]))
    config = cls(**options)
    assert cls(**json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()
    kinds = (bool, int, float)
    in_numpy = {name: np.array(value)[()] if type(value) in kinds else value for name, value in options.items()}
    again = cls(**in_numpy).to_dict()
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(config.to_dict()))

    name, wrong = data.draw(st.sampled_from(sorted(OPTIONS[cls]))), data.draw(st.sampled_from(WRONG))
    assume(not is_right(cls, name, wrong))
    with pytest.raises(HfpatchError, match=name):
        cls(**{**options, name: wrong})


def is_right(cls, name, value):
    """Whether a value of WRONG is right for an option after all."""
    whole, number = type(value) is int, type(value) in (int, float) and math.isfinite(value)
    if name in ("gated", "content_skip"):
        return type(value) is bool
    return {"expansion": number, "rank": whole, "seed": whole, "layers_to_transform": whole}.get(name, False)


def test_a_range_and_an_array_of_layers_are_a_list_and_one_target_may_be_a_string():
    for layers in (range(2), np.arange(2), (np.int64(0), np.int64(1)), [0, 1]):
        assert json.dumps(PreProjectionConfig(layers_to_transform=layers).layers_to_transform) == "[0, 1]"
    assert NonlinearQueryConfig(targets="key").targets == ("key",)


def test_numpys_numbers_in_a_config_of_peft_are_saved(tmp_path):
    config = LoraConfig(
        r=np.int64(2),
        lora_alpha=np.float64(4),
        target_modules=["q_proj"],
        layers_to_transform=np.int64(1),
        rank_pattern={"q_proj": np.int32(1)},
    )
    folder = save_patch(patch(make_model("llama"), config, seed=np.int64(1)), tmp_path / "patch")
    saved = json.loads((folder / "lora" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["rank_pattern"]) == (2, 4.0, {"q_proj": 1})
    assert isinstance(config.r, np.int64)  # the caller's own is left alone


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (PreProjectionConfig, "pre-projection"),
        (NonlinearQueryConfig, "nonlinear query"),
        (QueryTemperatureConfig, "query temperature"),
    ],
)
def test_target_modules_name_whole_attentions(config, label):
    model = make_model("llama")
    for names in (["q_proj"], "all-linear", ["self_attn", "q_proj"], "(.*q_proj"):
        message = rf"{label}: target_modules='(q_proj|all-linear)' names no attention .*|is not a regular expression"
        with pytest.raises(HfpatchError, match=message):
            patch(model, config(target_modules=names))
        with pytest.raises(HfpatchError, match=message):
            model.add_adapter(config(target_modules=names))
    reused = config()
    for case in ("llama", "gpt2"):  # what one injection filled in does not choose for the next
        made = get_peft_model(make_model(case), reused)
        assert made.peft_config["default"] is reused
        assert len(reused.target_modules) == 2
    assert all(name.startswith("h.") for name in reused.target_modules)


@pytest.mark.parametrize("seed", [-1, 1.5, "0", 2**64, math.nan])
def test_a_seed_that_is_none(seed):
    with pytest.raises(HfpatchError, match=r"seed=.* must be a whole number of at least 0"):
        patch(make_model("llama"), PreProjectionConfig(), seed=seed)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (PreProjectionConfig, {"expansion": 1e9}, "expansion=1000000000.0 must be above 0 and at most 1024"),
        (PreProjectionConfig, {"target_modules": 3}, "target_modules=3 must be of type "),
        (PreProjectionConfig, {"modules_to_save": "score"}, "modules_to_save='score' must be of type "),
        (PreProjectionConfig, {"trainable_token_indices": {"wte": 3}}, "trainable_token_indices={'wte': 3} must be"),
        (NonlinearQueryConfig, {"targets": 1}, "targets=1 must be of type"),
        (PreProjectionConfig, {"expansion": 0.0}, r"expansion=0\.0 must be above 0, or content_skip be set"),
        (PreProjectionConfig, {"expansion": 0, "content_skip": True, "gated": True}, "gated=True has no effect"),
        (PreProjectionConfig, {"expansion": 0, "content_skip": True, "dropout": 0.1}, r"dropout=0\.1 has no effect"),
        (PreProjectionConfig, {"expansion": -1.0}, r"expansion=-1\.0 must be above 0"),
        (PreProjectionConfig, {"dropout": 1.0}, r"dropout=1\.0 must be at least 0 and below 1"),
        (PreProjectionConfig, {"activation": "swilu"}, "did you mean 'silu'"),
        (PreProjectionConfig, {"init": "zeros"}, "init='zeros' is not one of identity"),
        (NonlinearQueryConfig, {"rank": 0}, "rank=0 must be at least 1"),
        (NonlinearQueryConfig, {"activation": "gelu_new"}, "did you mean 'gelu'"),
        (NonlinearQueryConfig, {"input_norm": "rms"}, "input_norm='rms' is not one of .*did you mean 'rmsnorm'"),
        (NonlinearQueryConfig, {"output_norm": "batch"}, "output_norm='batch' is not one of"),
        (NonlinearQueryConfig, {"anchor": "weights"}, "anchor='weights' .*did you mean 'weight'"),
        (NonlinearQueryConfig, {"form": "preserve"}, "form='preserve' .*did you mean 'preserving'"),
        (NonlinearQueryConfig, {"targets": ("queries",)}, "targets='queries' is not one of query, key, value"),
        (NonlinearQueryConfig, {"targets": ()}, r"targets=\[\] must name query, key or value"),
        (NonlinearQueryConfig, {"targets": ("key", "key")}, "each at most once"),
        (NonlinearQueryConfig, {"anchor": "identity"}, "cannot preserve the model; set form='literal'"),
        (CanonConfig, {"width": 0}, "width=0"),
        (CanonConfig, {"at": "output"}, "at='output'"),
        (ParallelAdapterConfig, {"rank": 0}, "rank=0 must be at least 1"),
        (ParallelAdapterConfig, {"at": "steam"}, "at='steam' is not one of branch, stream.*did you mean 'stream'"),
        (ParallelAdapterConfig, {"activation": "tanh"}, "activation='tanh' is not one of"),
        (LoReFTConfig, {"rank": 0}, "rank=0 must be at least 1"),
        (LoReFTConfig, {"at": "steam"}, "at='steam' is not one of branch, stream.*did you mean 'stream'"),
        (NonlinearLoraConfig, {"rank": 0}, "rank=0 must be at least 1"),
        (NonlinearLoraConfig, {"rank": 2.0}, "rank=2.0 must be of type int"),
        (NonlinearLoraConfig, {"alpha": 0.0}, r"alpha=0.0 must be above 0 \(left out, it is twice the rank\)"),
        (NonlinearLoraConfig, {"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        (NonlinearLoraConfig, {"activation": "gellu"}, "activation='gellu' is not one of .*did you mean 'gelu'"),
        (NonlinearLoraConfig, {"targets": ("querry",)}, "query, key, value, output.*did you mean 'query'"),
        (NonlinearLoraConfig, {"targets": ()}, r"targets=\[\] must name query, key, value or output"),
        (NonlinearLoraConfig, {"targets": ("key", "key")}, r"targets=\['key', 'key'\] must name .* at most once"),
    ],
)
def test_unfit_values_are_refused_with_one_line(cls, options, message):
    with pytest.raises(HfpatchError, match=message) as error:
        cls(**options)
    assert isinstance(error.value, ValueError)


def test_query_and_key_together_warn_where_the_user_stands():
    with pytest.warns(UserWarning, match="both query and key") as caught:
        NonlinearQueryConfig(targets=("query", "key"))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NonlinearQueryConfig(targets=("query", "value"))
