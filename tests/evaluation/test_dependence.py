"""The guard against groups that nobody declared: its formula, its rate of false alarms, and what it finds."""

from pathlib import Path

import numpy as np
import pytest
from own_tasks import task_result, write_record
from scipy.stats import t as student

from hfpatch.evaluation import Records, compare, dependence
from hfpatch.evaluation.comparison import compare_by, find_dependent
from hfpatch.evaluation.dependence import LEVEL, Dependence, Neighbours, find_dependence, residuals
from hfpatch.evaluation.retention import kept_of
from hfpatch.results import load_results
from hfpatch.results.cautions import dependence_cautions
from hfpatch.results.records import published_runs, read_values

RESULTS = Path(__file__).parents[2] / "results"


def drawn(rng, documents, *, size=1, correlation=0.0, pairs=3):
    """Differences (pairs, documents) in groups of neighbours, half of each part shared by all pairs."""
    groups = np.arange(documents) // size

    def part(columns):
        return np.sqrt(0.5) * (rng.normal(size=columns) + rng.normal(size=(pairs, columns)))

    return np.sqrt(1 - correlation) * part(documents) + np.sqrt(correlation) * part(groups[-1] + 1)[:, groups]


def test_the_statistic_by_hand(monkeypatch):
    """Every run of every length, pair by pair, and the same random orders."""
    monkeypatch.setattr(dependence, "ORDERS", 19)
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 9, size=35).astype(float)
    pairs = rng.normal(size=(3, 35)) * weights
    pairs[2] = 0.5 * pairs[0] - 2 * pairs[1]  # as methods make pairs of each other
    rows = residuals(pairs, weights)
    assert rows == pytest.approx(np.stack([pair - pair.sum() / weights.sum() * weights for pair in pairs]))

    def ratio(rows, length):
        starts = range(35 - length + 1)
        return np.mean([
            np.mean([sum(row[start : start + length]) ** 2 for start in starts]) / (length * np.mean(row**2))
            for row in rows
        ])  # fmt: skip

    orders, lengths = np.random.default_rng(5), (2, 4, 8)  # four runs of 16 would need 64
    asked = [rows, *(rows[:, orders.permutation(35)] for _ in range(19))]
    table = np.array([[ratio(ordered, length) for length in lengths] for ordered in asked])
    largest = ((table - table.mean(axis=0)) / table.std(axis=0)).max(axis=1)
    tested = find_dependence(rows, seed=5)
    assert tested.p == np.mean(largest >= largest[0])
    assert tested.ratio == pytest.approx(table[0, lengths.index(tested.length)])
    assert find_dependence(np.zeros((2, 40))) is None
    assert find_dependence(rows[:, :7]) is None


@pytest.mark.parametrize(("documents", "simulations"), [(40, 400), pytest.param(300, 2000, marks=pytest.mark.slow)])
def test_independent_documents_alarm_at_the_stated_rate(monkeypatch, documents, simulations):
    """1 %: the share is within three standard errors of the simulation, whatever the distribution and the weights."""
    monkeypatch.setattr(dependence, "ORDERS", 99)  # p is at most 1 % for the largest of 100
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(simulations):
        weights = rng.integers(1, 50, size=documents).astype(float)
        differences = weights * rng.standard_t(3, size=(3, documents))
        alarms += find_dependence(residuals(differences, weights), seed=int(rng.integers(1 << 30))).alarms
    assert abs(alarms / simulations - LEVEL) <= 3 * np.sqrt(LEVEL * (1 - LEVEL) / simulations)


def committed(name, task, metric):
    """Return the residuals of all pairs of a committed comparison."""
    results, runs = load_results(RESULTS / name), published_runs(RESULTS / name)
    values = {
        method: [read_values(path)[task].metrics[metric] for path in its.values()] for method, its in runs.items()
    }
    sums = {method: -np.mean(by_seed, axis=0)[:, 0] for method, by_seed in values.items()}
    pairs = dict.fromkeys((one.method, one.reference) for one in results.comparisons)
    weights = next(iter(values.values()))[0][:, 1]
    return residuals(np.array([sums[method] - sums[reference] for method, reference in pairs]), weights)


def test_lines_of_few_articles_are_found_and_in_random_order_are_not():
    rows = committed("smollm2-135m-queries", "held_out_text", "nats_per_token")
    documents = rows.shape[1]
    assert documents == 128
    assert find_dependence(rows).alarms
    rng = np.random.default_rng(3)
    assert not any(find_dependence(rows[:, rng.permutation(documents)]).alarms for _ in range(5))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("smollm2-135m", "lambada_openai"),
        ("smollm2-135m-gpu", "lambada_openai"),
        ("smollm2-135m-gpu", "arc_easy"),
        ("gemma3-270m", "lambada_openai"),
        ("zoo", "tinyworld_endings"),
    ],
)
def test_tasks_of_independent_documents_are_quiet(monkeypatch, name, task):
    monkeypatch.setattr(dependence, "ORDERS", 199)
    assert not find_dependence(committed(name, task, "bits_per_byte")).alarms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("documents", "size", "correlation", "expected"),
    [(500, 5, 0.3, {"documents": 0.81, "runs": 0.94}), (1000, 20, 0.2, {"documents": 0.62, "runs": 0.90})],
)
def test_intervals_over_runs_of_neighbours_cover_at_their_rate(monkeypatch, documents, size, correlation, expected):
    monkeypatch.setattr(dependence, "ORDERS", 99)
    rng, covered = np.random.default_rng(4), {"documents": [], "runs": []}
    for _ in range(200):
        differences = drawn(rng, documents, size=size, correlation=correlation)
        # groups begin anywhere in a run
        differences = np.roll(differences, int(rng.integers(size)), axis=1)
        rows, mean = residuals(differences, np.ones(documents)), differences[0].mean()
        tested = find_dependence(rows, seed=int(rng.integers(1 << 30)))
        if not tested.alarms or documents / tested.length < 20:
            continue
        for kind, units in (
            ("documents", np.arange(documents)),
            ("runs", Neighbours.of(tested, documents).runs(documents)),
        ):
            sums = np.bincount(units, weights=rows[0])
            error = np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / documents
            covered[kind].append(abs(mean) < student.ppf(0.975, len(sums) - 1) * error)
    assert len(covered["runs"]) > 100
    for kind, share in expected.items():
        assert np.mean(covered[kind]) == pytest.approx(share, abs=3 * np.sqrt(share * (1 - share) / 200))


@pytest.mark.parametrize(
    ("units", "length", "expected"), [(640, 2, 8), (100, 2, 4), (60, 2, 2), (39, 2, 2), (128, 16, 16)]
)
def test_runs_are_as_long_as_leaves_enough_of_them(units, length, expected):
    neighbours = Neighbours.of(Dependence(p=0.003, length=length, ratio=2.0), units)
    assert neighbours == (expected, 0.003)
    assert neighbours.runs(units).tolist() == [index // expected for index in range(units)]
    groups = np.arange(3 * units) // 3
    assert neighbours.runs(3 * units, groups).tolist() == [index // expected for index in groups.tolist()]


def records(folder, differences, **columns):
    """Write a method and the baseline on a task; return the folders, and the task's result."""
    rng = np.random.default_rng(9)
    base = rng.normal(size=differences.shape[-1])
    runs = {"baseline": {0: write_record(folder / "baseline", "t", "score", base.tolist(), **columns)}}
    runs["it"] = {0: write_record(folder / "it", "t", "score", (base + differences).tolist(), **columns)}
    return runs


def test_a_comparison_takes_runs_of_neighbours_or_the_declared_groups(tmp_path):
    rng = np.random.default_rng(6)
    differences = drawn(rng, 400, size=5, correlation=0.6, pairs=1)[0]
    result, against = task_result("t", "score"), {"it": ["baseline"]}
    runs = records(tmp_path / "plain", differences)
    (compared,) = compare(Records(runs), {"t": result}, against)
    length = compared.clusters.run
    assert compared.clusters.groups == -(-400 // length) >= 20
    assert (compared.clusters.column, compared.clusters.p) == ("", 0.001)
    assert compared.test == "paired t over groups of documents"
    (warning,) = dependence_cautions([compared], {"t"})
    assert "neighbouring documents vary together (p = 0.001)" in warning
    assert f"tests take {compared.clusters.groups} groups of {length} neighbours as units" in warning
    assert "--cluster t=COLUMN" in warning
    assert "data.group" in next(iter(dependence_cautions([compared], ())))

    # the same as if the runs had been declared
    names = [f"run {index // length}" for index in range(400)]
    grouped = result.model_copy(update={"clusters": compared.clusters.model_copy(update={"run": None, "p": None})})
    declared = records(tmp_path / "declared", differences, cluster=names)
    (other,) = compare_by(Records(declared), [grouped], against, {})
    assert (other.low, other.high, other.p) == (compared.low, compared.high, compared.p)

    # with the true groups there is nothing to find
    true = records(tmp_path / "true", differences, cluster=[f"group {index // 5}" for index in range(400)])
    assert find_dependent(Records(true), [grouped], against) == {}
    assert find_dependent(Records(runs), [result], against).keys() == {"t"}
    assert not list(dependence_cautions([other], {"t"}))


def test_shares_of_dependent_documents_have_no_interval(tmp_path):
    right = np.random.default_rng(8).permutation([1.0] * 60 + [0.0] * 60)
    answers = np.where(np.arange(120) // 20 % 2, right, 1.0)  # the wrong ones of every second twenty are won
    runs = {"baseline": {0: write_record(tmp_path / "baseline", "t", "acc", right.tolist())}}
    runs["it"] = {0: write_record(tmp_path / "it", "t", "acc", answers.tolist())}
    tasks = {"t": task_result("t", "acc")}
    made = compare(Records(runs), tasks, {"it": ["baseline"]})
    assert made[0].clusters.run is not None
    (plain,), (grouped,) = (kept_of(Records(runs), ["it"], tasks, compared) for compared in ([], made))
    assert (plain.kept, plain.won) == (grouped.kept, grouped.won) == (1.0, answers[right == 0].mean())
    assert (plain.seeds, plain.right, plain.wrong) == (1, 60, 60)
    assert np.isfinite(plain.won_low)
    assert not np.isfinite(grouped.won_low)
    runs["it"][1] = runs["baseline"][0]  # a second seed, with the answers of the base
    (both,) = kept_of(Records(runs), ["it"], tasks)
    assert (both.seeds, both.kept, both.won) == (2, 1.0, plain.won / 2)
