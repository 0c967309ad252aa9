"""Metrics that are no means over documents: F1, Matthews correlation, Brier score, BLEU and kin, medians, NaN."""

import json
import math

import numpy as np
import pytest
from lm_eval.api import metrics as lm_evals
from own_tasks import read_record, task_result, write_record, write_task
from scipy.stats import t as student

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import Records, all_aggregations, check_comparable, compare, comparison, evaluate
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.selection import select
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.low_noise import LOW_NOISE

DOCUMENTS = 40
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": ["no", "yes"],
    "doc_to_target": "{{label}}",
}  # fmt: skip
WRITING = {
    "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6},
}  # fmt: skip
CLOZE = {"output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": " {{text}}"}
CODE = """
import math

def gaps(doc, results):
    return {"gaps": math.nan if doc["question"].startswith("Anna") else results[0][0]}

def objects(doc, results):
    return {"objects": {doc["text"]: results[0][0]}.items()}

def last_of(items):
    return float(len(items) and list(items[-1])[0][1])
"""
TASKS = {  # what the task is, its metric and aggregation, and that function
    "f1": (CHOICE, "f1", None, lm_evals.f1_score),
    "mcc": (CHOICE, "mcc", None, lm_evals.matthews_corrcoef),
    "brier": (CHOICE, "brier_score", None, lm_evals.brier_score),
    "bleu": (WRITING, "bleu", None, lm_evals.bleu),
    "chrf": (WRITING, "chrf", None, lm_evals.chrf),
    "ter": (WRITING, "ter", None, lm_evals.ter),
    "median": (CLOZE, "perplexity", "median", lm_evals.median),
    "perplexity": (CLOZE, "perplexity", "perplexity", lm_evals.perplexity),
    "gaps": (CLOZE, "gaps", "nanmean", lambda values: np.nanmean(np.array(values, dtype=float))),
}


def write_tasks(folder, support, tasks):
    texts = [text.rpartition(" ") for text in support.passages(DOCUMENTS)]
    rows = [{"question": text, "text": word, "label": i % 2} for i, (text, _, word) in enumerate(texts)]
    support.write_rows(folder / "rows.jsonl", rows)
    (folder / "own.py").write_text(CODE)
    for name, (form, metric, aggregation, *_) in tasks.items():
        options = {"aggregation": aggregation, "higher_is_better": metric != "perplexity"} if aggregation else {}
        code = {"process_results": f"!function own.{metric}"} if f"def {metric}(" in CODE else {}
        write_task(folder, name, **form, **code, metric_list=[{"metric": metric, **options}])
    return EvaluationSettings(tasks=tuple(tasks), include_path=folder, batch_size=DOCUMENTS)


@pytest.fixture(scope="module")
def scored(taught, tokenizer, support, tmp_path_factory):
    """The scores of a taught and of an untaught model, and where their records are."""
    folder = tmp_path_factory.mktemp("metrics")
    chosen = write_tasks(folder, support, TASKS)
    results = {
        name: evaluate(model, tokenizer, select(chosen), storage=Storage(records=folder / name))
        for name, model in {"baseline": support.gpt_neox(), "taught": taught}.items()
    }
    return folder, results, select(chosen).tasks


def values(folder, task, metric):
    return [row[metric] for row in read_record(folder, task)]


def by_primary(scores, runs, aggregations, method="taught"):
    """The comparisons by the primary metrics; those by the low-noise ones are read from the same files."""
    made = compare(Records(runs, aggregations=aggregations), scores, {method: ["baseline"]})
    return [one for one in made if one.metric == scores[one.task].primary]


def test_they_are_compared_by_lm_evals_own_function(scored, monkeypatch):
    folder, results, tasks = scored
    scores = results["baseline"]
    monkeypatch.setattr(comparison, "RESAMPLES", 30)
    aggregations = all_aggregations(tasks)
    check_comparable(folder / "baseline", scores, aggregations)
    runs = {"baseline": {0: folder / "baseline"}, "taught": {0: folder / "taught"}}
    compared = by_primary(scores, runs, aggregations)
    assert [one.task for one in compared] == list(TASKS)
    for one in compared:
        _, metric, _, function = TASKS[one.task]
        both = [np.array(values(folder / name, one.task, metric), dtype=object) for name in ("taught", "baseline")]
        again = [function(list(column)) for column in both]
        assert again == pytest.approx([results[name][one.task].metrics[metric] for name in ("taught", "baseline")])
        assert one.difference == pytest.approx(again[0] - again[1], rel=1e-6, abs=1e-9)
        assert one.low <= one.difference <= one.high
        assert (one.p < 0.05) == (one.low > 0 or one.high < 0)
        json.dumps(one.to_json(), allow_nan=False)
        tests = {"perplexity": "paired permutation of log ratios"}
        assert one.test == tests.get(one.task, "paired bootstrap t over documents")
    (perplexity,) = (one for one in compared if one.task == "perplexity")
    assert perplexity.high < 0
    assert perplexity.p < 0.05


@pytest.mark.parametrize(("task", "metric"), [("brier", "brier_score"), ("median", "perplexity")])
def test_the_interval_is_that_of_a_bootstrap_over_documents(scored, task, metric):
    folder, results, tasks = scored
    scores = {task: results["baseline"][task]}
    aggregations = all_aggregations({task: tasks[task]})
    runs = {"baseline": {0: folder / "baseline"}, "taught": {0: folder / "taught"}}
    (one,) = by_primary(scores, runs, aggregations)
    both = [np.array(values(folder / name, task, metric), dtype=object) for name in ("taught", "baseline")]
    draws = np.random.default_rng(3).integers(0, DOCUMENTS, size=(1000, DOCUMENTS))
    error = np.std([np.diff([aggregations[task][metric](list(column[d])) for column in both]) for d in draws])
    assert one.high - one.low == pytest.approx(2 * student.ppf(0.975, DOCUMENTS - 1) * error, rel=0.2)


def medians_compared(folder, scores):
    """Return the comparison of the medians of two methods."""
    runs = {name: {0: write_record(folder / name, "count", "steps", values)} for name, values in scores.items()}
    records = Records(runs, aggregations={"count": {"steps": lm_evals.median}})
    (one,) = compare(records, {"count": task_result("count", "steps", n=len(scores["a"]))}, {"a": ["baseline"]})
    return one


def test_a_score_that_no_draw_changes_gets_no_verdict(tmp_path):
    one = medians_compared(tmp_path, {"baseline": [1.0] * 30, "a": [2.0] * 30})
    assert (one.difference, one.test, one.p) == (1.0, "none (values without a finite mean or variance)", None)


@pytest.mark.parametrize(("documents", "freedom"), [(30, 29), (250, 199)])
def test_the_error_of_200_draws_has_their_freedom_at_most(documents, freedom, tmp_path):
    rng = np.random.default_rng(0)
    one = medians_compared(tmp_path, {name: rng.normal(size=documents).tolist() for name in ("baseline", "a")})
    assert [part[1] for part in one.errors] == [freedom]


def test_several_seeds_add_their_own_variance(scored, monkeypatch):
    folder, results, tasks = scored
    monkeypatch.setattr(comparison, "RESAMPLES", 30)
    scores = {"f1": results["baseline"]["f1"]}
    runs = {"baseline": {0: folder / "baseline"}, "a": {0: folder / "taught", 1: folder / "baseline"}}
    aggregations = all_aggregations({"f1": tasks["f1"]})
    (one,) = by_primary(scores, runs, aggregations, "a")
    gain = results["taught"]["f1"].metrics["f1"] - results["baseline"]["f1"].metrics["f1"]
    assert one.test == "paired bootstrap t over seeds and documents"
    assert one.difference == pytest.approx(gain / 2)
    assert one.high - one.low >= 2 * 12.706 * abs(gain) / 2


def test_only_ratios_have_an_error_and_what_is_no_number_is_null_or_refused(
    scored, taught, tokenizer, support, tmp_path
):
    folder, results, _ = scored
    errors = {name: set(result.stderr) - set(LOW_NOISE) for name, result in results["taught"].items()}
    assert errors == {task: set() for task in TASKS} | {"perplexity": {"perplexity"}}
    assert None in values(folder / "taught", "gaps", "gaps")
    chosen = write_tasks(tmp_path, support, {"nothing": (CLOZE, "gaps", "mean")})
    with pytest.raises(HfpatchError, match="task nothing: its metric gaps is nan over 40 documents"):
        evaluate(taught, tokenizer, select(chosen), storage=Storage(records=tmp_path))


def test_a_metric_that_records_cannot_give_again_is_refused_before_anything_is_compared(
    taught, tokenizer, support, tmp_path
):
    chosen = write_tasks(tmp_path, support, {"objects": (CLOZE, "objects", "!function own.last_of")})
    scores = evaluate(taught, tokenizer, select(chosen), storage=Storage(records=tmp_path))
    assert math.isfinite(scores["objects"].metrics["objects"])
    aggregations = all_aggregations(select(chosen).tasks)
    with pytest.raises(HfpatchError, match="task objects: its metric objects does not follow from the documents'"):
        check_comparable(tmp_path, scores, aggregations)
