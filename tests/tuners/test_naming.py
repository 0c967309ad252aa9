"""Which attentions a configuration names, by the options that PEFT's configurations have in common."""

import json
import logging

import pytest
import torch
from families import make_config, make_model
from peft import PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, ValueResidualConfig
from hfpatch.tuners import model as tuner_model


def four_layers():
    return AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=4))


def layers_of(**options):
    paths = get_peft_model(four_layers(), PreProjectionConfig(**options)).targeted_module_names
    assert all(name.endswith("self_attn") for name in paths)
    return [int(name.split(".")[-2]) for name in paths]


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"target_modules": ["self_attn"]}, [0, 1, 2, 3]),
        ({"target_modules": ["0.self_attn", "model.layers.2.self_attn"]}, [0, 2]),
        ({"target_modules": r".*\.[13]\.self_attn"}, [1, 3]),
        ({"target_modules": r".*\.[13]\.self_attn", "layers_to_transform": [2, 3]}, [3]),
        ({"exclude_modules": ["1.self_attn"]}, [0, 2, 3]),
        ({"exclude_modules": r".*\.[01]\..*", "layers_to_transform": [1, 2]}, [2]),
        ({"layers_to_transform": [1, 2], "layers_pattern": "layers"}, [1, 2]),
        ({"layers_to_transform": 3, "layers_pattern": ["h", "layers"]}, [3]),
        ({"modules_to_save": ["layers.0"]}, [1, 2, 3]),
    ],
)
def test_names_and_patterns_choose(options, layers):
    assert layers_of(**options) == layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude_modules": ["q_proj"]}, r"exclude_modules='q_proj' names no attention of this model, such as"),
        ({"exclude_modules": ["self_attn"]}, "no layer of this model can be changed: target_modules, exclude_modules"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, r"\[0\] are not in layers_pattern='h', which no list"),
        ({"layers_to_transform": [7], "layers_pattern": "layers"}, "which has layers 0 to 3"),
        ({"layers_to_transform": [7]}, r"layers \[7\] do not exist"),
        ({"exclude_modules": "(("}, "is not a regular expression"),
        ({"layers_to_transform": [0], "layers_pattern": "("}, r"layers_pattern='\(' is not a regular expression"),
    ],
)
def test_what_names_nothing_is_refused_and_the_model_stays(options, message):
    model, config = four_layers(), PreProjectionConfig(**options)
    names = list(model.state_dict())
    with pytest.raises(HfpatchError, match=message):
        get_peft_model(model, config)
    assert list(model.state_dict()) == names
    assert config.target_modules is None


def test_a_pattern_needs_layers_and_the_first_one_that_is_read_is_the_first_named():
    with pytest.raises(HfpatchError, match="layers_pattern='layers' says where layers_to_transform counts"):
        PreProjectionConfig(layers_pattern="layers")
    model = get_peft_model(four_layers(), ValueResidualConfig(exclude_modules=["0.self_attn"]))
    assert [int(name.split(".layers.")[1][0]) for name, p in model.named_parameters() if p.requires_grad] == [2, 3]


def test_files_name_the_modules_sorted_and_tuples_are_lists(tmp_path):
    config = NonlinearQueryConfig(targets=("query", "value"), exclude_modules=["2.self_attn", "1.self_attn"])
    get_peft_model(four_layers(), config)
    config.save_pretrained(str(tmp_path))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == ["layers.0.self_attn", "layers.3.self_attn"]
    assert written["exclude_modules"] == ["1.self_attn", "2.self_attn"]
    assert written == config.to_dict() == PeftConfig.from_pretrained(str(tmp_path)).to_dict()


def test_a_start_that_is_none_depends_on_seed_layer_and_name_alone():
    def tensors(seed, *others):
        model = hfpatch.patch(make_model("llama"), [*others, PreProjectionConfig(init_weights=False, seed=seed)])
        parameters = {name: p.detach() for name, p in model.named_parameters() if "pre_projection.weight" in name}
        return {name.replace(".base_layer", ""): p for name, p in parameters.items()}

    torch.manual_seed(1)
    first, again, other = tensors(0), tensors(0, NonlinearQueryConfig()), tensors(1)
    assert all(torch.equal(again[name], p) for name, p in first.items())
    assert not any(torch.equal(other[name], p) for name, p in first.items())
    down = [p for name, p in first.items() if "_down." in name]
    assert len(down) == 2
    assert not torch.equal(*down)
    assert all(p.abs().max() <= 40**-0.5 and p.std() > 0.8 * (40 * 3) ** -0.5 for p in down)  # U(-1/√n, 1/√n)


def test_the_share_of_a_large_adapter_is_a_warning_once(caplog, monkeypatch):
    tuner_model._LOGGED.clear()
    with caplog.at_level(logging.INFO, logger=tuner_model.__name__):
        for limit in (10_000_000, 5000):
            monkeypatch.setattr(tuner_model, "_LARGE", limit)
            for _ in range(2):
                hfpatch.patch_summary(hfpatch.patch(make_model("llama"), PreProjectionConfig()))
    records = [record for record in caplog.records if record.name == tuner_model.__name__]
    lines = [(record.levelname, record.getMessage()) for record in records]
    text = "pre-projection: 5,120 parameters added, 23.63% of the base's 21,664"  # 2.5 · 32² in each of two layers
    assert lines[0] == ("INFO", text)
    assert lines[1][0] == "WARNING"
    assert lines[1][1].startswith(f"{text}; hfpatch.sized(")
    assert len(lines) == 2
    assert hfpatch.patch_summary(hfpatch.patch(make_model("llama"), PreProjectionConfig())).share == 5120 / 21664
