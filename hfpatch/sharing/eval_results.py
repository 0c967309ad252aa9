"""A patch's scores as the hub reads them: ``.eval_results/TASK.yaml``, one for each task on a data set of the hub.

The format: https://huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import math
from pathlib import Path

import yaml
from huggingface_hub import constants

from hfpatch.results.comparison import ComparisonResults

FOLDER = ".eval_results"


def eval_results(results: ComparisonResults, method: str, seed: int, repo_id: str) -> dict[str, bytes]:
    """Return the files of one method and seed, by their path in the repository."""
    from hfpatch.evaluation.tasks import hub_dataset  # lm-eval takes seconds to import

    include, date = results.evaluation.get("include_path"), results.provenance.get("started")
    version = results.provenance.get("versions", {}).get("lm_eval", "")
    found = {}
    for name, score in results.methods[method].runs[seed].evaluation.items():
        dataset = hub_dataset(name, include_path=None if include is None else Path(include))
        if dataset is not None and math.isfinite(score.metrics.get(score.primary, math.nan)):
            part = " of a part of the set only" if _is_limited(results, score.task) else ""
            entry = {
                "dataset": {"id": dataset, "task_id": score.task},
                "value": score.metrics[score.primary],
                **({"date": date} if date else {}),
                "source": {"url": f"{constants.ENDPOINT}/{repo_id}/blob/main/report.md", "name": "hfpatch report"},
                "notes": f"{score.primary} of lm-eval {version}, task version {score.version}, "
                f"{score.num_fewshot}-shot, {score.n} documents{part}, seed {seed}",
            }
            found[f"{FOLDER}/{name}.yaml"] = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True).encode()
    return found


def _is_limited(results: ComparisonResults, task: str) -> bool:
    """Return whether a limit holds for a task: that of all, its own, or one of a group that may have it."""
    tasks = results.evaluation.get("tasks")
    options = tasks if isinstance(tasks, dict) else {}
    own = [options[task]] if task in options else options.values()
    return results.evaluation.get("limit") is not None or any((each or {}).get("limit") is not None for each in own)
