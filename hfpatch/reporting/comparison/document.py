"""A comparison, or several, as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure

from hfpatch.errors import listed
from hfpatch.reporting import document as doc
from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.comparison.answer import (
    changed_text,
    headline_table,
    lead,
    sentences,
    uncovered,
)
from hfpatch.reporting.comparison.attribution import attribution
from hfpatch.reporting.comparison.figures import FIGURES, figure_block
from hfpatch.reporting.comparison.frontier import budget_table
from hfpatch.reporting.comparison.retention import answers_table, retention_table
from hfpatch.reporting.comparison.tables import (
    difference_table,
    method_table,
    results_csv,
    score_table,
    seed_table,
)
from hfpatch.reporting.comparison.tuning import tuning_sections
from hfpatch.reporting.differing import measured_differently, trained_differently
from hfpatch.reporting.facts import environment_facts, protocol_facts
from hfpatch.reporting.numbers import NOTHING, count, duration
from hfpatch.results.cautions import rates_sentence
from hfpatch.results.comparison import ComparisonResults
from hfpatch.support.files import printable

_SEVERAL = (
    "Each difference is the paired one of its own run; none was tested across runs. Scores of runs that were measured "
    "alike can be compared."
)


@dataclass(frozen=True)
class RunData:
    """A run: its results and the other contents of its report."""

    title: str  # the run's label where several are reported side by side, else nothing
    results: ComparisonResults  # with methods by their names in the recipe
    unread: Sequence[str] = ()  # a sentence for each file that cannot be read or is left out
    drawn: Mapping[str, Figure] = field(default_factory=dict)  # the figures; the summary for a terminal needs none
    note: str = ""  # for tables that show some of the run's methods

    @cached_property
    def shown(self) -> ComparisonResults:
        """The results with every method under its label, for all but CSV files."""
        return self.results.labelled()

    @property
    def missing(self) -> list[str]:
        """A sentence for each thing that is missing."""
        return [*missing(self.shown), *self.unread]


def read_material(label: str, run_dir: Path, results: ComparisonResults) -> RunData:
    """Return the run of a folder, which names the folders of methods that the results do not have."""
    runs = run_dir / "runs"
    names = sorted(printable(path.name) for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    unknown = [name for name in names if name not in results.methods]
    left_out = [f"runs/{name}: not a method of these results, so it is left out." for name in unknown]
    return RunData(label, results, left_out)


def comparison_document(material: Sequence[RunData]) -> doc.Document:
    """Build the document of one comparison, or of several side by side, with what differs between them."""
    first, results = material[0], [run.shown for run in material]
    several = len(material) > 1
    opening: tuple[doc.Section, ...] = ()
    if several:
        runs = {run.title: run.results for run in material}
        measured, trained = tuple(measured_differently(runs)), tuple(trained_differently(runs))
        blocks: list[doc.Block] = [doc.Text(_SEVERAL)]
        blocks += [doc.Sentences(measured, "How they were measured")] if measured else []
        blocks += [doc.Sentences(trained, "How they were trained")] if trained else []
        opening = (doc.Section("differing", "What differs between the runs", tuple(blocks)),)
    bases = [run.study.baseline if run.study else str(run.model.get("name") or NOTHING) for run in results]
    times = [time for run in results if isinstance(time := run.provenance.get("wall_s"), int | float)]
    notes = doc.Sentences((*first.missing, *cautions(first.shown)), brief=True)
    return doc.Document(
        title=" and ".join(run.name or "Comparison" for run in results),
        description="Several runs, side by side." if several else first.results.description,
        complete=all(run.complete for run in results),
        glance=(
            ("Baseline" if first.results.study else "Frozen model", ", ".join(dict.fromkeys(bases))),
            ("Variants" if first.results.study else "Methods", count(len({e for run in results for e in run.others}))),
            ("Tasks", count(len({name for run in results for name in run.tasks}))),
            ("Seeds", count(len({seed for run in results for seed in run.seeds}))),
            ("Protocol", ", ".join(dict.fromkeys(run.protocol.replace("_", " ") for run in results))),
            ("Wall time", duration(sum(times)) if times else NOTHING),
        ),
        opening=opening,
        parts=tuple(
            doc.Part(tuple(_sections(run)), run.title, f"run{index}-" if several else "")
            for index, run in enumerate(material, 1)
        ),
        closing=(citation_section(results),),
        summary=(notes, *_answer(first.shown)),  # the answer last, where a reader looks
    )


def _answer(results: ComparisonResults, figures: Sequence[doc.Figure] = ()) -> list[doc.Block]:
    """Return the answer in sentences, its figures, and one table."""
    table = headline_table(results) if results.frontier is None else budget_table(results, results.frontier)
    blocks: list[doc.Block] = [doc.Text(lead(results), "headline"), sentences(results), *figures]
    blocks += [table] if table.rows else []
    blocks += [doc.Text(changed, "caption")] if (changed := changed_text(results)) else []
    return blocks


def cautions(results: ComparisonResults) -> tuple[str, ...]:
    """Return everything that is to be known of the numbers, each once."""
    every = [*filter(None, [rates_sentence(results)]), *results.warnings, *uncovered(results)]
    return tuple(dict.fromkeys(every))


def _sections(material: RunData) -> Iterator[doc.Section]:
    results = material.shown

    def figures(name: str) -> list[doc.Figure]:  # one or none
        if name not in material.drawn:
            return []
        return [figure_block(name, material.drawn[name], material.results)]

    yield doc.Section("answer", "Answer", tuple(_answer(results, figures("differences"))))  # the first screen
    warnings = cautions(results)
    notes: list[doc.Block] = [doc.Sentences(warnings)] if warnings else []
    if not results.complete:
        checked = "parameters match, updates survive and the base is sound"
        if results.study is not None:
            checked = "parameters match and updates survive"
        notes.append(doc.Text(f"Not checked yet: whether {checked} is checked once a run is complete."))
    if absent := material.missing:
        notes.append(doc.Sentences(tuple(absent), "What is missing"))
    yield doc.Section("cautions", "Cautions", tuple(notes) or (doc.Text("None."),))
    if results.frontier is not None:
        yield doc.Section("frontier", "Gain by budget", (*figures("frontier"), headline_table(results)), "Budgets")
    if shown := figures("training"):
        yield doc.Section("training", FIGURES["training"].title, tuple(shown), "Training")
    # learning and forgetting
    table, answers = retention_table(results), answers_table(results)
    forgotten: list[doc.Block] = [*figures("retention"), *(block for block in (table, answers) if block.rows)]
    if forgotten:
        yield doc.Section("retention", "Learning and forgetting", tuple(forgotten), "Forgetting")
    yield from attribution(results)
    yield from tuning_sections(results, figures("tuning"))
    if shown := figures("diagnostics"):
        yield doc.Section("diagnostics", FIGURES["diagnostics"].title, tuple(shown), "Size of f")
    if shown := figures("layers"):
        yield doc.Section("layers", FIGURES["layers"].title, tuple(shown), "Layers")
    # every number
    pairs = difference_table(results)
    yield doc.Section("paired", "Paired differences", (pairs if pairs.rows else doc.Text("None was made."),))
    download = doc.Download("results.csv", "every number of every run (CSV)", results_csv({"": material.results}))
    scores = [table for table in (score_table(results), seed_table(results)) if table.rows]
    yield doc.Section("results", "Scores", (*scores, download, method_table(results)))
    protocol = doc.Facts(tuple(protocol_facts(material.results)))
    environment = doc.Facts(tuple(environment_facts(material.results)), "Environment")
    yield doc.Section("protocol", "Protocol and provenance", (protocol, environment), "Protocol", folded=True)


def missing(results: ComparisonResults) -> Iterator[str]:
    """Name the runs, scores, curves and comparisons that are not there."""
    if not results.complete:
        command = "compare" if results.study is None else "pretrain"
        yield f"The run is not complete: the same hfpatch {command} with --resume finishes it."
    if not results.methods:
        yield f"No {results.noun} has a result."
    if not results.tasks and (results.study is None or results.data.get("held_out")):
        yield "No task has a result."
    if unfinished := [name for name, method in results.methods.items() if not method.runs]:
        yield f"{listed(unfinished)}: no run is finished."
    for name, method in results.methods.items():
        seeds = results.seeds_asked(name) if method.runs and (method.parts or results.study) else ()
        if absent := [str(seed) for seed in seeds if seed not in method.runs]:
            yield f"{name}: no finished run with seed{'s' * (len(absent) > 1)} {listed(absent)}."
        for seed, run in sorted(method.runs.items()):
            scored = {task: score.metrics for task, score in run.evaluation.items()}
            tasks = [task for task, info in results.tasks.items() if info.primary not in scored.get(task, {})]
            if tasks and run.diverged_step is None:
                yield f"{name}, seed {seed}: no result on {', '.join(tasks)}."
    if results.complete and results.tasks and len(results.methods) > 1 and not results.comparisons:
        yield "No paired comparison was made."
    names = results.methods.items()
    without = [
        name
        for name, method in names
        if method.curve is None and not method.all_diverged and any(run.train for run in method.runs.values())
    ]
    if without:
        yield f"{', '.join(without)}: no training curve (metrics.jsonl)."
