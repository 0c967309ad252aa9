import dataclasses
import importlib
import inspect

import pytest
from peft import PeftConfig

import hfpatch

NAMES = [
    "PreProjectionConfig", "NonlinearQueryConfig", "QueryTemperatureConfig", "fold",
    "patch", "unpatch", "patch_summary", "save_patch", "load_patch",
    "find_sites", "match_lora_rank", "check", "AttentionSite", "Family", "register_family", "HfpatchError",
    "fast_matmul", "load_results",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_public_names(name):
    assert name in hfpatch.__all__
    assert name in dir(hfpatch)
    value = getattr(hfpatch, name)
    assert inspect.getdoc(value)
    assert inspect.isclass(value) or callable(value)


@pytest.mark.parametrize("name", hfpatch.__all__)
def test_everything_listed_is_there(name):
    assert getattr(hfpatch, name) is not None


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'hfpatch' has no attribute 'patchh'"):
        _ = hfpatch.patchh


def parameters(call):
    return list(inspect.signature(call).parameters)


def test_signatures_of_the_design():
    assert parameters(hfpatch.patch)[:2] == ["model", "config"]
    assert parameters(hfpatch.unpatch) == ["model"]
    assert parameters(hfpatch.patch_summary) == ["model"]
    assert parameters(hfpatch.save_patch) == ["model", "directory"]
    assert parameters(hfpatch.load_patch)[:2] == ["model", "directory"]
    assert parameters(hfpatch.find_sites) == ["model"]
    assert parameters(hfpatch.match_lora_rank) == ["model", "budget", "target_modules"]
    assert parameters(hfpatch.check)[:2] == ["model_or_id", "config"]
    assert parameters(hfpatch.load_results) == ["folder"]


def test_options_of_the_design():
    for config, names in (
        (hfpatch.PreProjectionConfig, ["expansion", "activation", "gated", "dropout", "content_skip", "init"]),
        (
            hfpatch.NonlinearQueryConfig,
            ["rank", "activation", "input_norm", "output_norm", "anchor", "form", "targets"],
        ),
    ):
        assert issubclass(config, PeftConfig)
        assert {*names, "layers_to_transform"} <= {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize("module", ["nn", "sites", "tuners"])
def test_packages_list_what_they_have(module):
    package = importlib.import_module(f"hfpatch.{module}")
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        assert hasattr(package, name)
