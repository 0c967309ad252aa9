"""Documents that come in groups, such as several questions on one passage, whose scores vary together.

Standard errors that take such documents as independent are too small. The independent unit is the group: its terms and
weights are summed, ``a_g = Σ aᵢ`` and ``c_g = Σ cᵢ`` over its documents (see `hfpatch.evaluation.metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfpatch.errors import HfpatchError, nearest
from hfpatch.evaluation.metrics import Array

Groups = NDArray[np.int64]
"""The group of each document, (documents,), counted from 0."""

KNOWN_CLUSTERS = {
    "belebele_*": "flores_passage",
    "boolq": "passage",
    "boolq-seq2seq": "passage",
    "drop": "passage",
    "mc_taco": "sentence",
    "multirc": "paragraph",
    "qa4mre_*": "document_str",
    "record": "passage",
    "squadv2": "context",
    "super_glue-boolq-t5-prompt": "passage",
    "super_glue-multirc-t5-prompt": "paragraph",
    "xquad_*": "context",
}
"""The columns of lm-eval's tasks that ask several questions on one text, by task name or pattern.

Sources: the column is the text that the task's own prompt shows before the question (lm-eval 0.4.13); Miller (2024,
arXiv 2411.00640) names DROP and SQuAD. RACE is not here: lm-eval's ``race`` has one document for each article."""


def cluster_columns(tasks: Mapping[str, Any], given: Mapping[str, str | None]) -> dict[str, str]:
    """Return by task the column that groups its documents, for the tasks that have one.

    It is the one in ``given`` (None for none), else the task's own ``metadata.cluster``, else the known one.

    Raises:
        HfpatchError: if a task's documents have no such column.
    """
    by_task = {}
    for name, task in tasks.items():
        declared = (task.get_config("metadata") or {}).get("cluster")
        listed = next((column for pattern, column in KNOWN_CLUSTERS.items() if fnmatchcase(name, pattern)), None)
        column = given.get(name, declared or listed)
        columns = list(next(iter(task.eval_docs), {}))
        if column is None or not columns:
            continue
        if column in columns:
            by_task[name] = column
        elif name in given or declared:  # a known task may have been replaced by another of its name
            hint = nearest(str(column), columns) or f"; there are {', '.join(columns)}"
            raise HfpatchError(f"task {name}: its documents have no column {column!r} to be the cluster{hint}")
    return by_task


def count_groups(groups: Groups) -> int:
    """Return the number of groups."""
    return int(groups.max()) + 1


def unit_sums(values: Array, groups: Groups | None) -> Array:
    """Return the sums over each group's documents, (..., groups), of values (..., documents); without groups these."""
    if groups is None:
        return values
    sums: Array = np.apply_along_axis(lambda row: np.bincount(groups, weights=row), -1, values)
    return sums
