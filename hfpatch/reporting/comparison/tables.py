"""The tables of a comparison: scores, paired differences, methods, seeds, tasks, and every number as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hfpatch.errors import listed
from hfpatch.reporting.comparison.forest import FOOTNOTES
from hfpatch.reporting.document import Cell, Column, Filter, Row, Table
from hfpatch.reporting.facts import settings_text
from hfpatch.reporting.numbers import (
    NOTHING,
    Scale,
    change_of,
    change_text,
    count,
    decimal,
    diverged_text,
    documents_text,
    gain_of,
    interval_of,
    margin_text,
    metric_text,
    p_text,
    part_text,
    scale_in,
    score,
    signed,
    significant,
    verdict_text,
)
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.cautions import level_at
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.low_noise import LOW_NOISE
from hfpatch.results.parts import Comparison
from hfpatch.results.tables import Record, pair_records
from hfpatch.results.verdicts import QUESTIONS, Verdict

_MOST_IN_MARKDOWN = 40  # verdicts; of more, Markdown has only differences that were found
_VERDICTS = ("better", "worse", "same", "undecided", "not tested", "no verdict")
_SCORES = ("method", "seed", "task", "metric", "value", "stderr", "n", "trainable")
_OF_PAIR = (
    *("other", "difference", "low", "high", "p", "test"),
    *("role", "question", "outcome", "margin", "corrected_low", "corrected_high", "p_corrected", "level", "family"),
    *("detectable", "margin_detectable", "seeds_needed", "documents_needed", "at_rates_tried", "changed", "why"),
)
_RESULTS = (*_SCORES, *_OF_PAIR, "groups", "grouped_by", "higher_is_better")


def score_table(results: ComparisonResults) -> Table:
    """Build the table of methods and tasks: the mean over seeds of each primary metric; without rows if no task is."""
    rows = []
    trained = [name for name in results.methods if name != results.base]
    seeds = {name: max((len(results.values(name, task)) for task in results.tasks), default=0) for name in trained}
    differ = len({*seeds.values()} - {0}) > 1  # means over other seeds do not compare
    for name, method in results.methods.items() if results.tasks else ():
        scores = {}
        for task, info in results.tasks.items():
            scale = scale_in(results, task, info.primary)
            text = score(results.mean(name, task), scale)
            if name != results.base:
                scores[task] = diverged_text(method.diverged) if method.diverged and text == NOTHING else text
                continue
            # seeds change nothing in a base, so its standard error over documents is that of its first run
            scored = (run.evaluation[task] for _, run in sorted(method.runs.items()) if task in run.evaluation)
            errors = [score.stderr[info.primary] for score in scored if info.primary in score.stderr]
            if errors and scale is Scale.POINTS:
                text = f"{text.removesuffix(' %')} ± {decimal(100 * errors[0], 1)} %"
            elif errors:
                text = f"{text} ± {significant(errors[0], 2)}"
            scores[task] = text
        number = [str(seeds.get(name) or NOTHING)] if differ else []
        rows.append(Row((name, *number, *scores.values()), strong=name == results.baseline))
    error = "" if results.base is None else "; the baseline with its standard error over documents"
    elsewhere = " Differences and verdicts are in the table of paired differences."
    return Table(
        name="main",
        title="Scores",
        columns=(
            Column(results.noun),
            *([Column("seeds", number=True)] if differ else []),
            *(_task(results, task) for task in results.tasks),
        ),
        rows=tuple(rows),
        caption=f"The mean over seeds{error}.{elsewhere if difference_table(results).rows else ''}",
        heading=False,
        search=True,
    )


def _task(results: ComparisonResults, task: str) -> Column:
    info = results.tasks[task]
    better = "higher is better" if info.higher_is_better else "lower is better"
    level = level_at(results, results.baseline, task)
    notes = (f"{info.primary}, n = {documents_text(info.n, info.clusters)}", better)
    return Column(task, (*notes, *([f"base {level}"] if level else [])), number=True)


def difference_table(results: ComparisonResults) -> Table:
    """Build the table of all paired differences: first the verdicts, then the measures that decide nothing."""
    decided = [pair for pair in results.verdicts if pair.task in results.tasks and pair.method in results.methods]
    asked = {verdict.pair: verdict.question for verdict in decided}
    others = [
        pair
        for pair in results.comparisons
        if pair.task in results.tasks and results.deciding[pair.task].metric != pair.metric and pair.pair in asked
    ]
    long = len(decided) > _MOST_IN_MARKDOWN and any(verdict.is_found for verdict in decided)
    rows = []
    for verdict in decided:
        elsewhere = verdict.role == "primary" or (verdict.other, verdict.task) == (results.baseline, results.first_task)
        rows.append(_difference_row(results, verdict, verdict.question, long and (elsewhere or not verdict.is_found)))
    absent = sum(row.page_only for row in rows)
    rows += [_difference_row(results, pair, asked[pair.pair], True) for pair in others]
    sizes = {verdict.question: verdict.family for verdict in decided if verdict.family}
    margins: dict[str, dict[str, None]] = {}
    for verdict in decided:
        if margin := margin_text(verdict, gain_of(results, verdict)):
            margins.setdefault(verdict.question, {})[margin] = None
    families = ", ".join(
        f"{_question(results, question)} {size}"
        + (f" (margin {listed(list(margins[question]))})" if question in margins else "")
        for question, size in sizes.items()
    )
    levels = (
        "All tests of a question share a level of 5 %. The confidence level of a corrected interval is 1 − level in "
        "results.csv."
    )
    tests = f" Tests of each question: {families}. {levels}" if sizes else ""
    left_out = [f"{absent} that are in the answer or not decided"] * bool(absent)
    left_out += [f"{len(others)} by other measures, which have no verdict"] * bool(others)
    more = f" Markdown leaves out {', and '.join(left_out)}; the page and results.csv have all."
    minus = f"{results.noun.capitalize()} minus reference."
    metrics = [*(pair.metric for pair in decided), *(pair.metric for pair in others)]
    measures = tuple(dict.fromkeys(map(metric_text, metrics)))
    return Table(
        name="differences",
        title="Paired differences",
        columns=(
            Column(results.noun, ("against",)),
            Column("task", ("measure",), tip="One measure decides a task; the others have no verdict."),
            Column("difference", ("plain 95 % interval",), number=True, tip=minus),
            Column("corrected", number=True, tip="The interval of the verdict, corrected over its question."),
            Column("p corrected", ("p alone",), number=True),
            Column("verdict"),
        ),
        rows=tuple(rows),
        caption=f"{minus}{tests}{more if left_out else ''}",
        heading=False,
        search=True,
        footnotes=FOOTNOTES,
        filters=(
            Filter("question", "Question", tuple(dict.fromkeys(_question(results, pair.question) for pair in decided))),
            Filter("measure", "Measure", measures),
            Filter("task", "Task", tuple(results.tasks)),
            Filter("verdicts", "Verdict", _VERDICTS),
        ),
    )


def _question(results: ComparisonResults, question: str) -> str:
    return "does it differ from the baseline?" if question == "base" and results.study else QUESTIONS[question]


def _difference_row(results: ComparisonResults, one: Verdict | Comparison, question: str, page_only: bool) -> Row:
    verdict, measure = one if isinstance(one, Verdict) else None, metric_text(one.metric)
    corrected: str | Cell = NOTHING
    p_values: str | Cell = NOTHING
    if verdict is not None and verdict.p_corrected is not None:
        corrected = interval_of(change_of(results, verdict, plain=False))
        p_values = Cell((p_text(verdict.p_corrected), p_text(verdict.p)))
    outcome = "no verdict" if verdict is None else Cell((verdict_text(results, verdict),), verdict.tone)
    difference = change_text(change_of(results, one)) if one.n > 0 else NOTHING
    cells = Cell(one.pair), Cell((one.task, measure)), difference, corrected, p_values, outcome
    keys = {"question": _question(results, question), "task": one.task, "measure": measure}
    keys["verdicts"] = "no verdict" if verdict is None else verdict.tone
    return Row(cells, faint=verdict is None, keys={key: (e,) for key, e in keys.items()}, page_only=page_only)


def seed_table(results: ComparisonResults) -> Table:
    """Build the table of each seed's scores by the primary metrics."""
    rows = []
    for name, method in results.methods.items():
        for seed, run in sorted(method.runs.items()) if results.tasks and (method.parts or method.variant) else ():
            texts = []
            for task, info in results.tasks.items():
                value = run.evaluation[task].metrics.get(info.primary) if task in run.evaluation else None
                texts.append(score(value, scale_in(results, task, info.primary)))
            rows.append(Row((name, str(seed), *texts), page_only=True))
    columns = (Column(results.noun), Column("seed", number=True), *(_task(results, task) for task in results.tasks))
    return Table("seeds", "Each seed", columns, tuple(rows), folded=True)


def method_table(results: ComparisonResults) -> Table:
    """Build the table of methods: parts, parameters, how they were matched, and how training went."""
    names = ("method", "parts", "form", "matched to", "trainable", "updates kept", "final loss")
    rows: list[tuple[str, ...]] = []
    if results.study is not None:
        common = results.study.architecture
        for name, method in results.methods.items():
            if (made := method.variant) is not None:
                architecture = {key: value for key, value in made.architecture.items() if key not in common}
                texts = made.query, made.description, settings_text(architecture), settings_text(made.training)
                rows.append((name, *(text or NOTHING for text in texts), count(method.trainable)))
        headings = ("variant", "query", "description", "architecture", "its own training", "parameters in all")
        return Table.of("methods", "Variants", headings, rows)
    for name, method in results.methods.items():
        loss, kept = method.mean("final_loss"), method.least_survival
        matched, match = NOTHING, method.match
        if match is not None:
            share = match.parameters / match.target_parameters - 1 if match.target_parameters else 0.0
            asked = f"{count(match.target_parameters)} asked ({signed(100 * share, 1)} %)"
            matched = f"{match.to}: {match.words}, {asked}"
        rows.append(
            (
                name,
                " + ".join(map(part_text, method.parts)) or "nothing: the frozen base",
                method.form or NOTHING,
                matched,
                count(method.trainable),
                NOTHING if kept is None else f"{decimal(100 * kept, 1)} %",
                NOTHING if loss is None else decimal(loss, 4),
            )
        )
    return Table.of("methods", "Methods", names, rows)


def results_csv(runs: Mapping[str, ComparisonResults]) -> str:
    """Return every number of every run in long format, and below them every paired difference.

    A row of a difference has no ``seed`` and no ``value``; the columns from ``other`` to ``why`` are empty in all other
    rows. The columns after ``test`` belong to verdicts. The loss on held-out text has no task where its documents were
    not compared. The last columns say in how many groups a task's documents come, by which of their columns, and
    whether a higher value is better, which is known of low-noise metrics and of the one that a task is compared by. Of
    several runs, the first column is the label of the run.
    """
    headings = ("run", *_RESULTS) if len(runs) > 1 else _RESULTS
    rows = []
    for label, results in runs.items():
        directions = {(task, info.primary): info.higher_is_better for task, info in results.tasks.items()}
        for row in (*results.records("scores"), *_pairs(results)):
            trainable, metric = results.methods[row["method"]].trainable, row["metric"]
            higher = LOW_NOISE.get(metric, directions.get((row["task"], metric)))
            rows.append({**row, "trainable": trainable, "higher_is_better": higher, "run": label})
    return csv_text(rows, headings)


def _pairs(results: ComparisonResults) -> Iterator[Record]:
    """Yield every paired difference: those with verdicts, then those by measures that decide nothing."""
    tasks, deciding = results.tasks, results.deciding
    shown = {*tasks, *(results.retention.texts if results.retention is not None else ())}
    yield from pair_records(one for one in results.verdicts if one.task in shown and one.method in results.methods)
    others = (one for one in results.comparisons if one.task in tasks and deciding[one.task].metric != one.metric)
    for record in pair_records(others):
        yield {**record, "other": record["reference"]}
