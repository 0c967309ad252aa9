import json
import math

import numpy as np
import pytest

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import Comparison, TaskResult, compare


def result(task, primary, higher=True):
    return TaskResult(task, 0, {}, {}, primary, higher, 0, "", "1")


TASKS = {
    "quiz": result("quiz", "acc"),
    "novel": result("novel", "word_perplexity", higher=False),
}


def write(folder, task, metric, values, hashes=None):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"doc_id": i, "doc_hash": hashes[i] if hashes else f"h{i}", "target": "é", metric: value}
        for i, value in enumerate(values)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def records(tmp_path):
    """A baseline with one run; a method that answers 14 more of 200 questions and lowers the perplexity by 4 %."""
    rng = np.random.default_rng(0)
    right = rng.permutation([1.0] * 80 + [0.0] * 120)
    gained = right.copy()
    gained[np.flatnonzero(right == 0)[:15]] = 1.0
    gained[np.flatnonzero(right == 1)[:1]] = 0.0
    words = rng.integers(50, 90, size=40)
    losses = words * rng.normal(3.0, 0.3, size=40)
    better = losses - words * rng.normal(0.04, 0.02, size=40)
    runs = {"baseline": {0: tmp_path / "baseline"}, "method": {0: tmp_path / "method"}}
    write(tmp_path / "baseline", "quiz", "acc", right)
    write(tmp_path / "method", "quiz", "acc", gained)
    write(tmp_path / "baseline", "novel", "word_perplexity", [[-a, int(c)] for a, c in zip(losses, words, strict=True)])
    write(tmp_path / "method", "novel", "word_perplexity", [[-a, int(c)] for a, c in zip(better, words, strict=True)])
    scores = [math.exp(terms.sum() / words.sum()) for terms in (losses, better)]
    return runs, scores


def test_one_seed(records):
    runs, (before, after) = records
    quiz, novel = compare(runs, tasks=TASKS, references={"method": ["baseline"]})
    assert (quiz.method, quiz.reference, quiz.task, quiz.metric) == ("method", "baseline", "quiz", "acc")
    assert (quiz.n, quiz.seeds, quiz.test, quiz.verdict) == (200, 1, "McNemar exact", "better")
    assert quiz.difference == pytest.approx(14 / 200)
    assert quiz.p == pytest.approx(2 * (1 + 16) / 2**16)
    assert quiz.low < 0.07 < quiz.high
    assert quiz.high - quiz.low == pytest.approx(2 * 1.96 * math.sqrt((16 / 200 - 0.07**2) / 200), rel=0.1)
    assert novel.difference == pytest.approx(after - before)
    assert (novel.n, novel.test, novel.verdict) == (40, "paired permutation of log ratios", "better")
    assert novel.low < novel.difference < novel.high < 0


def test_holm_goes_over_the_tasks_of_one_pair(records):
    runs, _ = records
    found = compare(runs, tasks=TASKS, references={"method": ["baseline"], "baseline": ["method"]})
    assert [comparison.verdict for comparison in found] == ["better", "better", "worse", "worse"]
    for pair in (found[:2], found[2:]):
        small, large = sorted(pair, key=lambda comparison: comparison.p)
        assert small.p_holm == pytest.approx(2 * small.p)
        assert large.p_holm == pytest.approx(max(large.p, 2 * small.p))


def test_equal_models_are_within_noise(records):
    runs, _ = records
    runs["copy"] = runs["baseline"]
    quiz, novel = compare(runs, tasks=TASKS, references={"copy": ["baseline"]})
    for comparison in (quiz, novel):
        assert (comparison.difference, comparison.low, comparison.high) == (0, 0, 0)
        assert (comparison.p, comparison.p_holm, comparison.verdict) == (1, 1, "within noise")
    assert quiz.smallest_visible == pytest.approx(6 / 200)


def test_smallest_visible_is_in_the_metrics_unit(records):
    runs, (before, _) = records
    quiz, novel = compare(runs, tasks=TASKS, references={"method": ["baseline"]})
    # Student's t at 0.975 and 0.8, with 199 and with 39 degrees of freedom.
    assert quiz.smallest_visible == pytest.approx((1.97196 + 0.84341) * math.sqrt((16 / 200 - 0.07**2) / 199), rel=1e-3)
    ratio_error = math.log1p(novel.smallest_visible / before) / (2.02269 + 0.85114)
    assert ratio_error == pytest.approx(0.02 / math.sqrt(40), rel=0.3)


def test_several_seeds_share_the_baselines_single_run(tmp_path):
    rng = np.random.default_rng(1)
    base = (rng.random(300) < 0.4).astype(float)
    runs = {"baseline": {0: write(tmp_path / "b", "quiz", "acc", base)}, "method": {}}
    tables = []
    for seed in (0, 1, 2):
        values = np.where(rng.random(300) < 0.1, 1.0, base)
        tables.append(values)
        runs["method"][seed] = write(tmp_path / f"m{seed}", "quiz", "acc", values)
    (found,) = compare(runs, tasks={"quiz": TASKS["quiz"]}, references={"method": ["baseline"]})
    assert (found.seeds, found.test) == (3, "paired t over seeds and documents")
    assert found.difference == pytest.approx(np.mean([values.mean() - base.mean() for values in tables]))
    assert found.low < found.difference < found.high
    assert found.verdict == "better"


def test_runs_are_paired_by_seed(tmp_path):
    rng = np.random.default_rng(2)
    runs = {"a": {}, "b": {}}
    for seed in (3, 1, 7):
        values = (rng.random(100) < 0.5).astype(float)
        runs["a"][seed] = write(tmp_path / f"a{seed}", "quiz", "acc", values)
        if seed != 7:
            runs["b"][seed] = write(tmp_path / f"b{seed}", "quiz", "acc", values)
    (found,) = compare(runs, tasks={"quiz": TASKS["quiz"]}, references={"a": ["b"]})
    assert (found.seeds, found.difference, found.p) == (2, 0, 1)
    runs["b"] = {8: tmp_path / "b1", 9: tmp_path / "b3"}
    with pytest.raises(HfpatchError, match="a and b have no seed in common"):
        compare(runs, tasks=TASKS, references={"a": ["b"]})


def test_direction_of_an_unknown_metric_comes_from_the_task(tmp_path):
    rng = np.random.default_rng(3)
    scores = rng.random(50)
    runs = {
        "a": {0: write(tmp_path / "a", "odd", "brier_score", scores + 0.2)},
        "b": {0: write(tmp_path / "b", "odd", "brier_score", scores)},
    }
    for higher, verdict in ((False, "worse"), (True, "better")):
        task = {"odd": result("odd", "brier_score", higher)}
        (found,) = compare(runs, tasks=task, references={"a": ["b"]})
        assert (found.test, found.verdict) == ("paired permutation", verdict)
        assert found.difference == pytest.approx(0.2)


def test_one_document_tells_nothing(tmp_path):
    runs = {
        "a": {0: write(tmp_path / "a", "quiz", "acc", [1.0])},
        "b": {0: write(tmp_path / "b", "quiz", "acc", [0.0])},
    }
    (found,) = compare(runs, tasks={"quiz": TASKS["quiz"]}, references={"a": ["b"]})
    assert (found.difference, found.p, found.verdict, found.smallest_visible) == (1, 1, "within noise", None)


def test_equal_methods_differ_in_five_percent_of_simulations(tmp_path):
    rng = np.random.default_rng(4)
    tasks = {"novel": TASKS["novel"]}
    verdicts = []
    for _ in range(300):
        words = rng.integers(40, 60, size=30)
        for name in "ab":
            terms = -words * rng.normal(3.0, 0.2, size=30)
            write(
                tmp_path / name,
                "novel",
                "word_perplexity",
                [[float(a), int(c)] for a, c in zip(terms, words, strict=True)],
            )
        runs = {name: {0: tmp_path / name} for name in "ab"}
        (found,) = compare(runs, tasks=tasks, references={"a": ["b"]})
        verdicts.append(found.verdict != "within noise")
    assert 0.02 < np.mean(verdicts) < 0.085


def test_other_documents_and_broken_records_are_refused(records):
    runs, _ = records
    folder = runs["method"][0]
    rows = [json.loads(line) for line in (folder / "quiz.jsonl").read_text(encoding="utf-8").splitlines()]
    write(folder, "quiz", "acc", [row["acc"] for row in rows], hashes=["x", *(row["doc_hash"] for row in rows[1:])])
    with pytest.raises(HfpatchError, match="quiz was scored on other documents"):
        compare(runs, tasks=TASKS, references={"method": ["baseline"]})
    (folder / "quiz.jsonl").write_text('{"doc_hash": "h0"', encoding="utf-8")
    with pytest.raises(HfpatchError, match=r"quiz\.jsonl: not a record of acc"):
        compare(runs, tasks=TASKS, references={"method": ["baseline"]})
    (folder / "quiz.jsonl").unlink()
    with pytest.raises(HfpatchError, match=r"quiz\.jsonl: not a record of acc"):
        compare(runs, tasks=TASKS, references={"method": ["baseline"]})


def test_comparisons_are_json(records):
    runs, _ = records
    for comparison in compare(runs, tasks=TASKS, references={"method": ["baseline"]}):
        assert Comparison(**json.loads(json.dumps(comparison.to_json()))) == comparison
