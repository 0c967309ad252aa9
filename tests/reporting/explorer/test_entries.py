"""Gains and costs of one run, against numbers worked out by hand from what the example holds."""

import math

import pytest
from reporting.study_example import study as pretrained
from scipy import stats

from hfpatch.reporting.explorer.entries import entries
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults

SKIP, CLOZE, TEXT = "pre_projection_skip", "tinyworld_cloze", "tinyworld_text"


def by_axis(results):
    return {(entry.method, entry.axis.task, entry.axis.metric): entry for entry in entries(results)}


def test_a_gain_is_better_above_zero_in_the_units_of_the_report(results):
    listed = by_axis(results)
    assert len(listed) == 2 * 3
    cloze, text = listed[SKIP, CLOZE, "acc"], listed[SKIP, TEXT, "word perplexity"]
    wider = stats.t.ppf(1 - 0.025 / 6, 100) / stats.t.ppf(0.975, 100)  # of six intervals together
    half = 3 * wider  # 0.03 in points, and 0.6 of 20: lower is better
    assert (cloze.gain, cloze.low, cloze.high) == pytest.approx((5.0, 5 - half, 5 + half))
    assert (text.gain, text.low, text.high) == pytest.approx((12.0, 12 - half, 12 + half))
    assert (cloze.axis.unit, text.axis.unit) == ("points", "% lower")
    assert (cloze.verdict, listed["lora", TEXT, "word perplexity"].verdict) == ("better", "undecided")
    assert (cloze.parameters, cloze.seconds, cloze.memory, cloze.seeds) == (80_000, 409_600 / 2048, 512 * 2**20, 2)
    assert text.text == f"+12.0 [{12 - half:.1f}, {12 + half:.1f}] %"
    assert cloze.axis.documents == "400 documents"


def test_an_entry_is_that_of_the_look_that_decided_and_says_what_holds_at_the_rates_tried(results):
    decided = results.verdict(SKIP, CLOZE, "baseline").model_copy(update={"seeds": 1, "at_rates_tried": True})
    joined = [decided if one.pair == decided.pair and one.task == CLOZE else one for one in results.verdicts]
    entry = by_axis(results.model_copy(update={"joined": joined}))[SKIP, CLOZE, "acc"]
    assert entry.seeds == 1
    assert entry.text.endswith(" points at the rates tried")


def test_what_is_missing_has_no_number_and_says_why(build, raw):
    lost = raw["methods"]["lora"]
    for seed, step in (("0", 7), ("1", 9)):
        lost["runs"][seed]["train"]["diverged_step"] = step
        lost["runs"][seed]["evaluation"] = {}
    raw["comparisons"] = [pair for pair in raw["comparisons"] if pair["method"] != "lora"]
    raw["comparisons"][1] |= dict.fromkeys(("low", "high", "p")) | {"test": "none (too few documents)"}
    raw["comparisons"][2] |= dict.fromkeys(("difference", "low", "high", "p")) | {"test": "none (not finite)"}
    listed = by_axis(build(raw))
    infinite = listed[SKIP, TEXT, "word perplexity"]  # JSON, which the page's script reads, has no NaN
    assert (infinite.gain, infinite.low, infinite.verdict) == (None, None, "not tested")
    assert infinite.text == "not a number % (no interval)"
    diverged = listed["lora", CLOZE, "acc"]
    assert (diverged.gain, diverged.verdict) == (None, "diverged")
    assert diverged.text == "diverged at step 7 (seed 0) and 9 (seed 1)"
    few_documents = listed[SKIP, "tinyworld_endings", "acc norm"]
    assert (few_documents.low, few_documents.verdict) == (None, "not tested")
    assert few_documents.text == "+1.50 points (no interval)"


def test_a_measure_that_decides_nothing_has_no_verdict(build, raw, compared):
    few = dict.fromkeys(("low", "high", "p"))
    raw["comparisons"] += [
        compared("lora", CLOZE, -0.1, 0.05, "better", metric="bits_per_byte"),
        compared("lora", CLOZE, 0.3, 0.1, "", metric="margin") | few,
    ]
    for method in raw["methods"].values():
        for run in method["runs"].values():
            run["evaluation"][CLOZE]["metrics"]["bits_per_byte"] = 2.0
    listed = by_axis(build(raw))
    accuracy, low_noise = listed["lora", CLOZE, "acc"], listed["lora", CLOZE, "bits per byte"]
    assert (accuracy.axis.primary, accuracy.verdict, accuracy.gain) == (False, "no verdict", pytest.approx(1.5))
    assert low_noise.gain == pytest.approx(0.1)  # in bits
    assert (low_noise.axis.primary, low_noise.verdict) == (True, "better")
    assert listed["lora", CLOZE, "margin"].text == "+0.300 (no interval)"


def test_a_study_shows_each_variant_against_its_baseline():
    listed = {entry.method: entry for entry in entries(ComparisonResults.model_validate(pretrained()))}
    assert {name: (entry.gain, entry.parameters) for name, entry in listed.items()} == {
        "nonlinear": (pytest.approx(0.1), 1_005_000),
        "identity": (pytest.approx(-0.1), 900_000),
    }
    axes = {(entry.axis.reference, entry.axis.size, entry.axis.model) for entry in listed.values()}
    assert axes == {("linear", "non-embedding parameters", "pretrained in queries")}


def test_an_evaluation_shows_patches_against_the_base(evaluated):
    (worse, low_noise) = entries(evaluated)  # the third names a patch that was not evaluated
    assert (worse.method, worse.parameters) == ("one", 1200)
    assert (worse.gain, worse.low) == pytest.approx((-25.0, -30.0))
    assert worse.axis.reference == "the base"
    assert math.isfinite(low_noise.gain)
    whole = {"name": "other", "sha256": "cd" * 32, "dtype": "float32", "parameters": 7_000}
    raw = evaluated.to_json()
    raw["variants"]["one"]["model"] = whole
    entry = entries(EvaluationResults.model_validate(raw))[0]
    assert (entry.parameters, entry.axis.reference, entry.axis.size) == (7_000, "base", "parameters of the model")
