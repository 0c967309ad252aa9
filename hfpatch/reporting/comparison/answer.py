"""The answer of a comparison, read from its verdicts: a sentence for each primary pair, and the table of methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hfpatch.errors import listed
from hfpatch.recipes import pairs
from hfpatch.reporting.comparison.forest import (
    ANOTHER,
    EXPLORATORY,
    FOOTNOTES,
    TRIED,
    are_loras,
    asked,
    control_for,
    loras_text,
    others_text,
)
from hfpatch.reporting.document import Cell, Column, Finding, Findings, Row, Table, Tone
from hfpatch.reporting.numbers import (
    MINUS,
    NOTHING,
    Change,
    diverged_text,
    gain_of,
    gain_on,
    interval_of,
    margin_text,
    metric_text,
    needs_text,
    outcome_of,
    ratio,
    short_count,
    signed_size,
    size_text,
    task_text,
    unit_text,
    why_text,
)
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.decision import ALPHA, reach
from hfpatch.results.verdicts import INCOMPLETE, Verdict

_MOST_SENTENCES = 6  # of more pairs, a sentence for each outcome names them
_FEW_SEEDS = 5
_LONGEST_WHY = 40  # letters of a reason in a table; sentences have longer ones
_SHARED = "*"
_TONES: tuple[Tone, ...] = ("better", "worse", "same", "undecided", "not tested")
_OF_KEPT: tuple[Tone, ...] = ("worse", "undecided", "same", "not tested")  # of several tasks the first that one has
_Column = tuple[Column, Sequence[str | Cell]]  # a column and its cells


def lead(results: ComparisonResults) -> str:
    """Return what the first question found, in one sentence."""
    if results.baseline is None or not results.others:
        return f"There is no {results.noun} to compare with a baseline."
    verdicts = asked(results)
    untested = all(verdict.tone == "not tested" for verdict in verdicts)
    if untested and not results.complete:
        return "The run is not complete; nothing is tested yet, so nothing is decided."
    if untested and not results.comparisons:
        return "No paired comparison was made, so nothing is decided."
    if not verdicts:
        return "No pair was compared, so nothing is decided."
    loras = [verdict for verdict in verdicts if are_loras(results, [verdict.other])]
    verdicts = loras or verdicts  # a question may ask about controls, too
    measure, other = _measured(verdicts[0]), others_text(results, verdicts)
    on = "On" if verdicts[0].role == "primary" else "Exploratory: on"
    better, tones = [pair for pair in verdicts if pair.tone == "better"], {verdict.tone for verdict in verdicts}
    than = "what it is compared with" if other == ANOTHER else other
    if better:
        return f"{on} {measure}, {_beaten(results, better, other)}."
    if tones == {"not tested"}:
        return f"{on} {measure} nothing was tested{_why(verdicts)}."
    if tones == {"worse"} and len(verdicts) > 1:
        tried = [verdict.method for verdict in verdicts if verdict.at_rates_tried]
        rates = f", {listed(tried)} at the rates tried" if tried else ""
        return f"{on} {measure} every {results.noun} that was asked about is worse than {than}{rates}."
    return f"{on} {measure} no {results.noun} is shown to be better than {than}."


def _beaten(results: ComparisonResults, better: Sequence[Verdict], other: str) -> str:
    """Return which methods beat what; wins at the rates tried come last."""
    clauses = []
    for tried in (False, True):
        group = [pair for pair in better if bool(pair.at_rates_tried) == tried]
        if group and other != ANOTHER:
            few = len(group) <= _MOST_SENTENCES
            names = listed([pair.method for pair in group]) if few else f"{len(group)} {results.noun}s"
            clauses.append(f"{names} {'beat' if len(group) > 1 else 'beats'} {other}{outcome_of(group[0]).rates}")
        else:
            clauses += [f"{pair.method} beats {pair.other}{outcome_of(pair).rates}" for pair in group]
    return listed(clauses)


def sentences(results: ComparisonResults) -> Findings:
    """Return a sentence for each primary pair; of more than a few pairs one for each outcome.

    Where no primary question asks what is better, the differences from the base follow, which are exploratory.
    """
    items, verdicts = list[Finding](), results.primary
    if results.comparisons:
        verdicts += [verdict for verdict in asked(results) if verdict.role == "secondary"]
    verdicts = [verdict for verdict in verdicts if verdict.why != INCOMPLETE]  # which the first sentence says
    untested = all(verdict.tone == "not tested" for verdict in verdicts)
    for question in ("gain", "keep", "base"):
        group = [verdict for verdict in verdicts if verdict.question == question]
        if len(items) + len(group) <= _MOST_SENTENCES and not untested and question != "base":
            items += [_sentence(results, verdict) for verdict in group]
            continue
        for task in dict.fromkeys(verdict.task for verdict in group):
            items += _grouped(results, [verdict for verdict in group if verdict.task == task])
    return Findings(tuple(items))


def answer(results: ComparisonResults) -> str:
    """Return the answer as one paragraph."""
    return " ".join([lead(results), *map(str, sentences(results).items)])


def _sentence(results: ComparisonResults, verdict: Verdict) -> Finding:
    """Return the sentence of one primary pair, with its numbers."""
    gain, task, other = gain_of(results, verdict), task_text(verdict.task), verdict.other
    keeps = verdict.question == "keep"
    if gain is None or verdict.tone == "not tested":
        about = f"on {_measured(verdict)}" if keeps else f"against {other} on {_measured(verdict)}"
        return Finding(verdict.method, f"{about}: {outcome_of(verdict)}.", verdict.tone)
    outcome, ends = outcome_of(verdict, gain), _ends(gain)
    size = f"{size_text(gain, unit=False)} {unit_text(verdict.metric, gain.scale)}"
    sign = signed_size(gain)[0]
    less = f", less than {margin_text(verdict, gain)}" if "less than" in verdict.outcome else ""
    if keeps:  # a rounded zero has no sign
        verb = {"+": "gains", MINUS: "loses"}.get(sign, "differs by")
        text = f"{verb} {size} on {task}{ends}"
    else:
        side = {"+": "ahead of", MINUS: "behind"}.get(sign, "apart from")
        text = f"is {size} {side} {other}{ends}"
    if verdict.tone == "undecided":
        needs = needs_text(verdict)
        why = f"; at this difference, {needs} would decide it in 80 % of cases" if needs else ""
        if verdict.why:
            why = f" ({verdict.why})"
        text += f": undecided{why}. {_alone(results, verdict)}".rstrip(". ")
    elif verdict.tone == "same":
        text += f": {outcome.verb}{outcome.within}"
    else:
        text += f": {outcome.verb}{outcome.rates}{less}"
    return Finding(verdict.method, f"{text}.", verdict.tone)


def _measured(verdict: Verdict) -> str:
    """Return the task of a verdict with its measure; where nothing was measured without one."""
    measure = f" ({metric_text(verdict.metric)})" if verdict.metric else ""
    return f"{task_text(verdict.task)}{measure}"


def _alone(results: ComparisonResults, verdict: Verdict) -> str:
    """Say that the plain interval of an undecided difference excludes 0; nothing where it does not."""
    plain = gain_of(results, verdict, plain=True)
    if plain is None or verdict.p is None or plain.low <= 0 <= plain.high:
        return ""
    if (verdict.low, verdict.high) == (verdict.corrected_low, verdict.corrected_high):  # the only pair of its question
        return "The interval excludes 0"
    return f"Alone, its 95 % interval{_ends(plain)} excludes 0"


def _ends(gain: Change) -> str:
    """Return an interval that no line breaks, after a space; nothing where it is unbounded."""
    if not math.isfinite(gain.high - gain.low):
        return ""
    return " " + interval_of(gain).replace(" ", "\u00a0")


def _grouped(results: ComparisonResults, verdicts: Sequence[Verdict]) -> Iterator[Finding]:
    """Yield a sentence for each outcome of one question on one task, with the names of the methods that have it.

    Undecided ones are named with what would decide them.
    """
    role, other = "" if verdicts[0].role == "primary" else "Exploratory, ", others_text(results, verdicts)
    names_by_words: dict[tuple[Tone, str], list[str]] = {}
    for verdict in sorted(verdicts, key=lambda pair: (_TONES.index(pair.tone), bool(pair.at_rates_tried))):
        outcome, name = outcome_of(verdict, gain_of(results, verdict)), verdict.method
        words, needs = outcome.verb + _why([verdict]), "" if verdict.why else needs_text(verdict)
        if verdict.question != "keep":
            than = {"better": "than", "worse": "than", "equivalent": "to"}.get(outcome.verb, "against")
            words += "" if other == ANOTHER else f" {than} {other}"
            name += f" {than} {verdict.other}" if other == ANOTHER else ""
        name += f" (needs {needs})" if needs else ""
        words = f"{role}{_measured(verdict)}: {words}{outcome.within}{outcome.rates}"
        names_by_words.setdefault((verdict.tone, words), []).append(name)
    for (tone, words), names in names_by_words.items():
        yield Finding(words, f"– {listed(names)}.", tone)


def _why(verdicts: Iterable[Verdict]) -> str:
    reasons = ", ".join(filter(None, dict.fromkeys(map(why_text, verdicts))))
    return f" ({reasons})" if reasons else ""


def headline_table(results: ComparisonResults) -> Table:
    """Build the table of methods, by gain, the highest first; columns without values are left out."""
    task = next((verdict.task for verdict in asked(results)), results.first_task)
    gains = {name: gain for name in results.others if task and (gain := gain_on(results, name, task)) is not None}
    order = sorted(results.others, key=lambda name: -gains[name].difference if name in gains else math.inf)
    controls = {name: control_for(results, name) for name in order}
    compared = [(name, other) for name, other in controls.items() if other is not None]
    others = {other for _, other in compared}
    shared = next(iter(others)) if len(others) == 1 else loras_text(results, compared)
    columns: list[_Column] = [(Column(results.noun), order)]
    if task is not None:
        units = [unit_text(results.deciding[task].metric, gain.scale) for gain in gains.values()]
        gain_cells = [signed_size(gains[name]) if name in gains else NOTHING for name in order]
        columns.append((Column("gain", (task_text(task), *units[:1]), number=True, tip=_GAIN), gain_cells))
        cells = [_against(results, name, task, controls[name]) for name in order]
        if not shared:  # each cell names its own
            cells = [_naming(controls[name], cell) for name, cell in zip(order, cells, strict=True)]
        columns.append((Column(f"against {shared}".rstrip(), tip=_AGAINST), cells))
    columns += [_kept(results, order), *_sizes(results, order, controls), *_costs(results, order, controls)]
    rows = tuple(map(Row, zip(*(cells for _, cells in columns), strict=True)))
    shown = tuple(column for column, _ in columns)
    legend = _LEGEND if gains else ""
    table = Table("headline", "Headline", shown, rows, legend, heading=False, footnotes=_FOOTNOTES)
    return table.with_values()


def _sizes(results: ComparisonResults, order: Sequence[str], controls: Mapping[str, str | None]) -> list[_Column]:
    """Return the columns of parameters, and how many times those of the control they are."""
    sizes, ratios = [], list[str]()
    for name in order:
        size, other = results.methods[name].compared_size, controls[name]
        of_control = results.methods[other].compared_size if other is not None else 0
        sizes.append(short_count(size))
        ratios.append(f"{ratio(size / of_control)} ×" if of_control else NOTHING)
    notes = ("non-embedding",) if results.study is not None else ()
    return [
        (Column("params", notes, number=True, tip="Trainable parameters."), sizes),
        (Column("size", number=True, tip="Parameters over those of what it is compared with.", detail=True), ratios),
    ]


_GAIN = "The difference to the baseline, above 0 is better. Gains are compared with each other in the next column."
_AGAINST = "The paired difference with the interval of its outcome, above 0 is better."


def _against(results: ComparisonResults, name: str, task: str, control: str | None) -> str | Cell:
    """Return the outcome of a method against its control: with its numbers, primary or exploratory."""
    method = results.methods[name]
    if not method.runs:
        return "not finished"
    if method.all_diverged:
        return diverged_text(method.diverged)
    verdict = results.verdict(name, task, control) if control else None
    if verdict is None:
        return "is a LoRA" if pairs.is_lora(method.parts) else NOTHING
    gain = gain_of(results, verdict)
    marks = EXPLORATORY * (verdict.role != "primary") + TRIED * bool(verdict.at_rates_tried)
    diverged = (
        f"{len(method.diverged)} of {len(method.runs)} seeds diverged" if method.diverged and not verdict.why else ""
    )
    if verdict.tone == "not tested" and gain is not None:  # the sentences say why
        return Cell((f"not tested, {signed_size(gain)}",), verdict.tone)
    numbers = ""
    if gain is not None:
        size = "" if verdict.is_found else f" {signed_size(gain)}"
        numbers = size + _ends(gain)
    outcome = replace(outcome_of(verdict, gain), rates="")  # marked
    if len(verdict.why) > _LONGEST_WHY:
        outcome = replace(outcome, reasons=())
    return Cell((f"{outcome}{numbers}{marks}{f', {diverged}' if diverged else ''}",), verdict.tone)


def _naming(control: str | None, cell: str | Cell) -> str | Cell:
    """Return an outcome that begins with the name of what the method is compared with."""
    return cell if control is None or isinstance(cell, str) else replace(cell, lines=(f"{control}: {cell.lines[0]}",))


def _kept(results: ComparisonResults, order: Sequence[str]) -> _Column:
    """Return what each method kept, the second question; of several tasks the tasks with each outcome."""
    keep = [verdict for verdict in results.primary if verdict.question == "keep"]
    tasks = list(dict.fromkeys(verdict.task for verdict in keep))
    margin = next(filter(None, (margin_text(pair, gain_of(results, pair)) for pair in keep)), "")
    cells: list[str | Cell] = []
    for name in order:
        verdicts = [verdict for verdict in keep if verdict.method == name]
        if not verdicts:
            cells.append(NOTHING)
            continue
        if len(tasks) == 1:
            outcome = replace(outcome_of(verdicts[0], gain_of(results, verdicts[0])), within="", rates="")
            cells.append(Cell((f"{outcome}{TRIED * bool(verdicts[0].at_rates_tried)}",), verdicts[0].tone))
            continue
        by_words: dict[str, list[str]] = {}
        for verdict in verdicts:
            words = verdict.outcome.partition(" by ")[0] + TRIED * bool(verdict.at_rates_tried)
            by_words.setdefault(words, []).append(task_text(verdict.task).removeprefix("tinyworld_"))
        text = "; ".join(f"{words}: {', '.join(names)}" for words, names in by_words.items())
        tones = {verdict.tone for verdict in verdicts}
        cells.append(Cell((text,), next(tone for tone in _OF_KEPT if tone in tones)))
    one = len(tasks) == 1
    notes = (f"within {margin}",) if one and margin else ()
    return Column(f"keeps {task_text(tasks[0])}" if one else "keeps", notes, tip=_KEPT), cells


_KEPT = "The second question: is what the base could do kept?"


def _costs(results: ComparisonResults, order: Sequence[str], controls: Mapping[str, str | None]) -> list[_Column]:
    """Return the columns of cost: time of a step and peak memory over those of the control, and merging."""
    times, memory, folds = list[str](), list[str](), list[str]()
    for name in order:
        cost, control = results.methods[name].cost, controls[name]
        other = results.methods[control].cost if control is not None else None
        over = cost.memory_over(other) if cost and other else None
        mark = f" {_SHARED}" if cost is not None and cost.shared else ""
        times.append(f"{ratio(cost.steps_over(other))} ×{mark}" if cost and other else NOTHING)
        memory.append(NOTHING if over is None else f"{ratio(over)} ×")
        folds.append({True: "yes", False: "no", None: NOTHING}[results.methods[name].merges])
    return [
        (Column("step time", number=True, tip=_TIME, detail=True), times),
        (Column("memory", number=True, tip=_MEMORY, detail=True), memory),
        (Column("folds", tip="Whether it can be merged into the base's weights.", detail=True), folds),
    ]


_TIME = "The time of a training step over that of what it is compared with, the median of interleaved rounds."
_MEMORY = "The peak memory of a training step over that of what it is compared with."
_LEGEND = "Gains are over the baseline; above 0 is better."
_FOOTNOTES = {
    "[": "[Intervals] belong to their outcomes, corrected for all pairs of the question.",
    **FOOTNOTES,
    _SHARED: "*: other programs used the machine meanwhile.",
    " ×": "× is over what a row is compared with.",
}


def changed_text(results: ComparisonResults) -> str:
    """Return which questions were asked when results existed already; nothing where none was."""
    changed = dict.fromkeys(f"Question {pair.question}: {pair.changed}." for pair in results.primary if pair.changed)
    return " ".join(changed)


def uncovered(results: ComparisonResults) -> Iterator[str]:
    """Yield a line for each source of noise or error that the intervals do not cover, or cover badly."""
    if not results.comparisons:
        return
    seeds = max(pair.seeds for pair in results.comparisons)
    if seeds == 1:
        yield "Seeds: one, so the intervals do not cover how much results vary from seed to seed."
    elif seeds < _FEW_SEEDS:
        t = reach([(1.0, seeds - 1)], ALPHA)
        only = "only huge differences" if seeds == 2 else "only large differences"
        yield f"Seeds: {seeds}, so Student's t is {t:.1f}; where results vary from seed to seed, {only} can show."
    if results.tuning is not None:
        yield f"The rates were chosen with one seed ({results.tuning.seed}); another seed may choose others."
    if seeds > 1:
        yield "A seed sets both initialisation and order of the data, so their effects cannot be told apart."
    if len(results.questions) > 1:
        yield "Each primary question has a level of 5 % for any false claim, both together of 10 %."
