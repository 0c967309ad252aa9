import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hfpatch.data.documents import Documents
from hfpatch.evaluation import Records
from hfpatch.evaluation.retention import compare_points, retained_result, share_of
from hfpatch.results.parts import Clusters
from hfpatch.results.records import write_values
from hfpatch.results.retention import KeptAnswers, RetentionPoint

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
    one = replace(documents(), bytes=np.eye(DOCUMENTS, dtype=int)[0])  # all others have no bytes of their own
    assert retained_result(TASK, values, one).stderr.keys() == {"kl", "top1_agreement", "forgetting"}


@pytest.mark.parametrize("grouped", [False, True])
def test_differences_have_intervals_over_seeds_and_documents_or_groups(tmp_path, grouped):
    """The jackknife that leaves out one document at a time, or one group of one or two from the records' clusters."""
    names = np.arange(DOCUMENTS) * 2 // 3 if grouped else np.arange(DOCUMENTS)
    described = replace(documents(), groups=names.astype(np.int32) if grouped else None)
    records = {"baseline": {0: tmp_path / "base"}, "lora": {}, "lora at 0.5": {}}
    texts = {TASK: retained_result(TASK, changes(0, base=True), described, tmp_path / "base")}
    write_values(tmp_path / "base", texts)
    for seed in range(3):
        for name, shift in (("lora at 0.5", 10), ("lora", 1)):
            folder = records[name][seed] = tmp_path / name / str(seed)
            scored = retained_result(TASK, changes(seed + shift), described, folder)
            write_values(folder, texts)
    points = [RetentionPoint(method="lora", scale=scale) for scale in (0.5, 1.0, 2.0)]
    compared = compare_points(points, Records(records), texts, None)
    assert [point.scale for point in compared] == [0.5, 1.0]  # at 2 there are no records
    assert {comparison.method for point in compared for comparison in point.comparisons} == {"lora"}

    kl, tokens = np.stack([changes(seed + 1)[:, 3] for seed in range(3)]), changes(1)[:, 0]
    units = [names == name for name in np.unique(names)]
    count = len(units)

    def error_of(sums):
        without = np.array([sums[~unit].sum() / tokens[~unit].sum() for unit in units])
        return math.sqrt((count - 1) / count * ((without - sums.sum() / tokens.sum()) ** 2).sum())

    of_seeds = (kl.sum(axis=1) / tokens.sum()).std(ddof=1) / math.sqrt(3)
    ratio, of_documents = kl.mean(axis=0).sum() / tokens.sum(), error_of(kl.mean(axis=0))
    half = math.hypot(stats.t.ppf(0.975, count - 1) * of_documents, stats.t.ppf(0.975, 2) * of_seeds)
    one = compared[1].comparison(TASK, "kl")
    assert (one.difference, one.low, one.high) == pytest.approx((ratio, ratio - half, ratio + half))
    assert one.test == f"paired t over seeds and {'groups of ' * grouped}documents"
    assert scored.stderr["kl"] == pytest.approx(error_of(kl[2]))
    clusters = Clusters(column="data.group", groups=count) if grouped else None
    assert texts[TASK].clusters == scored.clusters == one.clusters == clusters
    rows = [json.loads(line) for line in (folder / f"{TASK}.jsonl").read_text().splitlines()]
    assert [row.get("cluster") for row in rows] == [str(name) if grouped else None for name in names]


def test_a_share_of_answers_and_its_interval_over_seeds_and_documents():
    seeds = np.ones((2, 40))
    seeds[0, :10] = seeds[1, 5:14] = 0
    shares = share_of("kept", seeds, grouped=False)
    of_documents = np.r_[seeds.mean(axis=0), 1, 0]  # one right and one wrong are added
    errors = [(of_documents.std(ddof=1) / math.sqrt(42), 41), (np.std([30 / 40, 31 / 40], ddof=1) / math.sqrt(2), 1)]
    half = math.sqrt(sum((stats.t.ppf(0.975, freedom) * error) ** 2 for error, freedom in errors))
    assert shares == pytest.approx({"kept": 61 / 80, "kept_low": 61 / 80 - half, "kept_high": 61 / 80 + half})


def test_shares_of_all_and_of_none():
    shares = share_of("kept", np.ones((1, 3)), grouped=False)
    assert shares["kept"] == shares["kept_high"] == 1.0
    assert 0 < shares["kept_low"] < 1  # three documents that agree do not show that all would
    assert math.isnan(share_of("won", np.ones((1, 0)), grouped=False)["won"])
    grouped = share_of("kept", np.ones((1, 3)), grouped=True) | share_of("won", np.zeros((1, 2)), grouped=True)
    kept = KeptAnswers(method="lora", task="quiz", seeds=1, right=3, wrong=2, **grouped)
    assert (kept.kept, kept.won, kept.kept_low, kept.kept_high) == (1.0, 0.0, -math.inf, math.inf)
    assert json.loads(json.dumps(kept.to_json()))["kept_low"] is None
