"""The verdicts of a comparison: one question, one measure, one test, one verdict for each pair and task.

Every report reads this list and tests nothing itself. The questions and their pairs are fixed by the recipe:

    base     does a method change the base, on each task and text? (what is forgotten is read from these, too)
    lora     is it better than the LoRA of its match group?
    parts    what carries its effect: all other pairs that the recipe declares
    models   of whole models: does one differ from another?

One measure decides a task: bits per byte of the right answer, or of the text, where documents have log-likelihoods (one
unit, the lowest noise, defined for choices and texts alike), else the task's primary metric, such as the nats per token
of held-out text. Other measures are shown with plain intervals and have no verdict.

Each question is one family of m tests, of all its pairs and tasks, corrected by Holm's method: with p-values in
ascending order, the k-th is rejected where all before it are and ``p < α/(m - k + 1)``, α = 5 %. A simultaneous
interval is that of the level ``1 - α/m``: all intervals of a family together cover with 95 % (Bonferroni). It leaves
out 0 exactly where the verdict is better or worse: where only a later step of Holm's rejects, its end near 0 is that of
the level ``1 - α/(m - k + 1)``, and the sign holds with the error rate of the verdicts. (No finite intervals do both
with 95 % together: Holm's method spends all of α on signs; Guilbaud 2008, Biometrical Journal 50, 678.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hfpatch.recipes.pairs import Question
from hfpatch.results.low_noise import BITS_PER_BYTE, LOW_NOISE, is_share
from hfpatch.results.parts import Clusters, Comparison, High, Low, Number, Part

ALPHA = 0.05
POWER = 0.80
Outcome = Literal["better", "worse", "no difference shown", "not tested"]
Pairs = Mapping[Question, Sequence[tuple[str, str]]]
"""The method and the other of every pair that a question compares."""
_MEASURED = ("difference", "low", "high", "p", "n", "clusters", "seeds", "test")
QUESTIONS: dict[Question, str] = {
    "base": "does it change the base?",
    "lora": "is it better than LoRA?",
    "parts": "what carries its effect?",
    "models": "do the models differ?",
    "retention": "does it keep what the base knew?",
}


class Measure(NamedTuple):
    """A metric, and whether a higher value is better."""

    metric: str
    higher_is_better: bool


class Verdict(Part):
    """The verdict on one pair on one task.

    Attributes:
        question: the question that it answers.
        method, other: the pair.
        task: the task.
        metric: the measure that decides the task.
        verdict: the outcome of the corrected test; ``why`` says why nothing was tested.
        difference: method minus other, in the metric's own unit; NaN where nothing was measured.
        low, high: ends of the plain 95 % interval, of this difference alone.
        simultaneous_low, simultaneous_high: ends of the interval that belongs to the verdict.
        p: two-sided p-value of no difference, by ``test``; None where nothing was tested.
        p_corrected: ``p`` corrected by Holm's method over the family.
        family: how many tests the family has.
        n: documents.
        clusters: the groups that they come in, if any.
        seeds: seeds of the method.
        smallest_visible: the true difference that is found with a probability of about 80 % by a test at the level
            α/m, the first that Holm's correction asks for; None where there is none.
    """

    written_if_set = frozenset({"clusters"})

    question: Question
    method: str
    other: str
    task: str
    metric: str
    higher_is_better: bool
    verdict: Outcome = "not tested"
    why: str = ""
    difference: Number = math.nan
    low: Low = -math.inf
    high: High = math.inf
    simultaneous_low: Low = -math.inf
    simultaneous_high: High = math.inf
    p: float | None = None
    p_corrected: float | None = None
    family: int = 0
    n: int = 0
    clusters: Clusters | None = None
    seeds: int = 0
    test: str = ""
    smallest_visible: float | None = None

    @property
    def is_found(self) -> bool:
        """Whether the test found a difference."""
        return self.verdict in ("better", "worse")


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method: the k-th smallest of m times ``m + 1 - k``."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def reach(parts: Iterable[tuple[Any, float]], p: float) -> Any:
    """Return half the length of the interval at level 1 - p: ``sqrt(Σ (t(1 - p/2, f) · error)²)``.

    Args:
        parts: the standard error (or an array of many) and the degrees of freedom f of each source of variation.
        p: one minus the level.
    """
    from scipy.special import stdtrit

    return sum((stdtrit(freedom, p / 2) * error) ** 2 for error, freedom in parts) ** 0.5


def deciding(primary: Mapping[str, Measure], measured: Iterable[tuple[str, str]]) -> dict[str, Measure]:
    """Return the measure that decides each task: bits per byte where it is measured by them, else the primary metric.

    Args:
        primary: the primary metric of each task.
        measured: the tasks and metrics by which there are comparisons, or scores while there are none.
    """
    low_noise = {task for task, metric in measured if metric == BITS_PER_BYTE}
    bits = Measure(BITS_PER_BYTE, LOW_NOISE[BITS_PER_BYTE])
    return {task: bits if task in low_noise else measure for task, measure in primary.items()}


def judge(
    comparisons: Iterable[Comparison],
    pairs: Pairs,
    measures: Mapping[str, Measure],
    why_not: Callable[[str, str, str], str] = lambda method, other, task: "not compared",
) -> list[Verdict]:
    """Return the verdict of every pair on every task.

    Args:
        comparisons: the paired differences; those by other measures than the deciding one are left aside.
        pairs: the pairs of each question, as they were declared.
        measures: the measure that decides each task.
        why_not: says why a pair was not compared on a task.
    """
    made = {(each.method, each.reference, each.task, each.metric): each for each in comparisons}
    found: list[Verdict] = []
    for question, declared in pairs.items():
        # Every pair on every task, without a verdict
        drafts = []
        for method, other in declared:
            for task, measure in measures.items():
                one = made.get((method, other, task, measure.metric))
                known = {} if one is None else {key: getattr(one, key) for key in _MEASURED}
                if one is None:
                    known["why"] = why_not(method, other, task)
                elif one.p is None:
                    known["why"] = one.test.removeprefix("none (").removesuffix(")")
                named = {"question": question, "method": method, "other": other, "task": task}
                drafts.append((Verdict(**named, **measure._asdict(), **known), one))

        # Holm's method over the testable ones, and the simultaneous intervals
        tested = [(place, one) for place, (_, one) in enumerate(drafts) if one is not None and one.p is not None]
        corrected = holm([one.p or 0.0 for _, one in tested])
        for rank, index in enumerate(sorted(range(len(tested)), key=lambda each: tested[each][1].p or 0.0)):
            place, one = tested[index]
            draft = drafts[place][0]
            rejected, above = corrected[index] < ALPHA, one.difference > 0
            far = ALPHA / len(tested)
            near = ALPHA / (len(tested) - rank) if rejected and (one.p or 0.0) >= far else far  # its step in Holm's
            low = one.difference - _side(one, above, near if above else far)
            high = one.difference + _side(one, not above, far if above else near)
            if is_share(one.metric):
                low, high = max(low, -1.0), min(high, 1.0)
            verdict: Outcome = "no difference shown"
            if rejected:
                verdict = "better" if above == draft.higher_is_better else "worse"
            update: dict[str, Any] = {"verdict": verdict, "p_corrected": corrected[index], "family": len(tested)}
            update |= {"simultaneous_low": low, "simultaneous_high": high, "smallest_visible": _visible(one, far)}
            drafts[place] = draft.model_copy(update=update), one
        found += [draft for draft, _ in drafts]
    return found


def _side(one: Comparison, towards_zero: bool, level: float) -> float:
    """Return how far the interval of a level reaches to one side: the plain interval's, in proportion.

    Towards 0 it reaches 0 exactly where the test does not reject at that level, also where the test is an exact one,
    whose p-value Student's t of the interval only approximates.
    """
    side = one.difference - one.low if (one.difference > 0) == towards_zero else one.high - one.difference
    size, p = abs(one.difference), one.p or 0.0
    errors = _errors(one)
    reached = side * _stretch(one, errors, level)
    if not towards_zero or size == 0 or (p < level) == (reached < size):
        return reached
    exact = _stretch(one, errors, p)
    return size * (_stretch(one, errors, level) / exact if exact else 1.0)


def _stretch(one: Comparison, errors: Sequence[tuple[float, float]], level: float) -> float:
    """Return how many times as long as the plain interval that of another level is."""
    choices = one.choices or 1
    return float(reach(errors, level / choices) / reach(errors, ALPHA / choices))


def shrinks_with(one: Comparison, family: int, seeds: int) -> float | None:
    """Return how many times as large the smallest detectable difference would be with another number of seeds.

    It is reach(α/m) + reach(2 (1 - power)), where the seeds' error is σ/√S with S - 1 degrees of freedom. None where
    that part of the error is not known.
    """
    if len(one.errors) != 2 or one.seeds < 2:
        return None
    documents, (error, _) = one.errors
    other = [documents, (error * math.sqrt(one.seeds / seeds), seeds - 1)]
    levels = (ALPHA / family, 2 * (1 - POWER))
    now, then = (sum(float(reach(parts, level)) for level in levels) for parts in (one.errors, other))
    return then / now if now else None


def _errors(one: Comparison) -> Sequence[tuple[float, float]]:
    """Return the sources of variation; of results without them one whose t gives both the interval and p."""
    if one.errors and any(error for error, _ in one.errors):
        return one.errors
    from scipy.optimize import brentq
    from scipy.special import stdtrit

    side = one.difference - one.low if one.difference > 0 else one.high - one.difference
    most, p = 1e6, one.p or 0.0
    exact = "permutation" in one.test or not 1e-12 < p < 1  # p has a least value, or says nothing
    if exact or not (math.isfinite(side) and side > 0):
        return [(1.0, most)]

    def beyond(freedom: float) -> float:
        return float(stdtrit(freedom, p / 2) / stdtrit(freedom, ALPHA / 2)) - abs(one.difference) / side

    fewest = 1.0
    return [(1.0, brentq(beyond, fewest, most) if beyond(fewest) * beyond(most) < 0 else most)]


def _visible(one: Comparison, level: float) -> float | None:
    """Return the smallest detectable difference at a level: ``reach(level) + reach(2 (1 - power))``."""
    errors = _errors(one)
    half = (one.high - one.low) / 2
    if not math.isfinite(half):
        return None
    visible = half * (_stretch(one, errors, level) + _stretch(one, errors, 2 * (1 - POWER)))
    if one.test == "McNemar exact":  # so many documents must change one way
        visible = max(visible, math.ceil(math.log2(2 / level)) / one.n)
    return None if is_share(one.metric) and visible > 1 else visible
