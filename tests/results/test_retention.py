import json

import pytest

from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.layout import Method, Parameters
from hfpatch.results.parts import Comparison
from hfpatch.results.retention import KL, Retention, RetentionPoint, front

TEXT = "retention_old"


def change(method, difference, p, *, task=TEXT, metric="bits_per_byte"):
    return Comparison(
        method=method, reference="baseline", task=task, metric=metric, n=50, seeds=2, difference=difference,
        low=difference - 1, high=difference + 1, p=p, test="t", errors=[(0.5, 49)],
    )  # fmt: skip


def point(method, scale=1.0, loss=None, comparisons=()):
    return RetentionPoint(method=method, scale=scale, tuning_loss=loss, comparisons=list(comparisons))


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
