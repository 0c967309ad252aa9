import json
import math

import numpy as np
import pytest
from own_tasks import read_record
from own_tasks import task_result as result
from own_tasks import write_record as write

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import Comparison, Records, compare
from hfpatch.evaluation.comparison import compare_by
from hfpatch.results.verdicts import Measure, judge

TASKS = {"quiz": result("quiz"), "novel": result("novel", "word_perplexity", higher=False)}
MEASURES = {task: Measure(scored.primary, scored.higher_is_better) for task, scored in TASKS.items()}


def judged(made, measures=MEASURES):
    """The verdicts on comparisons that answer one question."""
    pairs = dict.fromkeys((one.method, one.reference) for one in made)
    return judge(made, {"base": list(pairs)}, {one.task: measures[one.task] for one in made})


@pytest.fixture
def records(tmp_path):
    """A baseline with one run; a method that answers 14 more of 200 questions and lowers the perplexity by 4 %."""
    rng = np.random.default_rng(0)
    right = rng.permutation([1.0] * 80 + [0.0] * 120)
    gained = right.copy()
    gained[np.flatnonzero(right == 0)[::8]] = 1.0  # 15
    gained[np.flatnonzero(right == 1)[:1]] = 0.0
    words = rng.integers(50, 90, size=40)
    losses = words * rng.normal(3.0, 0.3, size=40)
    better = losses - words * rng.normal(0.04, 0.02, size=40)
    runs = {"baseline": {0: tmp_path / "baseline"}, "method": {0: tmp_path / "method"}}
    for name, answers, terms in (("baseline", right, losses), ("method", gained, better)):
        write(tmp_path / name, "quiz", "acc", answers)
        write(tmp_path / name, "novel", "word_perplexity", np.stack([-terms, words], axis=1).tolist())
    scores = [math.exp(terms.sum() / words.sum()) for terms in (losses, better)]
    return runs, scores


def test_one_seed(records):
    runs, (before, after) = records
    quiz, novel = compare(Records(runs), tasks=TASKS, references={"method": ["baseline"]})
    assert (quiz.method, quiz.reference, quiz.task, quiz.metric) == ("method", "baseline", "quiz", "acc")
    assert (quiz.n, quiz.seeds, quiz.test) == (200, 1, "McNemar exact")
    assert quiz.difference == pytest.approx(14 / 200)
    assert quiz.p == pytest.approx(2 * (1 + 16) / 2**16)
    assert quiz.low < 0.07 < quiz.high
    assert quiz.high - quiz.low == pytest.approx(2 * 1.972 * math.sqrt((18 / 202 - (14 / 202) ** 2) / 201), rel=1e-3)
    assert novel.difference == pytest.approx(after - before)
    assert (novel.n, novel.test) == (40, "paired permutation of log ratios")
    assert {one.outcome for one in judged([quiz, novel])} == {"better"}
    assert novel.low < novel.difference < novel.high < 0
    for comparison in (quiz, novel):
        assert Comparison.model_validate_json(json.dumps(comparison.to_json())) == comparison
    # the smallest visible difference, by Student's t at 0.975 and a known error
    assert judged([quiz])[0].detectable == pytest.approx(
        (1.97184 + 0.84162) * math.sqrt((18 / 202 - (14 / 202) ** 2) / 201), rel=1e-3
    )
    ratio_error = judged([novel])[0].detectable / before / (2.02269 + 0.84162)
    assert ratio_error == pytest.approx(0.02 / math.sqrt(40), rel=0.3)
    turned = compare(Records(runs), tasks=TASKS, references={"baseline": ["method"]})
    assert [verdict.outcome for verdict in judged(turned)] == ["worse", "worse"]
    references = {"method": ["baseline", "gone"], "gone": ["baseline"]}
    gone = compare(Records(runs | {"gone": {}}), TASKS, references)
    assert {(one.method, one.reference) for one in gone} == {("method", "baseline")}


def low_noise_runs(folder, documents=60):
    """A method that makes right answers likelier without telling right from wrong better, and one equal to the base."""
    rng = np.random.default_rng(2)
    sizes, base = rng.integers(5, 40, size=documents), rng.normal(-20, 4, size=documents)
    margins, shares = rng.normal(0.2, 2.0, size=documents), rng.random(documents)
    runs = {}
    for name, gain in (("baseline", 0.0), ("style", 2.0), ("same", 0.0)):
        noise = rng.normal(0, 0.5, size=documents) if name != "baseline" else np.zeros(documents)
        values = {
            "bits_per_byte": list(zip(base + gain + noise, sizes.tolist(), strict=True)),
            "gold_probability": np.clip(shares + noise / 50, 0, 1),
            "margin": margins + noise / 10,
        }
        runs[name] = {0: write(folder / name, "quiz", "acc", (margins > 0).astype(float), **values)}
    return runs


def test_low_noise_metrics_are_compared_like_others(tmp_path):
    runs = low_noise_runs(tmp_path)
    names = ("acc", "bits_per_byte", "gold_probability", "margin")
    tasks = {"quiz": result("quiz", "acc").model_copy(update={"metrics": dict.fromkeys(names, 0.5)})}
    given = {"tasks": tasks, "references": {"style": ["baseline", "same"], "same": ["baseline"]}}
    every = compare(Records(runs), **given)
    low_noise = [one for one in every if one.metric != "acc"]
    assert [one.metric for one in every[:3]] == ["acc"] * 3
    assert [(one.method, one.reference, one.metric) for one in low_noise] == [
        (method, reference, metric)
        for method, reference in (("style", "baseline"), ("style", "same"), ("same", "baseline"))
        for metric in names[1:]
    ]
    by_metric = {one.metric: one for one in low_noise if (one.method, one.reference) == ("style", "baseline")}
    assert [by_metric[metric].p < 0.05 for metric in names[1:]] == [True, False, False]
    # The values by their definition: bits over bytes, and means.
    rows = {name: read_record(tmp_path / name, "quiz") for name in runs}
    bits = {name: -sum(row["bits_per_byte"][0] for row in table) / math.log(2) for name, table in rows.items()}
    size = sum(row["bits_per_byte"][1] for row in rows["style"])
    assert by_metric["bits_per_byte"].difference == pytest.approx((bits["style"] - bits["baseline"]) / size)
    assert by_metric["bits_per_byte"].high < 0
    means = {name: np.mean([row["margin"] for row in table]) for name, table in rows.items()}
    assert by_metric["margin"].difference == pytest.approx(means["style"] - means["baseline"])


def test_a_low_noise_metric_that_is_primary_or_not_finite_is_not_tested_again(tmp_path):
    runs = low_noise_runs(tmp_path, documents=30)
    rows = read_record(tmp_path / "style", "quiz")
    columns = {name: [row[name] for row in rows] for name in ("bits_per_byte", "margin")}
    columns["margin"][3] = None
    write(tmp_path / "style", "quiz", "acc", [row["acc"] for row in rows], **columns)
    metrics = {"bits_per_byte": 1.0, "margin": 0.5}
    tasks = {"quiz": result("quiz", "bits_per_byte", higher=False).model_copy(update={"metrics": metrics})}
    given = {"tasks": tasks, "references": {"style": ["baseline"], "same": ["baseline"]}}
    assert [(one.method, one.metric) for one in compare(Records(runs), **given)[2:]] == [("same", "margin")]
    of_its_own = compare(Records(runs, aggregations={"quiz": {"margin": max}}), **given)
    assert {one.metric for one in of_its_own} == {"bits_per_byte"}
    assert {one.metric for one in compare(Records(runs), without_low_noise=["quiz"], **given)} == {"bits_per_byte"}


def test_equal_models_show_no_difference(records):
    runs, _ = records
    runs["copy"] = runs["baseline"]
    quiz, novel = compare(Records(runs), tasks=TASKS, references={"copy": ["baseline"]})
    for comparison in (quiz, novel):
        assert comparison.difference == 0
        (verdict,) = judged([comparison])
        assert (comparison.p, verdict.p_corrected, verdict.outcome) == (1, 1, "not decided")
    assert (novel.low, novel.high) == (0, 0)
    assert quiz.high == -quiz.low  # some might have changed
    assert quiz.high == pytest.approx(1.972 * math.sqrt(2 / 202 / 201), rel=1e-3)
    assert judged([quiz])[0].detectable == pytest.approx(6 / 200)


def test_runs_are_paired_by_seed(tmp_path):
    rng = np.random.default_rng(2)
    runs = {"a": {}}
    for seed in (3, 1, 7):
        runs["a"][seed] = write(tmp_path / f"a{seed}", "quiz", "acc", (rng.random(100) < 0.5).astype(float))
    runs["b"] = {seed: runs["a"][seed] for seed in (3, 1)}
    (compared,) = compare(Records(runs), tasks={"quiz": TASKS["quiz"]}, references={"a": ["b"]})
    assert (compared.seeds, compared.difference, compared.p) == (2, 0, 1)
    assert compared.test == "paired t over seeds and documents"


@pytest.mark.parametrize("seeds", [1, 3, 6])
def test_methods_that_agree_on_every_document_have_no_difference_but_rounding_errors(tmp_path, seeds):
    values = np.random.default_rng(0).lognormal(size=(60, 2))
    folder = write(tmp_path / "base", "novel", "word_perplexity", values.tolist())
    runs = {"baseline": {0: folder}, "a": dict.fromkeys(range(seeds), folder)}
    (one,) = compare(Records(runs), tasks={"novel": TASKS["novel"]}, references={"a": ["baseline"]})
    assert (one.difference, one.low, one.high, one.p) == (0.0, 0.0, 0.0, 1.0)


def test_a_control_with_one_seed_left_has_a_variance_over_seeds(tmp_path):
    rng = np.random.default_rng(6)
    base = rng.permutation([1.0] * 100 + [0.0] * 100)
    scores = {right: np.where(np.arange(200) < right, 1.0, base) for right in (30, 50, 70, 10)}
    run = {right: write(tmp_path / str(right), "quiz", "acc", values) for right, values in scores.items()}
    runs = {"a": {0: run[30], 1: run[50], 2: run[70]}, "b": {1: run[10]}}
    asked = ([TASKS["quiz"]], {"a": ["b"]}, {})
    (lone,) = compare_by(Records(runs), *asked)
    (untrained,) = compare_by(Records(runs, "b"), *asked)
    assert (lone.test, lone.seeds) == ("t over documents (paired) and seeds (not paired)", 3)
    assert lone.difference == untrained.difference
    means = np.array([scores[right].mean() for right in (30, 50, 70)])
    assert lone.high - lone.low > 2 * 4.3026 * means.std(ddof=1) * math.sqrt(1 + 1 / 3)
    assert lone.high - lone.low > 1.8 * (untrained.high - untrained.low)
    runs["b"] = {8: runs["b"][1], 9: runs["b"][1]}  # no seed in common
    (apart,) = compare_by(Records(runs), *asked)
    assert apart.test == lone.test


def test_direction_of_an_unknown_metric_comes_from_the_task(tmp_path):
    rng = np.random.default_rng(3)
    scores = rng.random(50)
    both = {"a": scores + 0.2, "b": scores}
    runs = {name: {0: write(tmp_path / name, "odd", "surprise", values)} for name, values in both.items()}
    for higher, verdict in ((False, "worse"), (True, "better")):
        task = {"odd": result("odd", "surprise", higher)}
        (compared,) = compare(Records(runs), tasks=task, references={"a": ["b"]})
        (decided,) = judged([compared], {"odd": Measure("surprise", higher)})
        assert (compared.test, decided.outcome) == ("paired permutation", verdict)
        assert compared.difference == pytest.approx(0.2)


@pytest.mark.parametrize(("documents", "seeds"), [(1, 1), (2, 2), (19, 1), (19, 3)])
def test_too_few_documents_get_no_verdict(tmp_path, documents, seeds):
    runs = {"baseline": {0: write(tmp_path / "b", "quiz", "acc", [0.0] * documents)}}
    runs["a"] = {seed: write(tmp_path / f"a{seed}", "quiz", "acc", [1.0] * documents) for seed in range(seeds)}
    (compared,) = compare(Records(runs), tasks={"quiz": TASKS["quiz"]}, references={"a": ["baseline"]})
    assert (compared.difference, compared.test) == (1, "none (too few documents)")
    assert [(one.outcome, one.why) for one in judged([compared])] == [("not tested", "too few documents")]
    assert (compared.low, compared.high) == (-math.inf, math.inf)
    assert compared.p is None


@pytest.mark.parametrize("values", [(1e308, -1e308), (1e200, -1e200), (math.inf, 0.0), (800.0, 0.0)])
@pytest.mark.parametrize("seeds", [1, 2])
def test_values_without_a_finite_mean_or_variance_are_not_tested(tmp_path, values, seeds):
    """Sums and squares overflow: there is no difference, and none is found at p = 0.0001."""
    rng, name = np.random.default_rng(0), "perplexity" if values[0] == 800 else "score"
    records = {}
    for method, value in zip(("it", "baseline"), values, strict=True):
        drawn = -value * (1 + 0.01 * rng.random(40))
        runs = range(seeds if method == "it" else 1)
        records[method] = {s: write(tmp_path / f"{method}-{s}", "t", name, drawn.tolist()) for s in runs}
    results = {"t": result("t", name)}
    (compared,) = compare(Records(records), tasks=results, references={"it": ["baseline"]})
    assert (compared.test, compared.p, compared.low, compared.errors) == (
        *("none (values without a finite mean or variance)", None, -math.inf, []),
    )


def test_what_no_difference_could_show_is_not_called_visible(tmp_path):
    base = np.tile([0.0, 1.0], 60)
    runs = {"baseline": {0: write(tmp_path / "b", "quiz", "acc", base)}, "a": {}}
    for seed, right in enumerate((0, 100)):
        runs["a"][seed] = write(tmp_path / f"a{seed}", "quiz", "acc", np.where(np.arange(120) < right, 1.0, base))
    (compared,) = compare(Records(runs), tasks={"quiz": TASKS["quiz"]}, references={"a": ["baseline"]})
    (one,) = judged([compared])
    assert (compared.low, compared.high, one.detectable, one.outcome) == (-1.0, 1.0, None, "not decided")


def test_other_documents_and_broken_records_are_refused(records):
    runs, _ = records
    folder = runs["method"][0]
    rows = read_record(folder, "quiz")
    hashes = ["x", *(row["doc_hash"] for row in rows[1:])]
    for spoil, message in [
        (lambda: write(folder, "quiz", "acc", [row["acc"] for row in rows], doc_hash=hashes), "on other documents"),
        (lambda: (folder / "quiz.jsonl").write_text('{"doc_hash": "h0"'), r"quiz\.jsonl: not a record of acc"),
        (lambda: (folder / "quiz.jsonl").unlink(), r"quiz\.jsonl: not a record of acc"),
    ]:
        spoil()
        with pytest.raises(HfpatchError, match=message):
            compare(Records(runs), tasks=TASKS, references={"method": ["baseline"]})
