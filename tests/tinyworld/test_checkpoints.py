import json
import math

import pytest
import torch
from evaluation.conftest import continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyworld.build import built_files, manifest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpatch.errors import HfpatchError
from hfpatch.tinyworld import CHECKPOINTS, checkpoint, documents, items

LIMIT_BYTES = 4_000_000
ITEMS = 50
# (lowest, highest) share of right answers on the first 50 items. Chance is 0.25 for endings and questions; for the
# last word it is about 0.08 among the words of its kind. The GPT-2 has learnt to bind objects and friends but hardly
# places, so it stays close above chance.
WINDOWS = {
    "gpt-neox": {"cloze": (0.6, 0.85), "endings": (0.5, 0.75), "questions": (0.42, 0.7)},
    "gpt2": {"cloze": (0.25, 0.5), "endings": (0.3, 0.5), "questions": (0.28, 0.5)},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def base(request):
    folder = checkpoint(request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return request.param, model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def best_choice(model, tokenizer, context, choices):
    sums = [continuation(model, tokenizer, context, f" {choice}")[0].sum().item() for choice in choices]
    return sums.index(max(sums))


def is_right(task, model, tokenizer, item):
    if task == "cloze":
        context, word = item["text"].rsplit(" ", 1)
        return bool(continuation(model, tokenizer, context, f" {word}")[1].all())
    if task == "endings":
        return best_choice(model, tokenizer, item["ctx"], item["endings"]) == item["label"]
    context = f"{item['passage']}\nQuestion: {item['question']}\nAnswer:"
    return "ABCD"[best_choice(model, tokenizer, context, item["choices"]["text"])] == item["answerKey"]


@pytest.mark.parametrize("task", ["cloze", "endings", "questions"])
def test_baseline_is_above_chance_and_below_one(base, task):
    name, model, tokenizer = base
    accuracy = sum(is_right(task, model, tokenizer, item) for item in items(task)[:ITEMS]) / ITEMS
    low, high = WINDOWS[name][task]
    assert low <= accuracy <= high, (name, task, accuracy)


def test_it_knows_the_base_split_better_than_the_shifted_one(base):
    _, model, tokenizer = base

    def perplexity(split):
        scores = [
            continuation(model, tokenizer, tokenizer.eos_token, text)[0]
            for text in documents(split, count=40, seed=12345)
        ]
        return math.exp(-torch.cat(scores).mean().item())

    assert 1.3 < perplexity("base") < 0.9 * perplexity("shifted")


def test_the_manifest_names_every_built_file_by_its_hash():
    assert manifest()["files"] == built_files()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_size_and_kind_of_the_files_which_name_no_machine(name):
    files = [path for path in checkpoint(name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LIMIT_BYTES
    assert {path.suffix for path in files} <= {".safetensors", ".json"}
    assert (checkpoint(name) / "model.safetensors").stat().st_size > 3_000_000
    for path in checkpoint(name).glob("*.json"):
        values = json.loads(path.read_text(encoding="utf-8")).values() if path.name != "tokenizer.json" else ()
        assert not [value for value in values if isinstance(value, str) and ("/" in value or "\\" in value)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoint("gpt2"), local_files_only=True)


@given(text=st.text(max_size=50))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("split", ["base", "shifted"])
def test_documents_survive_the_tokenizer_and_fit_the_context(tokenizer, split):
    for text in documents(split, count=200, seed=5):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text
        assert len(tokens) < 200


def test_special_tokens_and_unknown_names(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    with pytest.raises(HfpatchError, match="did you mean 'gpt-neox'"):
        checkpoint("gptneox")
