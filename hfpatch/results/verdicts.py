"""The verdicts of a comparison: what each pair decides on each task, primary questions first.

Every report reads this list and tests nothing itself.

**Primary questions** are declared before the run (``questions`` in the recipe; :mod:`hfpatch.recipes.questions`):

    gain     is a method better than another one, by default the LoRA of its size?
    keep     does it keep what the base could do?

Each has m tests: its pairs times its tasks, counted as declared, also where one could not be made. A pair is decided at
the level ``a = α/m`` (Bonferroni, α = 5 %) by the rules of :mod:`hfpatch.results.decision`, so that any false claim of
a question has a probability of at most 5 %. It is not Holm's method, because a pair can be claimed in two ways: after
true equivalences a step down would test others at too high a level. A measure without a margin claims signs alone.

With **looks** the seeds grow until pairs are decided. Look k tests at the level ``a = α w_k / m``, where ``Σ w_k = 1``
(a union bound over looks); a pair has the outcome, the difference and the interval of the look that decided it, else
those of the last one. What comes after that look, as where a later seed diverges, is shown and decides nothing again.

**Learning rates.** Where each method was tuned, a sign in nats per token or bits per byte that another rate might turn
holds *at the rates tried*, and two methods whose rates may be worth half the margin are not equivalent (`with_rates`).

A pair with fewer than two paired seeds is undecided. A method with a diverged seed can be neither better nor equivalent
nor kept, as what is left is the better part of it; nor is it better in a secondary pair.

**Secondary**, exploratory: everything else that is compared, by question:

    base         does a method change the base, on each task and text?
    lora         is it better than a LoRA of its match group?
    parts        what carries its effect: all other pairs that the recipe declares
    models       of whole models: does one differ from another?
    retention    does it change text that training should not change?

Each is one family, corrected by Holm's method, of signs alone: with p-values in ascending order, the k-th of m is
rejected where all before it are and ``p < α/(m - k + 1)``. What is not rejected is *not decided*, which says nothing. A
corrected interval is that of the level ``1 - α/m``; where a later step of Holm's rejects, its end near 0 is that of the
level ``1 - α/(m - k + 1)``. It leaves out 0 exactly where a sign is found, which only a diverged seed leaves without a
verdict. (No finite intervals both cover together and do that: Holm's method spends all of α on signs; Guilbaud 2008,
Biometrical Journal 50, 678.)

One measure decides a task: bits per byte of the right answer, or of the text, where documents have log-likelihoods (one
unit, the lowest noise, defined for choices and texts alike), else the task's primary metric, such as the nats per token
of held-out text. Other measures are shown with plain intervals and have no verdict.

No interval leaves what is possible of a difference: of shares between -1 and 1, of KL(base ‖ patched) not below 0. The
reference's score is measured, too: a method cannot be right less often than never, but a base that answered 2 % of the
documents may know more, and how much of that is lost is as uncertain as anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from pydantic import Field, computed_field

from hfpatch.recipes.pairs import Question
from hfpatch.recipes.questions import Asked
from hfpatch.recipes.strict import MOST_SEEDS
from hfpatch.results.decision import ALPHA, MOST_DOCUMENTS, POWER, Decided, decide_gain, decide_keep, fewest, reach
from hfpatch.results.low_noise import BITS_PER_BYTE, LOW_NOISE, is_share
from hfpatch.results.parts import NATS_PER_TOKEN, Clusters, Comparison, High, Low, Number, Part
from hfpatch.results.retention import AGREEMENT, KL

Outcome = Literal[Decided, "not decided", "not tested"]
Role = Literal["primary", "secondary"]
Pairs = Mapping[Question, Sequence[tuple[str, str]]]
"""The method and the other of every pair that a secondary question compares."""
BETTER = ("better", "better by less than the margin")
WORSE = ("worse", "worse by less than the margin", "lost", "lost by less than the margin")
SAME = ("equivalent", "kept")
_WITHIN = ("equivalent", BETTER[1], WORSE[1])  # the margin, of `gain`
_WITHOUT_MARGIN: dict[str, Decided] = {
    "better by less than the margin": "better",
    "worse by less than the margin": "worse",
    "lost by less than the margin": "lost",
}
QUESTIONS: dict[str, str] = {
    "gain": "is it better?",
    "keep": "does it keep what the base could do?",
    "base": "does it change the base?",
    "lora": "is it better than LoRA?",
    "parts": "what carries its effect?",
    "models": "do the models differ?",
    "retention": "does it keep what the base knew?",
}
INCOMPLETE = "the run is not complete"
_FEW_SEEDS = ("one seed", "fewer than two paired seeds")
_MEASURED = ("difference", "low", "high", "p", "n", "clusters", "seeds", "test")
_POSSIBLE = {KL: (0.0, math.inf), AGREEMENT: (-1.0, 0.0), "mcc": (-2.0, 2.0)}
"""The least and the largest possible difference by a measure, of the first two from the base; other shares have 1."""


class Measure(NamedTuple):
    """A metric, and whether a higher value is better."""

    metric: str
    higher_is_better: bool


class PrimaryQuestion(Asked, Part):
    """A primary question, as it was declared.

    Attributes:
        changed: what the recipe asked when results existed already, in words; "" where it was declared before them.
    """

    changed: str = ""


class LookTaken(Part):
    """What was found with so many seeds: at one of several looks, or at the end.

    Attributes:
        seeds: the number of seeds.
        part: its part of the level of each pair; those of all looks add up to 1.
        comparisons: the differences of the primary pairs, with these seeds alone.
        growing: the methods that get more seeds: those of undecided pairs, and their references.
    """

    seeds: int
    part: float
    comparisons: list[Comparison]
    growing: list[str] = Field(default_factory=list)


class Reason(Part):
    """Why nothing was tested, or what keeps a primary pair undecided; empty where it is decided.

    Attributes:
        text: the reason, or how it begins where it names methods.
        methods: what is said of each method that it names, to follow the name.
    """

    text: str = ""
    methods: dict[str, str] = Field(default_factory=dict)

    def __str__(self) -> str:
        return self.text + ", ".join(name + rest for name, rest in self.methods.items())


class Verdict(Part):
    """The verdict on one pair on one task.

    Attributes:
        role: ``primary``, or ``secondary`` and exploratory.
        question: the question that it answers.
        outcome: what is decided.
        reason: why nothing was tested, or what keeps a primary pair undecided; ``why``, in the file, is its text.
        metric: the measure that decides the task.
        difference: method minus other, in the metric's own unit; NaN where nothing was measured.
        low, high: ends of the plain 95 % interval, of this difference alone.
        corrected_low, corrected_high: ends of the interval at ``level``, which belongs to the outcome: that at 2a of
            ``keep`` and of a difference within the margin, so that the interval, too, is above the margin's loss or
            within the margin; else that at a.
        p: two-sided p-value of no difference, by ``test``; None where nothing was tested.
        p_corrected: ``p`` corrected over the question and over looks, below 5 % where a sign is claimed: by Holm's
            method, of primary pairs times α over a, of ``keep`` over 2a.
        level: one minus the level of the corrected interval, of this pair alone.
        family: how many tests the question has, m.
        margin: the largest difference that does not matter; None where only signs are claimed.
        clusters: the groups that they come in, if any.
        seeds: seeds of the method.
        test: the name of the test.
        detectable: the true difference that such a test finds with a probability of 80 %.
        margin_detectable: the margin within which it would find equal methods equivalent as often.
        seeds_needed: the fewest seeds that would decide an undecided pair with 80 % at the difference seen; None where
            it is decided, or none would.
        documents_needed: the same with more documents, or groups of them, and the seeds that there are.
        looks: whether it was decided, or is still undecided, at a look at growing seeds: the plain interval is not
            corrected for these.
        changed: what is said of a question that was changed when results existed already.
        at_rates_tried: whether another learning rate may turn the sign, see `with_rates`; else None.
    """

    role: Role = "secondary"
    question: str
    outcome: Outcome = "not tested"
    reason: Reason = Field(default=Reason(), exclude=True)
    method: str
    other: str
    task: str
    metric: str
    higher_is_better: bool
    difference: Number = math.nan
    low: Low = -math.inf
    high: High = math.inf
    corrected_low: Low = -math.inf
    corrected_high: High = math.inf
    p: float | None = None
    p_corrected: float | None = None
    level: float | None = None
    family: int = 0
    margin: float | None = None
    n: int = 0
    clusters: Clusters | None = None
    seeds: int = 0
    test: str = ""
    detectable: float | None = None
    margin_detectable: float | None = None
    seeds_needed: int | None = None
    documents_needed: int | None = None
    looks: bool | None = None
    changed: str = ""
    at_rates_tried: bool | None = None

    @computed_field  # type: ignore[prop-decorator]  # pydantic stacks it on properties
    @property
    def why(self) -> str:
        """The reason in words."""
        return str(self.reason)

    @property
    def pair(self) -> tuple[str, str]:
        """The method and the other."""
        return self.method, self.other

    @property
    def is_found(self) -> bool:
        """Whether a difference was found, of whatever size."""
        return self.outcome in BETTER or self.outcome in WORSE

    @property
    def needs_seeds(self) -> bool:
        """Whether more seeds may decide it: neither a diverged one nor the choice of the rates keeps it undecided."""
        return self.outcome == "undecided" and self.why in ("", *_FEW_SEEDS)

    @property
    def tone(self) -> Literal["better", "worse", "same", "undecided", "not tested"]:
        """The outcome in one of five groups, as reports colour it."""
        for tone, outcomes in (("better", BETTER), ("worse", WORSE), ("same", SAME)):
            if self.outcome in outcomes:
                return tone  # type: ignore[return-value]  # one of the three above, which mypy takes for any text
        return "not tested" if self.outcome == "not tested" else "undecided"


def look_parts(seeds: Sequence[int]) -> list[float]:
    """Return the part of the level that each look has, in proportion to its number of seeds."""
    return [count / sum(seeds) for count in seeds]


def deciding(primary: Mapping[str, Measure], measured: Iterable[tuple[str, str]]) -> dict[str, Measure]:
    """Return the measure that decides each task: bits per byte where it is measured by them, else the primary metric.

    Args:
        primary: the primary metric of each task.
        measured: the tasks and metrics by which there are comparisons, or scores while there are none.
    """
    low_noise = {task for task, metric in measured if metric == BITS_PER_BYTE}
    bits = Measure(BITS_PER_BYTE, LOW_NOISE[BITS_PER_BYTE])
    return {task: bits if task in low_noise else measure for task, measure in primary.items()}


def margin_for(margins: Mapping[str, float], task: str, metric: str) -> float | None:
    """Return the margin of a task, else of its measure, by name or ``accuracy`` of a share; None where it has none."""
    names = (task, metric, metric.partition(",")[0], *(["accuracy"] if is_share(metric) else []))
    return next((margins[name] for name in names if name in margins), None)


def judge_primary(
    asked: PrimaryQuestion,
    looks: Sequence[LookTaken],
    measures: Mapping[str, Measure],
    margins: Mapping[str, float],
    *,
    why_not: Callable[[str, str, str], Reason] = lambda method, other, task: Reason(text="not compared"),
    diverged: Mapping[str, Collection[int]] | None = None,
    rates: Callable[[Verdict], Verdict] = lambda verdict: verdict,
) -> list[Verdict]:
    """Return the verdict of every pair of a primary question on every task.

    Args:
        asked: the question.
        looks: the paired differences at each look, in their order; without looks one.
        measures: the measure that decides each task.
        margins: by task and measure.
        why_not: says why a pair was not compared on a task.
        diverged: the seeds of each method that diverged.
        rates: returns a verdict with what the choice of the learning rates leaves open, see `with_rates`.
    """
    tests = max(1, asked.tests)  # a baseline alone has no pairs
    looked, by_look, verdicts = any(look.part < 1 for look in looks) or None, [], []
    for look in looks:
        by_then = {
            name: [seed for seed in seeds if not looked or seed < look.seeds]
            for name, seeds in (diverged or {}).items()
        }
        by_look.append((_by_pair(look.comparisons), ALPHA * look.part / tests, by_then))
    for method, other in asked.pairs:
        for task in asked.on:
            measure, verdict, decisive = measures.get(task), None, None
            named = {"method": method, "other": other, "task": task, "looks": looked}
            for comparisons, level, by_then in by_look:
                one = None if measure is None else comparisons.get((method, other, task, measure.metric))
                if one is None and verdict is not None:  # it got no more seeds
                    continue
                verdict, decisive = _decided(asked, named, measure, one, level, margins, by_then), one
                if verdict.outcome not in ("undecided", "not tested"):
                    break
            assert verdict is not None
            if verdict.n == 0:
                verdict = verdict.model_copy(update={"reason": why_not(method, other, task)})
            verdict = rates(verdict)
            if decisive is not None and verdict.level is not None and verdict.outcome in _WITHIN:
                level = 2 * verdict.level
                low, high = interval_at(decisive, level)
                verdict = verdict.model_copy(update={"corrected_low": low, "corrected_high": high, "level": level})
            verdicts.append(verdict)
    return verdicts


def _by_pair(comparisons: Iterable[Comparison]) -> dict[tuple[str, str, str, str], Comparison]:
    return {(*one.pair, one.task, one.metric): one for one in comparisons}


def _measured(one: Comparison) -> dict[str, Any]:
    """Return the fields of a verdict that are those of a difference."""
    why = one.test.removeprefix("none (").removesuffix(")") if one.p is None else ""
    return {key: getattr(one, key) for key in _MEASURED} | {"reason": Reason(text=why)}


def _decided(
    asked: PrimaryQuestion,
    named: Mapping[str, Any],
    measure: Measure | None,
    one: Comparison | None,
    level: float,
    margins: Mapping[str, float],
    diverged: Mapping[str, Collection[int]],
) -> Verdict:
    """Return the verdict on a primary pair at a level; ``named`` are its names."""
    fields: dict[str, Any] = {"role": "primary", "question": asked.question, "changed": asked.changed, **named}
    fields |= {**(measure or Measure("", True))._asdict(), "family": asked.tests, "level": level}
    if one is None:
        return Verdict(**fields)
    margin = margin_for(margins, one.task, one.metric)
    fields |= {**_measured(one), "margin": margin}
    if one.p is None:
        return Verdict(**fields)
    of_margin = interval_at(one, 2 * level)
    of_sign, tested = (of_margin, 2 * level) if asked.question == "keep" else (interval_at(one, level), level)
    fields |= {"corrected_low": of_sign[0], "corrected_high": of_sign[1], "level": tested}
    fields["p_corrected"] = min(1.0, ALPHA / tested * one.p)
    if len(one.errors) < 2 or "not paired" in one.test:
        return Verdict(**fields | {"outcome": "undecided", "reason": Reason(text=_FEW_SEEDS[one.seeds > 1])})

    size = margin or 0.0
    turned = [ends if fields["higher_is_better"] else (-ends[1], -ends[0]) for ends in (of_sign, of_margin)]
    reason = Reason()
    outcome = decide_gain(turned[0], turned[1], size) if asked.question == "gain" else decide_keep(turned[1], size)
    for name, wins in ((one.method, (*BETTER, *SAME)), (one.reference, (*WORSE, "equivalent"))):
        if (lost := diverged.get(name)) and outcome in wins:
            outcome, reason = "undecided", _seeds_diverged(name, lost)
        elif lost:  # by how much the loser is worse is not known
            outcome = _WITHOUT_MARGIN.get(outcome, outcome)
    design = one.design
    fields["detectable"] = _possible(one, design.smallest_difference(level, asked.question))
    fields["margin_detectable"] = _possible(one, design.smallest_margin(level, asked.question))
    if outcome == "undecided" and not reason.methods:
        effect = one.difference if fields["higher_is_better"] else -one.difference
        pair = asked.question, effect, level, size
        fields["seeds_needed"] = fewest(design.with_seeds, pair, above=one.seeds, most=MOST_SEEDS)
        fields["documents_needed"] = fewest(design.with_documents, pair, above=one.units, most=MOST_DOCUMENTS)
    return Verdict(**fields | {"outcome": outcome, "reason": reason})


def _seeds_diverged(method: str, seeds: Collection[int]) -> Reason:
    which = f"seeds {', '.join(map(str, sorted(seeds)))}" if len(seeds) > 1 else f"seed {next(iter(seeds))}"
    return Reason(text=f"{which} of ", methods={method: " diverged"})


def _possible(one: Comparison, value: float) -> float | None:
    """Return a difference; None where it is not possible or not finite."""
    return value if math.isfinite(value) and not (is_share(one.metric) and value > 1) else None


def with_rates(verdict: Verdict, errors: Mapping[str, float | None], bits_per_nat: float | None = None) -> Verdict:
    """Return a verdict with what the choice of the learning rates leaves open, in nats per token or bits per byte.

    A sign holds *at the rates tried* where the difference is smaller than what the choice of its loser's rate may be
    worth. Two methods are equivalent, or differ by less than the margin, only where that is below half the margin for
    both.

    Args:
        verdict: the verdict.
        errors: by method what the choice of its rate may be worth, nats per token: infinite where its best rate is at
            an edge, None where it was not tuned.
        bits_per_nat: what a nat per token is in bits per byte, on tuning's text; None where that is not known, so that
            only measures in nats per token are looked at.
    """
    unit = {NATS_PER_TOKEN: 1.0, BITS_PER_BYTE: bits_per_nat}.get(verdict.metric)
    if unit is None:
        return verdict
    errors = {name: None if error is None else error * unit for name, error in errors.items()}
    loser = errors.get(verdict.method if verdict.tone == "worse" else verdict.other)
    if verdict.is_found and loser is not None and abs(verdict.difference) < loser:
        verdict = verdict.model_copy(update={"at_rates_tried": True})
    wide = {
        name: "'s is not bounded" if math.isinf(error) else f"'s may be worth {error:.2g}"
        for name in verdict.pair
        if (error := errors.get(name)) is not None and error >= (verdict.margin or 0.0) / 2
    }
    update: dict[str, object] = {}
    if wide and verdict.outcome == "equivalent":
        update = {"outcome": "undecided", "reason": Reason(text="the choice of the rates: ", methods=wide)}
    elif wide and verdict.question == "gain":
        update = {"outcome": _WITHOUT_MARGIN.get(verdict.outcome, verdict.outcome)}
    return verdict.model_copy(update=update)


def interval_at(one: Comparison, level: float, near: float | None = None) -> tuple[float, float]:
    """Return the interval of a difference at the level ``1 - level``, from its errors, within what is possible.

    The end near 0 is at the level ``1 - near`` where that is given.
    """
    above = one.difference > 0
    down, up = (near or level, level) if above else (level, near or level)
    return within(one, one.difference - _side(one, above, down), one.difference + _side(one, not above, up))


def within(one: Comparison, low: float, high: float) -> tuple[float, float]:
    """Return the part of an interval that is possible of a difference by its measure."""
    of_others = (-1.0, 1.0) if is_share(one.metric) else (-math.inf, math.inf)
    least, most = _POSSIBLE.get(one.metric.partition(",")[0], of_others)
    return min(max(low, least), one.difference), max(min(high, most), one.difference)


def judge(
    comparisons: Iterable[Comparison],
    pairs: Pairs,
    measures: Mapping[str, Measure],
    why_not: Callable[[str, str, str], Reason] = lambda method, other, task: Reason(text="not compared"),
    *,
    without: Collection[tuple[str, str, str]] = (),
    diverged: Mapping[str, Collection[int]] | None = None,
) -> list[Verdict]:
    """Return the secondary verdict of every pair on every task.

    Args:
        comparisons: the paired differences; those by other measures than the deciding one are left aside.
        pairs: the pairs of each question, as they were declared.
        measures: the measure that decides each task.
        why_not: says why a pair was not compared on a task.
        without: the method, the other and the task of each pair that a primary question decides.
        diverged: the seeds of each method that diverged.
    """
    by_pair, verdicts = _by_pair(comparisons), list[Verdict]()
    for question, declared in pairs.items():
        asked = [(*pair, task) for pair, task in product(declared, measures) if (*pair, task) not in without]
        made = {key: by_pair.get((*key, measures[key[2]].metric)) for key in asked}

        # Holm's method over the testable ones: p ascending, times how many are left; and the corrected intervals
        tested = [(one.p, key, one) for key, one in made.items() if one is not None and one.p is not None]
        tested.sort(key=lambda test: test[0])
        steps = dict[tuple[str, str, str], dict[str, Any]]()
        corrected, far = 0.0, ALPHA / max(1, len(tested))
        for rank, (p, key, one) in enumerate(tested):
            left = len(tested) - rank
            corrected = max(corrected, min(1.0, left * p))
            rejected = corrected < ALPHA
            low, high = interval_at(one, far, near=ALPHA / left if rejected and p >= far else far)
            outcome: Outcome = "not decided"
            if rejected:
                outcome = "better" if (one.difference > 0) == measures[one.task].higher_is_better else "worse"
            steps[key] = {"outcome": outcome, "p_corrected": corrected, "family": len(tested), "level": far}
            winner = one.method if outcome == "better" else one.reference
            if rejected and (lost := (diverged or {}).get(winner)):  # what is left is its better part
                steps[key] |= {"outcome": "not decided", "reason": _seeds_diverged(winner, lost)}
            steps[key] |= {"corrected_low": low, "corrected_high": high, "detectable": _visible(one, far)}

        for key, difference in made.items():
            named = {"question": question, **dict(zip(("method", "other", "task"), key, strict=True))}
            fields = {"reason": why_not(*key)} if difference is None else _measured(difference)
            verdicts.append(Verdict(**named | measures[key[2]]._asdict() | fields | steps.get(key, {})))
    return verdicts


def _side(one: Comparison, towards_zero: bool, level: float) -> float:
    """Return how far the interval of a level reaches to one side.

    It is the reach of the errors; where these do not give the plain interval, the plain interval's in proportion. It
    reaches 0 exactly where the test does not reject at that level, also of an exact test, whose p-value Student's t
    only approximates.
    """
    down = (one.difference > 0) == towards_zero
    side = one.difference - one.low if down else one.high - one.difference
    size, p = abs(one.difference), one.p or 0.0
    errors = _errors(one)
    if one.log_ratio or _errors_give_it(one):
        half = float(reach(errors, level))
        reached = one.unit * (-math.expm1(-half) if down else math.expm1(half)) if one.log_ratio else half
    else:
        reached = side * _stretch(errors, level)
    if not towards_zero or size == 0 or (p < level) == (reached < size):
        return reached
    exact = _stretch(errors, p)
    return size * (_stretch(errors, level) / exact if exact else 1.0)


def _errors_give_it(one: Comparison) -> bool:
    """Return whether the plain interval is the one of the errors, within what is possible."""
    if not any(error for error, _ in one.errors):
        return False
    half = float(reach(one.errors, ALPHA))
    ends = within(one, one.difference - half, one.difference + half)
    return all(
        math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6 * half) for pair in zip(ends, (one.low, one.high), strict=True)
    )


def _stretch(errors: Sequence[tuple[float, float]], level: float) -> float:
    """Return how many times as long as the plain interval that of another level is."""
    return float(reach(errors, level) / reach(errors, ALPHA))


def _errors(one: Comparison) -> Sequence[tuple[float, float]]:
    """Return the sources of variation; where all documents and seeds agree, one whose t is normal."""
    return one.errors if any(error for error, _ in one.errors) else [(1.0, math.inf)]


def _visible(one: Comparison, level: float) -> float | None:
    """Return the difference that a test at a level finds in 80 % of cases."""
    if one.errors and any(error for error, _ in one.errors):
        size = one.design.smallest_difference(level)
    else:
        errors, half = _errors(one), (one.high - one.low) / 2
        size = half * (_stretch(errors, level) + _stretch(errors, 2 * (1 - POWER)))
    visible = _possible(one, size)
    if visible is not None and one.test == "McNemar exact":  # so many documents must change one way
        visible = max(visible, math.ceil(math.log2(2 / level)) / one.n)
    return visible
