"""Recipes, lm-eval and inspection refuse a base that sees later tokens, in one line and before any work."""

import pytest
from tiny_runs import Nothing, refused, small_recipe
from transformers import BertConfig, BertForMaskedLM

from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.runs import compare, evaluate, inspect, train
from hfpatch.surgery.bases import require_causal
from hfpatch.tinyworld import documents
from hfpatch.training.architecture import build_model

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = train_tokenizer(list(documents("base", count=50)), 300)
    tokenizer.save_pretrained(folder)
    config = BertConfig(**BERT, vocab_size=len(tokenizer), max_position_embeddings=64)
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_a_bidirectional_base_is_refused(bert, tmp_path):
    recipe, out = small_recipe(bert), tmp_path / "out"
    model = ModelSettings(name=str(bert))
    lines = [
        refused(compare, recipe, out, progress=Nothing()),
        refused(train, recipe, "pre", out, progress=Nothing()),
        refused(evaluate, model, settings=EvaluationSettings(tasks=["tinyworld_cloze"], limit=2)),
        refused(inspect, model, None, text="x", tokens=64),
    ]
    assert all("(BertLMHeadModel) is not causal: a token changes logits before it" in line for line in lines), lines


@pytest.mark.parametrize(("options", "causal"), [({}, False), ({"is_decoder": True}, True)])
def test_a_switch_decides(options, causal):
    model = build_model({"model_type": "bert", **BERT, **options, "vocab_size": 50, "max_position_embeddings": 64})
    if causal:
        require_causal(model, "architecture")
    else:
        assert refused(require_causal, model, "architecture").startswith("architecture (BertLMHeadModel) is not causal")


def test_the_language_models_are_causal():
    from families import FAMILIES, make_model

    for case in FAMILIES:
        require_causal(make_model(case), case)
