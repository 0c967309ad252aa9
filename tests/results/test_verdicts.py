"""Verdicts against Holm's method and Student's intervals written out here, and by simulation."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats

from hfpatch.evaluation.stats import Estimate, Part
from hfpatch.recipes.pairs import question_of
from hfpatch.results.decision import Design
from hfpatch.results.parts import Clusters, Comparison, with_names
from hfpatch.results.verdicts import (
    LookTaken,
    Measure,
    PrimaryQuestion,
    Reason,
    Verdict,
    deciding,
    interval_at,
    judge,
    judge_primary,
    look_parts,
    with_rates,
    within,
)

BITS = Measure("bits_per_byte", False)


def comparison(method, difference, error, freedom, *, task="text", other="base", **more):
    """A difference with Student's interval and p."""
    reach = stats.t.ppf(0.975, freedom) * error
    fields = {
        **{"method": method, "reference": other, "task": task, "metric": "bits_per_byte", "n": 100, "seeds": 3},
        **{"difference": difference, "low": difference - reach, "high": difference + reach, "test": "paired t"},
        **{"p": 2 * stats.t.sf(abs(difference) / error, freedom), "errors": [(error, freedom)]},
    }
    return Comparison(**(fields | more))


def judged(made, **more):
    pairs = list(dict.fromkeys((one.method, one.reference) for one in made))
    tasks = dict.fromkeys((one.task for one in made), BITS)
    return judge(made, {"base": pairs}, tasks, **more)


def holm_reference(p_values, alpha=0.05):
    """Reject in ascending order of p while p < alpha / (tests left); the textbook's loop."""
    rejected = set()
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] >= alpha / (len(p_values) - rank):
            break
        rejected.add(int(index))
    return rejected


@pytest.mark.parametrize("seed", range(40))
def test_a_verdict_is_holms_and_its_interval_leaves_out_0_exactly_where_it_is_one(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.normal(0, 3, size=rng.integers(1, 30))
    made = [comparison(f"m{i}", d, 1.0, float(rng.integers(2, 200))) for i, d in enumerate(sizes)]
    verdicts = judged(made)
    p, rejected = np.array([one.p for one in made]), holm_reference([one.p for one in made])
    corrected = np.minimum(1, np.maximum.accumulate(np.arange(len(p), 0, -1) * np.sort(p)))
    assert sorted(verdict.p_corrected for verdict in verdicts) == pytest.approx(corrected)
    for i, (verdict, one) in enumerate(zip(verdicts, made, strict=True)):
        assert verdict.is_found == (i in rejected)
        assert verdict.outcome == ("not decided" if i not in rejected else "better" if sizes[i] < 0 else "worse")
        assert (verdict.corrected_low > 0 or verdict.corrected_high < 0) == verdict.is_found
        assert verdict.family == len(made)
        far = stats.t.ppf(1 - 0.025 / len(made), one.errors[0][1])  # Bonferroni's quantile
        ends = [verdict.corrected_low, verdict.corrected_high]
        assert max(abs(end - verdict.difference) for end in ends) == pytest.approx(far, rel=1e-6)
        assert (verdict.low, verdict.high) == (one.low, one.high)
        assert verdict.detectable == pytest.approx(far + stats.norm.ppf(0.8), rel=1e-3)  # its error is known


@pytest.mark.parametrize("p", [0.0004, 0.004, 0.04, 0.4])
@pytest.mark.parametrize("difference", [0.5, 1.5, 2.5, 4.5])
def test_an_exact_test_decides_where_its_p_is_not_that_of_the_interval(p, difference):
    made = [comparison("a", difference, 1.0, 100.0, p=p, test="McNemar exact"), comparison("b", 0.1, 1.0, 100.0)]
    first, _ = judged(made)
    assert first.is_found == (2 * p < 0.05)
    assert (first.corrected_low > 0) == first.is_found


def test_a_test_without_errors_finds_what_its_interval_shows():
    """Where all documents and seeds agree, the errors are 0 and the half of the plain interval is 1.96 of them."""
    (verdict,) = judged([comparison("a", 0.5, 1.0, 9.0, errors=[(0.0, 9.0)], low=-0.5, high=1.5, p=0.3)])
    assert verdict.detectable == pytest.approx((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) / stats.norm.ppf(0.975))


def test_what_was_not_tested_says_why_and_counts_in_no_family():
    few = comparison("few", 1.0, 1.0, 9.0, p=None, low=-math.inf, high=math.inf, test="none (too few documents)")
    made = [few, comparison("a", -9.0, 1.0, 9.0)]
    pairs = {"base": [("few", "base"), ("gone", "base"), ("a", "base")]}
    verdicts = judge(made, pairs, {"text": BITS}, lambda method, *_: Reason(methods={method: " diverged"}))
    assert [(verdict.outcome, verdict.why, verdict.family) for verdict in verdicts] == [
        ("not tested", "too few documents", 0),
        ("not tested", "gone diverged", 0),
        ("better", "", 1),
    ]


def test_questions_are_families_of_their_own():
    made = [comparison(f"m{i}", 2.3, 1.0, 1e6, other="base" if i % 2 else "lora") for i in range(8)]
    assert {question_of(one.pair, "base", ["lora"]) for one in made} == {"base", "lora"}
    pairs = {name: [one.pair for one in made if one.reference == name] for name in ("base", "lora")}
    assert {one.question: one.family for one in judge(made, pairs, {"text": BITS})} == {
        "base": 4,
        "lora": 4,
    }


def test_no_difference_of_shares_is_larger_than_1():
    made = comparison("a", 0.1, 0.3, 1.0, metric="acc")
    (verdict,) = judge([made], {"base": [("a", "base")]}, {"text": Measure("acc", True)})
    assert (verdict.corrected_low, verdict.corrected_high, verdict.detectable) == (-1.0, 1.0, None)


def test_one_measure_decides_a_task_and_others_do_not_count():
    primary = {"quiz": Measure("acc", True), "story": Measure("bleu", True)}
    measures = deciding(primary, [("quiz", "acc"), ("quiz", "bits_per_byte"), ("story", "bleu")])
    assert measures == {"quiz": BITS, "story": Measure("bleu", True)}
    made = [comparison("a", -9.0, 1.0, 9.0, task="quiz"), comparison("a", -9.0, 1.0, 9.0, task="quiz", metric="acc")]
    (quiz, _) = judge(made, {"base": [("a", "base")]}, measures)
    assert (quiz.metric, quiz.family, quiz.outcome) == ("bits_per_byte", 1, "better")


GAIN = PrimaryQuestion(question="gain", pairs=[("a", "lora"), ("b", "lora")], on=["text"])


def paired(method, difference, *, seeds=5, error=0.004, of_documents=(0.003, 199.0), **more):
    """A difference over seeds and 200 documents by bits per byte; lower is better."""
    errors = [of_documents, (error, seeds - 1.0)]
    half = np.hypot(*(stats.t.ppf(0.975, freedom) * error for error, freedom in errors))
    fields = {"low": difference - half, "high": difference + half, "errors": errors, "other": "lora"}
    fields["p"] = Estimate(difference, [Part(*part) for part in errors if part[1]]).p
    return comparison(method, difference, error, seeds - 1, **{"seeds": seeds, **fields, **more})


def primary(asked=GAIN, *made, margins={"bits_per_byte": 0.02}, **more):  # noqa: B006
    return judge_primary(
        asked, [LookTaken(seeds=5, part=1.0, comparisons=made)], {"text": BITS, "quiz": BITS}, margins, **more
    )


def test_a_primary_pair_is_decided_at_its_part_of_the_level():
    one, two = primary(GAIN, paired("a", -0.05), paired("b", 0.001, error=0.002))
    for verdict, error, level in ((one, 0.004, 0.025), (two, 0.002, 0.05)):
        half = math.hypot(stats.t.ppf(1 - level / 2, 199) * 0.003, stats.t.ppf(1 - level / 2, 4) * error)
        assert (verdict.level, verdict.family, verdict.role, verdict.margin) == (level, 2, "primary", 0.02)
        assert verdict.corrected_high - verdict.difference == pytest.approx(half)
        assert verdict.difference - verdict.corrected_low == pytest.approx(half)
        assert verdict.p_corrected == min(1, 2 * verdict.p)
    assert (one.outcome, two.outcome) == ("better", "equivalent")
    assert one.seeds_needed is None


def test_the_interval_of_a_pair_shows_its_outcome():
    """Its interval excludes 0 where a sign is claimed, and the margin where that is."""
    outcomes = set()
    for difference, error in product(np.linspace(-0.03, 0.03, 31), (0.002, 0.009)):
        (verdict, _) = primary(GAIN, paired("a", difference, error=error))
        low, high, outcome = verdict.corrected_low, verdict.corrected_high, verdict.outcome
        is_within = outcome == "equivalent" or "less than the margin" in outcome
        assert (low > -0.02 and high < 0.02) == is_within
        if outcome != "equivalent":
            assert (low > 0 or high < 0) == verdict.is_found == (verdict.p_corrected < 0.05)
        outcomes.add(outcome)
    assert outcomes == {"better", "better by less than the margin", "equivalent", "undecided", "worse",
                        "worse by less than the margin"}  # fmt: skip


@pytest.mark.parametrize("groups", [None, 40])
@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize(("question", "effect"), [("gain", 0.02), ("gain", -0.02), ("keep", -0.01)])
def test_an_undecided_pair_says_what_would_decide_it(question, effect, higher, groups):
    """More seeds where these vary most, else more groups of documents."""
    of_documents, error = ((0.003, 199.0), 0.012) if groups is None else ((0.012, groups - 1.0), 0.001)
    clusters = groups and Clusters(column="passage", groups=groups)
    made = paired("a", effect if higher else -effect, error=error, of_documents=of_documents, clusters=clusters, n=400)
    asked, look = GAIN.model_copy(update={"question": question}), LookTaken(seeds=5, part=1.0, comparisons=[made])
    given = asked, [look], {"text": Measure("bits_per_byte", higher)}, {"bits_per_byte": 0.02}
    one, missing = judge_primary(*given, why_not=lambda *_: Reason(text="gone"))
    assert one.outcome == "undecided"
    assert (missing.outcome, missing.why) == ("not tested", "gone")
    design = Design(of_documents, (error, 4), estimate_freedom=4)
    with_more, needed = design.with_documents, one.documents_needed
    if groups is None:
        assert one.documents_needed is None  # the seeds vary too much
        with_more, needed = design.with_seeds, one.seeds_needed
    assert with_more(needed).decides(question, effect, 0.025, 0.02) >= 0.8
    assert with_more(needed - 1).decides(question, effect, 0.025, 0.02) < 0.8
    assert one.detectable == design.smallest_difference(0.025, question)
    assert one.margin_detectable == design.smallest_margin(0.025, question)


@pytest.mark.parametrize(
    ("made", "diverged", "outcome", "why"),
    [
        (paired("a", -0.05, seeds=1, errors=[(0.003, 199.0)]), {}, "undecided", "one seed"),
        (paired("a", -0.05, test="t over documents (paired) and seeds (not paired)"), {}, "undecided",
         "fewer than two paired seeds"),
        (paired("a", -0.05), {"a": {3: 10}}, "undecided", "seed 3 of a diverged"),
        (paired("a", 0.001, error=0.001), {"lora": {0: 9, 2: 9}}, "undecided", "seeds 0, 2 of lora diverged"),
        (paired("a", -0.05), {"lora": {0: 9}}, "better", ""),
        (paired("a", 0.05), {"a": {0: 9}}, "worse", ""),
        (paired("a", 0.009, error=0.001), {}, "worse by less than the margin", ""),
        (paired("a", 0.009, error=0.001), {"a": {0: 9}}, "worse", ""),  # by how much is not known
        (paired("a", -0.009, error=0.001), {"lora": {0: 9}}, "better", ""),
    ],
)  # fmt: skip
def test_what_one_seed_or_a_diverged_one_leaves_open(made, diverged, outcome, why):
    asked = GAIN.model_copy(update={"pairs": [("a", "lora")]})
    (verdict,) = primary(asked, made, diverged=diverged)
    assert (verdict.outcome, verdict.why) == (outcome, why)
    assert verdict.level == (0.1 if "margin" in outcome else 0.05)  # that of a margin only where one is claimed


@pytest.mark.parametrize(
    ("difference", "diverged", "outcome", "why"),
    [
        (-9.0, {"a": {4: 7, 1: 9}}, "not decided", "seeds 1, 4 of a diverged"),
        (-9.0, {"lora": {0: 9}}, "better", ""),
        (9.0, {"lora": {0: 9}}, "not decided", "seed 0 of lora diverged"),
        (9.0, {"a": {0: 9}}, "worse", ""),
        (0.1, {"a": {0: 9}}, "not decided", ""),
    ],
)
def test_what_is_left_of_diverged_seeds_is_not_better_in_a_secondary_pair_either(difference, diverged, outcome, why):
    made = comparison("a", difference, 1.0, 9.0, other="lora")
    (verdict,) = judged([made], diverged=diverged)
    assert (verdict.outcome, verdict.why, verdict.family) == (outcome, why, 1)


def test_a_reason_has_the_new_names_of_its_methods_and_of_no_other():
    asked = GAIN.model_copy(update={"pairs": [("seed 3 of lora", "lora")]})
    (verdict,) = primary(asked, paired("seed 3 of lora", 0.001, error=0.001), diverged={"lora": {3: 10}})
    assert verdict.why == "seed 3 of lora diverged"
    renamed = with_names(verdict, {"seed 3 of lora": "A", "lora": "B"})
    assert (renamed.pair, renamed.why) == (("A", "B"), "seed 3 of B diverged")
    assert renamed.to_json()["why"] == renamed.why


@pytest.mark.parametrize(("difference", "outcome"), [(0.009, "worse"), (0.001, "undecided")])
def test_an_outcome_that_the_rates_take_the_margin_from_has_the_interval_of_its_sign(difference, outcome):
    asked = GAIN.model_copy(update={"pairs": [("a", "lora")]})
    made = paired("a", difference, error=0.001)
    for error, level in ((0.001, 0.1), (0.5, 0.05)):
        rates = partial(with_rates, errors={"a": 0.0, "lora": error}, bits_per_nat=1.0)
        (verdict,) = primary(asked, made, rates=rates)
        assert (verdict.outcome == outcome) == (error > 0.02)
        half = math.hypot(stats.t.ppf(1 - level / 2, 199) * 0.003, stats.t.ppf(1 - level / 2, 4) * 0.001)
        assert verdict.level == level
        assert (verdict.corrected_low, verdict.corrected_high) == pytest.approx((difference - half, difference + half))


def test_what_is_kept_is_decided_on_every_task_against_the_base():
    asked = PrimaryQuestion(question="keep", pairs=[("a", "base")], on=["text", "quiz"])
    made = [paired("a", 0.003, other="base", error=0.001), paired("a", 0.09, other="base", task="quiz")]
    text, quiz = primary(asked, *made)
    assert [(text.outcome, text.level), (quiz.outcome, quiz.level)] == [("kept", 0.05), ("lost", 0.05)]
    assert [verdict.margin for verdict in primary(asked, *made, margins={"quiz": 0.2, "bits_per_byte": 0.01})] == [
        0.01,
        0.2,
    ]
    assert primary(asked, *made, margins={})[0].outcome == "undecided"  # signs alone
    for difference in np.linspace(0.002, 0.02, 19):  # the interval and p that are shown agree with the outcome
        (verdict, _) = primary(asked, paired("a", difference, other="base"))
        assert ("lost" in verdict.outcome) == (verdict.corrected_low > 0) == (verdict.p_corrected < 0.05)
        assert (verdict.outcome in ("kept", "lost by less than the margin")) == (verdict.corrected_high < 0.02)


def test_at_looks_a_pair_has_the_outcome_of_the_one_that_decided_it():
    parts = look_parts([4, 6, 10])
    assert parts == [0.2, 0.3, 0.5]
    asked = GAIN.model_copy(update={"pairs": [("a", "lora"), ("b", "lora")]})
    looks = [[paired("a", -0.06, seeds=4), paired("b", -0.02, seeds=4, error=0.02)],
             [paired("a", -0.01, seeds=6), paired("b", -0.06, seeds=6)],
             [paired("b", -0.01, seeds=10)]]  # fmt: skip
    given = [
        LookTaken(seeds=made[0].seeds, part=part, comparisons=made) for made, part in zip(looks, parts, strict=True)
    ]
    later = {"a": {4: 9}, "b": {6: 9}}  # seeds that diverge after the look decide nothing again
    one, two = judge_primary(asked, given, {"text": BITS}, {}, diverged=later)
    assert [(one.outcome, one.seeds, one.difference), (two.outcome, two.seeds)] == [("better", 4, -0.06), ("better", 6)]
    assert [one.level, two.level] == pytest.approx([0.05 * 0.2 / 2, 0.05 * 0.3 / 2])
    one, two = judge_primary(asked, given, {"text": BITS}, {}, diverged={"a": {3: 9}, "b": {5: 9}})
    assert (one.outcome, two.outcome) == ("undecided", "undecided")


@pytest.mark.parametrize("base", [0.0, 0.02, 0.99])
def test_a_base_that_knows_little_is_measured_as_badly_as_a_method(base):
    """It is not known to have nothing to lose, nor a method at the top to lose nothing."""
    made = paired("a", 0.0, other="base", metric="acc", error=0.05, reference_score=base)
    for question, outcome in (("keep", "kept"), ("gain", "equivalent")):
        asked = PrimaryQuestion(question=question, pairs=[("a", "base")], on=["text"])
        looks = [LookTaken(seeds=5, part=1.0, comparisons=[made])]
        for margin in (0.05, 0.5):
            (verdict,) = judge_primary(asked, looks, {"text": Measure("acc", True)}, {"accuracy": margin})
            assert verdict.outcome == (outcome if margin == 0.5 else "undecided")
            level = 0.1 if verdict.outcome != "undecided" or question == "keep" else 0.05
            half = math.hypot(stats.t.ppf(1 - level / 2, 199) * 0.003, stats.t.ppf(1 - level / 2, 4) * 0.05)
            assert (verdict.corrected_low, verdict.corrected_high) == pytest.approx((-half, half))


def test_no_interval_leaves_what_is_possible_of_a_difference():
    possible = {"acc": (-1, 1), "mcc": (-2, 2), "kl": (0, math.inf), "top1_agreement": (-1, 0),
                "bits_per_byte,none": (-math.inf, math.inf)}  # fmt: skip
    for metric, (least, most) in possible.items():
        difference, half = (0.05 if least == 0 else -0.05), 9 * stats.t.ppf(0.975, 3)
        one = comparison("a", difference, 9.0, 3.0, metric=metric)
        one = one.model_copy(update=dict(zip(("low", "high"), within(one, one.low, one.high), strict=True)))
        ends = max(least, difference - half), min(most, difference + half)
        assert (one.low, one.high) == pytest.approx(ends)
        assert interval_at(one, 0.05) == pytest.approx(ends)


def test_a_perplexity_has_the_interval_of_its_logarithm():
    errors, ratio, base = [(0.02, 99.0), (0.05, 4.0)], -0.3, 20.0

    def reach(p):
        return math.hypot(*(stats.t.ppf(1 - p / 2, freedom) * error for error, freedom in errors))

    def shifted(log):
        return base * math.expm1(log)

    ends = {"low": shifted(ratio - reach(0.05)), "high": shifted(ratio + reach(0.05))}
    fields = {"errors": errors, "log_ratio": True, **ends}
    fields["p"] = Estimate(ratio, [Part(*part) for part in errors]).p
    made = comparison("a", shifted(ratio), 1.0, 4.0, metric="word_perplexity", **fields)
    assert interval_at(made, 0.01) == pytest.approx((shifted(ratio - reach(0.01)), shifted(ratio + reach(0.01))))


@pytest.mark.parametrize(
    ("outcome", "difference", "errors", "expected"),
    [
        ("worse", 0.04, {"a": 0.09, "lora": 0.0}, ("worse", True, "")),
        ("worse", 0.04, {"a": 0.03, "lora": 0.09}, ("worse", None, "")),  # a better rate of the winner changes no sign
        ("better", -0.04, {"a": 0.0, "lora": math.inf}, ("better", True, "")),
        ("better", -0.04, {"a": None, "lora": None}, ("better", None, "")),
        ("equivalent", 0.001, {"a": 0.009, "lora": 0.0}, ("equivalent", None, "")),
        ("equivalent", 0.001, {"a": 0.011, "lora": math.inf},
         ("undecided", None, "the choice of the rates: a's may be worth 0.011, lora's is not bounded")),
        ("worse by less than the margin", 0.01, {"a": 0.009, "lora": 0.0}, ("worse by less than the margin", None, "")),
        ("worse by less than the margin", 0.01, {"a": 0.009, "lora": 0.011}, ("worse", None, "")),
        ("better by less than the margin", -0.01, {"a": 0.011, "lora": 0.011}, ("better", True, "")),
    ],
)  # fmt: skip
def test_the_choice_of_the_rates_is_said(outcome, difference, errors, expected):
    fields = {"question": "gain", "method": "a", "other": "lora", "task": "held_out_text", "margin": 0.02}
    fields |= {"outcome": outcome, "difference": difference, "metric": "nats_per_token", "higher_is_better": False}
    verdict = with_rates(Verdict(**fields), errors)
    assert (verdict.outcome, verdict.at_rates_tried, verdict.why) == expected
    assert with_rates(Verdict(**{**fields, "metric": "acc"}), errors).outcome == outcome
    bits = {"metric": "bits_per_byte", "difference": difference / 3, "margin": 0.02 / 3}
    verdict = with_rates(Verdict(**fields | bits), errors, 1 / 3)  # three bytes times ln 2 are a token
    assert (verdict.outcome, verdict.at_rates_tried) == expected[:2]
    assert with_rates(Verdict(**fields | bits), errors).outcome == outcome
