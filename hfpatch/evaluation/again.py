"""A comparison decided again, by the rules of today, from the values that its folder keeps of every document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpatch.evaluation.comparison import compare
from hfpatch.evaluation.retention import compare_points, kept_of
from hfpatch.results.folder import load_results
from hfpatch.results.parts import HELD_OUT
from hfpatch.results.records import published_runs
from hfpatch.results.schema import ComparisonResults


def compare_again(folder: str | Path) -> ComparisonResults:
    """Compute the differences and verdicts of a comparison again, from ``values.safetensors`` in its folder.

    ``folder`` is that of ``hfpatch compare``, or a published copy, without the runs' folders or a model. Differences by
    measures that are no mean or ratio of the documents' values, such as BLEU, stay as they are.

    Returns:
        The results with ``comparisons``, ``retention`` and ``kept`` computed again, and the verdicts that follow.

    Raises:
        HfpatchError: if the folder has no results or no values.
    """
    folder = Path(folder)
    results, records = load_results(folder), published_runs(folder)
    if results.baseline is None:
        return results
    base, references = results.methods[results.baseline].runs[0], dict[str, list[str]]()
    for each in results.comparisons:
        others = references.setdefault(each.method, [])
        others += [] if each.reference in others else [each.reference]
    given: dict[str, Any] = {"tasks": base.evaluation, "baseline": results.baseline}
    made = {
        (one.method, one.reference, one.task, one.metric): one
        for one in compare(records, references=references, **given)
    }
    before = {(one.method, one.reference, one.task, one.metric): one for one in results.comparisons}
    comparisons = list({**before, **made}.values())
    kept = kept_of(records, methods=results.others, comparisons=comparisons, **given)
    update: dict[str, Any] = {"comparisons": comparisons, "kept": kept}
    if results.retention is not None:
        texts: dict[str, Any] = {"texts": base.retention or {}, "held_out": base.evaluation.get(HELD_OUT)}
        points = compare_points(results.retention.points, records, **texts, baseline=results.baseline)
        update["retention"] = results.retention.model_copy(update={"points": points})
    return results.model_copy(update=update)
