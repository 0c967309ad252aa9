"""A comparison, or several, as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hfpatch.reporting import document as doc
from hfpatch.reporting.citations import citation_section
from hfpatch.reporting.comparison.answer import answer, headline_table, uncovered
from hfpatch.reporting.comparison.attribution import attribution
from hfpatch.reporting.comparison.figures import Layers, figure_csv
from hfpatch.reporting.comparison.frontier import frontier_blocks
from hfpatch.reporting.comparison.merging import Check
from hfpatch.reporting.comparison.retention import CAPTION, answers_table, retention_sentences, retention_table
from hfpatch.reporting.comparison.samples import Samples, read_samples
from hfpatch.reporting.comparison.tables import (
    difference_table,
    method_table,
    results_csv,
    score_table,
    seed_table,
    sides_table,
    task_table,
)
from hfpatch.reporting.comparison.tuning import tuning_csv, tuning_sections
from hfpatch.reporting.facts import environment_facts, protocol_facts
from hfpatch.reporting.numbers import MOST_METHODS, NOTHING, count, duration
from hfpatch.results.cautions import rates_sentence, warned_of_floor
from hfpatch.results.schema import ComparisonResults
from hfpatch.results.series import QUANTITIES, read_analyses
from hfpatch.support.files import printable

_FIGURES = {
    "differences": (
        "Differences to the baseline",
        "Differences",
        "Differences to the baseline, to the right is better; thick lines are plain 95 % intervals, thin ones the "
        "corrected intervals of the verdicts.",
    ),
    "retention": ("Learning against forgetting", "Forgetting", CAPTION),
    "quality": (
        "Quality against trainable parameters",
        "Quality",
        "The mean over seeds against trainable parameters; bars are the standard deviation over seeds, the grey line "
        "is the baseline. A mark at a panel's edge lies outside it; its number is beside it.",
    ),
    "training": (
        "Training curves",
        "Training",
        "The training loss, mean over seeds, as a running mean; and the same minus that of one method. All methods see "
        "the same batches, so the noise of the batches cancels there. Where the loss on held-out text was measured, it "
        "has a panel of its own.",
    ),
    "layers": (
        "Layer by layer",
        "Layers",
        "Layer by layer, the mean over seeds. Norms are Frobenius norms of what training left in the saved patch; of "
        "several series of one method in a panel, such as heads, the mean is drawn.",
    ),
}
"""Title, short title and caption of each figure."""
_SAMPLES = (
    "Gained: documents that most seeds of a method get right and the baseline wrong; lost: the reverse. Of a measure "
    "that is neither right nor wrong, the documents whose value changed most are listed. What is shown of a document "
    "is what the evaluation recorded."
)
_LEGEND = (
    "Better, worse: a paired test at 5 % with Holm's correction over all methods and tasks of its question. No "
    "difference shown: the test finds none, which does not prove that there is none.",
    "One measure decides a task: bits per byte of the right answer or the text, else its primary metric. Bits per byte "
    "of right answers also see style; whether wrong answers gained too is in the margin, which has no verdict.",
    "[Intervals] of gains are corrected: all of a question cover with 95 %. More in docs/fair-comparison.md.",
)


@dataclass(frozen=True)
class RunData:
    """A run, or several that share a table: the results and the other contents of its report.

    Attributes:
        title: the run's label where several are reported side by side, else nothing.
        results: the results.
        layers: the series by layer.
        samples: the documents that changed sides.
        missing: a sentence for each thing that is missing.
        sources: label -> results of each run behind it, for protocol and environment.
        drawn: the figures as SVG documents, by name. The summary for a terminal needs none.
        unlabelled: the run with every method under its name in the recipe; None where it has no labels.
        note: a sentence for tables that show some of the run's methods.
    """

    title: str
    results: ComparisonResults
    layers: Layers
    samples: Samples
    missing: Sequence[str]
    sources: Mapping[str, ComparisonResults]
    drawn: Mapping[str, str] = field(default_factory=dict)
    unlabelled: RunData | None = None
    note: str = ""

    @property
    def data(self) -> RunData:
        """The run for CSV files, with names of methods and not labels."""
        return self.unlabelled or self

    def renamed(self, results: ComparisonResults, names: Mapping[str, str]) -> RunData:
        """Return the run with other results, and with the methods in ``names`` alone, each by its new name."""
        layers = [(names[name], series) for name, series in self.layers if name in names]
        sides = [replace(side, method=names[side.method]) for side in self.samples.sides if side.method in names]
        return replace(self, results=results, layers=layers, samples=replace(self.samples, sides=tuple(sides)))

    def labelled(self) -> RunData:
        """Return the run with every method under its label."""
        return replace(self.renamed(self.results.labelled(), self.results.labels), unlabelled=self)


def read_material(label: str, run_dir: Path, results: ComparisonResults) -> RunData:
    """Read the documents that changed sides and the analyses beside the results."""
    samples = read_samples(run_dir, results)
    layers, broken = [], []
    for name, method in results.methods.items():
        analyses, unread = read_analyses(run_dir, name)
        known = {(each.quantity, each.group): each for each in (*analyses, *method.layers)}
        layers += [(name, series) for series in known.values()]
        broken += unread
    order = {quantity: place for place, quantity in enumerate(QUANTITIES)}
    layers.sort(key=lambda pair: order.get(pair[1].quantity, len(order)))
    runs = run_dir / "runs"
    names = sorted(printable(path.name) for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    unknown = [name for name in names if name not in results.methods]
    left_out = [f"runs/{name}: not a method of these results, so it is left out." for name in unknown]
    absent = [*missing(results), *left_out, *broken, *samples.missing]
    return RunData(label, results, layers, samples, absent, {label: results})


def comparison_document(material: Sequence[RunData], checks: Sequence[Check] = ()) -> doc.Document:
    """Build the document of one comparison, or of several: side by side, or as one where they share its tables.

    ``checks`` say whether several runs agree, in each respect.
    """
    first, results = material[0], [each.results for each in material]
    several = len(material) > 1
    sources = [source for each in material for source in each.sources.values()]
    labels = [label for each in material for label in each.sources]
    compared: list[doc.Section] = []
    if checks:  # whether the runs agree
        apart = ", ".join(check.what.lower() for check in checks if check.decides and check.verdict != "same")
        other = [check.what.lower() for check in checks if not check.decides and check.verdict != "same"]
        differ = f"They differ, or are not known to agree, in: {', '.join(other)}."
        words = (
            f"These runs cannot share a table, because they do not agree in: {apart}. Each has its own part."
            if several
            else "These runs measured the same frozen model on the same documents, so they share the tables. Each "
            "difference is the paired one of its own run; none was tested across runs. "
            f"{differ if other else 'They agree in all else.'}"
        )
        rows = []
        for check in checks:
            tone: doc.Tone = "better" if check.verdict == "same" else "worse" if check.decides else "not tested"
            verdict = doc.Cell((check.verdict,), tone)
            rows.append(doc.Row((check.what, verdict, *check.values, check.consequence or NOTHING)))
        columns = tuple(map(doc.Column, ("of the runs", "verdict", *labels, "what follows")))
        table = doc.Table("common", "What the runs have in common", columns, tuple(rows), heading=False)
        compared.append(doc.Section("comparability", "Comparability", (doc.Text(words), table)))
    times = [time for each in sources if isinstance(time := each.provenance.get("wall_s"), int | float)]
    return doc.Document(
        title=" and ".join(each.name or "Comparison" for each in results),
        description="Several runs, side by side." if several else first.results.description,
        complete=all(each.complete for each in results),
        glance=(
            ("Frozen model", ", ".join(dict.fromkeys(str(each.model.get("name") or NOTHING) for each in results))),
            ("Methods", count(len({name for each in results for name in each.others}))),
            ("Tasks", count(len({name for each in results for name in each.tasks}))),
            ("Seeds", count(len({seed for each in results for seed in each.seeds}))),
            ("Protocol", ", ".join(dict.fromkeys(each.protocol.replace("_", " ") for each in results))),
            ("Wall time", duration(sum(times)) if times else NOTHING),
        ),
        opening=tuple(compared) if several else (),
        parts=tuple(
            doc.Part(tuple(_sections(each, () if several else compared)), each.title, f"run{place}-" if several else "")
            for place, each in enumerate(material, 1)
        ),
        closing=(citation_section(sources),),
        summary=(
            score_table(first.results),
            doc.Sentences((*warned_of_floor(first.results), *uncovered(first.results), *first.missing)),
            headline_table(first.results),
            *frontier_blocks(first.results, None, first.results),
            *([retention] if (retention := retention_table(first.results)).rows else []),
            doc.Text(f"{answer(first.results)} {rates_sentence(first.results)}".strip()),
        ),
    )


def _sections(material: RunData, compared: Sequence[doc.Section]) -> Iterator[doc.Section]:
    results, samples, drawn = material.results, material.samples, material.drawn
    # the sentence, the table of methods, the differences, and the warnings
    blocks: list[doc.Block] = [doc.Text(answer(results), "headline")]
    blocks += frontier_blocks(results, drawn.get("frontier"), material.data.results)
    table = headline_table(results)
    if table.rows:
        blocks += [table, *(doc.Text(line, "caption") for line in _LEGEND)]
    blocks += [_figure("differences", material)] if "differences" in drawn else []
    warnings = [*filter(None, [rates_sentence(results)]), *warned_of_floor(results), *uncovered(results)]
    if warnings:
        blocks.append(doc.Sentences(tuple(dict.fromkeys(warnings)), "Warnings"))
    elif results.complete:
        blocks.append(doc.Text("None."))
    else:
        checked = "whether parameters match, updates survive and the base is sound is checked once a run is complete"
        blocks.append(doc.Text(f"Not checked yet: {checked}."))
    if material.missing:
        blocks.append(doc.Sentences(tuple(material.missing), "What is missing"))
    yield doc.Section("answer", "Answer", tuple(blocks))
    yield from compared
    if results.tasks:
        yield doc.Section("what", "What the tasks are", (task_table(results, samples.documents),), "Tasks")
    yield from attribution(results)
    # learning and forgetting
    table, answers = retention_table(results), answers_table(results)
    forgotten: list[doc.Block] = [retention_sentences(results), table] if table.rows else []
    if "retention" in drawn:
        forgotten.insert(1, _figure("retention", material))
    forgotten += [answers] if answers.rows else []
    if forgotten:
        yield doc.Section("retention", "Learning and forgetting", tuple(forgotten), "Forgetting")
    # how methods were trained
    yield from tuning_sections(results, drawn.get("tuning"), tuning_csv(material.data.results))
    for name in ("quality", "training", "layers"):
        if name in drawn:
            title, short, _ = _FIGURES[name]
            yield doc.Section(name, title, (_figure(name, material),), short)
    # every number
    if samples.sides:
        # sides by method and task, and the documents that they name, for the page's script
        methods, tasks = (list(dict.fromkeys(getattr(e, of) for e in samples.sides)) for of in ("method", "task"))
        sides: list[list[dict[str, Any] | None]] = [[None] * len(tasks) for _ in methods]
        for side in samples.sides:
            changes = [[change.document, round(change.gained, 6), change.lost] for change in side.changes]
            listed = {"seeds": side.seeds, "binary": side.gained is not None, "left_out": side.left_out}
            sides[methods.index(side.method)][tasks.index(side.task)] = {**listed, "changes": changes}
        browser = doc.Browser({"methods": methods, "tasks": tasks, "sides": sides, "documents": samples.documents})
        shown = (doc.Text(_SAMPLES, "caption"), browser, sides_table(samples.sides))
        yield doc.Section("samples", "What changed sides", shown)
    pairs = difference_table(results)
    yield doc.Section("paired", "Paired differences", (pairs if pairs.rows else doc.Text("None was made."),))
    download = doc.Download("results.csv", "every number of every run (CSV)", results_csv({"": material.data.results}))
    yield doc.Section("results", "Scores", (score_table(results), seed_table(results), download, method_table(results)))
    # the facts of each run behind the part, with its label where there are several
    runs = [(label if len(material.sources) > 1 else "", each) for label, each in material.sources.items()]
    protocol = tuple(doc.Facts(tuple(protocol_facts(each)), label) for label, each in runs)
    yield doc.Section("protocol", "Protocol and provenance", protocol, "Protocol")
    environment = tuple(doc.Facts(tuple(environment_facts(each)), label) for label, each in runs)
    yield doc.Section("environment", "Environment", environment)


def _figure(name: str, material: RunData) -> doc.Figure:
    title, _, caption = _FIGURES[name]
    others = len(material.results.others)
    if others > MOST_METHODS:
        caption += (
            f" Of {others} methods the {MOST_METHODS} are drawn whose differences to the baseline have the smallest p, "
            "in either direction; the tables and the data have all."
        )
    return doc.Figure(
        name, title, caption, material.drawn[name], figure_csv(name, material.data.results, material.data.layers)
    )


def missing(results: ComparisonResults) -> Iterator[str]:
    """Name the runs, scores, curves and comparisons that are not there."""
    if not results.complete:
        yield "The run is not complete: the same hfpatch compare with --resume finishes it."
    if not results.methods:
        yield "No method has a result."
    if not results.tasks:
        yield "No task has a result."
    for name, method in results.methods.items():
        if not method.runs:
            yield f"{name}: no run is finished."
            continue
        for seed in results.seeds if method.parts else ():
            if seed not in method.runs:
                yield f"{name}: no finished run with seed {seed}."
        for seed, run in sorted(method.runs.items()):
            scored = {task: score.metrics for task, score in run.evaluation.items()}
            tasks = [task for task, info in results.tasks.items() if info.primary not in scored.get(task, {})]
            if tasks and run.diverged_step is None:
                yield f"{name}, seed {seed}: no result on {', '.join(tasks)}."
    if results.tasks and len(results.methods) > 1 and not results.comparisons:
        yield "No paired comparison was made."
    for name, method in results.methods.items():
        if method.curve is None and any(run.train for run in method.runs.values()):
            yield f"{name}: no training curve (metrics.jsonl)."
