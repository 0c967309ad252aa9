import re

import pytest
from scipy import stats

from hfpatch.reporting.comparison.answer import answer, control_for, headline_table, method_lines, tone_of, uncovered

TEXT, CLOZE, ENDINGS, SKIP = "tinyworld_text", "tinyworld_cloze", "tinyworld_endings", "pre_projection_skip"
T6 = stats.t.ppf(1 - 0.025 / 6, 100) / stats.t.ppf(0.975, 100)  # the example compares six pairs with the base


def rows(results):
    return {str(row.cells[0]): [str(cell) for cell in row.cells[1:]] for row in headline_table(results).rows}


def test_the_table_has_the_gain_with_its_corrected_interval_the_size_and_the_verdict(results):
    half = 3.0 * T6  # per cent of 20
    assert rows(results) == {
        SKIP: [
            f"+12.0 [{12 - half:.1f}, {12 + half:.1f}]\nbetter",
            "better on tinyworld_cloze (acc)",
            "80,000 (0.98 ×)",
            "better on tinyworld_text (word perplexity)",
        ],
        "lora": [
            f"+5.0 [−0.7, {5 + half * 2.5 / 3:.1f}]\nnot decided",  # p is 0.02
            "not decided (acc, acc norm)",
            "81,920",
            "is a LoRA",
        ],
    }
    columns = [(column.name, *column.notes[:1]) for column in headline_table(results).columns[1:4]]
    gain = ("gain on tinyworld_text", "% lower word perplexity")
    assert columns == [gain, ("other tasks", "2: acc, acc norm"), ("parameters", "(× lora)")]


def test_worse_is_said_with_its_measure_and_methods_are_ordered_by_gain(build, raw, compared):
    raw["comparisons"] = [
        compared(SKIP, CLOZE, 0.05, 0.03, "better"),
        compared(SKIP, TEXT, 4.0, 1.0, "worse"),
        compared("lora", TEXT, 0.1, 1.0, "not decided"),
        compared(SKIP, CLOZE, 0.05, 0.02, "better", reference="lora"),
        compared(SKIP, TEXT, 4.0, 1.0, "worse", reference="lora"),
    ]
    lora, skip = method_lines(build(raw))
    assert (lora.method, skip.method) == ("lora", SKIP)
    assert skip.words == "better on tinyworld_cloze (acc), worse on tinyworld_text (word perplexity)"
    assert tone_of(skip.against) == "mixed"
    counts = [re.findall(r"\d|none", clause) for clause in answer(build(raw)).split("; ")]
    assert counts == [["2", "none", "1"], ["1"], ["1", "1"]]


def test_without_comparisons_nothing_is_claimed(build, raw):
    raw["comparisons"] = []
    assert answer(build(raw)).startswith("No paired comparison")
    raw["complete"] = False
    assert "not complete" in answer(build(raw))
    raw["methods"] = {"baseline": raw["methods"]["baseline"]}
    assert "no method" in answer(build(raw))


def test_too_few_documents_are_said_and_get_no_verdict(build, raw, compared):
    few = {**dict.fromkeys(("low", "high", "p")), "test": "none (too few documents)"}
    raw["comparisons"] = [compared(SKIP, TEXT, 0.02, 0.03, "", reference=other) | few for other in ("baseline", "lora")]
    results = build(raw)
    assert rows(results)[SKIP][0].endswith("not tested")
    assert rows(results)[SKIP][-1] == "not tested (not compared, too few documents)"
    assert "none was tested against baseline" in answer(results)


def test_the_control_is_the_matched_lora(build, raw, compared):
    other = {**raw["methods"]["lora"], "match": None, "parameters": {"trainable": 80_001, "added": 0, "base": 0}}
    raw["methods"] = {"near": other, **raw["methods"]}
    raw["comparisons"].append(compared(SKIP, TEXT, 0.1, 1.0, "not decided", reference="near"))
    results = build(raw)
    assert control_for(results, SKIP) == "lora"
    assert control_for(results, "lora") is None
    raw["methods"]["lora"]["match"] = None
    assert control_for(build(raw), SKIP) == "near"


def test_sizes_that_differ_and_what_diverged_are_said(build, raw):
    raw["methods"]["lora"]["match"] = None
    assert rows(build(raw))[SKIP][-1] == "better on tinyworld_text (word perplexity), sizes differ"
    run = raw["methods"][SKIP]["runs"]["1"]
    raw["methods"][SKIP]["runs"]["1"] = {"train": {**run["train"], "diverged_step": 90}, "evaluation": {}}
    assert rows(build(raw))[SKIP][-1].endswith("; 1 of 2 seeds diverged")
    raw["methods"][SKIP]["runs"] = {"1": raw["methods"][SKIP]["runs"]["1"]}
    raw["comparisons"] = [each for each in raw["comparisons"] if each["method"] == "lora"]
    raw["pairs"] = {"base": [[SKIP, "baseline"], ["lora", "baseline"]], "lora": [[SKIP, "lora"]]}
    results = build(raw)
    assert rows(results)[SKIP] == [
        "–",
        f"not tested ({SKIP} diverged)",
        "80,000 (0.98 ×)",
        "diverged at step 90 (seed 1)",
    ]
    assert answer(results).endswith("none was tested against a LoRA.")


@pytest.mark.parametrize(
    ("seeds", "told"), [(1, "Seeds: one"), (2, "t is 12.7"), (4, "t is 3.2"), (5, "A seed decides")]
)
def test_noise_that_the_intervals_do_not_cover_is_named(build, raw, seeds, told):
    for each in raw["comparisons"]:
        each["seeds"] = seeds
    assert told in next(uncovered(build(raw)))
