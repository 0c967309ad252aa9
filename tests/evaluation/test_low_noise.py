"""Bits per byte, probability and margin of right answers, recomputed from HFLM one request at a time."""

import math

import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from own_tasks import read_record as records
from own_tasks import write_task

from hfpatch.evaluation import HfpatchLM, evaluate
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.low_noise import low_noise_scores, low_noise_values, scored_bytes
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings

MEASURED = {"bits_per_byte", "gold_probability", "margin"}
ROWS = [
    dict(zip(("q", "options", "gold", "golds", "parts"), row, strict=True))
    for row in (
        ("Wer holt die Lampe?", ["Jörg", "die Müllerin", "喜"], 0, [0, 2], "to a"),
        ("Who left the café?", ["Zoë, at noon", "Anna", "nobody"], 1, [1], "at ☕"),
        ("Where is it cold?", ["in the mill", "in", "in the"], 2, [2, 0, 2], "é"),
        ("Anna took the coin", [" to her", " home", "."], 0, [1], "to the mill"),
    )
]
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "options", "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
FORMS = {
    "choice": CHOICE,
    "spaced": {**CHOICE, "doc_to_text": "{{q}} A: ", "target_delimiter": ""},  # lm-eval strips nothing here
    "several": {**CHOICE, "doc_to_target": "golds"},
    "named": {**CHOICE, "doc_to_target": "{{options[gold]}}"},
    "mutual": {**CHOICE, "metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}]},
    "blank": {**CHOICE, "doc_to_text": "gold", "doc_to_choice": "!function own.filled", "doc_to_target": "parts"},
    "checked": {**CHOICE, "process_results": "!function own.first_is_chosen"},
    "cloze": {
        "output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": " {{parts}}",
        "metric_list": [{"metric": "acc"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}} {{parts}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "unrelated": {**CHOICE, "process_results": "!function own.another_measure"},
    "unlabelled": CHOICE,
    "all_right": {**CHOICE, "doc_to_target": "golds"},
}  # fmt: skip
CODE = """
def filled(doc):
    return [f"{doc['q']} {option}" for option in doc["options"]]

def likeliest(results):
    return max(range(len(results)), key=lambda i: results[i][0])

def first_is_chosen(doc, results):
    return {"acc": float(likeliest(results) == doc["gold"])}

def another_measure(doc, results):
    return {"acc": float(likeliest(results) != doc["gold"])}
"""


def expected_requests(name, row):
    """The requests of a document and the places of its right answers, written by hand; None is a whole text."""
    options, gold = row["options"], {row["gold"]}
    asked = {
        "spaced": [(f"{row['q']} A:", f" {option}") for option in options],
        "blank": [(f"{row['q']} {option}", f" {row['parts']}") for option in options],
        "cloze": [(row["q"], f" {row['parts']}")],
        "text": [(None, f"{row['q']} {row['parts']}")],
    }
    right = {"several": set(row["golds"]), "cloze": {0}, "text": {0}}
    return asked.get(name, [(row["q"], f" {option}") for option in options]), right.get(name, gold)


@pytest.fixture(scope="module")
def scored(taught, tokenizer, support, tmp_path_factory):
    """The results of all forms, their records, every request that was scored, and HFLM's log-likelihoods."""
    folder = tmp_path_factory.mktemp("low-noise")
    rows = dict.fromkeys(FORMS, ROWS)
    rows["unlabelled"] = [*ROWS[:2], {**ROWS[2], "gold": 3}]
    rows["all_right"] = [*ROWS[:2], {**ROWS[2], "golds": [0, 1, 2]}]
    (folder / "own.py").write_text(CODE)
    for name, form in FORMS.items():
        support.write_rows(folder / f"{name}.jsonl", rows[name])
        write_task(folder, name, **form, dataset_kwargs={"data_files": f"{folder}/{name}.jsonl"})
    chosen = EvaluationSettings(tasks=tuple(FORMS), include_path=folder, batch_size=4)
    with pytest.MonkeyPatch.context() as patched:
        asked = watch(patched)
        results = evaluate(taught, tokenizer, select(chosen), storage=Storage(records=folder / "records"))
    return results, folder / "records", asked, chosen


def watch(patched):
    """Note the tokens of every scored request."""
    asked, real = [], HfpatchLM._loglikelihood_tokens

    def noted(self, requests, *arguments, **options):
        asked.extend((tuple(context), tuple(targets)) for _, context, targets in requests)
        return real(self, requests, *arguments, **options)

    patched.setattr(HfpatchLM, "_loglikelihood_tokens", noted)
    return asked


def one_by_one(model, tokenizer, requests):
    """HFLM's log-likelihoods at batch size 1, each request by itself."""
    lm = HFLM(model, tokenizer=tokenizer, batch_size=1)
    values = []
    for context, continuation in requests:
        kind = "loglikelihood" if context else "loglikelihood_rolling"
        args = (context, continuation) if context else (continuation,)
        answer = getattr(lm, kind)([Instance(kind, {}, args, 0)], disable_tqdm=True)[0]
        values.append(answer[0] if context else answer)
    return values


def recomputed(values, requests, right):
    """The metrics of a document by their definitions, the bytes of what was scored among them."""
    sizes = [len(continuation.encode("utf-8")) for _, continuation in requests]
    metrics = {"bits_per_byte": [sum(values[i] for i in right), sum(sizes[i] for i in right)]}
    wrong = set(range(len(values))) - right
    if wrong:
        total = math.fsum(map(math.exp, values))
        metrics["gold_probability"] = sum(math.exp(values[i]) for i in right) / total
        metrics["margin"] = max(values[i] for i in right) - max(values[i] for i in wrong)
    return metrics


@pytest.mark.parametrize("name", list(FORMS)[:9])
def test_they_are_those_of_hflm_one_request_at_a_time(scored, taught, tokenizer, name):
    results, folder, _, _ = scored
    expected = []
    for row, record in zip(ROWS, records(folder, name), strict=True):
        requests, right = expected_requests(name, row)
        expected.append(recomputed(one_by_one(taught, tokenizer, requests), requests, right))
        for metric, value in expected[-1].items():
            assert record[metric] == pytest.approx(value, abs=1e-4), (metric, row)
    values, sizes = np.array([document["bits_per_byte"] for document in expected]).T
    metrics = results[name].metrics
    assert metrics["bits_per_byte"] == pytest.approx(-values.sum() / math.log(2) / sizes.sum(), abs=1e-4)
    for metric in expected[0].keys() - {"bits_per_byte"}:
        column = [document[metric] for document in expected]
        assert metrics[metric] == pytest.approx(np.mean(column), abs=1e-4)
        assert results[name].stderr[metric] == pytest.approx(np.std(column, ddof=1) / 2, abs=1e-4)
    if name == "choice":
        assert all((record["margin"] > 0) == (record["acc"] == 1) for record in records(folder, name))


def test_nothing_more_is_scored_than_lm_eval_asks_for_and_answers_are_kept(scored, taught, tokenizer, tmp_path):
    results, _, asked, chosen = scored
    with pytest.MonkeyPatch.context() as patched, quiet():
        by_lm_eval = watch(patched)
        lm = HfpatchLM(taught, tokenizer=tokenizer)
        for name, task in select(chosen).tasks.items():
            scores = lm_eval.evaluate(lm, {name: task}, bootstrap_iters=0)["results"][name]
            theirs = {key.removesuffix(",none"): value for key, value in scores.items() if key.endswith(",none")}
            ours = {key: value for key, value in results[name].metrics.items() if key in theirs}
            assert ours == pytest.approx({key: theirs[key] for key in ours}), name
            assert results[name].primary in ours
    assert asked == by_lm_eval
    for reused in (0, len(asked)):
        again = evaluate(taught, tokenizer, select(chosen), storage=Storage(answers=tmp_path))
        assert again == results
        assert sum(result.reused for result in again.values()) == reused


def test_they_are_left_out_where_no_answer_is_known_to_be_right(scored):
    results, folder, _, _ = scored
    for name in ("unrelated", "unlabelled", "all_right"):
        assert not MEASURED & set(results[name].metrics), name
        assert not any(MEASURED & set(record) for record in records(folder, name))
    choices = ("choice", "spaced", "several", "named", "mutual", "blank", "checked")
    assert tuple(name for name, result in results.items() if set(result.metrics) >= MEASURED) == choices


def test_an_impossible_answer_has_no_finite_value(scored):
    *_, chosen = scored
    task = select(chosen).tasks["choice"]
    arguments = [("q", " a"), ("q", " b"), ("q", " c")]
    for logs, expected in {(-math.inf, -1.0, -2.0): (-math.inf, 0.0, -math.inf), (-math.inf,) * 3: None}.items():
        sample = {"doc_id": 5, "doc": ROWS[0], "target": 0, "arguments": arguments, "metrics": ["acc"]}
        values = low_noise_values(task, [{**sample, "resps": [[(log, False)] for log in logs]}])
        assert low_noise_scores(values) == {}
        (bits, probability, margin) = values[5].values()
        if expected is None:
            assert math.isnan(probability)
            assert math.isnan(margin)
        else:
            assert (bits[0], probability, margin) == expected


def test_bytes_are_those_of_the_continuation_with_the_white_space_that_moves_to_it(tokenizer, support):
    cases = {("Wo?", " in Köln"): 9, ("Wo? \n", "☕"): 5, ("", "a b"): 3, ("a\u00a0", "b"): 3}
    lm = HFLM(support.gpt_neox(), tokenizer=tokenizer)
    for (context, continuation), size in cases.items():
        assert scored_bytes(context, continuation) == size
        tokens = lm._encode_pair(context, continuation)[1] if context else tokenizer(continuation)["input_ids"]
        assert len(tokenizer.decode(tokens).encode("utf-8")) == size


def test_tasks_of_lm_eval_and_of_the_paper_have_them(taught, tokenizer, data_dir, support, tmp_path):
    local = ("lambada_openai", "hellaswag", "arc_easy", "wikitext")
    tasks = (*local, "paper_lambada", "paper_hellaswag", "paper_arc_easy", "paper_wikitext")
    settings = EvaluationSettings(tasks=tasks, limit=6)
    results = evaluate(taught, tokenizer, select(settings, data_dir), storage=Storage(records=tmp_path))
    for name in tasks:
        chooses = "hellaswag" in name or "arc" in name
        assert MEASURED & set(results[name].metrics) == (MEASURED if chooses else {"bits_per_byte"}), name
    pages = [row["page"] for row in support.articles(4)]  # lm-eval's own: bytes of the page as published
    assert [record["bits_per_byte"][1] for record in records(tmp_path, "wikitext")] == [len(p.encode()) for p in pages]
    paragraphs = [row["text"] for row in support.paragraphs() if len(row["text"]) >= 50][:6]
    for text, record in zip(paragraphs, records(tmp_path, "paper_wikitext"), strict=True):
        tokens = tokenizer(text)["input_ids"][:128]  # the longest row; the first token is given
        assert record["bits_per_byte"][1] == len(tokenizer.decode(tokens[1:]).encode())
        total = -record["paragraph_perplexity"] * (len(tokens) - 1)
        assert record["bits_per_byte"][0] == pytest.approx(total, rel=1e-6)


def test_what_guessing_gets_is_known_where_choices_are_right_or_wrong(scored):
    results, *_ = scored
    third = pytest.approx(1 / 3)  # one of three choices is right
    expected = {**dict.fromkeys(("choice", "spaced", "named", "mutual", "blank"), third), "several": pytest.approx(0.5)}
    unknown = ("checked", "cloze", "text", "unrelated", "unlabelled", "all_right")  # own functions, or nothing to guess
    assert {name: result.chance for name, result in results.items()} == expected | dict.fromkeys(unknown)
    assert results["text"].to_json()["chance"] is None
    assert results["choice"].to_json()["chance"] == third
