"""The scorer against lm-eval's decisions and an fp64 model on real texts, where the data is at hand."""

import json

import numpy as np
import pytest
import torch
from families import perturb
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.tasks import load_tasks

TASKS = {"lambada_openai": 8, "hellaswag": 4, "arc_easy": 8}
SHARED = {"vocab_size": 50304, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED |= {"intermediate_size": 64, "max_position_embeddings": 256}
KINDS = {"gpt_neox": {}, "llama": {}, "mistral": {"num_key_value_heads": 2, "sliding_window": 64}}


def test_hellaswag_is_prepared_as_published(shared_data):
    task = load_tasks(tuple(TASKS), data_dir=shared_data)["hellaswag"]
    published = (shared_data / "hellaswag" / "lm_eval_docs_1000.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, published[:200]):
        document = task.eval_docs[row["row"]]
        assert task.doc_to_text(document).replace("..", ".") == row["query"]
        assert task.doc_to_target(document) == row["gold"]
        choices = [choice.replace("..", ".").strip() for choice in document["choices"]]
        assert choices == [choice.strip() for choice in row["choices"]]


@pytest.fixture(scope="module")
def requests(shared_data):
    with quiet():
        tasks = load_tasks(tuple(TASKS), data_dir=shared_data)  # built once in this process
        for name, task in tasks.items():
            task.build_all_requests(limit=TASKS[name], rank=0, world_size=1)
    return {name: task.instances for name, task in tasks.items()}


@pytest.fixture(scope="module")
def tokenizer(shared_data):
    return AutoTokenizer.from_pretrained(shared_data / "gpt-neox-tokenizer")


def scored(kind, model, tokenizer, requests):
    """Return all log-likelihoods and all greedy decisions."""
    lm = kind(model, tokenizer=tokenizer, batch_size=8)
    with quiet():
        answers = [each for made in requests.values() for each in lm.loglikelihood(made, disable_tqdm=True)]
    return [value for value, _ in answers], [greedy for _, greedy in answers]


@pytest.mark.parametrize(("kind", "patched"), [("gpt_neox", True), ("llama", False), ("mistral", True)])
def test_every_decision_is_lm_evals_and_no_value_is_further_from_fp64(kind, patched, requests, tokenizer):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHARED, **KINDS[kind], initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if patched:
        patch(model, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()]).eval()
        with torch.no_grad():
            perturb(model)
    (values, decisions), (others, also) = (scored(each, model, tokenizer, requests) for each in (HfpatchLM, HFLM))
    exact, _ = scored(HFLM, model.double(), tokenizer, requests)
    assert decisions == also
    errors, theirs = (np.abs(np.subtract(each, exact)) for each in (values, others))
    assert errors.max() <= theirs.max() + np.finfo(np.float32).eps * np.abs(exact).max()
