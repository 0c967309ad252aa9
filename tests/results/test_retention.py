import json
import math

import numpy as np
import pytest
from scipy import stats

from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.layout import Method, Parameters
from hfpatch.results.parts import Comparison
from hfpatch.results.retention import KL, Retention, RetentionPoint, front, kept_answers

TEXT = "retention_old"


def change(method, difference, p, *, task=TEXT, metric="bits_per_byte"):
    return Comparison(
        method=method, reference="baseline", task=task, metric=metric, n=50, seeds=2, difference=difference,
        low=difference - 1, high=difference + 1, p=p, test="t", errors=[(0.5, 49)],
    )  # fmt: skip


def point(method, scale=1.0, loss=None, comparisons=()):
    return RetentionPoint(method=method, scale=scale, tuning_loss=loss, comparisons=list(comparisons))


def test_kept_and_won_are_shares_of_what_the_base_has_right_and_wrong():
    base = np.repeat([1.0, 0.0], [40, 2])
    seeds = np.ones((2, 42))
    seeds[0, :10] = seeds[1, 5:14] = seeds[0, 41] = seeds[1, 40:] = 0
    answers = kept_answers("lora", "quiz", base, seeds)
    assert (answers.right, answers.wrong, answers.seeds, answers.kept, answers.won) == (40, 2, 2, 61 / 80, 1 / 4)
    of_documents = np.r_[seeds[:, :40].mean(axis=0), 1, 0]  # one right and one wrong are added
    errors = [(of_documents.std(ddof=1) / math.sqrt(42), 41), (np.std([30 / 40, 31 / 40], ddof=1) / math.sqrt(2), 1)]
    half = math.sqrt(sum((stats.t.ppf(0.975, freedom) * error) ** 2 for error, freedom in errors))
    assert (answers.kept_low, answers.kept_high) == pytest.approx((61 / 80 - half, 61 / 80 + half))


def test_shares_of_all_and_of_none():
    base = np.array([1.0, 1, 1])
    answers = kept_answers("lora", "quiz", base, np.ones((1, 3)))
    assert answers.kept == answers.kept_high == 1.0
    assert 0 < answers.kept_low < 1  # three documents that agree do not show that all would
    assert math.isnan(answers.won)
    grouped = kept_answers("lora", "quiz", base, np.ones((1, 3)), grouped=True)
    assert (grouped.kept, grouped.kept_low, grouped.kept_high) == (1.0, -math.inf, math.inf)
    assert json.loads(json.dumps(grouped.to_json()))["kept_low"] is None


def test_the_verdicts_are_corrected_over_methods_and_texts_by_bits_per_byte():
    other = "retention_other"
    made = {"a": (0.03, 0.5), "b": (0.02, 0.02)}
    points = [
        point(m, comparisons=[change(m, 0.2, p), change(m, 9, 1e-9, metric=KL), change(m, 0.1, q, task=other)])
        for m, (p, q) in made.items()
    ]
    points.append(point("a", 0.5, comparisons=[change("a", 0.1, 1e-9)]))
    retention = Retention(texts={TEXT: {}, other: {}}, points=points)
    method = Method(parameters=Parameters(trainable=0, added=0, base=0))
    trained = method.model_copy(update={"parts": [{"type": "lora"}]})
    methods = {"baseline": method, **dict.fromkeys("ab", trained)}
    whole = ComparisonResults(name="any", methods=methods, retention=retention)
    corrected = {(verdict.method, verdict.task): verdict.p_corrected for verdict in whole.verdicts}
    assert corrected == {
        ("b", TEXT): pytest.approx(0.08), ("b", other): pytest.approx(0.08), ("a", TEXT): pytest.approx(0.08),
        ("a", other): pytest.approx(0.5),
    }  # fmt: skip
    assert {verdict.family for verdict in whole.verdicts} == {4}
    some = whole.only(["a"])
    assert [one.p_corrected for one in some.verdicts] == [
        corrected["a", TEXT],
        corrected["a", other],
    ]
    kept = some.retention
    assert Retention.model_validate(json.loads(json.dumps(kept.to_json()))).points == kept.points


def test_the_text_of_tuning_chooses_the_scale():
    points = [point("a", 0.25, 2.0), point("a", 0.5, 1.5), point("a", 1.0, 1.5), point("b"), point("c", 0.5, 1.0)]
    retention = Retention(points=[*points, point("c", 1.0, 1.2)])
    assert [retention.chosen(name) for name in "abc"] == [1.0, None, 0.5]


def test_the_front_has_what_nothing_betters():
    points = [(0.0, 0.0), (0.2, 0.5), (0.1, 0.3), (0.15, 0.2), (0.3, 0.5), (0.1, 0.1)]
    assert front(points) == [(0.0, 0.0), (0.1, 0.3), (0.2, 0.5)]
