"""Exchange rates: by hand where they are known, and on simulated frontiers whose truth is known."""

import math

import numpy as np
import pytest
from own_tasks import task_result, write_record
from scipy.stats import t

from hfpatch.evaluation import Records
from hfpatch.evaluation.exchange import Sizes, bounds, exchange_rate, exchange_rates, frontier, monotone
from hfpatch.results.frontier import Exchange

SIZES = np.array([3e3, 12e3, 48e3, 192e3])
SLOPE = 0.05


def exact(gains, seeds=1, documents=25):
    """Gains (sizes,) that every document has with every seed."""
    return np.broadcast_to(np.asarray(gains, dtype=float)[:, None, None], (len(gains), seeds, documents)).copy()


def along(sizes, times=1.0):
    """Gains that are linear in log n, of a method that needs so many times the parameters."""
    return SLOPE * np.log(np.asarray(sizes) / times / 1000)


def pooled(values):
    """Isotonic regression by pooling neighbours that fall, in plain Python."""
    blocks = []
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (first, many), (second, more) = blocks[-2:]
            blocks[-2:] = [[(first * many + second * more) / (many + more), many + more]]
    return [value for value, many in blocks for _ in range(many)]


def test_gains_are_made_to_rise_by_isotonic_regression():
    gains = np.random.default_rng(0).normal(size=(50, 5))
    np.testing.assert_allclose(monotone(gains), [pooled(row) for row in gains], atol=1e-12)


def test_a_frontier_goes_through_its_points_and_never_falls():
    x, g = frontier(np.log(SIZES), np.array([[0.1, 0.5, 0.52, 2.0]]))
    np.testing.assert_allclose(np.interp(np.log(SIZES), x, g[0]), [0.1, 0.5, 0.52, 2.0])
    assert (np.diff(g) >= 0).all()


@pytest.mark.parametrize("times", [1.0, 3.0, 1 / 5])
def test_a_method_that_needs_so_many_times_the_parameters(times):
    weights = np.linspace(1, 3, 25)
    ours, theirs = (exact(along(SIZES, factor)) * weights for factor in (times, 1.0))
    exchange = exchange_rate(Sizes(SIZES, ours), Sizes(SIZES, theirs), weights)
    assert (exchange.rate, exchange.low, exchange.high) == pytest.approx((times, times, times))
    assert (exchange.lowest, exchange.highest) == pytest.approx(
        (SLOPE * math.log(3 / min(1, times)) if times < 1 else SLOPE * math.log(3), along(SIZES, max(times, 1))[-1])
    )


def test_the_mean_over_the_gains_that_both_reach():
    # x(γ) = γ log 10 of the reference, 2 γ log 10 of the method, γ from 0 to 0.5: the mean of γ log 10
    sizes = np.array([100.0, 1000.0])
    exchange = exchange_rate(Sizes(sizes, exact([0, 0.5])), Sizes(sizes, exact([0, 1.0])), np.ones(25))
    assert exchange.rate == pytest.approx(10**0.25)
    assert (exchange.lowest, exchange.highest) == pytest.approx((0, 0.5))


def test_a_method_of_one_size_or_of_sizes_that_gain_alike():
    one, other = Sizes(np.array([500.0]), exact([0.5])), Sizes(np.array([100.0, 10_000.0]), exact([0, 1.0]))
    exchange = exchange_rate(one, other, np.ones(25))
    assert exchange.rate == pytest.approx(500 / 1000)
    assert (exchange.lowest, exchange.highest) == pytest.approx((0.5, 0.5))
    alike = Sizes(np.array([500.0, 900.0]), exact([0.5, 0.5]))  # the least of its sizes is needed
    assert [exchange_rate(*pair, np.ones(25)).rate for pair in ((alike, other), (other, alike))] == pytest.approx(
        [0.5, 2]
    )


def test_the_error_over_seeds():
    # seeds that shift all gains of a method by δ change log ρ by -δ / slope: the error is sd(δ) / (slope √S)
    shifts = np.array([-0.01, 0.02, 0.005])
    ours = exact(along(SIZES), seeds=3) + shifts[None, :, None]
    made = exchange_rate(Sizes(SIZES, ours), Sizes(SIZES, exact(along(SIZES), seeds=3)), np.ones(25))
    reach = t.ppf(0.975, 2) * shifts.std(ddof=1) / SLOPE / math.sqrt(3)
    middle = -shifts.mean() / SLOPE
    assert np.log([made.rate, made.low, made.high]) == pytest.approx([middle, middle - reach, middle + reach], 1e-6)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_error_over_documents(grouped):
    """A shift δ of all gains changes log ρ by -δ / slope; one document or group is left out at a time."""
    rng, many = np.random.default_rng(3), 100
    weights, shifts = np.exp(rng.normal(size=many)), rng.normal(0, 0.02, size=many)
    groups = np.repeat(np.arange(many // 4), 4) if grouped else None
    ours, theirs = (weights * (exact(along(SIZES), documents=many) + shift) for shift in (shifts, 0.0))
    exchange = exchange_rate(Sizes(SIZES, ours), Sizes(SIZES, theirs), weights, groups)
    units = np.arange(many) if groups is None else groups
    means = [np.average(shifts[units != unit], weights=weights[units != unit]) for unit in np.unique(units)]
    changes, count = np.array(means) - np.average(shifts, weights=weights), len(means)
    reach = t.ppf(0.975, count - 1) * math.sqrt((count - 1) / count * (changes**2).sum()) / SLOPE
    assert math.log(exchange.high / exchange.low) / 2 == pytest.approx(reach, rel=1e-6)


@pytest.mark.parametrize(("errors", "known"), [(0.0, False), (1.6, False), (1.8, True)])
def test_an_overlap_of_gains_that_may_be_chance_gives_no_rate(errors, known):
    """The highest gain of a line is so many standard errors above the lowest of the other: t(0.95, 25) is 1.71."""
    shifts = np.tile([0.02, -0.02], 13)
    ours = exact(along(SIZES[:2]), documents=26) + shifts
    lowest = along(SIZES)[1] - errors * 0.02 / math.sqrt(25)
    theirs = exact(along(SIZES[2:]) - along(SIZES)[2] + lowest, documents=26)
    exchange = exchange_rate(Sizes(SIZES[:2], ours), Sizes(SIZES[2:], theirs), np.ones(26))
    assert (exchange.rate is not None) == known
    assert known or exchange.why == "whether they reach a common gain is not certain"


@pytest.mark.parametrize("metric", ["f1", "f1,strict", "own,strict"])
def test_a_score_that_is_no_mean_of_documents_has_no_rate(metric, tmp_path):
    """A filter of answers, named after a comma, does not change what the score is."""
    families = {"pre": {"pre@1": 1, "pre@2": 2}, "lora": {"lora@1": 1, "lora@2": 2}}
    names = ("baseline", *families["pre"], *families["lora"])
    values = [float(i % 2) if metric.startswith("own") else [i % 2, 1] for i in range(25)]
    runs = {name: {0: write_record(tmp_path / name, "task", metric, values)} for name in names}
    records = Records(runs, aggregations={"task": {"own": max}})
    made = exchange_rates(records, families, "lora", task_result("task", metric))
    assert made == {"pre": Exchange(why=f"{metric} is no mean of documents")}


@pytest.mark.parametrize("size", [1, 4])
def test_without_a_rate_there_is_a_reason(size):
    """Also where documents come in groups."""
    groups = np.repeat(np.arange(25), size) if size > 1 else None
    low, ones = exact(along(SIZES), documents=25 * size), np.ones(25 * size)
    high, most = low + 1, SIZES[-1] / SIZES[0]  # even at its largest size low gains less than high at its smallest
    expected = Exchange(why="they reach no common gain", more_than=most)
    assert exchange_rate(Sizes(SIZES, low), Sizes(SIZES, high), ones, groups) == expected
    assert exchange_rate(Sizes(SIZES, high), Sizes(SIZES, low), ones, groups).less_than == 1 / most
    few, part = Sizes(SIZES, low[..., : 10 * size]), None if groups is None else groups[: 10 * size]
    assert exchange_rate(few, few, ones[: 10 * size], part) == Exchange(why="too few documents")
    wild = low + np.random.default_rng(0).normal(0, 20, size=low.shape)
    exchange = exchange_rate(Sizes(SIZES, wild), Sizes(SIZES, low), ones, groups)
    assert (exchange.rate, exchange.more_than, exchange.less_than) == (None, None, None)


def saturating(sizes):
    return 0.3 * (1 - np.exp(-((np.asarray(sizes) / 30_000) ** 0.5)))


def simulated(gains, rng, seeds, *, of_seeds=0.005, of_documents=0.1, documents=200):
    """Gains with noise: of each size and seed, of documents in all seeds of a size, and of documents in each run."""
    shape = (len(gains), seeds, documents)
    shared = rng.normal(0, of_documents / 2, size=(shape[0], 1, documents))
    of_runs = rng.normal(0, of_documents / 2, size=shape)
    return np.asarray(gains)[:, None, None] + rng.normal(0, of_seeds, size=(*shape[:2], 1)) + shared + of_runs


def rates(truth, seeds, repeats, *, documents=200, spread=0.0):
    """Rates where documents' weights are log-normal with σ = ``spread``; one seed is taken as the only one."""
    rng = np.random.default_rng(1)
    for _ in range(repeats):
        weights = np.exp(spread * rng.normal(size=documents))
        noise = {"of_seeds": 0.005 if seeds > 1 else 0.0, "documents": documents}
        pair = (Sizes(SIZES, weights * simulated(gains, rng, seeds, **noise)) for gains in truth)
        yield exchange_rate(*pair, weights)


@pytest.mark.parametrize(
    ("times", "seeds", "documents", "spread", "expected"),
    [(1, 3, 200, 0, 0.97), (3, 3, 200, 0, 0.98), (3, 5, 200, 0, 0.97), (3, 1, 200, 0, 0.95), (3, 1, 40, 1.5, 0.92)],
)
def test_intervals_cover_the_truth_at_their_rate(times, seeds, documents, spread, expected):
    truth = saturating(SIZES / times), saturating(SIZES)
    exchanges = list(rates(truth, seeds, 100, documents=documents, spread=spread))
    exact_rate = exchange_rate(Sizes(SIZES, exact(truth[0])), Sizes(SIZES, exact(truth[1])), np.ones(25))
    assert exact_rate.rate == pytest.approx(times, rel=0.02)  # what is left is the interpolation's
    made = [exchange for exchange in exchanges if exchange.rate is not None]
    assert len(made) >= (90 if spread else 100)
    covered = np.mean([exchange.low <= exact_rate.rate <= exchange.high for exchange in made])
    assert covered == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / len(made)))
    if not spread:
        assert np.median([exchange.rate for exchange in made]) == pytest.approx(exact_rate.rate, rel=0.05)


@pytest.mark.parametrize("times", [0.2, 5.0])
def test_bounds_of_rates_that_are_not_known_hold(times):
    """A method that is worse, or better, by a factor at each size: both bounds are on the right side of it."""
    rng, weights, wrong, bounded = np.random.default_rng(2), np.ones(200), 0, 0
    for _ in range(150):
        ours, theirs = (Sizes(SIZES, simulated(along(SIZES, factor), rng, 3, of_seeds=0.01)) for factor in (times, 1.0))
        more, less = bounds(ours, theirs, weights, None)
        bounded += more is not None or less is not None
        wrong += (more is not None and more > times) or (less is not None and less < times)
    assert bounded > 30
    assert wrong / 150 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)


def test_a_bound_is_found_at_the_level_of_all_pairs_of_sizes():
    pattern, sizes = np.tile([1.0, -1.0], 12), np.array([10.0, 20.0])  # of documents: the mean 0 with the error 1/√23
    reach = t.ppf(1 - 0.05 / 4 / 2, 23) / math.sqrt(23)
    for loss, bound in ((0.99 * reach, None), (1.01 * reach, 2.0)):
        ours, theirs = (Sizes(sizes, np.tile(gains, (2, 1, 1))) for gains in (pattern - loss, np.zeros(24)))
        assert bounds(ours, theirs, np.ones(24), None) == (bound, None)


def test_frontiers_that_do_not_rise_have_no_rate():
    flat = np.full(len(SIZES), 0.1)
    assert sum(exchange.rate is not None for exchange in rates((flat, flat), 3, 60)) <= 3
