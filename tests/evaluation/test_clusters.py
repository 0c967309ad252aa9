"""Documents that come in groups: standard errors, intervals and tests take the groups as independent."""

import math
from fnmatch import fnmatchcase
from pathlib import Path

import lm_eval.tasks
import numpy as np
import pytest
from lm_eval.api import metrics as lm_evals
from lm_eval.tasks._yaml_loader import load_yaml
from own_tasks import read_record, task_result, write_record, write_task
from scipy.stats import t as student

from hfpatch.data.rows import number_groups
from hfpatch.errors import HfpatchError
from hfpatch.evaluation import Records, TaskResult, clusters, compare, comparison, evaluate, index, load_tasks, stats
from hfpatch.evaluation.run import Storage
from hfpatch.evaluation.selection import select
from hfpatch.evaluation.stats import Estimate
from hfpatch.recipes.evaluation import EvaluationSettings

TASK = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": ["no", "yes"],
    "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}, {"metric": "f1"}],
}  # fmt: skip


SIZES = {
    "equal": lambda groups, rng: np.full(groups, 5),
    "varied": lambda groups, rng: rng.geometric(0.2, size=groups),
    "one large": lambda groups, rng: np.array([3] * (groups - 1) + [groups]),
}


def result(task, primary, groups=None):
    return task_result(task, primary, clusters=None if groups is None else {"column": "passage", "groups": groups})


def write(folder, task, metric, values, names=None):
    return write_record(folder, task, metric, values, **({} if names is None else {"cluster": names}))


def by_hand(differences, weights, names):
    """The jackknife that leaves out one group at a time, document by document."""
    whole, left = sum(differences) / sum(weights), []
    for out in dict.fromkeys(names):
        kept = [i for i, name in enumerate(names) if name != out]
        left.append(sum(differences[i] for i in kept) / sum(weights[i] for i in kept))
    return math.sqrt((len(left) - 1) / len(left) * sum((value - whole) ** 2 for value in left)), len(left)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_error_is_that_of_the_jackknife(grouped):
    """Over groups, and over documents, each of which is a group by itself."""
    rng = np.random.default_rng(0)
    names = [str(name) for name in (rng.integers(0, 7, size=40) if grouped else range(40))]
    differences, weights = rng.normal(size=40), rng.integers(1, 9, size=40).astype(float)
    error, count = by_hand(differences, weights, names)
    groups = number_groups(names) if grouped else None
    assert stats.over_documents(differences, weights, groups=groups) == pytest.approx((error, count - 1))
    assert number_groups(["b", None, "b", None, "a"]).tolist() == [0, 1, 0, 2, 3]


def test_shares_have_one_group_gained_and_one_lost():
    differences, weights = np.zeros(50), np.ones(50)
    groups = np.repeat(np.arange(10), 5)
    unchanged = stats.over_documents(differences, weights, shares=True, groups=groups)
    assert unchanged.freedom == 11
    assert unchanged.error > 0
    differences[:5] = 1  # one whole group gained: the groups that are added are as large
    gained = stats.over_documents(differences, weights, shares=True, groups=groups)
    names = [*map(str, groups), *("gained",) * 5, *("lost",) * 5]
    expected, count = by_hand([*differences, *[1.0] * 5, *[-1.0] * 5], [1.0] * 60, names)
    assert gained == pytest.approx((expected, count - 1))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("together", [0.0, 0.5, 0.9])
def test_intervals_cover_at_their_rate(kind, together):
    """Documents of a group share ``together`` of their variance."""
    rng = np.random.default_rng(3)
    repeats, groups = 1500, 25
    sizes = SIZES[kind](groups, rng)
    members, weights = np.repeat(np.arange(groups), sizes), np.ones(sizes.sum())
    covered = []
    for _ in range(repeats):
        scores = math.sqrt(together) * rng.normal(size=groups)[members]
        scores += math.sqrt(1 - together) * rng.normal(size=len(members))
        parts = (stats.over_documents(scores, weights, groups=units) for units in (members, None))
        covered.append([abs(scores.mean()) <= Estimate(0.0, (part,)).reach(0.05) for part in parts])
    over_groups, over_documents = np.mean(covered, axis=0)
    assert over_groups == pytest.approx(0.945, abs=3 * math.sqrt(0.95 * 0.05 / repeats))
    assert together == 0 or over_documents < 0.8
    assert (kind, together) != ("equal", 0.5) or over_documents == pytest.approx(0.75, abs=0.033)


def test_a_comparison_with_one_seed_is_students_over_groups(tmp_path):
    """With several seeds it is compared in the tests of retention."""
    rng = np.random.default_rng(5)
    names = [str(name) for name in np.repeat(np.arange(24), 4)]
    words = rng.integers(5, 90, size=96).astype(float)
    base = words * rng.normal(3.0, 0.3, size=96)
    values = base - words * np.repeat(rng.normal(0.03, 0.05, size=24), 4)
    runs = {
        name: {0: write(tmp_path / name, "novel", "bits_per_byte", list(zip(-nats, words, strict=True)), names)}
        for name, nats in (("baseline", base), ("a", values))
    }
    (made,) = compare(Records(runs), {"novel": result("novel", "bits_per_byte", 24)}, {"a": ["baseline"]})
    difference = (values - base) / math.log(2)
    error, count = by_hand(difference, words, names)
    reach, expected = student.ppf(0.975, count - 1) * error, difference.sum() / words.sum()
    assert made.difference == pytest.approx(expected)
    assert (made.low, made.high) == pytest.approx((expected - reach, expected + reach))
    assert made.test == "paired t over groups of documents"
    assert (made.n, made.clusters.groups, made.clusters.column) == (96, 24, "passage")


def test_a_score_that_is_no_ratio_is_resampled_by_groups(tmp_path):
    rng, drawn = np.random.default_rng(6), []

    def median(values):
        drawn.append(values)
        return lm_evals.median(values)

    names = [str(name) for name in np.repeat(np.arange(30), 6)]
    runs = {}
    for name, shift in (("a", 0.4), ("b", 0.0)):
        values = np.repeat(rng.normal(shift, 1.0, size=30), 6)
        runs[name] = {0: write(tmp_path / name, "odd", "steps", values, names)}
    records = Records(runs, aggregations={"odd": {"steps": median}})
    (apart,) = compare(records, {"odd": result("odd", "steps", 30)}, {"a": ["b"]})
    counts = [np.unique(draw, return_counts=True)[1] for draw in drawn]  # of each group's value
    assert len(drawn) > 2 * comparison.RESAMPLES
    assert all(sizes.sum() == 180 and (sizes % 6 == 0).all() for sizes in counts)
    (naive,) = compare(records, {"odd": result("odd", "steps")}, {"a": ["b"]})
    assert apart.test == "paired bootstrap t over groups of documents"
    assert apart.high - apart.low > 1.7 * (naive.high - naive.low)


def test_two_tasks_with_one_function_are_resampled_apart(tmp_path):
    rng = np.random.default_rng(7)
    runs = {name: {0: tmp_path / name} for name in "ab"}
    for task, spread in (("one", 1.0), ("two", 10.0)):
        for name in "ab":
            write(tmp_path / name, task, "steps", spread * rng.normal(size=40))
    tasks = {task: result(task, "steps") for task in ("one", "two")}
    records = Records(runs, aggregations={task: {"steps": lm_evals.median} for task in tasks})
    one, two = compare(records, tasks, {"a": ["b"]})
    (alone,) = compare(records, {"two": tasks["two"]}, {"a": ["b"]})
    assert (two.low, two.high) == (alone.low, alone.high)
    assert two.high - two.low > 4 * (one.high - one.low)


@pytest.mark.parametrize("groups", [1, 19])
def test_too_few_groups_get_no_verdict(tmp_path, groups):
    names = [str(i % groups) for i in range(100)]
    scores = {"a": 1.0, "b": 0.0}
    runs = {name: {0: write(tmp_path / name, "quiz", "acc", [value] * 100, names)} for name, value in scores.items()}
    (compared,) = compare(Records(runs), tasks={"quiz": result("quiz", "acc", groups)}, references={"a": ["b"]})
    assert (compared.test, compared.p) == ("none (too few groups)", None)


@pytest.fixture
def grouped_task(support, tmp_path):
    """Settings of a task with five questions on each passage, whose file says so or does not."""
    texts = enumerate(support.passages(60))
    rows = [{"question": text, "label": i % 2, "passage": {"id": i // 5}, "single": None} for i, text in texts]
    support.write_rows(tmp_path / "rows.jsonl", rows)

    def make(name="quiz", column=None, **options):
        metadata = {"version": 1.0} | ({} if column is None else {"cluster": column})
        write_task(tmp_path, name, **TASK, metadata=metadata)
        return EvaluationSettings(tasks=(name,), include_path=tmp_path, **options)

    return make


def test_records_and_results_name_the_groups(taught, tokenizer, grouped_task, tmp_path):
    chosen = grouped_task(column="passage")
    scored = evaluate(taught, tokenizer, select(chosen), storage=Storage(records=tmp_path / "a"))["quiz"]
    rows = read_record(tmp_path / "a", "quiz")
    assert [row["cluster"] for row in rows[::5]] == [row["cluster"] for row in rows[4::5]]
    assert len({row["cluster"] for row in rows}) == 12 == scored.clusters.groups
    right = [float(row["acc"]) for row in rows]
    assert scored.stderr["acc"] == pytest.approx(
        by_hand(right, [1.0] * 60, [row["doc"]["passage"]["id"] for row in rows])[0]
    )
    assert TaskResult.model_validate(scored.to_json()) == scored
    errors = {}
    for column, groups in ((None, None), ("single", 60), ("label", 2)):
        settings = grouped_task(column="passage", cluster={"quiz": column})
        again = evaluate(taught, tokenizer, select(settings))["quiz"]
        assert (again.clusters and again.clusters.groups) == groups
        assert again.metrics == scored.metrics
        errors[groups] = again.stderr
    assert errors[60] == errors[None] != errors[2]  # a group for each document changes nothing
    assert evaluate(taught, tokenizer, select(grouped_task(limit=8)))["quiz"].to_json()["clusters"] is None


def test_an_unknown_column_is_refused_before_anything_is_scored(taught, tokenizer, grouped_task, tmp_path):
    folder, message = tmp_path / "records", "task quiz: its documents have no column 'pasage' to be the cluster"
    for given in ({"cluster": {"quiz": "pasage"}}, {"column": "pasage"}):
        with pytest.raises(HfpatchError, match=rf"{message} \(did you mean 'passage'\?\)"):
            evaluate(taught, tokenizer, select(grouped_task(**given)), storage=Storage(records=folder))
    assert not folder.exists()


def test_known_tasks_have_their_columns(grouped_task, monkeypatch):
    monkeypatch.setitem(clusters.KNOWN_CLUSTERS, "quiz_*", "passage")
    cases = (("quiz_one", {}, "passage"), ("quiz_one", {"quiz_one": None}, None), ("quiz", {}, None))
    for name, given, expected in cases:
        chosen = grouped_task(name=name)
        tasks = load_tasks(chosen.tasks, include_path=chosen.include_path)
        assert clusters.cluster_columns(tasks, given).get(name) == expected
    monkeypatch.setitem(clusters.KNOWN_CLUSTERS, "quiz_*", "article")  # another task under a known one's name
    assert clusters.cluster_columns(tasks, {}) == {}


@pytest.mark.parametrize(("pattern", "column"), clusters.KNOWN_CLUSTERS.items())
def test_the_known_tasks_of_the_installed_lm_eval_have_their_columns(pattern, column):
    """Every task of the pattern's names reads the column, in its file or in the code beside it."""
    folders = {"boolq": "super_glue", "multirc": "super_glue", "record": "super_glue", "squadv2": "squadv2"}
    stem = pattern.removeprefix("super_glue-").removesuffix("_*").split("-")[0]
    folder = Path(lm_eval.tasks.__file__).parent / folders.get(stem, stem)
    entries = {name: entry for name, entry in index._index((folder,)).items() if fnmatchcase(name, pattern)}
    defined = {name: entry for name, entry in entries.items() if entry.kind.name in index.TASKS}
    assert defined
    for name, entry in defined.items():
        config = load_yaml(entry.yaml_path, resolve_func=False)
        code = [path.read_text(encoding="utf-8") for path in entry.yaml_path.parent.glob("*.py")]
        uses = (f"{{{{{column}}}}}", f"{{{{{column}.", f'doc["{column}"]')
        assert any(use in text for use in uses for text in (str(config), *code)), name
