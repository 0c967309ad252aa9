import math

import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance

from hfpatch.evaluation import evaluate
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.paper_tasks import first_documents, first_paragraphs
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings


@pytest.fixture(scope="module")
def results(taught, tokenizer, data_dir):
    tasks = ("paper_lambada", "paper_hellaswag", "paper_arc_easy", "paper_wikitext")
    return evaluate(taught, tokenizer, select(EvaluationSettings(tasks=tasks, batch_size=4), data_dir))


def per_token_choice(support, model, tokenizer, context, endings):
    means = [float(support.continuation(model, tokenizer, context, f" {ending}")[0].mean()) for ending in endings]
    return means.index(max(means))


def test_lambada_needs_every_target_token_greedy(results, taught, tokenizer, support):
    right = 0
    for text in support.passages(24):
        cut = text.rindex(" ")
        right += bool(support.continuation(taught, tokenizer, text[:cut], text[cut:])[1].all())
    assert 0 < right < 24
    assert results["paper_lambada"].metrics["acc"] == right / 24


@pytest.mark.parametrize("task", ["hellaswag", "arc_easy"])
def test_a_choice_has_the_raw_context_and_divides_by_tokens(results, taught, tokenizer, support, task):
    """ARC's is the bare question, on the validation split."""
    rows = [(row["ctx"], row["endings"], int(row["label"])) for row in support.hellaswag()]
    if task == "arc_easy":
        choices = [(row["question"], row["choices"], row["answerKey"]) for row in support.arc(16, 50)]
        rows = [(question, given["text"], given["label"].index(key)) for question, given, key in choices]
    right = [per_token_choice(support, taught, tokenizer, *row[:2]) == row[2] for row in rows]
    assert results[f"paper_{task}"].metrics["acc"] == sum(right) / len(right)


@torch.no_grad()
def test_perplexity_is_the_exponential_of_the_mean_paragraph_loss(results, taught, tokenizer, support):
    lines = [row["text"] for row in support.paragraphs()[:300] if len(row["text"]) >= 50]
    cut = [torch.tensor([tokenizer(line)["input_ids"][:128]]) for line in lines]  # the model's longest row
    losses = [float(taught(ids, labels=ids).loss) for ids in cut]
    result = results["paper_wikitext"]
    assert (result.n, result.higher_is_better, result.primary) == (len(lines), False, "paragraph_perplexity")
    assert result.metrics["paragraph_perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert any(ids.shape[1] < 128 for ids in cut)


@torch.no_grad()
def test_paragraphs_are_cut_at_512_tokens(support, tokenizer, own_data_dir):
    text = " ".join(support.passages(36))
    assert len(tokenizer(text)["input_ids"]) > 520
    support.write_rows(own_data_dir / "wikitext/wikitext-2-raw-v1/validation.jsonl", [{"text": text}])
    model = support.gpt_neox(positions=2048)
    chosen = EvaluationSettings(tasks=("paper_wikitext",))
    result = evaluate(model, tokenizer, select(chosen, own_data_dir))["paper_wikitext"]
    ids = torch.tensor([tokenizer(text)["input_ids"][:512]])
    assert result.metrics["paragraph_perplexity"] == pytest.approx(math.exp(model(ids, labels=ids).loss), rel=1e-4)
    assert result.stderr == {}


@pytest.mark.parametrize("longest", [1, 7, 9, 20])
def test_bytes_are_those_of_the_predicted_tokens_within_a_character_too(taught, tokenizer, longest):
    text = "東京 " * 3
    assert len(tokenizer(text)["input_ids"]) == len(text.encode()) == 21  # a token is a byte
    request = Instance("paragraph_loglikelihood", {}, (text, longest), 0, metadata=("paragraph", 0, 1))
    scorer = HfpatchLM(taught, tokenizer=tokenizer)
    scorer.left_out = {}
    ((_, tokens, size),) = scorer.paragraph_loglikelihood([request])
    assert tokens == size == longest - 1


def test_only_the_first_500_documents_and_300_lines_count():
    assert len(first_documents(Dataset.from_dict({"text": ["x"] * 501}))) == 500
    lengths = [50, 49, *[0] * 297, 51, 60]
    chosen = first_paragraphs(Dataset.from_dict({"text": ["x" * length for length in lengths]}))
    assert [len(text) for text in chosen["text"]] == [50, 51]
