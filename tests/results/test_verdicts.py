"""Verdicts against Holm's method and Student's intervals written out here, and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from hfpatch.recipes.pairs import by_question
from hfpatch.results.parts import Comparison
from hfpatch.results.verdicts import Measure, deciding, judge, shrinks_with

BITS = Measure("bits_per_byte", False)


def comparison(method, difference, error, freedom, *, task="text", other="base", **more):
    """A difference with Student's interval and p."""
    reach = stats.t.ppf(0.975, freedom) * error
    known = {
        **{"method": method, "reference": other, "task": task, "metric": "bits_per_byte", "n": 100, "seeds": 3},
        **{"difference": difference, "low": difference - reach, "high": difference + reach, "test": "paired t"},
        **{"p": 2 * stats.t.sf(abs(difference) / error, freedom), "errors": [(error, freedom)]},
    }
    return Comparison(**(known | more))


def judged(made, **more):
    pairs = list(dict.fromkeys((one.method, one.reference) for one in made))
    tasks = dict.fromkeys((one.task for one in made), BITS)
    return judge(made, {"base": pairs}, tasks, **more)


def holm_reference(p_values, alpha=0.05):
    """Reject in ascending order of p while p < alpha / (tests left); the textbook's loop."""
    rejected = set()
    for place, index in enumerate(np.argsort(p_values)):
        if p_values[index] >= alpha / (len(p_values) - place):
            break
        rejected.add(int(index))
    return rejected


@pytest.mark.parametrize("seed", range(40))
def test_a_verdict_is_holms_and_its_interval_leaves_out_0_exactly_where_it_is_one(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.normal(0, 3, size=rng.integers(1, 30))
    made = [comparison(f"m{i}", d, 1.0, float(rng.integers(2, 200))) for i, d in enumerate(sizes)]
    found = judged(made)
    rejected = holm_reference([one.p for one in made])
    for i, (each, one) in enumerate(zip(found, made, strict=True)):
        assert each.is_found == (i in rejected)
        assert each.verdict == ("no difference shown" if i not in rejected else "better" if sizes[i] < 0 else "worse")
        assert (each.simultaneous_low > 0 or each.simultaneous_high < 0) == each.is_found
        assert each.family == len(made)
        far = stats.t.ppf(1 - 0.025 / len(made), one.errors[0][1])  # Bonferroni's quantile
        ends = [each.simultaneous_low, each.simultaneous_high]
        assert max(abs(end - each.difference) for end in ends) == pytest.approx(far, rel=1e-6)
        assert (each.low, each.high) == (one.low, one.high)
        visible = far + stats.t.ppf(0.8, one.errors[0][1])
        assert each.smallest_visible == pytest.approx(visible, rel=1e-6)


def test_intervals_cover_all_true_differences_together_and_signs_are_rarely_wrong():
    """Half of the differences are 0, half are such that some are found and some are not; they share their noise."""
    rng, runs, family = np.random.default_rng(0), 1500, 12
    true = np.array([0.0] * 6 + [2.0, 3.0, 4.0, -2.0, -3.0, -4.0])
    covered = wrong = 0
    for _ in range(runs):
        noise = 0.6 * rng.normal(size=family) + 0.8 * rng.normal()
        found = judged([comparison(f"m{i}", d, 1.0, 1e6) for i, d in enumerate(true + noise)])
        covered += all(
            each.simultaneous_low <= value <= each.simultaneous_high for each, value in zip(found, true, strict=True)
        )
        wrong += any(
            each.is_found and (value == 0 or (value < 0) != (each.verdict == "better"))
            for each, value in zip(found, true, strict=True)
        )
    error = 3 * math.sqrt(0.05 * 0.95 / runs)
    assert covered / runs > 0.95 - error
    assert wrong / runs < 0.05 + error


@pytest.mark.parametrize("p", [0.0004, 0.004, 0.04, 0.4])
@pytest.mark.parametrize("difference", [0.5, 1.5, 2.5, 4.5])
def test_an_exact_test_decides_where_its_p_is_not_that_of_the_interval(p, difference):
    made = [comparison("a", difference, 1.0, 100.0, p=p, test="McNemar exact"), comparison("b", 0.1, 1.0, 100.0)]
    first, _ = judged(made)
    assert first.is_found == (2 * p < 0.05)
    assert (first.simultaneous_low > 0) == first.is_found


def test_results_without_errors_get_the_quantile_that_explains_interval_and_p():
    made = comparison("a", 5.0, 1.0, 7.0)
    other = comparison("b", 0.1, 1.0, 7.0)
    known, guessed = (judged([one, other])[0] for one in (made, made.model_copy(update={"errors": []})))
    assert guessed.simultaneous_low == pytest.approx(known.simultaneous_low, rel=1e-4)


def test_what_was_not_tested_says_why_and_counts_in_no_family():
    few = comparison("few", 1.0, 1.0, 9.0, p=None, low=-math.inf, high=math.inf, test="none (too few documents)")
    made = [few, comparison("a", -9.0, 1.0, 9.0)]
    pairs = {"base": [("few", "base"), ("gone", "base"), ("a", "base")]}
    found = judge(made, pairs, {"text": BITS}, lambda method, *_: f"{method} diverged")
    assert [(each.verdict, each.why, each.family) for each in found] == [
        ("not tested", "too few documents", 0),
        ("not tested", "gone diverged", 0),
        ("better", "", 1),
    ]


def test_questions_are_families_of_their_own():
    made = [comparison(f"m{i}", 2.3, 1.0, 1e6, other="base" if i % 2 else "lora") for i in range(8)]
    pairs = by_question([(one.method, one.reference) for one in made], "base", ["lora"])
    assert {each.question: each.family for each in judge(made, pairs, {"text": BITS})} == {"base": 4, "lora": 4}


def test_no_difference_of_shares_is_larger_than_1():
    made = comparison("a", 0.1, 0.3, 1.0, metric="acc")
    (found,) = judge([made], {"base": [("a", "base")]}, {"text": Measure("acc", True)})
    assert (found.simultaneous_low, found.simultaneous_high, found.smallest_visible) == (-1.0, 1.0, None)


def test_one_measure_decides_a_task_and_others_do_not_count():
    primary = {"quiz": Measure("acc", True), "story": Measure("bleu", True)}
    measures = deciding(primary, [("quiz", "acc"), ("quiz", "bits_per_byte"), ("story", "bleu")])
    assert measures == {"quiz": BITS, "story": Measure("bleu", True)}
    made = [comparison("a", -9.0, 1.0, 9.0, task="quiz"), comparison("a", -9.0, 1.0, 9.0, task="quiz", metric="acc")]
    (quiz, _) = judge(made, {"base": [("a", "base")]}, measures)
    assert (quiz.metric, quiz.family, quiz.verdict) == ("bits_per_byte", 1, "better")


def test_more_seeds_make_the_smallest_detectable_difference_smaller_by_the_formula():
    made = comparison("m", 0.1, 0.02, 2, errors=[(0.01, 399.0), (0.02, 2.0)])

    def visible(seeds):
        error = 0.02 * (3 / seeds) ** 0.5
        sides = ((1 - 0.025 / 12), 0.8)
        return sum(((stats.t.ppf(q, 399) * 0.01) ** 2 + (stats.t.ppf(q, seeds - 1) * error) ** 2) ** 0.5 for q in sides)

    assert shrinks_with(made, 12, 5) == pytest.approx(visible(5) / visible(3))
    assert shrinks_with(made, 12, 3) == pytest.approx(1)
    assert shrinks_with(made.model_copy(update={"errors": []}), 12, 5) is None
