"""What a plan says that a comparison can decide, against simulated comparisons."""

import math

import numpy as np
import pytest
from own_tasks import task_result
from scipy import stats

from hfpatch.recipes.questions import Asked
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import Design
from hfpatch.results.layout import Method, Parameters
from hfpatch.results.parts import Comparison
from hfpatch.results.planning import level_of, stored_for


def difference(method, reference, error, seeds=3, documents=200):
    return Comparison(
        method=method, reference=reference, task="text", metric="score", n=documents, seeds=seeds, difference=0.0,
        low=-1.0, high=1.0, p=1.0, test="paired t over seeds and documents",
        errors=[(0.004, documents - 1), (error, seeds - 1)],
    )  # fmt: skip


def results_of(*comparisons):
    size = Parameters(trainable=1, added=1, base=1)
    methods = {name: Method(parts=[{"type": "lora"}], parameters=size) for name in "abc"}
    methods["baseline"] = Method(parameters=size)
    tasks = {"text": task_result("text", "score", n=200).shared}
    return ComparisonResults(name="earlier", complete=True, tasks=tasks, methods=methods, comparisons=comparisons)


def test_a_pairs_own_variance_is_taken_before_that_of_the_median_pair():
    pairs = [("a", "b", 0.01), ("a", "c", 0.03), ("b", "c", 0.02), ("a", "baseline", 0.5)]
    results = results_of(*(difference(*pair) for pair in pairs))
    same = stored_for(results, ("a", "b"), "text", with_base=False)
    assert (same.pair, same.errors[1][0], same.units) == (("a", "b"), 0.01, 200)
    other = stored_for(results, ("new", "c"), "text", with_base=False)
    assert other.errors[1][0] == 0.02
    assert stored_for(results, ("new", "baseline"), "text", with_base=True).errors[1][0] == 0.5
    assert stored_for(results, ("a", "b"), "quiz", with_base=False) is None
    for change in ({"errors": [(0.004, 199)]}, {"test": "t over seeds, not paired, and documents"}):
        left_out = difference("a", "b", 0.01).model_copy(update=change)
        assert stored_for(results_of(left_out), ("a", "b"), "text", with_base=False) is None


@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 6), (5, 5), (6, 12), (8, 4), (8, 8)])
@pytest.mark.parametrize("pairs", [1, 5])
def test_what_is_planned_is_decided_in_80_percent(before, after, pairs):
    """The earlier run has ``before`` seeds, the planned one ``after``; averaged over what the earlier one could be."""
    rng, of_seeds, of_documents, freedom = np.random.default_rng(0), 0.02, 0.004, before - 1
    level = level_of(Asked(question="gain", pairs=[("a", "b")] * pairs, on=["text"]))
    decided = {"better": [], "equivalent": [], "lost": [], "kept": []}
    for share in stats.chi2.ppf((np.arange(80) + 0.5) / 80, freedom) / freedom:
        stored = Design.of([(of_documents, 199), (of_seeds * math.sqrt(share / before), freedom)])
        design = stored.with_seeds(after).with_documents(200)
        values = of_seeds * rng.normal(size=(500, after)) + of_documents * rng.normal(size=(500, 1))
        error, mean = values.std(axis=1, ddof=1) / math.sqrt(after), values.mean(axis=1)
        wide, narrow = (
            np.hypot(stats.t.ppf(1 - a / 2, after - 1) * error, stats.t.ppf(1 - a / 2, 199) * of_documents)
            for a in (level, 2 * level)
        )
        decided["better"].append(np.mean(np.abs(mean + design.smallest_difference(level)) > wide))
        decided["equivalent"].append(np.mean(np.abs(mean) + narrow < design.smallest_margin(level)))
        decided["lost"].append(np.mean(mean - design.smallest_difference(level, "keep") + narrow < 0))
        decided["kept"].append(np.mean(mean - narrow > -design.smallest_margin(level, "keep")))
    assert {outcome: np.mean(share) for outcome, share in decided.items()} == pytest.approx(
        dict.fromkeys(decided, 0.80), abs=0.03
    )


def test_fewer_documents_leave_no_smaller_error_over_seeds():
    design = Design.of([(0.01, 99), (0.012, 4)])
    fewer, more = design.with_documents(25), design.with_documents(400)
    assert (fewer.of_documents, fewer.of_seeds) == ((pytest.approx(0.02), 24), (pytest.approx(0.024), 4))
    assert (more.of_documents, more.of_seeds) == ((pytest.approx(0.005), 399), (0.012, 4))


@pytest.mark.parametrize("error", [0.0, 1e-300, 1e-320])
def test_errors_whose_squares_are_zero_find_any_difference(error):
    design = Design((error, 30), (error, 4), 4)
    assert design.smallest_difference(0.05) == 0.0
    assert design.smallest_margin(0.05) < 1e-300
