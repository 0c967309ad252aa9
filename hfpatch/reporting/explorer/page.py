"""The explorer's page: every gain of many runs, with figures and filters that its script draws."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hfpatch.errors import HfpatchError
from hfpatch.reporting.differing import evaluated_differently
from hfpatch.reporting.document import Column, Document, Explorer, Part, Row, Section, Sentences, Table, Text
from hfpatch.reporting.explorer.entries import Axis, Entry, entries
from hfpatch.reporting.facts import digest, settings_text
from hfpatch.reporting.html import html
from hfpatch.reporting.numbers import NOTHING, count
from hfpatch.reporting.report import labels
from hfpatch.results.cautions import baseline_cautions
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.folder import RESULTS, Results, load_results
from hfpatch.support.files import write_text

_READING = (
    "Each panel has one base model, one task with the same documents and prompts, and one metric; where the horizontal "
    "axis is time or memory, one machine too. A gain is the difference to the base of its own run, or to a study's "
    "baseline, turned so that up is better, with its 95 % interval, the corrected one of a verdict; nothing was tested "
    "across runs. Verdicts are those of the run's own list: one measure decides a task, by a paired test, corrected "
    "over its question.",
    "Blue circles are better, red diamonds worse, squares the same within the margin. Grey is no finding: hollow "
    "circles are undecided, crosses were not tested or are of a measure that decides nothing.",
    "The line is the Pareto front of what is shown: the methods that are better after correction and for which no "
    "other one is as good with fewer parameters (or less time, or memory). Where nothing was tested it is dashed. It "
    "uses the points alone: where intervals overlap, the order is not certain.",
    "Time and memory are those of training, the mean over seeds, on the machine that the run names; on a CPU the "
    "memory is the peak of the whole process.",
)
_RUNS = ("run", "kind", "model", "methods", "tasks", "better", "seeds", "started", "commit")
_VERDICTS = ("better", "worse", "same", "undecided", "not tested", "no verdict", "diverged")


@dataclass(frozen=True)
class Source:
    """A run: its label, its results, and the address of its report from the page or nothing."""

    label: str
    results: Results
    report: str = ""


def write_explorer(roots: Sequence[Path], out: Path) -> Document:
    """Write one page over all runs among ``roots`` and in the folders below them, and return its document.

    Args:
        roots: folders that ``hfpatch compare``, ``pretrain`` or ``eval --output`` wrote, or folders that hold them.
        out: the page; links to reports are relative to it.

    Raises:
        HfpatchError: if one is missing, none has results that can be read, or ``out`` cannot be written.
    """
    # each run folder once, but not those inside a run
    folders: dict[Path, Path] = {}
    for top in roots:
        if not top.is_dir():
            raise HfpatchError(f"{top}: no such folder; give folders that compare, pretrain or eval wrote")
        for root, below, files in os.walk(top):
            below.sort()
            if RESULTS in files or "recipe.yaml" in files:
                folders.setdefault(Path(root).resolve(), Path(root))
                below.clear()
    if not folders:
        names = ", ".join(map(str, roots[:3])) + (", ..." if len(roots) > 3 else "")
        raise HfpatchError(f"{names}: no {RESULTS} there or below; give folders that compare, pretrain or eval wrote")
    sources: list[Source] = []
    left_out: list[str] = []
    for label, folder in labels(list(folders.values())).items():
        try:
            results, report, href = load_results(folder, None), folder / "report.html", ""
            if report.is_file():
                try:
                    path = os.path.relpath(report.resolve(), out.resolve().parent)
                    href = quote(path.replace(os.sep, "/"))
                except ValueError:  # another drive
                    href = report.resolve().as_uri()
            sources.append(Source(label, results, href))
        except HfpatchError as error:
            left_out.append(str(error))
    if not sources:
        raise HfpatchError(left_out[0])
    document = explorer_document(sources, left_out)
    write_text(out, html(document))
    return document


def explorer_document(sources: Sequence[Source], left_out: Sequence[str] = ()) -> Document:
    """Build the page's document from runs; ``left_out`` says which folders could not be read."""
    of_run = {source.label: entries(source.results) for source in sources}
    every = [entry for run_entries in of_run.values() for entry in run_entries]
    # the table of the runs, and what is missing
    missing, rows = [*left_out], []
    for source in sources:
        label, results = source.label, source.results
        listed, complete = of_run[label], getattr(results, "complete", True)
        rows.append(_row_of_run(source, listed))
        if all(entry.gain is None for entry in listed):
            scores = " Its scores are listed." if listed and isinstance(results, EvaluationResults) else ""
            missing.append(f"{label}: no differences to show; nothing was compared with a base.{scores}")
        if not complete:
            missing.append(f"{label}: the run is not complete.")
        if isinstance(results, ComparisonResults):
            missing += [f"{label}: {caution}" for caution in baseline_cautions(results)]
        if not source.report:
            missing.append(f"{label}: it has no report.html to open; hfpatch report writes it.")
    differing = tuple(evaluated_differently({source.label: source.results for source in sources}))
    columns = tuple(Column(name, number=name in ("methods", "tasks", "better", "seeds")) for name in _RUNS)
    caption = "Better: how many methods are significantly better than the base on at least one task and metric."
    table = Table("every-run", "Runs", columns, tuple(rows), caption, heading=False, search=True)
    sections = [
        Section("explore", "Gain against cost", (Explorer(_data(sources, of_run)),), "Explore"),
        Section("reading", "How to read it", (Sentences(_READING),), "Reading"),
        Section("runs", "Runs", (table,)),
    ]
    sections += [Section("differing", "What differs between the runs", (Sentences(differing),))] if differing else []
    sections += [Section("missing", "What is missing", (Sentences(tuple(missing)),))] if missing else []
    runs, differences = count(len(sources)), count(sum(entry.gain is not None for entry in every))
    return Document(
        title="Results explorer",
        kind="explorer",
        description="What methods gain, and what they cost, over many runs.",
        glance=(
            ("Runs", runs),
            ("Models", count(len({(entry.axis.model, entry.axis.identity) for entry in every}))),
            ("Tasks", count(len({entry.axis.task for entry in every}))),
            ("Methods", count(len({entry.method for entry in every}))),
            ("Differences", differences),
        ),
        parts=(Part(tuple(sections)),),
        summary=(
            Text(f"Differences: {differences}, runs: {runs}"),
            *((Sentences(tuple(f"left out: {reason}" for reason in left_out)),) if left_out else ()),
        ),
    )


def _row_of_run(source: Source, listed: Sequence[Entry]) -> Row:
    """Return a run's line in the table of runs."""
    results, provenance = source.results, source.results.provenance
    kind = "study" if getattr(results, "study", None) else results.kind
    seeds = {entry.seeds for entry in listed if entry.seeds}
    cells = (
        source.label,
        kind + ("" if getattr(results, "complete", True) else ", incomplete"),
        listed[0].axis.model if listed else NOTHING,
        count(len({entry.method for entry in listed})),
        count(len({entry.axis.task for entry in listed})),
        count(len({entry.method for entry in listed if entry.verdict == "better"})),
        "–".join(map(str, sorted({min(seeds), max(seeds)}))) if seeds else NOTHING,
        str(provenance.get("started") or NOTHING)[:10],
        str(provenance.get("commit") or NOTHING)[:12],
    )
    return Row(cells, href=source.report)


def _data(sources: Sequence[Source], of_run: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """Return the data of the page's script: the axes, the runs, and every entry as a row of values."""
    axes: dict[Axis, int] = {}
    machines: dict[str, int] = {}
    runs, rows = list[dict[str, Any]](), list[list[Any]]()
    for source in sources:
        results, where, training = source.results, source.results.provenance, ""
        threads = f"{where['threads']} thread{'s' * (where['threads'] != 1)}" if where.get("threads") else ""
        named = str(where.get("device") or ""), str(where.get("platform") or ""), threads
        machine = ", ".join(filter(None, named))
        index = machines.setdefault(machine, len(machines)) if machine else None
        if isinstance(results, ComparisonResults):  # the same for methods that share a line
            settings = {key: value for key, value in results.training.items() if key != "seeds"}
            tuned = " tuned" if results.tuning is not None else ""
            training = f"{digest(results.data.get('sha256'))} {settings_text(settings)}{tuned}"
        for entry in of_run[source.label]:
            axis_index = axes.setdefault(entry.axis, len(axes))
            numbers = (entry.gain, entry.low, entry.high, entry.seconds, entry.memory)
            *gain, seconds, memory = (None if size is None else float(f"{size:.6g}") for size in numbers)  # to draw
            cost = entry.parameters, seconds, memory, entry.seeds
            rows.append([len(runs), axis_index, entry.method, *gain, entry.text, _VERDICTS.index(entry.verdict), *cost])
        runs.append({"label": source.label, "href": source.report, "machine": index, "training": training})
    # models of one name that are not the same have their hash behind it, and documents that are not the same theirs
    shown = []
    for axis in axes:
        same_name = {other.identity for other in axes if other.model == axis.model}
        model = f"{axis.model} ({axis.identity or 'unknown hash'})" if len(same_name) > 1 else axis.model
        alike = [other for other in axes if replace(other, data=axis.data, prompts=axis.prompts) == axis]
        hashes = [axis.data and f"data {axis.data[:8]}"] if len({other.data for other in alike}) > 1 else []
        hashes += [axis.prompts] if len({other.prompts for other in alike}) > 1 else []
        documents = ", ".join(filter(None, (axis.documents, *hashes)))
        fields = {name: getattr(axis, name) for name in ("task", "metric", "unit", "primary", "reference", "size")}
        shown.append({**fields, "model": model, "documents": documents})
    return {"axes": shown, "runs": runs, "machines": list(machines), "verdicts": _VERDICTS, "rows": rows}
