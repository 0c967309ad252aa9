"""The outcomes and their probabilities against formulas written out here, and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from hfpatch.evaluation.stats import Estimate, Part
from hfpatch.results.decision import decide_gain, decide_keep, rate_error
from hfpatch.results.parts import Comparison
from hfpatch.results.verdicts import LookTaken, Measure, PrimaryQuestion, judge_primary

DELTA = 0.02


@pytest.mark.parametrize(
    ("difference", "wide", "narrow", "outcome"),
    [
        (0.05, 0.03, 0.025, "better"),
        (-0.05, 0.03, 0.025, "worse"),
        (0.001, 0.015, 0.012, "equivalent"),
        (0.01, 0.008, 0.007, "better by less than the margin"),
        (-0.01, 0.008, 0.007, "worse by less than the margin"),
        (0.01, 0.03, 0.025, "undecided"),
        (0.02, 0.03, 0.0, "undecided"),  # at the margin
    ],
)
def test_a_gain_has_one_of_four_outcomes(difference, wide, narrow, outcome):
    ends = [(difference - half, difference + half) for half in (wide, narrow)]
    assert decide_gain(*ends, DELTA) == outcome
    if "margin" not in outcome:
        without = "undecided" if outcome == "equivalent" else outcome
        assert decide_gain(*ends, 0.0) == without  # signs alone


@pytest.mark.parametrize(
    ("difference", "narrow", "outcome"),
    [
        (0.05, 0.03, "kept"),
        (-0.005, 0.01, "kept"),
        (-0.05, 0.03, "lost"),
        (-0.01, 0.008, "lost by less than the margin"),
        (-0.01, 0.015, "undecided"),
    ],
)
def test_what_is_kept_is_not_worse_by_the_margin(difference, narrow, outcome):
    assert decide_keep((difference - narrow, difference + narrow), DELTA) == outcome


def reach_of(errors, seeds, of_documents, level, documents=200):
    over_seeds = stats.t.ppf(1 - level / 2, seeds - 1) * errors
    return np.hypot(over_seeds, stats.t.ppf(1 - level / 2, documents - 1) * of_documents)


def test_looks_agree_with_the_decisions_of_the_simulation():
    """The first look at which a plain computation decides is the one that `judge_primary` takes."""
    rng, looks = np.random.default_rng(1), [4, 6, 9]
    for effect in (0.0, 0.01, 0.05) * 8:
        values, made, expected = effect + 0.01 * rng.normal(size=9), [], ("undecided", looks[-1])
        for seeds in reversed(looks):
            difference, error = values[:seeds].mean(), values[:seeds].std(ddof=1) / math.sqrt(seeds)
            level = 0.05 * seeds / sum(looks)
            wide, narrow = (reach_of(error, seeds, 0.004, a) for a in (level, 2 * level))
            ends = [(difference - half, difference + half) for half in (wide, narrow)]
            if (outcome := decide_gain(*ends, DELTA)) != "undecided":
                expected = (outcome, seeds)
            half = reach_of(error, seeds, 0.004, 0.05)
            given = {"low": difference - half, "high": difference + half, "n": 200, "seeds": seeds}
            errors = (Part(0.004, 199), Part(error, seeds - 1))
            given |= {
                "test": "paired t over seeds and documents",
                "errors": errors,
                "p": Estimate(difference, errors).p,
            }
            pair = {"method": "a", "reference": "b", "task": "text", "metric": "score"}
            one = Comparison(**pair, difference=difference, **given)
            made.insert(0, LookTaken(seeds=seeds, part=seeds / sum(looks), comparisons=[one]))
        asked = PrimaryQuestion(question="gain", pairs=[("a", "b")], on=["text"])
        (verdict,) = judge_primary(asked, made, {"text": Measure("score", True)}, {"text": DELTA})
        assert (verdict.outcome, verdict.seeds) == expected


@pytest.mark.parametrize(
    ("losses", "best", "cap", "error"),
    [
        ({1e-3: 3.4, 3e-3: 3.0, 1e-2: 3.1}, 3e-3, 4.0, 0.1),
        ({1e-3: 9.0, 3e-3: 3.0, 1e-2: 3.1}, 3e-3, 4.0, 0.25),  # the base's loss is 4
        ({1e-3: 3.1, 3e-3: 3.0, 1e-2: math.inf, 3e-2: math.inf}, 3e-3, 4.0, 0.25),
        ({1e-3: 3.1, 3e-3: 3.0, 1e-2: math.inf}, 3e-3, math.inf, math.inf),
        ({1e-3: 3.0, 3e-3: 3.1}, 1e-3, 4.0, math.inf),
        ({1e-3: 5.0, 3e-3: 4.8, 1e-2: 4.9}, 3e-3, 4.0, 0.05),  # a method that the base is better than
    ],
)
def test_what_the_choice_of_a_rate_may_be_worth(losses, best, cap, error):
    assert rate_error(losses, best, cap) == pytest.approx(error)
