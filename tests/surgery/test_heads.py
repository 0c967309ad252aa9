"""A patch survives a change of the head: causal model, body alone, classifier."""

import logging

import pytest
import torch
from families import frozen, perturb
from peft import get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

import hfpatch
from hfpatch import HfpatchError, NonlinearQueryConfig, PreProjectionConfig
from hfpatch.tuners import model as tuner
from hfpatch.twins import shrink

IDS = torch.arange(3, 19).reshape(2, 8)
CONFIGS = {"llama": LlamaConfig, "gpt2": GPT2Config, "bert": BertConfig}


@pytest.fixture
def folder(tmp_path):
    """Return a function that saves a tiny base and gives its folder."""

    def save(kind):
        config = shrink(CONFIGS[kind]())
        config.pad_token_id = 0
        torch.manual_seed(0)
        with_head = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        with_head.from_config(config).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def loaded(kind, base):
    """Return a model of a folder; the head that the folder lacks is the same every time."""
    torch.manual_seed(1)
    return kind.from_pretrained(base)


def body_of(model):
    return getattr(model, model.base_model_prefix, model)


@torch.no_grad()
def hidden(model):
    with frozen(model):
        return body_of(model).eval()(IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state


@pytest.mark.parametrize(("kind", "target_modules"), [("llama", None), ("gpt2", None), ("bert", "some")])
def test_a_patch_moves_between_heads(kind, target_modules, folder, tmp_path):
    base, lm = folder(kind), AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    classes = [lm, AutoModel, AutoModelForSequenceClassification]
    for made_on in classes if kind == "llama" else classes[:1]:
        model = loaded(made_on, base)
        named = {"target_modules": [hfpatch.find_sites(model)[1].path] if target_modules == "some" else None}
        hfpatch.patch(model, [PreProjectionConfig(content_skip=True, **named), NonlinearQueryConfig(**named)])
        perturb(model, std=0.1)
        expected = hidden(model)
        hfpatch.save_patch(model, tmp_path / "patch")
        for loaded_on in classes:
            again = hfpatch.load_patch(loaded(loaded_on, base), tmp_path / "patch")
            assert torch.equal(hidden(again), expected), f"{made_on.__name__} -> {loaded_on.__name__}"
            plain = loaded(loaded_on, base)
            plain.load_adapter(str(tmp_path / "patch" / "pre_projection"))
            plain.load_adapter(str(tmp_path / "patch" / "nonlinear_query"), "second")
            plain.set_adapter(["default", "second"])
            assert torch.equal(hidden(plain), expected), f"{made_on.__name__} -> {loaded_on.__name__} by load_adapter"


def test_another_body_is_another_base(folder, tmp_path):
    base = folder("llama")
    model = hfpatch.patch(AutoModelForCausalLM.from_pretrained(base), PreProjectionConfig())
    hfpatch.save_patch(model, tmp_path / "patch")
    other = AutoModel.from_pretrained(base)
    with torch.no_grad():
        other.layers[0].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(HfpatchError, match="made for another base"):
        hfpatch.load_patch(other, tmp_path / "patch")
    same_class = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        same_class.lm_head.weight[0, 0] += 1
    with pytest.raises(HfpatchError, match="made for another base"):
        hfpatch.load_patch(same_class, tmp_path / "patch")


def classifier(kind=BertConfig):
    return AutoModelForSequenceClassification.from_config(shrink(kind()))


SEQ_CLS = {"task_type": "SEQ_CLS"}


@pytest.mark.parametrize("method", [PreProjectionConfig, NonlinearQueryConfig])
@pytest.mark.parametrize(
    ("kind", "inject", "options", "frozen"),
    [
        (BertConfig, hfpatch.patch, {}, "classifier"),
        (BertConfig, hfpatch.patch, SEQ_CLS, "classifier"),  # PEFT's classes alone read a task type
        (BertConfig, get_peft_model, SEQ_CLS, None),
        (BertConfig, get_peft_model, {"modules_to_save": ["classifier"]}, None),
        (T5Config, get_peft_model, SEQ_CLS, "classification_head"),  # no name that they train
        (T5Config, get_peft_model, {**SEQ_CLS, "modules_to_save": ["classification_head.out_proj"]}, None),
        (DistilBertConfig, get_peft_model, SEQ_CLS, None),
    ],
)
def test_a_frozen_head_is_said_and_a_trained_one_is_not(kind, inject, options, frozen, method, caplog, monkeypatch):
    monkeypatch.setattr(tuner, "_LOGGED", set())
    caplog.set_level(logging.WARNING, logger=tuner.__name__)  # commands turn it off
    model = inject(classifier(kind), method(**options))
    said = [record.message for record in caplog.records if "stays frozen" in record.message]
    assert [line.split(" stays")[0] for line in said] == ([f"{method.spec.label}: {frozen}"] if frozen else [])
    trained = [name for name, p in model.named_parameters() if p.requires_grad and "hfpatch" not in name]
    assert bool(trained) == (frozen is None)


def test_a_classifier_is_no_causal_model():
    model = classifier()
    with pytest.raises(HfpatchError, match=r"task_type='CAUSAL_LM' applies to models that generate"):
        get_peft_model(model, PreProjectionConfig(task_type="CAUSAL_LM"))
    assert not any("hfpatch" in name for name, _ in model.named_parameters())
