import itertools
import math

import numpy as np
import pytest

from hfpatch.evaluation import stats


def ones(count):
    return np.ones(count)


def test_mcnemar_is_the_binomial_test_of_discordant_pairs():
    method = np.array([1] * 9 + [0] * 2 + [1] * 20 + [0] * 5)
    reference = np.array([0] * 9 + [1] * 2 + [1] * 20 + [0] * 5)
    tail = sum(math.comb(11, k) for k in range(3)) / 2**11
    assert stats.mcnemar_p(method, reference) == pytest.approx(2 * tail)
    assert stats.mcnemar_p(reference, method) == pytest.approx(2 * tail)
    assert stats.mcnemar_p(method, method) == 1.0


def test_mcnemar_calls_equal_models_different_in_at_most_five_percent():
    rng = np.random.default_rng(9)
    found = []
    for _ in range(2000):
        reference = rng.random(400) < 0.4
        method = np.where(rng.random(400) < 0.25, rng.random(400) < 0.4, reference)
        found.append(stats.mcnemar_p(method.astype(float), reference.astype(float)) < 0.05)
    assert 0.02 < np.mean(found) < 0.06  # an exact test of counts stays somewhat below its level


def test_few_documents_are_permuted_exactly():
    differences = np.array([0.5, -0.25, 1.5, 0.0, 2.0, 0.125])
    moving = [value for value in differences if value]
    sums = [
        abs(sum(s * d for s, d in zip(signs, moving, strict=True))) for signs in itertools.product((1, -1), repeat=5)
    ]
    expected = sum(value >= abs(differences.sum()) for value in sums) / 32
    assert stats.permutation_p(differences) == expected
    assert stats.permutation_p(np.zeros(4)) == 1.0
    assert stats.permutation_p(np.array([3.0])) == 1.0


def test_many_documents_are_permuted_at_random():
    rng = np.random.default_rng(1)
    differences = rng.normal(0.3, 1.0, size=60)
    normal = 2 * (1 - 0.5 * (1 + math.erf(abs(differences.sum()) / math.sqrt((differences**2).sum()) / math.sqrt(2))))
    assert stats.permutation_p(differences) == pytest.approx(normal, abs=0.01)
    assert stats.permutation_p(differences + 3.0) == 1 / 10_000


def test_permutation_finds_nothing_in_equal_models():
    rng = np.random.default_rng(2)
    found = [stats.permutation_p(rng.standard_t(3, size=40), seed=k) < 0.05 for k in range(400)]
    assert 0.025 < np.mean(found) < 0.08


def test_bootstrap_of_two_values_is_binomial():
    differences = np.array([1.0] * 30 + [0.0] * 70)
    low, high = stats.bootstrap_interval(differences, ones(100))
    assert (low, high) == pytest.approx((0.21, 0.39), abs=0.011)


def test_bootstrap_does_not_depend_on_how_documents_are_grouped():
    rng = np.random.default_rng(3)
    differences = rng.choice([-1.0, 0.0, 1.0], size=300, p=[0.1, 0.7, 0.2])
    grouped = stats.bootstrap_interval(differences, ones(300))
    apart = stats.bootstrap_interval(differences + 1e-9 * np.arange(300), ones(300))
    assert grouped == pytest.approx(apart, abs=0.008)
    assert stats.bootstrap_interval(np.zeros(5), ones(5)) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["accuracy", "perplexity"])
def test_bootstrap_intervals_cover_at_their_rate(kind):
    rng = np.random.default_rng(4)
    covered = []
    for k in range(400):
        if kind == "accuracy":
            weights, truth = ones(250), 0.03
            differences = rng.choice([-1.0, 0.0, 1.0], size=250, p=[0.05, 0.87, 0.08])
        else:
            weights, truth = rng.integers(50, 400, size=62).astype(float), 0.02
            differences = weights * (truth + 0.05 * rng.normal(size=62)) + 3 * rng.normal(size=62)
        low, high = stats.bootstrap_interval(differences, weights, seed=k)
        covered.append(low <= truth <= high)
    assert 0.91 < np.mean(covered) < 0.98


def test_one_seed_given_twice_is_the_estimate_over_documents():
    rng = np.random.default_rng(5)
    weights = rng.integers(1, 9, size=50).astype(float)
    differences = rng.normal(size=50) * weights
    alone = stats.over_documents(differences, weights)
    twice = stats.over_seeds_and_documents(np.stack([differences, differences]), weights)
    assert alone.difference == pytest.approx(differences.sum() / weights.sum())
    assert (twice.difference, twice.error) == pytest.approx((alone.difference, alone.error))
    assert twice.freedom == pytest.approx(49)


def test_two_by_two_table_by_hand():
    # grand mean 2, seed effects -+1, document effects -+0.5, no residual: mean squares 4, 1, 0
    estimate = stats.over_seeds_and_documents(np.array([[0.5, 1.5], [2.5, 3.5]]), ones(2))
    assert estimate.difference == pytest.approx(2.0)
    assert estimate.error == pytest.approx(math.sqrt((4 + 1 - 0) / 4))
    assert estimate.freedom == pytest.approx(25 / (16 + 1))


@pytest.mark.parametrize(("seeds", "by_seed", "residual"), [(3, 0.0, 0.0), (3, 1.0, 0.3), (5, 0.2, 0.5)])
def test_intervals_over_seeds_cover_at_their_rate(seeds, by_seed, residual):
    rng = np.random.default_rng(6)
    covered, found = [], []
    for _ in range(1000):
        table = (
            rng.normal(size=(1, 150)) + by_seed * rng.normal(size=(seeds, 1)) + residual * rng.normal(size=(seeds, 150))
        )
        estimate = stats.over_seeds_and_documents(table, ones(150))
        low, high = stats.student_interval(estimate)
        covered.append(low <= 0 <= high)
        found.append(stats.student_p(estimate) < 0.05)
    assert 0.93 < np.mean(covered) < 0.975
    assert np.mean(covered) == pytest.approx(1 - np.mean(found))


def test_seeds_that_differ_widen_the_interval():
    rng = np.random.default_rng(7)
    documents = rng.normal(0.5, 1.0, size=(1, 400))
    same = stats.over_seeds_and_documents(np.repeat(documents, 3, axis=0), ones(400))
    apart = stats.over_seeds_and_documents(documents + np.array([[-0.4], [0.0], [0.4]]), ones(400))
    assert apart.difference == pytest.approx(same.difference)
    assert stats.student_p(same) < 1e-6 < 0.05 < stats.student_p(apart)


def test_no_difference_at_all():
    estimate = stats.over_seeds_and_documents(np.zeros((3, 10)), ones(10))
    assert stats.student_interval(estimate) == (0.0, 0.0)
    assert stats.student_p(estimate) == 1.0
    assert stats.student_p(stats.over_seeds_and_documents(ones((3, 10)), ones(10))) == 0.0


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert stats.holm([0.2]) == [0.2]
    assert stats.holm([]) == []


@pytest.mark.parametrize(("documents", "low", "high"), [(100, 0.77, 0.83), (5, 0.77, 0.87)])
def test_a_difference_of_the_smallest_visible_size_is_found_four_times_out_of_five(documents, low, high):
    rng = np.random.default_rng(8)
    shift = stats.smallest_visible(stats.Estimate(0.0, error=1 / math.sqrt(documents), freedom=documents - 1))
    found = []
    for _ in range(2000):
        estimate = stats.over_documents(rng.normal(shift, 1.0, size=documents), ones(documents))
        found.append(stats.student_p(estimate) < 0.05)
    assert low < np.mean(found) < high


def test_few_degrees_of_freedom_see_less():
    few, many = (stats.smallest_visible(stats.Estimate(0.0, error=1.0, freedom=f)) for f in (2, 1000))
    assert few > 1.5 * many
