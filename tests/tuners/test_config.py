import warnings

import pytest
from families import make_model
from peft import PeftConfig, TaskType
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)

from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, tuners


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
    assert pre.task_type == query.task_type == TaskType.CAUSAL_LM


@pytest.mark.parametrize(
    ("name", "config", "model", "prefix"),
    [
        ("PRE_PROJECTION", PreProjectionConfig, tuners.PreProjectionModel, "preproj_"),
        ("NONLINEAR_QUERY", NonlinearQueryConfig, tuners.NonlinearQueryModel, "nonlinear_"),
    ],
)
def test_peft_knows_the_methods_by_the_string_in_the_file(name, config, model, prefix):
    assert PEFT_TYPE_TO_CONFIG_MAPPING[name] is config
    assert PEFT_TYPE_TO_TUNER_MAPPING[name] is model
    assert PEFT_TYPE_TO_PREFIX_MAPPING[name] == prefix


@pytest.mark.parametrize(
    "config",
    [
        PreProjectionConfig(gated=True, content_skip=True, expansion=0.5, layers_to_transform=[1], seed=3),
        NonlinearQueryConfig(rank=4, form="literal", targets=("value", "query"), output_norm="none", seed=5),
    ],
)
def test_a_config_survives_its_file(config, tmp_path):
    config.save_pretrained(str(tmp_path))
    again = PeftConfig.from_pretrained(str(tmp_path))
    assert type(again) is type(config)
    assert again.to_dict() == config.to_dict()


def test_one_target_may_be_given_as_a_string():
    assert NonlinearQueryConfig(targets="key").targets == ("key",)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (PreProjectionConfig, {"expansion": 0}, "expansion=0 must be above 0"),
        (PreProjectionConfig, {"expansion": -1.0}, r"expansion=-1\.0 must be above 0"),
        (PreProjectionConfig, {"dropout": 1.0}, r"dropout=1\.0 must be at least 0 and below 1"),
        (PreProjectionConfig, {"dropout": -0.1}, r"dropout=-0\.1 must be"),
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
    ],
)
def test_unfit_values_are_refused_with_one_line(cls, options, message):
    with pytest.raises(HfpatchError, match=message) as error:
        cls(**options)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


def test_query_and_key_together_warn_where_the_user_stands():
    with pytest.warns(UserWarning, match="both query and key") as caught:
        NonlinearQueryConfig(targets=("query", "key"))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NonlinearQueryConfig(targets=("query", "value"))


@pytest.mark.parametrize(
    ("case", "config", "message"),
    [
        ("llama", PreProjectionConfig(layers_to_transform=[2]), r"layers \[2\] do not exist; .* layers 0 to 1"),
        ("llama", PreProjectionConfig(layers_to_transform=[]), "no layer is given"),
        ("llama", PreProjectionConfig(expansion=0.01), "gives an inner width of 0 at hidden size 32"),
        ("gemma2", NonlinearQueryConfig(anchor="identity", form="literal"), "d_q=48 and d=32"),
        (
            "llama",
            NonlinearQueryConfig(anchor="identity", form="literal", targets=("value",)),
            "d_q=16 and d=32; use anchor='weight'",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_changed(case, config, message):
    model = make_model(case)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(HfpatchError, match=message):
        model.add_adapter(config)
    assert [name for name, _ in model.named_modules()] == names
