"""Results as tables: the records that pandas, notebooks and CSV files show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hfpatch.errors import HfpatchError
from hfpatch.results.parts import Comparison, GroupResult, Part, TaskResult
from hfpatch.results.verdicts import Verdict
from hfpatch.support.markup import html_table

if TYPE_CHECKING:
    from pandas import DataFrame

    from hfpatch.results.schema import ComparisonResults, StudyResults

Record = dict[str, Any]

_COST = ("final_loss", "wall_s", "tokens_per_s", "peak_memory_bytes")
_TABLES = {
    "comparison": ("scores", "methods", "verdicts", "comparisons", "curves", "layers", "trials", "retention"),
    "pretraining": ("rows", "verdicts", "runs", "curves"),
    "evaluation": ("scores", "verdicts", "comparisons"),
}
"""The tables of each kind of results."""


class Tabular(Part):
    """Results that are tables, too: of pandas, and in a notebook."""

    kind: str

    def to_pandas(self, table: str | None = None) -> DataFrame:
        """Return a table of the results as a pandas DataFrame.

        Args:
            table: of a comparison ``scores``, ``methods``, ``verdicts``, ``comparisons``, ``curves``, ``layers``,
                ``trials`` or ``retention``; of a study ``rows``, ``verdicts``, ``runs`` or ``curves``; of an evaluation
                ``scores``, ``verdicts`` or ``comparisons``. The first if not given.

        Raises:
            HfpatchError: if there is no such table, or pandas is not installed.
        """
        names = _TABLES[self.kind]
        name = names[0] if table is None else table
        if name not in names:
            raise HfpatchError(f"to_pandas({name!r}): these results have no such table; there are {', '.join(names)}")
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise HfpatchError("to_pandas needs pandas, which is not installed; pip install pandas") from error
        return DataFrame(list(records(self, name)))

    def _repr_html_(self) -> str:
        """Return an HTML table, as a notebook shows the results: a row for each method, variant or model."""
        results: Any = self
        rows: list[Record] = []
        match self.kind:
            case "comparison":
                for name, method in results.methods.items():
                    row = {"method": name, "trainable": method.trainable}
                    for task in results.tasks:
                        metric = results.deciding[task].metric
                        mean, made = results.mean(name, task, metric), results.verdict(name, task, results.baseline)
                        shown = mean if made is None or mean is None else f"{mean:.4g} ({made.outcome})"
                        row[f"{task} ({metric})"] = shown
                    rows.append(row)
            case "pretraining":
                left_out = ("sd", "seconds_per_step", "diverged", "best")
                for record in records(self, "rows"):
                    rows.append({key: value for key, value in record.items() if key not in left_out})
            case _:
                for name, variant in results.variants.items():
                    row = {"model": name, "added": variant.added}
                    for group in (variant.groups or {}).values():
                        row |= {f"{group.group} ({metric})": value for metric, value in group.metrics.items()}
                    rows.append(row | {each.task: each.metrics.get(each.primary) for each in variant.scores.values()})
        notes = getattr(self, "warnings", []) if self.kind != "pretraining" else []
        name = getattr(self, "name", "") or self.kind
        state = "" if getattr(self, "complete", True) else " (incomplete)"
        headings = list(dict.fromkeys(key for row in rows for key in row))
        return html_table(f"{name}{state}", headings, ([row.get(key) for key in headings] for row in rows), notes)


def records(results: Any, table: str) -> Iterator[Record]:
    """Yield the rows of a table of any results, see `Tabular.to_pandas`."""
    if results.kind == "comparison":
        yield from _comparison_records(results, table)
    elif results.kind == "pretraining":
        yield from _study_records(results, table)
    elif table != "scores":
        yield from _pairs(results.verdicts if table == "verdicts" else results.comparisons)
    else:
        for name, variant in results.variants.items():
            own = {"model": name, "patch": variant.patch, "added": variant.added}
            for each in (*(variant.groups or {}).values(), *variant.scores.values()):
                yield from ({**own, **score, "is_group": isinstance(each, GroupResult)} for score in _scores(each))


def _scores(score: TaskResult | GroupResult) -> Iterator[Record]:
    if isinstance(score, GroupResult):  # it has no primary metric, and its tasks are taken as independent
        task, clusters, primary = score.group, None, None
    else:
        task, clusters, primary = score.task, score.clusters, score.primary
    for metric, value in score.metrics.items():
        yield {
            **{"task": task, "metric": metric, "value": value, "stderr": score.stderr.get(metric)},
            **{"n": score.n, "groups": clusters and clusters.groups, "grouped_by": clusters and clusters.column},
            "primary": metric == primary,
        }


def _comparison_records(results: ComparisonResults, table: str) -> Iterator[Record]:
    """Yield the records of one table of a comparison."""
    match table:
        case "scores":
            for name, method in results.methods.items():
                for seed, run in sorted(method.runs.items()):
                    own = {"method": name, "seed": seed, "trainable": method.trainable}
                    scores = results.scores_of(run).values()
                    yield from ({**own, **score} for each in scores for score in _scores(each))
        case "methods":
            for name, method in results.methods.items():
                held_out = list(method.held_out_losses.values())
                trained = [run.train for run in method.runs.values() if run.train is not None]
                yield {
                    "method": name,
                    **method.parameters.to_json(),
                    "form": method.form,
                    "matched_to": method.match.to if method.match is not None else None,
                    "seeds": len(method.runs),
                    "diverged": len(method.diverged),
                    "held_out_loss": fmean(held_out) if held_out else None,
                    **{key: fmean(getattr(each, key) for each in trained) if trained else None for key in _COST},
                }
        case "verdicts" | "comparisons":
            yield from _pairs(results.verdicts if table == "verdicts" else results.comparisons)
        case "curves":
            for name, method in results.methods.items():
                if (curve := method.curve) is not None:
                    for step, loss in zip(curve.steps, curve.loss, strict=True):
                        yield {"method": name, "step": step, "loss": loss, "held_out": curve.held_out.get(step)}
        case "layers":
            for name, method in results.methods.items():
                for each in method.layers:
                    own = {"method": name, "quantity": each.quantity, "group": each.group}
                    yield from ({**own, "layer": layer, "value": value} for layer, value in sorted(each.points.items()))
        case "trials" if (tuning := results.tuning) is not None:
            for trial in tuning.trials:
                found = {"method": trial.method, **trial.values, "loss": trial.loss}
                yield {**found, "diverged_step": trial.diverged_step, "chosen": tuning.is_chosen(trial)}
        case "retention" if (retention := results.retention) is not None:
            for point in retention.points:
                own = {"method": point.method, "scale": point.scale}
                own |= {"chosen": retention.chosen(point.method) == point.scale, "tuning_loss": point.tuning_loss}
                yield from ({**pair, **own} for pair in _pairs(point.comparisons))


def _pairs(pairs: Iterable[Comparison | Verdict]) -> Iterator[Record]:
    for each in pairs:
        record = each.model_dump(mode="json")
        clusters = record.pop("clusters", None)
        yield {**record, "groups": clusters["groups"] if clusters else None}


def _study_records(study: StudyResults, table: str) -> Iterator[Record]:
    """Yield the records of one table of a study."""
    match table:
        case "rows":
            for row in study.rows:
                found = row.improvement.to_json() if row.improvement is not None else {}
                yield {
                    **{"variant": row.variant, **row.point, "best": row.best},
                    **{"seeds": len(row.loss.values) if row.loss else 0},
                    **{"loss": row.loss.mean if row.loss else None, "sd": row.loss.sd if row.loss else None},
                    **{"improvement": found.get("mean"), **{key: found.get(key) for key in ("low", "high", "p")}},
                    **{"diverged": len(row.diverged), "seconds_per_step": row.seconds_per_step},
                    **study.variants[row.variant].parameters.to_json(),
                }
        case "verdicts":
            yield from _pairs(study.verdicts)
        case "runs":
            for run in study.runs:
                yield {
                    **{"variant": run.variant, **run.point, "seed": run.seed, "outcome": run.outcome},
                    **{"diverged_step": run.diverged_step, "loss": run.evaluation[-1][1] if run.evaluation else None},
                    **{key: getattr(run.train, key, None) for key in ("steps", "tokens", *_COST)},
                }
        case "curves":
            for run in study.runs:
                own = {"variant": run.variant, **run.point, "seed": run.seed}
                yield from ({**own, "step": step, "loss": loss} for step, loss in run.evaluation)
