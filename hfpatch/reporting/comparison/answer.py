"""The answer of a comparison, read from its verdicts: a line for each method, and one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hfpatch.errors import listed
from hfpatch.recipes import pairs
from hfpatch.reporting.document import Cell, Column, Row, Table, Tone
from hfpatch.reporting.numbers import (
    NOTHING,
    Scale,
    change_text,
    count,
    diverged_text,
    gain_of,
    measured,
    metric_text,
    metrics_text,
    outcome_text,
    ratio,
)
from hfpatch.results.comparison import MATCHED
from hfpatch.results.decision import ALPHA, reach
from hfpatch.results.schema import ComparisonResults
from hfpatch.results.verdicts import Verdict

_MOST_NAMED = 2
_FEW_SEEDS = 5


@dataclass(frozen=True)
class Line:
    """One method.

    Attributes:
        method: its name.
        trainable: how many parameters it trains.
        first: the verdict against the baseline on the first task; None where there is none.
        others: the verdicts against the baseline on all other tasks.
        control: the LoRA that it was compared with, see :func:`control_for`.
        ratio: its parameters over the LoRA's.
        against: the verdicts against that LoRA.
        words: the verdicts in words.
    """

    method: str
    trainable: int
    first: Verdict | None
    others: tuple[Verdict, ...]
    control: str | None
    ratio: float | None
    against: tuple[Verdict, ...]
    words: str


def method_lines(results: ComparisonResults) -> list[Line]:
    """Return a line for each method, by gain on the first task, the highest first."""
    lines, gains = [], {}
    for name in results.others:
        own, method = results.answers("base", name), results.methods[name]
        control = control_for(results, name)
        size = results.methods[control].trainable if control else 0
        against = tuple(each for each in results.answers("lora", name) if each.other == control)
        lost = len(method.diverged)
        ending = f"; {lost} of {len(method.runs)} seeds diverged" if lost else ""
        if not method.runs:
            words = "not finished"
        elif method.all_diverged:
            words = diverged_text(method.diverged)
        elif control is None:
            words = ("is a LoRA" if pairs.is_lora(method.parts) else "not compared with a LoRA") + ending
        else:
            near = abs(size - method.trainable) <= MATCHED * method.trainable or are_matched(results, name, control)
            words = f"{summary(against)}{'' if near else ', sizes differ'}{ending}"
        first = next((each for each in own if each.task == results.first_task), None)
        if first is not None and (gain := gain_of(results, first)) is not None:
            gains[name] = gain.difference
        others = tuple(each for each in own if each.task != results.first_task)
        ratio = method.trainable / size if size else None
        lines.append(Line(name, method.trainable, first, others, control, ratio, against, words))
    return sorted(lines, key=lambda line: (line.method not in gains, -gains.get(line.method, 0.0)))


def answer(results: ComparisonResults) -> str:
    """Return one sentence that counts the verdicts."""
    lines = method_lines(results)
    if not lines or results.baseline is None:
        return "There is no method to compare with a baseline."
    if not results.comparisons:
        why = "No paired comparison was made" if results.complete else "The run is not complete; nothing is tested yet"
        return f"{why}, so nothing is decided."
    # on the first task
    known, task = [line.first for line in lines if line.first is not None], results.first_task
    said = f"none was tested against {results.baseline}"
    if task is not None and known:
        where = f"{task} ({metric_text(results.deciding[task].metric)})"
        better, worse = (sum(each.tone == outcome for each in known) for outcome in ("better", "worse"))
        if all(each.tone == "not tested" for each in known):
            said += f" on {where}"
        else:
            losing = f" and {worse} {'is' if worse == 1 else 'are'} worse" if worse else ""
            said = f"{better or 'none'} {'are' if better > 1 else 'is'} {'' if better else 'shown to be '}better"
            said += f" than {results.baseline} on {where}{losing}"
    clauses = [f"Of {len(lines)} method{'s' * (len(lines) != 1)}, {said}"]
    # on the other tasks
    others = [[each for each in line.others if each.tone != "not tested"] for line in lines]
    every = [each for tested in others for each in tested]
    if every:
        tasks, metrics = len({each.task for each in every}), metrics_text(each.metric for each in every)
        where = f"the {f'{tasks} other tasks' if tasks > 1 else 'other task'} ({metrics})"
        any_of = " on at least one" if tasks > 1 else ""
        outcomes = [{each.tone for each in tested} for tested in others]
        counts = [(sum(outcome in each for each in outcomes), outcome) for outcome in ("better", "worse")]
        parts = [f"{many} {'are' if many > 1 else 'is'} {outcome}{any_of}" for many, outcome in counts if many]
        clauses.append(f"on {where} " + (listed(parts) or "none is found to differ"))
    # against LoRA
    is_lora = {name: pairs.is_lora(method.parts) for name, method in results.methods.items()}
    against = [line.against for line in lines if not is_lora[line.method]]
    compared = [[each for each in verdicts if each.tone != "not tested"] for verdicts in against]
    if compared and any(is_lora.values()):
        known_ones = [tested for tested in compared if tested]
        if known_ones:
            outcomes = [{each.tone for each in tested} for tested in known_ones]
            better, worse = (sum(outcome in each for each in outcomes) for outcome in ("better", "worse"))
            same, undecided = (sum(tone_of(each) == tone for each in known_ones) for tone in ("same", "undecided"))
            untested = compared.count([])
            parts = [f"{better} {'are' if better > 1 else 'is'} better" if better else "none is shown to be better"]
            parts += [f"{worse} {'is' if worse == 1 else 'are'} worse"] if worse else []
            parts += [f"{same} {'is' if same == 1 else 'are'} equivalent"] if same else []
            parts += [f"{undecided} {'is' if undecided == 1 else 'are'} undecided"] if undecided else []
            parts += [f"{untested} {'was' if untested == 1 else 'were'} not tested"] if untested else []
            metrics = metrics_text(each.metric for tested in known_ones for each in tested)
            clauses.append(f"against LoRA ({metrics}) {listed(parts)}")
        else:
            clauses.append("none was tested against a LoRA")
    return "; ".join(clauses) + "."


def tone_of(verdicts: Sequence[Verdict]) -> Tone:
    """Return the tone of several verdicts together: ``mixed`` is better on one task and worse on another."""
    said = {each.tone for each in verdicts}
    if {"better", "worse"} <= said:
        return "mixed"
    tones: tuple[Tone, ...] = ("better", "worse", "undecided", "same")
    return next((tone for tone in tones if tone in said), "not tested")


def control_for(results: ComparisonResults, name: str) -> str | None:
    """Return the LoRA that a method is compared with: the first of its match group, else the nearest in size.

    None for a LoRA itself, and for a method that is compared with none.
    """
    if pairs.is_lora(results.methods[name].parts):
        return None
    declared = dict.fromkeys(each.other for each in results.verdicts if each.question == "lora" and each.method == name)
    known = [other for other in declared if other in results.methods]
    size = results.methods[name].trainable
    matched = next((other for other in known if are_matched(results, name, other)), None)
    return matched or min(known, key=lambda other: abs(results.methods[other].trainable - size), default=None)


def are_matched(results: ComparisonResults, one: str, other: str) -> bool:
    """Say whether one method's size was solved for the other's, or both for a third's."""
    anchors = {name: [method.match.to] if method.match else [] for name, method in results.methods.items()}
    return pairs.in_one_group(anchors, one, other)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return on which tasks, and by which measures, a method is better and on which it is worse."""
    parts = []
    tested = [each for each in verdicts if each.tone != "not tested"]
    for outcome in ("better", "worse"):
        side = [each for each in tested if each.tone == outcome]
        several = f"{len(side)} of {len(tested)} tasks ({metrics_text(each.metric for each in side)})"
        if side:
            parts.append(f"{outcome} on {measured(side) if len(side) <= _MOST_NAMED else several}")
    if parts:
        return ", ".join(parts)
    if tested:
        primary = [f"{outcome_text(each)} on {measured([each])}" for each in tested if each.role == "primary"]
        return "; ".join(primary) or f"not decided ({metrics_text(each.metric for each in tested)})"
    reasons = ", ".join(dict.fromkeys(each.why for each in verdicts if each.why))
    return f"not tested ({reasons})" if reasons else "not tested"


def headline_table(results: ComparisonResults) -> Table:
    """Build the table that a report opens with; for narrow terminals, of gains and of verdicts."""
    lines, first = method_lines(results), results.first_task
    table: list[tuple[Column, Sequence[str | Cell]]] = [(Column("method"), [line.method for line in lines])]
    if first is not None:
        metric = metric_text(results.deciding[first].metric)
        gains = [(line.first, gain_of(results, line.first)) if line.first else (None, None) for line in lines]
        scale = next((gain.scale for _, gain in gains if gain is not None), Scale.RAW)
        unit = {Scale.POINTS: "points of ", Scale.RELATIVE: "% lower "}.get(scale, "")
        notes = f"{unit}{metric}", f"n = {count(results.tasks[first].n)}"
        cells = [
            Cell((change_text(gain, unit=False), made.outcome), made.tone) if made and gain else NOTHING
            for made, gain in gains
        ]
        table.append((Column(f"gain on {first}", notes, number=True, tip=_GAIN), cells))
    others = {each.task: each.metric for line in lines for each in line.others}
    if others:
        column = Column("other tasks", (f"{len(others)}: {metrics_text(others.values())}",), tip=", ".join(others))
        summaries = [Cell((summary(line.others),), tone_of(line.others)) if line.others else NOTHING for line in lines]
        table.append((column, summaries))
    place = len(table)
    controls = {line.control for line in lines if line.control}
    shared = next(iter(controls)) if len(controls) == 1 else None
    column = Column("parameters", (f"(× {shared})",) if shared else (), number=True, tip=_SIZE)
    ratios = (
        f" ({ratio(line.ratio)} ×{'' if shared else f' {line.control}'})" if line.ratio is not None else ""
        for line in lines
    )
    table.append((column, [f"{count(line.trainable)}{size}" for line, size in zip(lines, ratios, strict=True)]))
    if any(pairs.is_lora(method.parts) for method in results.methods.values()):
        words = [Cell((line.words,), tone_of(line.against)) if line.against else line.words for line in lines]
        table.append((Column("against the LoRA of its size", tip=_LORA), words))

    tables = []
    for name, title, kept in (
        ("headline-gains", "Gains", table[:place]),
        ("headline-verdicts", "Verdicts", [table[0], *table[place:]]),
        ("headline", "Headline", table),
    ):
        rows = tuple(map(Row, zip(*(cells for _, cells in kept), strict=True)))
        tables.append(Table(name, title, tuple(column for column, _ in kept), rows))
    *halves, whole = tables
    return replace(whole, heading=False, narrow=tuple(halves))


_GAIN = "The difference to the baseline, above 0 is better, with the corrected interval of its verdict."
_SIZE = "Trainable parameters, and how many times those of the LoRA that the method is compared with."
_LORA = "The corrected paired tests against the LoRA of the method's match group, each by the measure of its task."


def uncovered(results: ComparisonResults) -> Iterator[str]:
    """Yield a line for each source of noise that the intervals do not cover, or cover badly."""
    if not results.comparisons:
        return
    seeds = max(each.seeds for each in results.comparisons)
    if seeds == 1:
        yield "Seeds: one, so the intervals do not cover how much results vary from seed to seed."
    elif seeds < _FEW_SEEDS:
        t = reach([(1.0, seeds - 1)], ALPHA)
        only = "only huge differences" if seeds == 2 else "only large differences"
        yield f"Seeds: {seeds}, so Student's t is {t:.1f}; where results vary from seed to seed, {only} can show."
    if results.tuning is not None:
        yield f"Choice of the rate: made with one seed ({results.tuning.seed}); another may choose another rate."
    if seeds > 1:
        yield "A seed decides initialisation and order of the data together, so their shares are not known apart."
