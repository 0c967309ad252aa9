"""Results as tables: the records that pandas and CSV files show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from hfpatch.errors import HfpatchError
from hfpatch.results.parts import GroupResult, Part, TaskResult

if TYPE_CHECKING:
    from pandas import DataFrame

Record = dict[str, Any]


class Tabular(Part):
    """Results that are tables of pandas, too."""

    tables: ClassVar[tuple[str, ...]]
    """The names of the tables."""

    def to_pandas(self, table: str | None = None) -> DataFrame:
        """Return a table of the results as a pandas DataFrame.

        Args:
            table: of a comparison ``scores``, ``methods``, ``verdicts``, ``comparisons``, ``curves``, ``layers``,
                ``diagnostics``, ``trials`` or ``retention``; of an evaluation ``scores``, ``verdicts`` or
                ``comparisons``. The first if not given.

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

    def __repr__(self) -> str:  # with their values they have many pages
        return f"<{type(self).__name__}, to_pandas: {', '.join(self.tables)}>"


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
        yield {**record, "groups": clusters and clusters["groups"], "grouped_by": clusters and clusters["column"]}
