import json
import warnings

import pytest
import torch
from families import FAMILIES, FEW, make_config, make_model
from peft import LoraConfig

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.promises import behaviour, run
from hfpatch.surgery.bases import hash_weights
from hfpatch.twins import random_model

NAMES = [name for name, _ in run.PROMISES]
FEATURES = "PEFT's features"
IN_USE = [
    "causality", "generation with and without cache", "left padding", "gradient checkpointing",
    "gradients reach exactly the added tensors", "save and load",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch, only):
    """Leave out torch.compile, and where it is checked, the further passes of its backend."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, backend="eager"))
    only(*(name for name in NAMES if name != "torch.compile"))


def snapshot(model):
    return (
        hash_weights(model), list(model.state_dict()), [p.requires_grad for p in model.parameters()], model.training,
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()], hasattr(model, "peft_config"),
        model.is_gradient_checkpointing, torch.get_rng_state().tolist(),
    )  # fmt: skip


CONFIGS = {
    "gated": PreProjectionConfig(gated=True, dropout=0.2),
    "literal": NonlinearQueryConfig(form="literal", layers_to_transform=[1]),
    "query": NonlinearQueryConfig(),
    "temperature": QueryTemperatureConfig(),
    "skip alone": PreProjectionConfig(expansion=0, content_skip=True),
    "lora": LoraConfig(r=2, lora_dropout=0.2, target_modules="all-linear"),
}


def test_all_promises_hold(only):
    only(*NAMES)
    model = make_model("gemma2")
    before = snapshot(model)
    report = hfpatch.check(model)
    assert snapshot(model) == before
    assert [verdict.promise for verdict in report.verdicts] == NAMES
    assert report.passed, str(report)
    assert not [verdict for verdict in report.verdicts if "the model itself" in verdict.measured], str(report)
    assert "FAIL" not in str(report)
    assert all(name in str(report) for name in NAMES)
    assert json.loads(json.dumps(report.to_json()))["passed"] is True


EVERY = [(case, what) for case in FAMILIES for what in ("skip", "query") if (case, what) != ("gemma2", "skip")]


@pytest.mark.parametrize(("case", "what"), EVERY)  # the one that is left out has all of them above
def test_the_promises_hold_on_every_family(case, what, only):
    if what == "query" or case not in FEW:
        only(*(IN_USE if what == "query" else set(NAMES) - {"torch.compile", FEATURES}))
    model = make_model(case)
    before = snapshot(model)
    report = hfpatch.check(model, None if what == "skip" else CONFIGS[what])
    assert report.passed, str(report)
    assert not [verdict for verdict in report.verdicts if "the model itself" in verdict.measured], str(report)
    assert snapshot(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FAMILIES if case not in FEW])
def test_pefts_features_hold_on_every_family(case, only):
    only(FEATURES)
    report = hfpatch.check(make_model(case))
    assert report.passed, str(report)


ALTERNATING = [  # each configuration on one of two families, and on the other where time is no matter
    pytest.param(case, what, marks=[pytest.mark.slow] if (i + j) % 2 else [])
    for i, case in enumerate(("llama", "gpt2"))
    for j, what in enumerate(CONFIGS)
]


@pytest.mark.parametrize(("case", "what"), ALTERNATING)
def test_the_promises_hold_for_other_configurations(case, what, only):
    """Those but PEFT's features, which test_catalogue has for every method."""
    only(*(set(NAMES) - {"torch.compile", FEATURES}))
    report = hfpatch.check(make_model(case), CONFIGS[what])
    assert report.passed, str(report)


def test_a_base_that_is_changed_is_seen(monkeypatch, only):
    only("no-op at init", "unpatch restores, base never changes")
    original = behaviour.patch

    def careless(model, *args, **kwargs):
        original(model, *args, **kwargs)
        model.model.layers[0].mlp.up_proj.weight.data += 1e-3
        return model

    monkeypatch.setattr(behaviour, "patch", careless)
    monkeypatch.setattr("hfpatch.promises.common.patch", careless)
    broken = {verdict.promise for verdict in hfpatch.check(make_model("llama")).verdicts if not verdict.holds}
    assert broken == {"no-op at init", "unpatch restores, base never changes"}


def test_other_trainables_than_fp32_are_seen(monkeypatch, only):
    only("fp32 trainables", "no-op at init")
    from hfpatch.tuners.layer import MethodLayer

    build = MethodLayer.update_layer

    def low(self, name, config, **kwargs):
        build(self, name, config, **kwargs)
        self.to(torch.float64)

    monkeypatch.setattr(MethodLayer, "update_layer", low)
    model = make_model("llama")
    before, report = snapshot(model), hfpatch.check(model)
    assert snapshot(model) == before
    assert "fp32 trainables" in {verdict.promise for verdict in report.verdicts if not verdict.holds}
    assert json.loads(json.dumps(report.to_json()))["passed"] is report.passed is False
    assert "FAIL" in str(report)


@pytest.mark.parametrize("error", [RuntimeError("broken\nin two lines"), HfpatchError("broken")])
def test_a_promise_that_breaks_with_an_error_is_a_verdict(monkeypatch, only, error):
    only("no-op at init", "save and load")

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("hfpatch.promises.behaviour.save_patch", full)
    model = make_model("llama")
    report = hfpatch.check(model)
    assert [(v.holds, v.measured) for v in report.verdicts][1] == (False, f"{type(error).__name__}: broken")
    assert report.verdicts[0].holds


def test_a_patch_that_loads_as_another_one_is_said(monkeypatch, only):
    only("save and load")
    load = behaviour.load_patch
    monkeypatch.setattr(behaviour, "load_patch", lambda model, folder: load(model, folder, scale=0.5))
    (verdict,) = hfpatch.check(make_model("llama")).verdicts
    assert (verdict.holds, verdict.measured) == (False, "other logits; files .json, .md, .safetensors")


def test_a_config_that_does_not_fit_and_a_model_that_does_not_exist():
    model = make_model("llama").train()
    before = snapshot(model)
    with pytest.raises(HfpatchError, match="do not exist"):
        hfpatch.check(model, PreProjectionConfig(layers_to_transform=[5]))
    assert snapshot(model) == before
    with pytest.raises(HfpatchError, match="does not exist"):
        hfpatch.check("/no/where")


def test_a_model_of_a_short_context_reads_no_more(only):
    only("no-op at init", "attention is where it is declared", "left padding")
    report = hfpatch.check(random_model(make_config("gpt2", n_positions=6)))
    assert report.passed, str(report)
    assert not [verdict for verdict in report.verdicts if "the model itself" in verdict.measured], str(report)


def test_the_users_gradient_checkpointing_stays_on(only):
    only("gradient checkpointing")
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # as of names that transformers will remove
        assert hfpatch.check(model).passed
    assert model.is_gradient_checkpointing
