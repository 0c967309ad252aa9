import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hfpatch.data.documents import Documents
from hfpatch.evaluation import Records
from hfpatch.evaluation.retention import compare_points, retained_result
from hfpatch.results.parts import Clusters
from hfpatch.results.records import write_values
from hfpatch.results.retention import RetentionPoint

TASK = "retention_old"
DOCUMENTS = 30


def documents():
    return Documents([f"{index:016x}" for index in range(DOCUMENTS)], np.arange(10, 10 + DOCUMENTS) * 4)


def changes(seed, *, base=False):
    """Tokens, the base's nats (of all seeds alike), the method's, KL and agreements of each document."""
    tokens = np.arange(10, 10 + DOCUMENTS, dtype=float)
    nats = np.random.default_rng(0).uniform(1, 2, DOCUMENTS) * tokens
    if base:
        return np.stack([tokens, nats, nats, 0 * tokens, tokens], axis=1)
    rng = np.random.default_rng(seed)
    patched, kl = nats + rng.normal(0.2, 0.3, DOCUMENTS) * tokens, rng.gamma(2, 0.1, DOCUMENTS) * tokens
    return np.stack([tokens, nats, patched, kl, np.floor(tokens * 0.8)], axis=1)


def test_the_scores_are_ratios_of_sums(tmp_path):
    values = changes(3)
    scored = retained_result(TASK, values, documents(), tmp_path)
    tokens, base, patched, kl, agreed = values.sum(axis=0)
    assert scored.n == DOCUMENTS
    assert scored.metrics == {
        "bits_per_byte": pytest.approx(patched / math.log(2) / documents().bytes.sum()),
        "kl": pytest.approx(kl / tokens),
        "top1_agreement": pytest.approx(agreed / tokens),
        "forgetting": pytest.approx((patched - base) / tokens),
    }
    rows = [json.loads(line) for line in (tmp_path / f"{TASK}.jsonl").read_text().splitlines()]
    assert rows[4]["kl"] == [pytest.approx(values[4, 3]), 14]
    values[7] = 0  # a document without tokens has no record
    assert retained_result(TASK, values, documents()).n == DOCUMENTS - 1


def test_differences_have_intervals_over_documents_and_seeds(tmp_path):
    records = {"baseline": {0: tmp_path / "base"}, "lora": {}, "lora at 0.5": {}}
    texts = {TASK: retained_result(TASK, changes(0, base=True), documents(), tmp_path / "base")}
    write_values(tmp_path / "base", texts)
    for seed in range(3):
        for name, shift in (("lora", 1), ("lora at 0.5", 10)):
            folder = records[name][seed] = tmp_path / name / str(seed)
            retained_result(TASK, changes(seed + shift), documents(), folder)
            write_values(folder, texts)
    points = [RetentionPoint(method="lora", scale=scale) for scale in (0.5, 1.0, 2.0)]
    compared = compare_points(points, Records(records), texts, None)
    assert [point.scale for point in compared] == [0.5, 1.0]  # at 2 there are no records
    assert {comparison.method for point in compared for comparison in point.comparisons} == {"lora"}
    kl = np.stack([changes(seed + 1)[:, 3] for seed in range(3)])
    tokens = changes(1)[:, 0]
    mean, ratio = kl.mean(axis=0), kl.mean(axis=0).sum() / tokens.sum()
    without = np.array([np.delete(mean, n).sum() / np.delete(tokens, n).sum() for n in range(DOCUMENTS)])
    of_documents = math.sqrt((DOCUMENTS - 1) / DOCUMENTS * ((without - ratio) ** 2).sum())
    of_seeds = (kl.sum(axis=1) / tokens.sum()).std(ddof=1) / math.sqrt(3)
    half = math.hypot(stats.t.ppf(0.975, DOCUMENTS - 1) * of_documents, stats.t.ppf(0.975, 2) * of_seeds)
    one = compared[1].comparison(TASK, "kl")
    assert (one.difference, one.low, one.high) == pytest.approx((ratio, ratio - half, ratio + half))


@pytest.mark.parametrize("grouped", [False, True])
def test_differences_on_a_text_in_groups_vary_over_groups(tmp_path, grouped):
    """The jackknife that leaves out one group at a time, here of one or two documents, from the records' clusters."""
    names = np.arange(DOCUMENTS) * 2 // 3
    described = replace(documents(), groups=names.astype(np.int32) if grouped else None)
    base = retained_result(TASK, changes(0, base=True), described, tmp_path / "base")
    folder = tmp_path / "lora"
    scored = retained_result(TASK, changes(1), described, folder)
    for path in (tmp_path / "base", folder):
        write_values(path, [TASK])
    (point,) = compare_points(
        [RetentionPoint(method="lora", scale=1.0)],
        Records({"baseline": {0: tmp_path / "base"}, "lora": {0: folder}}),
        {TASK: base},
        None,
    )
    kl, tokens = changes(1)[:, 3], changes(1)[:, 0]
    units = [names == name for name in np.unique(names)] if grouped else [np.arange(DOCUMENTS) == n for n in range(30)]
    count, ratio = len(units), kl.sum() / tokens.sum()
    without = np.array([kl[~unit].sum() / tokens[~unit].sum() for unit in units])
    error = math.sqrt((count - 1) / count * ((without - ratio) ** 2).sum())
    one = point.comparison(TASK, "kl")
    rows = [json.loads(line) for line in (folder / f"{TASK}.jsonl").read_text().splitlines()]
    if grouped:
        assert base.clusters == scored.clusters == one.clusters == Clusters(column="data.group", groups=count)
        assert [row["cluster"] for row in rows] == [str(name) for name in names]
        assert scored.stderr["kl"] == pytest.approx(error)
        half = stats.t.ppf(0.975, count - 1) * error
        assert (one.low, one.high) == pytest.approx((ratio - half, ratio + half))
    else:
        assert base.clusters is one.clusters is None
        assert not any("cluster" in row for row in rows)
        assert scored.stderr["kl"] == pytest.approx(error, rel=0.1)  # the jackknife and the delta method
