"""What a comparison shows, read from its verdicts: one line a method, and one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from hfpatch.recipes import pairs
from hfpatch.reporting.comparison.changes import gain_of
from hfpatch.reporting.document import Cell, Column, Row, Table, Tone
from hfpatch.reporting.numbers import NOTHING, Scale, change_text, count, diverged_text, listed, ratio
from hfpatch.reporting.words import measured, metric_text, metrics_text
from hfpatch.results.comparison import MATCHED
from hfpatch.results.schema import ComparisonResults, Method
from hfpatch.results.verdicts import ALPHA, Verdict, reach, shrinks_with

_MOST_NAMED = 2
_FEW_SEEDS = 5


@dataclass(frozen=True)
class Line:
    """One method.

    Attributes:
        method: its name.
        first: the verdict on the task that the lines are ordered by, see
            :attr:`hfpatch.results.comparison.ComparisonResults.first_task`; None where there is none.
        others: those against the baseline on all other tasks.
        control: the LoRA that it was compared with: of its match group, or the nearest in size.
        ratio: its parameters over the LoRA's.
        against: the verdicts against that LoRA.
        words: these in words.
    """

    method: str
    trainable: int
    first: Verdict | None
    others: tuple[Verdict, ...]
    control: str | None
    ratio: float | None
    against: tuple[Verdict, ...]
    words: str

    @property
    def tone(self) -> Tone:
        """What the verdicts against the LoRA say together."""
        return tone_of(self.against)


@dataclass(frozen=True)
class Answer:
    """What a report opens with."""

    sentence: str
    lines: tuple[Line, ...]


def answer(results: ComparisonResults) -> Answer:
    """Return what a reader who has one minute must know."""
    first = results.first_task
    lines = [_line(results, name, first) for name in results.others]
    lines.sort(key=lambda line: _place(results, line.first))
    return Answer(_sentence(results, lines, first), tuple(lines))


def tone_of(verdicts: Sequence[Verdict]) -> Tone:
    """Return what several verdicts say together: ``mixed`` is better on one task and worse on another."""
    said = {each.verdict for each in verdicts}
    if {"better", "worse"} <= said:
        return "mixed"
    tones: tuple[Tone, ...] = ("better", "worse", "no difference shown")
    return next((tone for tone in tones if tone in said), "not tested")


def control_for(results: ComparisonResults, name: str) -> str | None:
    """Return the LoRA that a method is compared with: the first of its match group, else the nearest in size.

    None for a LoRA itself, and for a method that is compared with none.
    """
    if is_lora(results.methods[name]):
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


def is_lora(method: Method) -> bool:
    """Say whether a method is LoRA and nothing else."""
    return pairs.is_lora(method.parts)


def _place(results: ComparisonResults, first: Verdict | None) -> tuple[bool, float]:
    """Order by gain, the highest first; what has none comes last."""
    gain = None if first is None else gain_of(results, first)
    return gain is None, 0.0 if gain is None else -gain.difference


def _line(results: ComparisonResults, name: str, first: str | None) -> Line:
    own = results.answers("base", name)
    control, trainable = control_for(results, name), results.methods[name].trainable
    size = results.methods[control].trainable if control else 0
    against = tuple(each for each in results.answers("lora", name) if each.other == control)
    return Line(
        name,
        trainable,
        next((each for each in own if each.task == first), None),
        tuple(each for each in own if each.task != first),
        control,
        trainable / size if size else None,
        against,
        _against(results, name, control, against),
    )


def _against(results: ComparisonResults, name: str, control: str | None, verdicts: Sequence[Verdict]) -> str:
    """Return in words what the verdicts of a method against its LoRA say."""
    method = results.methods[name]
    if not method.runs:
        return "not finished"
    if method.all_diverged:
        return diverged_text(method.diverged)
    lost = len(method.diverged)
    ending = f"; {lost} of {len(method.runs)} seeds diverged" if lost else ""
    if control is None:
        return ("is a LoRA" if is_lora(method) else "not compared with a LoRA") + ending
    size = results.methods[control].trainable
    near = abs(size - method.trainable) <= MATCHED * method.trainable or are_matched(results, name, control)
    return f"{summary(verdicts)}{'' if near else ', sizes differ'}{ending}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return on which tasks, and by which measures, a method is better and on which it is worse."""
    parts = []
    tested = [each for each in verdicts if each.verdict != "not tested"]
    for outcome in ("better", "worse"):
        side = [each for each in tested if each.verdict == outcome]
        several = f"{len(side)} of {len(tested)} tasks ({metrics_text(each.metric for each in side)})"
        if side:
            parts.append(f"{outcome} on {measured(side) if len(side) <= _MOST_NAMED else several}")
    if parts:
        return ", ".join(parts)
    if tested:
        return f"no difference shown ({metrics_text(each.metric for each in tested)})"
    reasons = ", ".join(dict.fromkeys(each.why for each in verdicts if each.why))
    return f"not tested ({reasons})" if reasons else "not tested"


def _sentence(results: ComparisonResults, lines: Sequence[Line], first: str | None) -> str:
    """Count in one sentence what the verdicts say."""
    if not lines or results.baseline is None:
        return "There is no method to compare with a baseline."
    if not results.comparisons:
        why = "No paired comparison was made" if results.complete else "The run is not complete; nothing is tested yet"
        return f"{why}, so no difference is shown."
    clauses = [f"Of {len(lines)} method{'s' * (len(lines) != 1)}, {_on_first(results, lines, first)}"]
    others = [line for line in lines if any(each.verdict != "not tested" for each in line.others)]
    if others:
        tested = [each for line in others for each in line.others if each.verdict != "not tested"]
        tasks, metrics = len({each.task for each in tested}), metrics_text(each.metric for each in tested)
        where = f"the {f'{tasks} other tasks' if tasks > 1 else 'other task'} ({metrics})"
        better, worse = (_many(others, lambda line: line.others, outcome) for outcome in ("better", "worse"))
        said = [
            f"{many} {'are' if many > 1 else 'is'} {word}"
            for many, word in ((better, "better"), (worse, "worse"))
            if many
        ]
        any_of = " on at least one" if tasks > 1 else ""
        clauses.append(f"on {where} " + (listed([f"{each}{any_of}" for each in said]) or "no difference is shown"))
    compared = [line for line in lines if not is_lora(results.methods[line.method])]
    if compared and any(map(is_lora, results.methods.values())):
        clauses.append(_against_loras(compared))
    return "; ".join(clauses) + "."


def _on_first(results: ComparisonResults, lines: Sequence[Line], task: str | None) -> str:
    known = [line.first for line in lines if line.first is not None]
    if task is None or not known:
        return f"none was tested against {results.baseline}"
    where = f"{task} ({metric_text(results.deciding[task].metric)})"
    better, worse = (sum(each.verdict == outcome for each in known) for outcome in ("better", "worse"))
    if all(each.verdict == "not tested" for each in known):
        return f"none was tested against {results.baseline} on {where}"
    losing = f" and {worse} {'is' if worse == 1 else 'are'} worse" if worse else ""
    said = f"{better or 'none'} {'are' if better > 1 else 'is'} {'' if better else 'shown to be '}better"
    return f"{said} than {results.baseline} on {where}{losing}"


def _many(lines: Sequence[Line], of: Callable[[Line], Sequence[Verdict]], outcome: str) -> int:
    """Return how many methods have a verdict on at least one task."""
    return sum(any(each.verdict == outcome for each in of(line)) for line in lines)


def _against_loras(lines: Sequence[Line]) -> str:
    tested = [line for line in lines if line.tone != "not tested"]
    if not tested:
        return "none was tested against a LoRA"
    better, worse = (_many(tested, lambda line: line.against, outcome) for outcome in ("better", "worse"))
    same, untested = sum(line.tone == "no difference shown" for line in tested), len(lines) - len(tested)
    metrics = metrics_text(each.metric for line in tested for each in line.against if each.verdict != "not tested")
    parts = [f"{better} {'are' if better > 1 else 'is'} better" if better else "none is shown to be better"]
    parts += [f"{worse} {'is' if worse == 1 else 'are'} worse"] if worse else []
    parts += [f"for {same} no difference is shown"] if same else []
    parts += [f"{untested} {'was' if untested == 1 else 'were'} not tested"] if untested else []
    return f"against LoRA ({metrics}) {listed(parts)}"


def headline_table(results: ComparisonResults, *, name: str = "headline", title: str = "") -> Table:
    """Build the table that a report opens with; for narrow terminals, of gains and of verdicts.

    Args:
        results: the results.
        name: the table's anchor.
        title: names the run where several are reported side by side.
    """
    found, first = answer(results), results.first_task
    controls = {line.control for line in found.lines if line.control}
    shared = next(iter(controls)) if len(controls) == 1 else None
    columns = [Column("method")]
    if first is not None:
        known = [line.first for line in found.lines if line.first is not None]
        columns.append(Column(f"gain on {first}", _unit(results, known, first), number=True, tip=_GAIN))
    others = {each.task: each.metric for line in found.lines for each in line.others}
    if others:
        columns.append(
            Column("other tasks", (f"{len(others)}: {metrics_text(others.values())}",), tip=", ".join(others))
        )
    columns.append(Column("parameters", (f"(× {shared})",) if shared else (), number=True, tip=_SIZE))
    if any(map(is_lora, results.methods.values())):
        columns.append(Column("against the LoRA of its size", tip=_LORA))
    rows = [_cells(results, line, shared, columns) for line in found.lines]
    place = next(i for i, column in enumerate(columns) if column.name == "parameters")
    halves = tuple(
        Table(
            f"{name}-{half.lower()}",
            f"{title}: {half.lower()}" if title else half,
            (columns[0], *columns[cut]),
            tuple(Row((row[0], *row[cut])) for row in rows),
        )
        for half, cut in (("Gains", slice(1, place)), ("Verdicts", slice(place, None)))
    )
    return Table(name, title or "Headline", tuple(columns), tuple(map(Row, rows)), heading=bool(title), narrow=halves)


_GAIN = "The difference to the baseline, above 0 is better, with the simultaneous 95 % interval of its verdict."
_SIZE = "Trainable parameters, and how many times those of the LoRA that the method is compared with."
_LORA = "The corrected paired tests against the LoRA of the method's match group, each by the measure of its task."


def _unit(results: ComparisonResults, known: Sequence[Verdict], task: str) -> tuple[str, ...]:
    metric = results.deciding[task].metric
    gains = [gain for each in known if (gain := gain_of(results, each)) is not None]
    scale = gains[0].scale if gains else Scale.RAW
    unit = {Scale.POINTS: "points of", Scale.RELATIVE: "% lower"}.get(scale, "")
    return (f"{unit} {metric_text(metric)}".strip(), f"n = {count(results.tasks[task].n)}")


def _cells(
    results: ComparisonResults, line: Line, shared: str | None, columns: Sequence[Column]
) -> tuple[str | Cell, ...]:
    cells: list[str | Cell] = [line.method]
    names = [column.name for column in columns]
    if names[1].startswith("gain on "):
        gain = None if line.first is None else gain_of(results, line.first)
        tone: Tone = "not tested" if line.first is None else line.first.verdict
        cells.append(NOTHING if gain is None else Cell((change_text(gain, unit=False), tone), tone))
    if "other tasks" in names:
        tone = tone_of(line.others)
        cells.append(Cell((summary(line.others),), tone) if line.others else NOTHING)
    size = "" if line.ratio is None else f" ({ratio(line.ratio)} ×{'' if shared else f' {line.control}'})"
    cells.append(f"{count(line.trainable)}{size}")
    if len(names) > len(cells):
        cells.append(Cell((line.words,), line.tone) if line.against else line.words)
    return tuple(cells)


def _shrinks(results: ComparisonResults, seeds: int, more: int) -> float | None:
    """Return the median factor by which more seeds would make the smallest detectable differences smaller."""
    made = {(each.method, each.reference, each.task, each.metric): each for each in results.comparisons}
    tested = [each for each in results.verdicts if each.family and each.seeds == seeds]
    found = ((made[each.method, each.other, each.task, each.metric], each.family) for each in tested)
    factors = [factor for one, family in found if (factor := shrinks_with(one, family, more)) is not None]
    return median(factors) if factors else None


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
        factor = _shrinks(results, seeds, _FEW_SEEDS)
        more = (
            ""
            if factor is None
            else (f" With {_FEW_SEEDS} seeds the smallest that can show would be about {factor:.2f} times as large.")
        )
        yield f"Seeds: {seeds}, so Student's t is {t:.1f}; where results vary from seed to seed, {only} can show.{more}"
    if results.tuning is not None:
        yield f"Choice of the rate: made with one seed ({results.tuning.seed}); another may choose another rate."
    if seeds > 1:
        yield "A seed decides initialisation and order of the data together, so their shares are not known apart."
