"""Texts as tasks: the held-out loss, and the change that a patch makes on a text that should be kept.

Each document has a record and each text a score, which are compared like those of tasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfpatch.data.documents import Documents
from hfpatch.data.rows import number_groups
from hfpatch.evaluation.clusters import count_groups
from hfpatch.evaluation.comparison import compare_by, find_dependent
from hfpatch.evaluation.metrics import Array, Metric, metric_named, metric_of
from hfpatch.evaluation.reading import Records
from hfpatch.evaluation.stats import Estimate, Part, over_documents
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.parts import NATS_PER_TOKEN, Clusters, Comparison, TaskResult
from hfpatch.results.records import hash_documents
from hfpatch.results.retention import AGREEMENT, FORGETTING, KL, RETENTION, KeptAnswers, RetentionPoint
from hfpatch.support.files import hash_values, write_text


def held_out_result(
    losses: Array, documents: Documents, records_dir: Path | None = None, *, starts: Array | None = None
) -> TaskResult:
    """Return the loss in nats per token over all documents, each token weighing the same, and write their records.

    Args:
        losses: (documents, 2) nats and predicted tokens of each; documents without tokens are left out.
        documents: their hashes and bytes.
        records_dir: where ``held_out_text.jsonl`` goes, one line a document: ``doc_id``, ``doc_hash``, the pair
            (log-likelihood, tokens) and the ``bytes`` of the text of these tokens. None writes nothing.
        starts: (2, 2), see :func:`hfpatch.training.validation.start_losses`.
    """
    rows = {}
    for index in np.flatnonzero(losses[:, 1] > 0).tolist():
        pair = (-float(losses[index, 0]), int(losses[index, 1]))
        rows[index] = {NATS_PER_TOKEN: pair, "bytes": int(documents.bytes[index])}
    result = _text_result(HELD_OUT, {NATS_PER_TOKEN: False}, rows, documents, records_dir)
    if starts is not None and starts[:, 1].all():
        first, inside = (starts[:, 0] / starts[:, 1]).tolist()
        result = result.model_copy(update={"starts": {"documents": first, "inside": inside}})
    return result


def retained_result(task: str, changes: Array, documents: Documents, records_dir: Path | None = None) -> TaskResult:
    """Return the scores on a text over all documents with tokens, and write their records.

    Args:
        task: the name of the scores.
        changes: (documents, 5), see :func:`hfpatch.training.retention.document_changes`.
        documents: their hashes and bytes.
        records_dir: where ``<task>.jsonl`` goes, one line a document: ``doc_id``, ``doc_hash``, and of each measure the
            pair of its sum (of ``bits_per_byte`` the log-likelihood) and the tokens or bytes. None writes nothing.
    """
    rows = {}
    for index in np.flatnonzero(changes[:, 0] > 0).tolist():
        tokens, base, patched, kl, agreed = map(float, changes[index])
        of_tokens = {KL: kl, AGREEMENT: agreed, FORGETTING: patched - base}
        sums = {name: (value, int(tokens)) for name, value in of_tokens.items()}
        rows[index] = {BITS_PER_BYTE: (-patched, int(documents.bytes[index])), **sums}
    return _text_result(task, RETENTION, rows, documents, records_dir)


def _text_result(
    task: str,
    measures: Mapping[str, bool],
    rows: Mapping[int, Mapping[str, Any]],
    documents: Documents,
    records_dir: Path | None,
) -> TaskResult:
    """Return the scores by measures (name -> higher is better), the first one primary, and write the records.

    ``rows`` has the values of each record by the document's index. Where documents come in groups, each record has the
    group as its ``cluster``, and standard errors are those over groups.
    """
    hashes = [documents.hashes[index] for index in rows]
    groups = None if documents.groups is None else number_groups([f"{documents.groups[index]}" for index in rows])
    units = len(rows) if groups is None else count_groups(groups)
    if records_dir is not None:
        clusters: Any = [{}] * len(rows) if groups is None else [{"cluster": str(group)} for group in groups.tolist()]
        named = zip(rows.items(), hashes, clusters, strict=True)
        lines = (
            json.dumps({"doc_id": index, "doc_hash": digest, **cluster, **row})
            for (index, row), digest, cluster in named
        )
        write_text(records_dir / f"{task}.jsonl", "".join(f"{line}\n" for line in lines))
    scores, errors = {}, {}
    for name in measures:
        metric, values = metric_named(name), [row[name] for row in rows.values()]
        scores[name] = metric.overall(values)
        if units > 1:
            terms = metric.ratio_terms(values)
            errors[name] = over_documents(*terms, groups=groups).error
    return TaskResult(
        task=task,
        n=len(rows),
        metrics=scores,
        stderr=errors,
        primary=(primary := next(iter(measures))),
        higher_is_better=measures[primary],
        num_fewshot=0,
        data_sha256=(data := hash_documents(hashes)),
        prompts_sha256=data,  # the hash of a document is that of its tokens
        tokens_sha256=data,
        task_sha256=hash_values([task, *measures]),
        version="1",
        clusters=None if groups is None else Clusters(column="data.group", groups=units),
    )


def point_name(method: str, scale: float) -> str:
    """Return the name in records of a method at a scale of its patch."""
    return method if scale == 1 else f"{method} at {scale:g}"


def compare_points(
    points: Sequence[RetentionPoint], records: Records, texts: Mapping[str, TaskResult], held_out: TaskResult | None
) -> list[RetentionPoint]:
    """Return points with their differences from the base; points without records are left out.

    Args:
        points: methods and scales.
        records: those of each point, under its `point_name`, and of the base.
        texts: any run's result of each text.
        held_out: the base's result on held-out text, if there is any.
    """
    measures = [
        result.model_copy(update={"primary": name, "higher_is_better": higher})
        for name, higher in RETENTION.items()
        for result in texts.values()
    ]
    on_new = [] if held_out is None else [held_out]

    # One answer for each text, from all points
    references = {point_name(point.method, point.scale): [records.baseline] for point in points}
    in_bits = [result for result in measures if result.primary == BITS_PER_BYTE]
    dependent = find_dependent(records, in_bits + on_new, references)
    compared = []
    for point in points:
        name = point_name(point.method, point.scale)
        if records.runs.get(name):
            asked = measures if point.scale == 1 else measures + on_new
            made = compare_by(records, asked, {name: references[name]}, dependent)
            comparisons = [one.model_copy(update={"method": point.method}) for one in made]
            compared.append(point.model_copy(update={"comparisons": comparisons}))
    return compared


def kept_of(
    records: Records,
    methods: Sequence[str],
    tasks: Mapping[str, TaskResult],
    comparisons: Sequence[Comparison] = (),
) -> list[KeptAnswers]:
    """Return the answers kept, gained and lost by each method, for every task whose answers are right or wrong.

    Methods without records are left out. Shares of a task whose documents ``comparisons`` take in groups have no
    interval.
    """
    in_groups = {one.task for one in comparisons if one.clusters is not None}
    kept, (base,) = list[KeptAnswers](), records.runs[records.baseline].values()
    for method in methods:
        runs = [path for _, path in sorted(records.runs.get(method, {}).items())]
        for task, result in tasks.items() if runs else ():
            if metric_of(result, {}) != Metric() or not result.higher_is_better:
                continue
            values = {run: np.asarray(v) for run, v in records.read_runs(result, [base, *runs]).items()}
            if all(np.isin(value, (0.0, 1.0)).all() for value in values.values()):
                grouped = result.clusters is not None or task in in_groups
                right, answers = values[base] == 1, np.stack([values[run] for run in runs])
                shares = share_of("kept", answers[:, right], grouped) | share_of("won", answers[:, ~right], grouped)
                counts = {"seeds": len(runs), "right": int(right.sum()), "wrong": int((~right).sum())}
                kept.append(KeptAnswers(method=method, task=task, **counts, **shares))
    return kept


def share_of(name: str, answers: Array, grouped: bool) -> dict[str, float]:
    """Return the share of right answers, (seeds, documents), and its interval over both, by field of `KeptAnswers`.

    One document right and one wrong are added for the interval, so that documents that all agree have some variation.
    Where documents come in groups there is none.
    """
    seeds, documents = answers.shape
    if not documents:
        return {name: math.nan}
    value = float(answers.mean())
    if grouped:
        return {name: value}
    of_documents = np.append(answers.mean(axis=0), [1.0, 0.0])
    parts = [Part(float(of_documents.std(ddof=1)) / math.sqrt(documents + 2), documents + 1.0)]
    if seeds > 1:
        parts.append(Part(float(answers.mean(axis=1).std(ddof=1)) / math.sqrt(seeds), seeds - 1.0))
    low, high = Estimate(value, tuple(parts)).interval
    return {name: value, f"{name}_low": max(0.0, low), f"{name}_high": min(1.0, high)}
