"""Assumed differences against simulated comparisons, by the very test that comparisons use."""

import numpy as np
import pytest

from hfpatch.evaluation.comparison import _test_ratio
from hfpatch.evaluation.power import Assumed
from hfpatch.evaluation.reading import Pair
from hfpatch.results.decision import Design


def table(rng, sd, assumed, accuracy, effect, documents, seeds):
    """Draw the terms of a comparison whose differences follow the model; ``sd`` is that of a difference in one run."""
    weights = np.ones(documents)
    if accuracy:  # answers won (1) and lost (-1): in a share κ of the documents all seeds change alike
        gain, lose = (sd**2 + effect) / 2, (sd**2 - effect) / 2
        uniform = rng.random((seeds, documents))
        alike = rng.random(documents) < assumed.shared
        uniform[:, alike] = uniform[0, alike]
        drawn = np.where(uniform < gain, 1.0, np.where(uniform < gain + lose, -1.0, 0.0))
        reference = (drawn < 0).astype(float)  # the answers themselves do not matter, only their differences
        return reference + drawn, reference, weights
    noise = rng.normal(size=(seeds, documents)) * np.sqrt(1 - assumed.shared)
    common = rng.normal(size=documents) * np.sqrt(assumed.shared)
    shift = rng.normal(size=(seeds, 1)) * assumed.shift * sd
    reference = np.broadcast_to(rng.normal(size=documents), (seeds, documents))
    return reference + effect + sd * (noise + common) + shift, reference, weights


@pytest.mark.parametrize(
    ("assumed", "accuracy", "documents", "seeds"),
    [
        (Assumed(0.8, shared=0.5, shift=0.0), True, 800, 3),
        (Assumed(0.8, shared=0.5, shift=0.0), True, 400, 5),
        (Assumed(0.8, shared=0.5, shift=0.0), False, 300, 3),
        (Assumed(0.9, shared=0.8, shift=0.05), False, 1000, 3),
    ],
    ids=["accuracy, 3 seeds", "accuracy, 5 seeds", "likelihood", "likelihood, seeds that shift"],
)
def test_the_planned_difference_is_found_in_80_percent_of_cases(assumed, accuracy, documents, seeds):
    reference_sd, rng, significant = 0.5, np.random.default_rng(0), 0
    sd = reference_sd * np.sqrt(2 * (1 - assumed.correlation))
    effect = assumed.design(reference_sd, documents, seeds).smallest_difference(0.05)
    for _ in range(1000):
        drawn = table(rng, sd, assumed, accuracy, effect, documents, seeds)
        pair = Pair("a", "b", [None] * seeds, [None] * seeds)
        significant += _test_ratio(pair, *drawn, None, of_logs=False).p < 0.05
    assert significant / 1000 == pytest.approx(0.80, abs=0.05)


def test_the_errors_are_those_of_the_model():
    assumed = Assumed(correlation=0.875, shared=0.75, shift=0.5)
    variance = 0.25 * 4.0  # of a difference: 2·(1 - 0.875) times the reference's
    expected = np.sqrt([variance * (0.75 + 0.25 / 5) / 100, (variance * 0.25 / 100 + 0.5**2 * variance) / 5])
    assert assumed.design(2.0, 100, 5) == Design((pytest.approx(expected[0]), 99), (pytest.approx(expected[1]), 4))
