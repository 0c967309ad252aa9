"""The loss on held-out documents as a task: a record of each document and a score, which are compared like others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hfpatch.data.documents import Documents
from hfpatch.evaluation.metrics import Array, metric_named, ratio_error
from hfpatch.results.held_out import HELD_OUT, NATS_PER_TOKEN
from hfpatch.results.records import hash_documents
from hfpatch.results.schema import TaskResult
from hfpatch.support.files import hash_values, write_text


def held_out_result(losses: Array, documents: Documents, records_dir: Path | None = None) -> TaskResult:
    """Return the loss in nats per token over all documents, each token weighing the same, and write their records.

    A document without a predicted token has no record.

    Args:
        losses: (documents, 2) nats and predicted tokens of each.
        documents: what identifies each, and its bytes.
        records_dir: where ``held_out_text.jsonl`` goes, one line a document: ``doc_id``, ``doc_hash``, the pair
            (log-likelihood, tokens) and the ``bytes`` of the text of these tokens. None writes nothing.
    """
    kept = np.flatnonzero(losses[:, 1] > 0).tolist()
    hashes = [documents.hashes[place] for place in kept]
    values = [(-float(losses[place, 0]), int(losses[place, 1])) for place in kept]
    if records_dir is not None:
        lines = (
            {"doc_id": place, "doc_hash": digest, NATS_PER_TOKEN: value, "bytes": int(documents.bytes[place])}
            for place, digest, value in zip(kept, hashes, values, strict=True)
        )
        write_text(records_dir / f"{HELD_OUT}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    metric = metric_named(NATS_PER_TOKEN, higher_is_better=False)
    errors = {NATS_PER_TOKEN: ratio_error(*metric.ratio_terms(values))} if len(values) > 1 else {}
    return TaskResult(
        task=HELD_OUT,
        n=len(kept),
        metrics={NATS_PER_TOKEN: metric.overall(values)},
        stderr=errors,
        primary=NATS_PER_TOKEN,
        higher_is_better=False,
        num_fewshot=0,
        data_sha256=(data := hash_documents(hashes)),
        prompts_sha256=data,  # the hash of a document is that of its tokens
        tokens_sha256=data,
        task_sha256=hash_values([HELD_OUT, NATS_PER_TOKEN]),
        version="1",
    )
