import math

import pytest

from hfpatch.reporting.numbers import (
    Change,
    Scale,
    change,
    change_text,
    count,
    decimal,
    diverged_text,
    duration,
    margin_of,
    margin_text,
    memory,
    outcome_of,
    p_text,
    part_text,
    ratio,
    scale_of,
    score,
    short_count,
    signed,
    signed_size,
    significant,
    times_text,
)
from hfpatch.results.verdicts import Verdict


@pytest.mark.parametrize(
    ("metric", "higher", "scale"),
    [
        ("acc", True, Scale.POINTS),
        ("acc_norm", True, Scale.POINTS),
        ("acc,none", True, Scale.POINTS),
        ("exact_match", True, Scale.POINTS),
        ("word_perplexity", False, Scale.RELATIVE),
        ("bits_per_byte", False, Scale.RAW),
        ("bleu", True, Scale.RAW),
    ],
)
def test_scale(metric, higher, scale):
    assert scale_of(metric, higher) is scale


def test_a_change_of_a_share_is_in_points_and_a_relative_one_in_per_cent():
    assert change(0.05, 0.02, 0.08, scale=Scale.POINTS, reference=0.4) == Change(5.0, 2.0, 8.0, Scale.POINTS, 100.0)
    relative = change(-2.4, -3.0, -1.8, scale=Scale.RELATIVE, reference=20.0)
    assert (relative.difference, relative.low, relative.high) == pytest.approx((-12.0, -15.0, -9.0))
    for reference in (None, 0.0):  # without a reference it is raw
        relative = change(-2.4, -3.0, -1.8, scale=Scale.RELATIVE, reference=reference)
        assert relative == Change(-2.4, -3.0, -1.8, Scale.RAW)


@pytest.mark.parametrize(
    ("low", "high", "scale", "text"),
    [
        (-1.0, 9.0, Scale.POINTS, "+4.0 [−1.0, 9.0] points"),
        (3.9, 4.1, Scale.POINTS, "+4.00 [3.90, 4.10] points"),
        (-200.0, 208.0, Scale.RELATIVE, "+4 [−200, 208] %"),
        (3.998, 4.002, Scale.RAW, "+4.0000 [3.9980, 4.0020]"),
        (4.0, 4.0, Scale.RAW, "+4.0 [4.0, 4.0]"),
        (0.004, 7.996, Scale.POINTS, "+4.000 [0.004, 7.996] points"),  # it leaves 0 out, and shows that
        (-1e-9, 8.0, Scale.RAW, "+4.0 [0.0, 8.0]"),
    ],
)
def test_change_text(low, high, scale, text):
    assert change_text(Change(4.0, low, high, scale)) == text


@pytest.mark.parametrize(
    ("difference", "low", "high", "shown"),
    [
        (-0.0446, -0.135, 0.046, "−0.045"),
        (0.00001, -0.03, 0.03, "0.0000"),
        (0.56, 0.55, 0.57, "+0.560"),
        (-0.0446, -math.inf, math.inf, "−0.0446"),
        (0.003, 0.003, 0.003, "+0.0030"),  # all documents changed alike
    ],
)
def test_a_size_without_its_interval_has_two_digits_where_these_are_known(difference, low, high, shown):
    assert signed_size(Change(difference, low, high, Scale.RAW)) == shown


@pytest.mark.parametrize(
    ("outcome", "fields", "bare", "sized"),
    [
        ("worse", {}, "worse", "worse by 0.045"),
        (
            "better by less than the margin",
            {"margin": 0.1},
            "better by less than 0.1",
            "better by 0.045, less than 0.1",
        ),
        ("lost", {"question": "keep"}, "lost", "lost 0.045"),
        ("equivalent", {"margin": 0.02}, "equivalent within 0.02", "equivalent within 0.02"),
        ("undecided", {"seeds_needed": 7}, "undecided (needs 7 seeds)", "undecided (needs 7 seeds)"),
        ("undecided", {}, *["undecided (needs more of both seeds and documents)"] * 2),
        ("undecided", {"difference": 0.0}, "undecided", "undecided"),  # which no number decides
        ("undecided", {"reason": {"text": "one seed"}}, "undecided (one seed)", "undecided (one seed)"),
        (
            "not tested",
            {"reason": {"text": "too few groups"}, "clusters": {"column": "page", "groups": 5}},
            *["not tested (too few groups: 5 groups of page, and 20 are needed)"] * 2,
        ),
    ],
)
def test_outcomes_in_words_have_margins_sizes_and_what_is_needed(outcome, fields, bare, sized):
    pair = {"question": "gain", "method": "a", "other": "b", "task": "t", "metric": "nats_per_token"}
    verdict = Verdict(**(pair | {"higher_is_better": False, "outcome": outcome, "difference": 0.0446} | fields))
    assert str(outcome_of(verdict)) == bare
    assert str(outcome_of(verdict, Change(-0.0446, -0.135, 0.046, Scale.RAW))) == sized


def test_margins_are_in_the_unit_of_the_gain():
    pair = {"question": "gain", "method": "a", "other": "b", "task": "t", "higher_is_better": True, "margin": 0.01}
    share = Verdict(**pair, metric="acc", outcome="equivalent")
    assert margin_of(share) == 1.0
    assert str(outcome_of(share)) == "equivalent within 1 point"
    perplexity = Verdict(**(pair | {"margin": 0.5, "metric": "word_perplexity", "higher_is_better": False}))
    for difference in (2.0, 0.0, -2.0):
        gain = change(difference, -3.0, 3.0, scale=Scale.RELATIVE, reference=20.0).turned
        assert margin_of(perplexity, gain) == 2.5
        assert margin_text(perplexity, gain) == "2.5 %"


def test_numbers_that_are_none_and_rounded_zeros():
    untested = Change(4.0, -math.inf, math.inf, Scale.POINTS)
    assert change_text(untested) == "+4.0 points"
    assert change_text(Change(-0.0123, -math.inf, math.inf, Scale.RAW)) == "−0.012"
    assert decimal(math.nan, 1) == "not a number"
    assert signed(-math.inf, 1) == "−∞"
    assert change_text(Change(math.nan, math.nan, math.inf, Scale.POINTS)).startswith("not a number [")
    assert score(math.inf, Scale.RELATIVE) == "∞"
    assert score(None, Scale.POINTS) == "–"
    assert signed(-0.04, 1) == "0.0"
    assert decimal(-0.04, 1) == "0.0"
    assert signed(0.06, 1) == "+0.1"


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (lambda value: significant(value, 4), {23.456: "23.46", 1234567.0: "1,234,567", 0.012345: "0.01235",
                                               -2.4: "−2.400", 1.5e12: "1.500e+12"}),
        (short_count, {0: "0", 950: "950", 999_600: "1M", 81_920: "81.9k", 24_772_608: "24.8M", 2.8e9: "2.8B",
                       4.1e12: "4100B"}),
        (ratio, {36992.1: "36,992", 27.04: "27.04", 0.976: "0.98", 0.1: "0.10", 0.0312: "0.031",
                 16 / 67584: "under 0.001"}),
        (times_text, {None: "∞", 123.4: "123", 99.6: "100", 99.4: "99", 0.1: "0.1"}),
        (count, {17_694_720: "17,694,720"}),
        (p_text, {None: "–", 0.031: "0.031", 0.0042: "0.0042", 1e-9: "< 0.0001", 0.04996: "0.04996", 0.05: "0.050",
                  0.0504: "0.050"}),
        (memory, {512 * 2**20: "512 MiB", 1.5 * 2**30: "1.5 GiB"}),
        (duration, {4.21: "4.2 s", 59.4: "59 s", 185: "3 min 05 s", 7800: "2 h 10 min"}),
    ],
    ids=["significant", "short count", "ratio", "times", "count", "p", "memory", "duration"],
)  # fmt: skip
def test_numbers_as_text(form, shown):
    assert {value: form(value) for value in shown} == shown


def test_parts_and_divergence_in_the_order_of_steps():
    part = {"type": "lora", "r": 8, "target_modules": ["q", "v"]}
    assert part_text(part) == "lora(r=8, target_modules=q+v)"
    assert part_text({"type": "pre_projection"}) == "pre_projection"
    assert diverged_text({}) == ""
    assert diverged_text({0: 360, 2: 340}) == "diverged at step 340 (seed 2) and 360 (seed 0)"
    assert diverged_text({1: 1340}) == "diverged at step 1,340 (seed 1)"
