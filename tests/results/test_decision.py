"""The outcomes and their probabilities against formulas written out here, and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from hfpatch.results.decision import Design, decide_gain, decide_keep

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


def parts_of(rng, effect, runs, seeds, *, of_documents, of_seeds):
    """Estimates of a design: the difference, and its error over seeds with its degrees of freedom."""
    values = effect + of_seeds * math.sqrt(seeds) * rng.normal(size=(runs, seeds))
    difference = values.mean(axis=1) + of_documents * rng.normal(size=runs)
    return difference, values.std(axis=1, ddof=1) / math.sqrt(seeds)


def reach_of(errors, seeds, of_documents, level, documents=200):
    over_seeds = stats.t.ppf(1 - level / 2, seeds - 1) * errors
    return np.hypot(over_seeds, stats.t.ppf(1 - level / 2, documents - 1) * of_documents)


@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize("pairs", [1, 5])
def test_what_a_design_can_find_is_found_in_80_percent(seeds, pairs):
    """Of a run's error over seeds at each quantile, a new run of the same design has the difference found from it."""
    rng, level, size, of_documents = np.random.default_rng(0), 0.05 / pairs, 0.01, 0.004
    quantiles = stats.chi2.ppf((np.arange(80) + 0.5) / 80, seeds - 1) / (seeds - 1)
    found, equal = [], []
    for error in size * np.sqrt(quantiles):
        design = Design((of_documents, 199), (error, seeds - 1), known=seeds - 1)
        effect, margin = design.smallest_difference(level), design.smallest_margin(level)
        differences, again = parts_of(rng, 0, 500, seeds, of_documents=of_documents, of_seeds=size)
        found.append(np.mean(np.abs(differences + effect) > reach_of(again, seeds, of_documents, level)))
        equal.append(np.mean(np.abs(differences) + reach_of(again, seeds, of_documents, 2 * level) < margin))
    assert np.mean(found) == pytest.approx(0.80, abs=0.03)
    assert np.mean(equal) == pytest.approx(0.80, abs=0.03)
