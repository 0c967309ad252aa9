from hfpatch.reporting.comparison.answer import answer, control_for
from hfpatch.reporting.comparison.tables import cell_of, paired_table


def told(results):
    found = answer(results)
    return {(finding.subject, finding.tone): str(finding) for finding in found.against_baseline}


def test_the_answer_has_numbers_budget_and_what_cannot_be_seen(results):
    assert told(results)["pre_projection_skip", "better"] == (
        "pre_projection_skip raises tinyworld_cloze (acc) by 5.0 points [2.0, 8.0], and lowers tinyworld_text (word "
        "perplexity) by 12.0 % [9.0, 15.0] at 0.98 times the parameters of lora; on tinyworld_endings (acc norm) there "
        "is no significant difference (n = 200; smallest detectable difference 6.0 points)."
    )


def test_a_difference_that_falls_to_the_correction_says_so(results):
    assert told(results)["lora", "within noise"] == (
        "lora shows no significant difference with 81,920 trainable parameters: it lowers tinyworld_text (word "
        "perplexity) by 5.0 % [2.5, 7.5], which is not significant after Holm's correction; on tinyworld_cloze (acc) "
        "and tinyworld_endings (acc norm) there is no significant difference (n = 400 and 200; smallest detectable "
        "difference 4.2 and 6.0 points)."
    )


def test_the_headline_counts_methods(results):
    assert answer(results).headline == (
        "Of 2 methods against baseline, by the primary metric of each task (acc, acc norm, word perplexity): 1 is "
        "better on at least one task and worse on none and 1 is within noise on every task."
    )


def test_methods_are_compared_with_each_other_too(results):
    (finding,) = answer(results).against_others
    assert str(finding) == (
        "pre_projection_skip against lora lowers tinyworld_text (word perplexity) by 7.4 % [4.4, 10.4]."
    )


def test_worse_mixed_and_noise(build, raw, compared):
    raw["comparisons"] = [
        compared("pre_projection_skip", "tinyworld_cloze", 0.05, 0.03, "better", p_holm=0.01),
        compared("pre_projection_skip", "tinyworld_text", 4.0, 1.0, "worse", p_holm=0.01),
        compared("lora", "tinyworld_cloze", 0.01, 0.03, "within noise", visible=0.05),
        compared("lora", "tinyworld_text", 0.1, 1.0, "within noise", visible=1.0),
    ]
    results = build(raw)
    found = told(results)
    assert found["pre_projection_skip", "mixed"].endswith(
        "raises tinyworld_cloze (acc) by 5.0 points [2.0, 8.0] at 0.98 times the parameters of lora; it is worse "
        "elsewhere: it raises tinyworld_text (word perplexity) by 20.0 % [15.0, 25.0]."
    )
    assert found["lora", "within noise"] == (
        "lora shows no significant difference with 81,920 trainable parameters: on tinyworld_cloze (acc) "
        "and tinyworld_text (word perplexity) there is no significant difference (n = 400 and 60; smallest "
        "detectable difference 5.0 points and 5.0 %)."
    )
    assert answer(results).headline == (
        "Of 2 methods against baseline, by the primary metric of each task (acc, word perplexity): 1 is better on one "
        "task and worse on another and 1 is within noise on every task."
    )


def test_an_interval_over_zero_keeps_its_sign(build, raw, compared):
    raw["comparisons"] = [compared("lora", "tinyworld_cloze", -0.02, 0.03, "worse", p_holm=0.01)]
    assert "is worse: it lowers tinyworld_cloze (acc) by 2.0 points [−1.0, 5.0]" in told(build(raw))["lora", "worse"]


def test_without_comparisons_nothing_is_claimed(build, raw):
    raw["comparisons"] = []
    assert "was not compared with baseline" in told(build(raw))["lora", "unknown"]
    raw["methods"] = {"baseline": raw["methods"]["baseline"]}
    assert answer(build(raw)).headline == "There is no method to compare with a baseline."


def test_too_few_documents_are_said_and_get_no_verdict(build, raw, compared):
    few = dict.fromkeys(("low", "high", "p", "p_holm", "smallest_visible"))
    raw["comparisons"] = [compared("lora", "tinyworld_cloze", 0.02, 0.03, "too few documents") | few | {"n": 8}]
    results = build(raw)
    assert told(results)["lora", "unknown"] == (
        "lora shows no significant difference with 81,920 trainable parameters: on tinyworld_cloze (acc) there are too "
        "few documents for a verdict (n = 8)."
    )
    assert answer(results).headline.endswith("(acc): 2 are without a verdict.")
    cell = cell_of(results, "lora", "tinyworld_cloze")
    assert cell.lines[1:] == ("+2.0", "too few documents")
    (row,) = paired_table(results).rows
    assert [str(cell).splitlines()[-1] for cell in row.cells[3:5]] == ["–", "–"]
    assert row.cells[3].lines[1] == "+0.0200"


def test_the_control_is_the_matched_lora(build, raw):
    other = {**raw["methods"]["lora"], "match": None, "parameters": {"trainable": 80_001, "added": 0, "base": 0}}
    raw["methods"] = {"near": other, **raw["methods"]}
    results = build(raw)
    assert control_for(results, "pre_projection_skip") == "lora"
    assert control_for(results, "lora") is None
