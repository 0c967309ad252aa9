import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom
from scipy.stats import t as student

from hfpatch.evaluation import stats
from hfpatch.evaluation.stats import Estimate, Part


def test_mcnemar_is_the_binomial_test_of_discordant_pairs():
    method = np.array([1.0] * 9 + [0] * 2 + [1] * 20 + [0] * 5)
    reference = np.array([0.0] * 9 + [1] * 2 + [1] * 20 + [0] * 5)
    tail = sum(math.comb(11, k) for k in range(3)) / 2**11
    assert stats.paired_accuracies(method, reference)[0] == pytest.approx(2 * tail)
    assert stats.paired_accuracies(reference, method)[0] == pytest.approx(2 * tail)
    assert stats.paired_accuracies(method, method)[0] == 1.0


@pytest.mark.parametrize("documents", [20, 35, 60, 100, 200])
def test_intervals_of_accuracies_cover_and_agree_with_the_test(documents):
    """Over every possible number of documents gained and lost, by exact enumeration."""
    counts = [
        (gained, lost)
        for gained, lost in itertools.product(range(documents + 1), repeat=2)
        if gained + lost <= documents and abs(gained - lost) < 30 and gained + lost < 70
    ]
    pairs = []
    for gained, lost in counts:
        method, reference = np.zeros(documents), np.zeros(documents)
        method[:gained] = reference[gained : gained + lost] = 1
        pairs.append(stats.paired_accuracies(method, reference))
    p, low, high = np.array([(p, *interval) for p, interval in pairs]).T
    np.testing.assert_array_equal(p < 0.05, (low > 0) | (high < 0))
    assert np.all((low >= -1) & (high <= 1) & (high > low))
    gained, lost = np.array(counts).T
    for gain, loss in [(0.03, 0.01), (0.1, 0.02), (0.01, 0.0), (0.08, 0.08), (0.1, 0.04)]:
        chance = binom.pmf(gained, documents, gain) * binom.pmf(lost, documents - gained, loss / (1 - gain))
        covered = chance[(low <= gain - loss) & (gain - loss <= high)].sum() / chance.sum()
        assert chance.sum() > 0.99
        assert covered > 0.945, (gain, loss)


def test_the_permutation_test_is_that_of_all_exchanges():
    rng = np.random.default_rng(0)
    differences, weights = rng.normal(0.4, 1.0, size=12), rng.integers(1, 9, size=12).astype(float)
    signs = np.array(list(itertools.product((1, -1), repeat=12)))

    def exact(value):
        shifted = differences - value * weights
        return np.mean(np.abs(signs @ shifted) >= abs(shifted.sum()) - 1e-12)

    p, (low, high) = stats.paired_permutation(differences, weights)
    assert p == pytest.approx(exact(0), abs=0.015)
    assert exact(low) == pytest.approx(0.05, abs=0.008)
    assert exact(high) == pytest.approx(0.05, abs=0.008)
    assert exact(2 * high - low) < 0.05 < exact((low + 3 * high) / 4)
    differences, weights = np.array([0.1, 0.2, -0.3, 1.0]), np.ones(4)  # 0.1 + 0.2 - 0.3 is 0 but for rounding
    signs = np.array(list(itertools.product((1, -1), repeat=4)))
    p, interval = stats.paired_permutation(differences, weights)
    assert p == pytest.approx(exact(0), abs=0.015)
    assert interval == (-math.inf, math.inf)  # in 2 of 16 exchanges nothing or everything is exchanged


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("rest", [0.0, 0.5])
def test_documents_without_weight_show_nothing(rest):
    """With 5 others the smallest p is 2 in 32, where none or all of them are exchanged."""
    differences, weights = np.array([0.1, 0.2, 0.1, 0.3, 0.2, *[rest] * 20]), np.array([0.7] * 5 + [0.0] * 20)
    p, interval = stats.paired_permutation(differences, weights)
    assert p > 0.05
    assert interval == (-math.inf, math.inf)


def test_the_permutation_test_and_its_interval_agree():
    rng = np.random.default_rng(1)
    agreed, significant = [], []
    for k in range(150):
        documents = int(rng.integers(20, 60))
        differences = rng.choice([0.0, 1.0], size=documents, p=[0.6, 0.4]) * rng.normal(0.3, 1, size=documents)
        p, (low, high) = stats.paired_permutation(differences, rng.uniform(1, 3, size=documents), seed=k)
        agreed.append((p < 0.05) == (low > 0 or high < 0))
        significant.append(p < 0.05)
    assert all(agreed)
    assert 0.05 < np.mean(significant) < 0.95
    assert stats.paired_permutation(np.zeros(30), np.ones(30)) == (1.0, (0.0, 0.0))


@pytest.mark.slow
def test_permutation_intervals_cover_at_their_rate():
    rng, covered = np.random.default_rng(4), []
    for k in range(400):
        weights = rng.integers(50, 400, size=40).astype(float)
        differences = weights * (0.02 + 0.05 * rng.standard_t(4, size=40)) + 3 * rng.normal(size=40)
        _, (low, high) = stats.paired_permutation(differences, weights, seed=k)
        covered.append(low <= 0.02 <= high)
    assert 0.92 < np.mean(covered) < 0.98


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("differences", "weights"), [([1.0, 2.0], [3.0, 0.0]), ([1.0, 0.0, 0.0], [3.0, 0.0, 0.0])], ids=["other", "alone"]
)
def test_one_document_with_all_weight_has_no_finite_error(differences, weights):
    """Without it there is no ratio, so the jackknife is not defined."""
    differences, weights = np.array(differences), np.array(weights)
    part = stats.over_documents(differences, weights)
    assert part == (math.inf, len(weights) - 1)
    assert Estimate(1.0, (part,)).p == 1.0
    assert Estimate(1.0, (part,)).interval == (-math.inf, math.inf)


@pytest.mark.parametrize(("documents", "expected"), [(20, 0.90), (40, 0.92), (100, 0.93)])
def test_intervals_over_texts_of_uneven_lengths_cover_at_their_rate(documents, expected):
    """Lengths are log-normal with σ = 1.5, where 7 % of the documents have half of the tokens."""
    rng, covered = np.random.default_rng(11), []
    for _ in range(2000):
        weights = np.exp(1.5 * rng.normal(size=documents))
        differences = weights * rng.normal(size=documents)
        part = stats.over_documents(differences, weights)
        low, high = Estimate(differences.sum() / weights.sum(), (part,)).interval
        covered.append(low <= 0 <= high)
    assert np.mean(covered) == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / len(covered)))


def test_the_part_of_seeds_by_hand():
    method, reference = np.array([3.0, 5.0, 7.0]), np.array([1.0, 4.0, 4.0])
    assert stats.over_seeds(method, reference, paired=True) == pytest.approx((1 / math.sqrt(3), 2))
    assert stats.over_seeds(method, np.array([1.0]), paired=True) == pytest.approx((2 / math.sqrt(3), 2))
    pooled = (8 + 6) / 4
    assert stats.over_seeds(method, reference, paired=False) == pytest.approx((math.sqrt(pooled * 2 / 3), 4))
    assert stats.over_seeds(method, np.array([1.0]), paired=False) == pytest.approx((math.sqrt(4 * (1 / 3 + 1)), 2))
    assert stats.over_seeds(np.array([1.0]), np.array([2.0]), paired=False) is None


def test_an_estimate_with_one_part_is_students_and_one_without_errors_is_exact():
    estimate = Estimate(2.0, (Part(0.9, 7.0),))
    assert estimate.interval == pytest.approx(student.interval(0.95, 7, loc=2.0, scale=0.9))
    assert estimate.p == pytest.approx(2 * student.sf(2 / 0.9, 7), rel=1e-6)
    assert estimate.reach(0.4) == pytest.approx(0.9 * student.ppf(0.8, 7))
    same, apart = (Estimate(difference, (Part(0.0, 2), Part(0.0, 9))) for difference in (0.0, 1.0))
    assert (same.interval, same.p) == ((0.0, 0.0), 1.0)
    assert 0 < apart.p < 1e-14


@pytest.mark.parametrize("difference", [0.0, -1e-9, 0.3, -2.0, 5.0, 1e3])
def test_interval_and_p_of_several_parts_agree(difference):
    for seeds, errors in itertools.product((2, 3, 5), [(0.1, 0.8), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)]):
        estimate = Estimate(difference, (Part(errors[0], seeds - 1), Part(errors[1], 399)))
        low, high = estimate.interval
        assert (estimate.p < 0.05) == (low > 0 or high < 0)
        assert 0 < estimate.p <= 1
        for part in estimate.parts:
            assert high - low >= Estimate(0.0, (part,)).reach(0.05) * 2 - 1e-9


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("spread", [0, 1, 2, 4, 10])
@pytest.mark.parametrize("residual", [0.0, 1.0])
def test_equal_methods_are_called_different_no_more_often_than_stated(seeds, spread, residual):
    """Seeds vary ``spread`` times as much as the mean over documents does; documents may vary with the seed, too."""
    rng = np.random.default_rng(100 * seeds + spread)
    repeats, documents = 20_000, 50
    by_document = rng.normal(size=(repeats, documents))
    scores, sums = [], by_document * seeds
    for _ in range(seeds):
        values = by_document + residual * rng.normal(size=(repeats, documents)) if residual else by_document
        shift = spread / math.sqrt(documents) * rng.normal(size=repeats)
        scores.append(values.mean(axis=1) + shift)
        sums = sums + values - by_document
    means = np.stack(scores)
    parts = (
        Part(means.std(axis=0, ddof=1) / math.sqrt(seeds), seeds - 1),
        Part((sums / seeds).std(axis=1, ddof=1) / math.sqrt(documents), documents - 1),
    )
    estimate = Estimate(means.mean(axis=0), parts)
    for p in (0.05, 0.0125, 0.001):
        rejected = np.mean(np.abs(estimate.difference) > estimate.reach(p))
        assert rejected < p + 0.01, p
        assert rejected < p * 1.15 + 0.001, p  # tighter where the nominal rate is small


def test_a_difference_within_the_rounding_of_a_median_has_a_p_of_1(monkeypatch):
    """SciPy 1.15 gives Student's t a median beside 0, and so an interval at level 1 a length."""
    exact = stats.reach
    monkeypatch.setattr(stats, "reach", lambda parts, p: exact(parts, p) + 1e-16)
    assert Estimate(1e-17, (Part(0.1, 19),)).p == Estimate(0.0, (Part(0.1, 19),)).p == 1.0
    assert Estimate(0.1, (Part(0.1, 19),)).p == pytest.approx(2 * student.sf(1, 19))
