"""The frontier of a comparison with budgets, for its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hfpatch.evaluation.exchange import Rate, exchange_rates
from hfpatch.evaluation.metrics import Aggregation
from hfpatch.recipes.budgets import family_of
from hfpatch.recipes.pairs import is_lora
from hfpatch.results.frontier import Exchange, Frontier, FrontierLine
from hfpatch.results.schema import ComparisonResults


def frontier_of(
    results: ComparisonResults,
    records: Mapping[str, Mapping[int, Path]],
    aggregations: Mapping[str, Mapping[str, Aggregation]],
) -> Frontier | None:
    """Return the frontier of complete results, by the measure that decides the first task; None without budgets.

    The reference is the LoRA called ``lora``, or the first one, that has several budgets.
    """
    families: dict[str, dict[str, int]] = {}
    for name in results.others:
        families.setdefault(family_of(name), {})[name] = results.methods[name].trainable
    task = results.first_task
    if task is None or all(name in own for name, own in families.items()):
        return None
    loras = [f for f, own in families.items() if len(own) > 1 and is_lora(results.methods[next(iter(own))].parts)]
    reference = "lora" if "lora" in loras else next(iter(loras), None)
    measure, rates = results.deciding[task], dict[str, Rate | str]()
    if reference is not None and results.baseline is not None:
        result = results.methods[results.baseline].runs[0].evaluation[task]
        chosen = result.model_copy(update={"primary": measure.metric, "higher_is_better": measure.higher_is_better})
        of_task = aggregations.get(task, {})
        rates = exchange_rates(
            records,
            families,
            reference,
            baseline=results.baseline,
            result=chosen,
            aggregation=of_task.get(measure.metric),
        )
    lines = [
        FrontierLine(
            method=name,
            points=sorted(own, key=lambda each: own[each]),
            exchange=_exchange(rates[name]) if name in rates else None,
        )
        for name, own in families.items()
    ]
    return Frontier(task=task, metric=measure.metric, reference=reference, lines=lines)


def _exchange(found: Rate | str) -> Exchange:
    if isinstance(found, str):
        return Exchange(why=found)
    ends = {"low": found.low, "high": found.high, "lowest": found.lowest, "highest": found.highest}
    return Exchange(rate=found.value, **ends)
