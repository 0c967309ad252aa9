"""Results as tables: the records that pandas, notebooks and CSV files show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from hfpatch.errors import HfpatchError
from hfpatch.results.layout import ComparisonFile
from hfpatch.results.parts import HELD_OUT, NATS_PER_TOKEN, GroupResult, Part, TaskResult, task_results
from hfpatch.support.markup import html_table

if TYPE_CHECKING:
    from pandas import DataFrame

Record = dict[str, Any]

COST = ("final_loss", "wall_s", "tokens_per_s", "peak_memory_bytes")


class Tabular(Part):
    """Results that are tables, too: of pandas, and in a notebook."""

    tables: ClassVar[tuple[str, ...]]
    """The names of the tables."""

    kind: str

    def to_pandas(self, table: str | None = None) -> DataFrame:
        """Return a table of the results as a pandas DataFrame.

        Args:
            table: of a comparison ``scores``, ``methods``, ``verdicts``, ``comparisons``, ``curves``, ``layers``,
                ``trials`` or ``retention``; of an evaluation ``scores``, ``verdicts`` or ``comparisons``. The first if
                not given.

        Raises:
            HfpatchError: if there is no such table, or pandas is not installed.
        """
        name = self.tables[0] if table is None else table
        if name not in self.tables:
            names = ", ".join(self.tables)
            raise HfpatchError(f"to_pandas({name!r}): these results have no such table; there are {names}")
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise HfpatchError("to_pandas needs pandas, which is not installed; pip install pandas") from error
        return DataFrame(list(self.records(name)))

    def records(self, table: str) -> Iterator[Record]:
        """Yield the rows of a table, see `to_pandas`."""
        raise NotImplementedError

    def overview(self) -> Iterator[Record]:
        """Yield a row for each method, variant or model, as a notebook shows the results."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the overview as an HTML table."""
        rows = list(self.overview())
        name = getattr(self, "name", "") or self.kind
        state = "" if getattr(self, "complete", True) else " (incomplete)"
        headings = list(dict.fromkeys(key for row in rows for key in row))
        values = ([row.get(key) for key in headings] for row in rows)
        return html_table(f"{name}{state}", headings, values, getattr(self, "warnings", []))


def score_records(score: TaskResult | GroupResult) -> Iterator[Record]:
    """Yield a row for each metric of a score."""
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


def pair_records(pairs: Iterable[Part]) -> Iterator[Record]:
    """Yield a row for each difference or verdict."""
    for pair in pairs:
        record = pair.to_json()
        clusters = record.pop("clusters")
        yield {**record, "groups": clusters and clusters["groups"]}


def comparison_records(results: ComparisonFile, table: str) -> Iterator[Record]:
    """Yield the rows of a table of a comparison, but those of its verdicts, which follow from what the file holds."""
    match table:
        case "scores":
            for name, method in results.methods.items():
                for seed, run in sorted(method.runs.items()):
                    of_run = {"method": name, "seed": seed, "trainable": method.trainable}
                    for score in task_results(results.tasks, run.evaluation).values():
                        yield from (of_run | row for row in score_records(score))
        case "methods":
            for name, method in results.methods.items():
                trained = [run.train for run in method.runs.values() if run.train is not None]
                scores = [
                    run.evaluation[HELD_OUT].metrics for run in method.runs.values() if HELD_OUT in run.evaluation
                ]
                losses = [metrics[NATS_PER_TOKEN] for metrics in scores if NATS_PER_TOKEN in metrics]
                yield {
                    "method": name,
                    **method.parameters.to_json(),
                    "form": method.form,
                    "matched_to": method.match.to if method.match is not None else None,
                    "seeds": len(method.runs),
                    "diverged": len(method.diverged),
                    "held_out_loss": fmean(losses) if losses else None,
                    **{key: fmean(getattr(train, key) for train in trained) if trained else None for key in COST},
                }
        case "comparisons":
            yield from pair_records(results.comparisons)
        case "curves":
            for name, method in results.methods.items():
                if (curve := method.curve) is not None:
                    for step, loss in zip(curve.steps, curve.loss, strict=True):
                        yield {"method": name, "step": step, "loss": loss, "held_out": curve.held_out.get(step)}
        case "layers":
            for name, method in results.methods.items():
                for series in method.layers:
                    of_series = {"method": name, "quantity": series.quantity, "group": series.group}
                    for layer, value in sorted(series.points.items()):
                        yield {**of_series, "layer": layer, "value": value}
        case "trials" if (tuning := results.tuning) is not None:
            for trial in tuning.trials:
                row = {"method": trial.method, **trial.values, "loss": trial.loss}
                yield {**row, "diverged_step": trial.diverged_step, "chosen": tuning.is_chosen(trial)}
        case "retention" if (retention := results.retention) is not None:
            for point in retention.points:
                of_point = {"method": point.method, "scale": point.scale, "tuning_loss": point.tuning_loss}
                of_point["chosen"] = retention.chosen(point.method) == point.scale
                yield from ({**row, **of_point} for row in pair_records(point.comparisons))
