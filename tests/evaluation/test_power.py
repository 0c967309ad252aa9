"""Planned sizes find the planned effect in 80 % of cases, by the very test that comparisons use."""

import numpy as np
import pytest
from scipy import stats

from hfpatch.evaluation.comparison import _test_ratio
from hfpatch.evaluation.power import Assumed, Differences
from hfpatch.evaluation.reading import Pair

FOUND = pytest.approx(0.80, abs=0.05)


def table(rng, model, effect, documents, seeds):
    """Draw the terms of a comparison whose differences follow the model."""
    weights = np.ones(documents)
    if model.accuracy:  # answers won (1) and lost (-1): in a share κ of the documents all seeds change alike
        discordance = max(model.sd**2, effect)
        gain, lose = (discordance + effect) / 2, (discordance - effect) / 2
        uniform = rng.random((seeds, documents))
        alike = rng.random(documents) < model.shared
        uniform[:, alike] = uniform[0, alike]
        drawn = np.where(uniform < gain, 1.0, np.where(uniform < gain + lose, -1.0, 0.0))
        reference = (drawn < 0).astype(float)  # the answers themselves do not matter, only their differences
        return reference + drawn, reference, weights
    noise = rng.normal(size=(seeds, documents)) * np.sqrt(1 - model.shared)
    common = rng.normal(size=documents) * np.sqrt(model.shared)
    shift = rng.normal(size=(seeds, 1)) * model.shift
    reference = np.broadcast_to(rng.normal(size=documents), (seeds, documents))
    return reference + effect + model.sd * (noise + common) + shift, reference, weights


def share_found(model, effect, documents, seeds, *, cases):
    rng, significant = np.random.default_rng(0), 0
    for _ in range(cases):
        drawn = table(rng, model, effect, documents, seeds)
        pair = Pair("a", "b", [None] * seeds, [None] * seeds)
        significant += _test_ratio(pair, *drawn, None, of_logs=False).p < 0.05
    return significant / cases


ACCURACY = Differences(np.sqrt(0.1), shared=0.5, accuracy=True)
LIKELIHOOD = Differences(0.3, shared=0.5, shift=0.0)
SHIFTED = Differences(0.3, shared=0.8, shift=0.01)
CASES = {
    "McNemar": (ACCURACY, 500, 1, 1000),
    "permutation": (LIKELIHOOD, 60, 1, 500),
    "accuracy, 2 seeds": (ACCURACY, 500, 2, 1000),
    "accuracy, 3 seeds": (ACCURACY, 800, 3, 1000),
    "accuracy, 5 seeds": (ACCURACY, 400, 5, 1000),
    "likelihood, 3 seeds": (LIKELIHOOD, 300, 3, 1000),
    "likelihood, 3 seeds that shift": (SHIFTED, 1000, 3, 1000),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_effect_is_found_in_80_percent_of_cases(name):
    model, documents, seeds, cases = CASES[name]
    effect = model.smallest_effect(documents, seeds)
    assert share_found(model, effect, documents, seeds, cases=cases) == FOUND


def test_planned_numbers_are_the_fewest_that_find_an_effect_in_80_percent():
    for name in ("McNemar", "accuracy, 3 seeds"):
        model, _, seeds, _ = CASES[name]
        documents = model.documents_for(0.04, seeds)
        assert model.power(0.04, documents, seeds) >= 0.8 > model.power(0.04, documents - 1, seeds)
    seeds = LIKELIHOOD.seeds_for(0.05, 300)
    assert LIKELIHOOD.power(0.05, 300, seeds) >= 0.8 > LIKELIHOOD.power(0.05, 300, seeds - 1)


def test_a_difference_of_nothing_is_found_no_more_often_than_the_level():
    for model, documents, seeds, _ in CASES.values():
        assert model.power(0.0, documents, seeds) <= 0.0501


def test_one_answer_gained_and_one_lost_are_in_the_error_of_few_accuracies():
    """Seeds that agree on every document: Student's t over these and the two answers that are added."""
    model, documents = Differences(np.sqrt(0.1), shared=1.0, accuracy=True), 25
    error, tested = np.sqrt(0.1 / documents), np.sqrt((0.1 * documents + 2) / (documents + 1) / (documents + 2))
    reach = stats.t.ppf(0.975, documents + 1) * tested
    assert model.power(0.0, documents, 2) == pytest.approx(2 * stats.norm.sf(reach / error))


def test_what_no_number_can_find_and_what_levels_and_assumptions_change():
    assert SHIFTED.documents_for(0.005, 3) is None  # seeds alone shift by more
    assert ACCURACY.smallest_effect(19, 3) is None  # too few documents are not tested
    assert LIKELIHOOD.seeds_for(0.0, 300) is None
    assert (LIKELIHOOD.seeds_for(9.0, 300), LIKELIHOOD.documents_for(9.0, 3)) == (2, 20)  # no fewer are tested
    assert ACCURACY.smallest_effect(500, 3, alpha=0.05 / 20) > ACCURACY.smallest_effect(500, 3)
    made = Assumed(correlation=0.8, shared=0.5, shift=0.1).differences(0.5, accuracy=True)
    assert (made.sd, made.shift) == (pytest.approx(np.sqrt(0.1)), pytest.approx(0.1 * np.sqrt(0.1)))
