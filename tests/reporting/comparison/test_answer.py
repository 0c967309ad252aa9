import re

import pytest
from reporting.big import write_big_run
from reporting.conftest import document_of
from reporting.ten_methods import ten_methods

from hfpatch.errors import listed
from hfpatch.reporting.comparison.answer import (
    changed_text,
    headline_table,
    lead,
    sentences,
    uncovered,
)
from hfpatch.reporting.comparison.forest import control_for
from hfpatch.reporting.comparison.tables import difference_table
from hfpatch.reporting.markdown import markdown
from hfpatch.results.folder import load_results
from hfpatch.results.verdicts import Verdict

TEXT, CLOZE, ENDINGS, SKIP = "tinyworld_text", "tinyworld_cloze", "tinyworld_endings", "pre_projection_skip"


def rows(results):
    table = headline_table(results)
    names = [column.name for column in table.columns]
    return {
        str(row.cells[0]): dict(
            zip(names[1:], (str(cell).replace("\u00a0", " ") for cell in row.cells[1:]), strict=True)
        )
        for row in table.rows
    }


def tones_and_sentences(results):
    return [(finding.tone, str(finding)) for finding in sentences(results).items]


@pytest.fixture
def asked(raw, build, compared):
    """Build results that ask whether SKIP is better than the LoRA, with seeds and documents, and what others keep."""

    def make(difference, half, *, keep=(), p: float | None = 1e-5, seed_error=0.001, margin=None, tests=1, **changes):
        others = [["lora", SKIP]] * (tests - 1)  # was not compared
        raw["questions"] = [{"question": "gain", "pairs": [[SKIP, "lora"], *others], "on": [TEXT]}]
        raw["margin"] = {TEXT: margin} if margin is not None else {}
        one = compared(SKIP, TEXT, difference, half, "", reference="lora") | {"p": p}
        one["errors"].append([seed_error, 2])
        raw["comparisons"] = [pair for pair in raw["comparisons"] if pair["reference"] == "baseline"] + [one | changes]
        if keep:
            raw["questions"].append({"question": "keep", "pairs": [[name, "baseline"] for name in keep], "on": [CLOZE]})
        for pair in raw["comparisons"]:
            if pair["task"] == CLOZE:
                pair["errors"] = [pair["errors"][0], [0.0001, 1]]
        return build(raw)

    return make


SITUATIONS = {
    "better": ({"difference": -2.0, "half": 0.2}, "better",
               rf"{SKIP} is 10\.5 % of word perplexity ahead of lora \[9\.5, 11\.6\]: better\.",
               "better by 10.5 % [9.5, 11.6]"),
    "worse": ({"difference": 2.0, "half": 0.2}, "worse",
              rf"{SKIP} is 10\.5 % of word perplexity behind lora \[−11\.6, −9\.5\]: worse\.",
              "worse by 10.5 % [−11.6, −9.5]"),  # above 0 is better, as in the sentence
    "equivalent": ({"difference": 0.05, "half": 0.1, "p": 0.5, "margin": 0.6}, "same",
                   r".* behind lora \[−\d.*\]: equivalent within 3\.16 %\.", r"equivalent within 3.16 % −0.26 % "),
    "undecided": ({"difference": 0.3, "half": 0.4, "p": 0.2, "tests": 2}, "undecided",
                  r".*: undecided; at this difference, \d+ documents would decide it in 80 % of cases\.",
                  "lora: undecided (needs"),
    # of a perplexity of 19: 0.89 and 0.01
    "alone": ({"difference": 0.45, "half": 0.1, "p": 0.045, "tests": 2, "seed_error": 0.1, "low": 0.01, "high": 0.89},
              "undecided", r".*2\.4 % .* behind lora \[−.*\]: undecided; .*\d+ seeds.* would decide it.*\. "
              r"Alone, its 95 % interval \[−4\.7, −0\.1\] excludes 0\.", "lora: undecided (needs"),
    "one seed": ({"difference": -2.0, "half": 0.2, "errors": [[0.1, 100]], "seeds": 1}, "undecided",
                 r"[^[]*\[[^[]*: undecided \(one seed\)\. The interval excludes 0\.", "undecided (one seed)"),
    "few groups": ({"difference": 0.5, "half": 0.2, **dict.fromkeys(("low", "high", "p")),
                    "test": "none (too few groups)", "clusters": {"column": "page", "groups": 5}}, "not tested",
                   rf"{TEXT} \(word perplexity\): not tested \(too few groups: 5 groups of page, and 20 are needed\) "
                   rf"against lora – {SKIP}\.", "not tested, −2.63 %"),
}  # fmt: skip
"""What is compared, and the tone, the sentence and the beginning of the cell that say it."""


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_primary_pair_has_a_tone_a_sentence_and_a_cell(asked, name):
    changes, tone, sentence, cell = SITUATIONS[name]
    results = asked(**changes)
    (said_tone, said), *_ = tones_and_sentences(results)
    assert said_tone == tone
    assert re.fullmatch(sentence, said.replace("\u00a0", " "))
    (said,) = [text for heading, text in rows(results)[SKIP].items() if heading.startswith("against")]
    assert said.startswith(cell)


@pytest.mark.parametrize("half", [0.02, 0.2, 1.2])
def test_a_sentence_rounds_as_the_tables_do(asked, half):
    results = asked(-2.0, half, seed_error=1e-4)  # 10.5 % of 19
    (finding,) = sentences(results).items
    cell = rows(results)[SKIP]["against lora"]
    (size,) = re.findall(r"[\d.]+(?= %)", cell)
    assert f"is {size} % of word perplexity ahead of lora" in str(finding)


def test_the_first_sentence_and_the_differences_say_the_same(asked):
    assert lead(asked(-2.0, 0.2)) == f"On {TEXT} (word perplexity), {SKIP} beats lora."
    assert lead(asked(2.0, 0.2)) == f"On {TEXT} (word perplexity) no method is shown to be better than lora."
    same = asked(0.05, 0.1, p=0.5, margin=0.6)
    table = difference_table(same)
    assert "is it better? 1 (margin 3.16 %), " in table.caption
    assert "share a level of 5 %" in table.caption
    outcomes = {(row.cells[0].lines, row.keys["task"]): str(row.cells[-1]) for row in table.rows}
    assert outcomes[(SKIP, "lora"), (TEXT,)] == "equivalent within 3.16 %"


def test_the_headline_explains_the_marks_that_it_has_and_no_others(asked, raw, build):
    words = {"[": "[Intervals]", "×": "× is over", "†": "†:", "‡": "‡:", "(needs ": "80 % of cases"}
    shown = set()
    untested = build({"schema": 2, "kind": "comparison", "name": "x", "methods": raw["methods"]})
    decided = asked(-2.0, 0.2), asked(0.05, 0.1, p=0.5, keep=["lora"])
    for results in (*decided, asked(0.3, 0.4, p=0.2, tests=2), build(raw | {"questions": []}), untested):
        table = headline_table(results)
        cells = " ".join(str(cell) for row in table.rows for cell in row.cells)
        explained = {mark for mark, word in words.items() if word in table.explained}
        assert explained == {mark for mark in words if mark in cells}
        shown.add(frozenset(explained))
    assert len(shown) > 1


@pytest.mark.parametrize("difference", [0.0, 1e-9, -1e-9])
def test_no_side_is_taken_where_the_shown_difference_is_0(asked, raw, difference):
    raw["comparisons"][3] |= {"difference": difference, "errors": [[0.001, 100]]}  # of lora on CLOZE
    first, second = sentences(asked(difference, 0.1, p=1.0, margin=0.6, keep=["lora"])).items
    assert re.match(r"is 0\.0+ % of word perplexity apart from lora \[−", first.rest)
    assert first.rest.endswith("equivalent within 3.16 %.")
    assert re.match(rf"differs by 0\.0+ points of acc on {CLOZE} ", second.rest)


def test_what_is_kept_has_sentences_too_and_many_pairs_one_for_each_outcome(asked, raw, build):
    results = asked(2.0, 0.2, keep=[SKIP, "lora"])
    assert "both together of 10 %" in list(uncovered(results))[-1]
    assert not any("both together" in text for text in uncovered(asked(2.0, 0.2)))
    assert [finding.subject for finding in sentences(results).items] == [SKIP, SKIP, "lora"]
    assert rows(results)[SKIP][f"keeps {CLOZE}"].startswith("kept")
    names = [f"m{i}" for i in range(7)]
    raw["methods"] |= dict.fromkeys(names, raw["methods"][SKIP])
    raw["comparisons"] += [raw["comparisons"][-1] | {"method": name} for name in names]
    raw["questions"][0]["pairs"] = [[name, "lora"] for name in names]
    (finding, *_) = tones_and_sentences(build(raw))
    assert finding == ("worse", f"{TEXT} (word perplexity): worse than lora – m0, m1, m2, m3, m4, m5 and m6.")


def test_a_sentence_of_many_undecided_pairs_says_what_would_decide_each(asked, raw, build):
    asked(0.3, 0.4, p=0.2, tests=2)
    needs = {f"m{i}": 0.3 + 0.02 * i for i in range(7)}
    raw["methods"] |= dict.fromkeys(needs, raw["methods"][SKIP])
    raw["comparisons"] += [raw["comparisons"][-1] | {"method": name, "difference": d} for name, d in needs.items()]
    raw["comparisons"][-1] |= {"errors": [[0.1, 100]], "seeds": 1}
    raw["questions"][0]["pairs"] = [[name, "lora"] for name in needs]
    results = build(raw)
    *several, one_seed = results.primary
    names = listed([f"{verdict.method} (needs {verdict.documents_needed} documents)" for verdict in several])
    assert tones_and_sentences(results) == [
        ("undecided", f"{TEXT} (word perplexity): undecided against lora – {names}."),
        ("undecided", f"{TEXT} (word perplexity): undecided (one seed) against lora – {one_seed.method}."),
    ]


def test_what_is_kept_on_several_tasks_is_said_of_each(asked, raw, build):
    asked(2.0, 0.2, keep=["lora", SKIP])
    raw["questions"][1]["on"] = [CLOZE, ENDINGS]
    raw["margin"] = {CLOZE: 0.05, ENDINGS: 0.01}
    raw["comparisons"][0] |= {"difference": -0.3, "low": -0.33, "high": -0.27}  # of the pre-projection on CLOZE
    for pair in raw["comparisons"]:
        pair["errors"] = [pair["errors"][0], [0.0001, 1]]
    table = headline_table(build(raw))
    (index,) = (i for i, column in enumerate(table.columns) if column.name == "keeps")
    cells = {str(row.cells[0]): (str(row.cells[index]), row.cells[index].tone) for row in table.rows}
    assert cells == {
        "lora": ("kept: cloze; undecided: endings", "undecided"),
        SKIP: ("lost: cloze; undecided: endings", "worse"),
    }


def test_without_a_primary_pair_differences_from_the_base_are_exploratory(results):
    assert lead(results) == f"Exploratory: on {TEXT} (word perplexity), {SKIP} beats baseline."
    (better, exploratory), (undecided, _) = tones_and_sentences(results)
    assert (better, undecided) == ("better", "undecided")
    assert exploratory.startswith(f"Exploratory, {TEXT} (word perplexity): better than baseline – {SKIP}")


def test_a_run_that_is_not_complete_says_so_once_and_what_its_looks_decided(asked, raw, build):
    asked(-2.0, 0.2, keep=["lora", SKIP])
    look = {
        "seeds": 2,
        "part": 0.4,
        "comparisons": [raw["comparisons"][-1] | {"metric": "bits_per_byte"}],
        "growing": [],
    }
    raw |= {"complete": False, "comparisons": []}
    results = build(raw)
    text = markdown(document_of(results))
    assert text.count("run is not complete") == 2  # the first sentence, and how it is completed
    assert tones_and_sentences(results) == []
    assert {verdict.why for verdict in results.primary} == {"the run is not complete"}
    raw |= {"looks": [look], "training": raw["training"] | {"seeds": {"looks": [2, 3]}}}
    assert lead(build(raw)) == f"On {TEXT} (bits per byte), {SKIP} beats lora."
    assert [tone for tone, _ in tones_and_sentences(build(raw))] == ["better"]


def test_the_table_has_gain_difference_size_and_no_empty_column(results):
    assert rows(results) == {
        SKIP: {
            "gain": "+12.0 %",
            "against lora": "better by 7.4 % [4.4, 10.4]†",
            "params": "80k",
            "size": "0.98 ×",
        },
        "lora": {
            "gain": "+5.0 %",
            "against lora": "is a LoRA",
            "params": "81.9k",
            "size": "–",
        },
    }
    gain = headline_table(results).columns[1]
    assert gain.notes == (TEXT, "% of word perplexity")


def test_costs_are_ratios_in_each_round_to_the_control_and_merging_is_said(raw, build):
    for name, steps, memory in ((SKIP, [2.0, 6.0, 3.0], 300), ("lora", [1.0, 2.0, 2.0], 200)):
        raw["methods"][name] |= {"cost": {"steps_s": steps, "memory_bytes": memory, "shared": name == SKIP}}
    raw["methods"][SKIP]["merges"] = False
    cells = rows(build(raw))
    assert not any("LoRA" in column.tip for column in headline_table(build(raw)).columns)  # which it need not be
    assert cells[SKIP]["step time"] == "2.00 × *"  # of 2, 3 and 1.5
    assert cells[SKIP]["memory"] == "1.50 ×"
    assert [cells[name]["folds"] for name in (SKIP, "lora")] == ["no", "–"]
    assert cells["lora"]["step time"] == "–"
    raw["methods"]["lora"]["cost"]["memory_bytes"] = None
    assert "memory" not in rows(build(raw))[SKIP]


def test_questions_that_were_asked_late_are_named(asked, raw, build):
    assert changed_text(asked(0.5, 0.2)) == ""
    raw["questions"][0]["changed"] = "declared late"
    assert "gain: declared late" in changed_text(build(raw))


def test_without_comparisons_nothing_is_claimed(build, raw):
    raw["comparisons"] = []
    assert lead(build(raw)).startswith("No paired comparison")
    assert tones_and_sentences(build(raw)) == []
    raw["complete"] = False
    assert "not complete" in lead(build(raw))
    raw["methods"] = {"baseline": raw["methods"]["baseline"]}
    assert "no method" in lead(build(raw))


def test_the_control_is_that_of_the_question_else_the_matched_lora(build, raw, compared):
    other = {**raw["methods"]["lora"], "match": None, "parameters": {"trainable": 80_001, "added": 0, "base": 0}}
    raw["methods"] = {"near": other, **raw["methods"]}
    raw["comparisons"].append(compared(SKIP, TEXT, 0.1, 1.0, "not decided", reference="near"))
    results = build(raw)
    assert control_for(results, SKIP) == "lora"
    assert control_for(results, "lora") is None
    raw["methods"]["lora"]["match"] = None
    assert control_for(build(raw), SKIP) == "near"
    raw["questions"] = [{"question": "gain", "pairs": [[SKIP, "lora"]], "on": [TEXT]}]
    assert control_for(build(raw), SKIP) == "lora"


@pytest.mark.parametrize(("times", "heading"), [(1.1, "against the LoRA of its size"), (1.2, "against a LoRA")])
def test_a_lora_of_another_size_is_not_called_of_its_size(build, times, heading):
    raw = ten_methods()
    lora, trainable = raw["methods"]["lora_of_its_size_1"], 1000
    for method in raw["methods"].values():
        method["parameters"] = {"trainable": trainable, "added": 0, "base": 0}
    lora["parameters"] = lora["parameters"] | {"trainable": round(times * trainable)}
    assert heading in [column.name for column in headline_table(build(raw)).columns]


def test_what_diverged_is_said(build, raw):
    run = raw["methods"][SKIP]["runs"]["1"]
    raw["methods"][SKIP]["runs"]["1"] = {"train": {**run["train"], "diverged_step": 90}, "evaluation": {}}
    assert rows(build(raw))[SKIP]["against lora"].startswith(f"not decided (seed 1 of {SKIP} diverged)")
    for pair in raw["comparisons"]:
        pair |= {"difference": -pair["difference"], "low": -pair["high"], "high": -pair["low"]}
    assert re.fullmatch("worse .*, 1 of 2 seeds diverged", rows(build(raw))[SKIP]["against lora"])
    raw["methods"][SKIP]["runs"] = {"1": raw["methods"][SKIP]["runs"]["1"]}
    raw["comparisons"] = [pair for pair in raw["comparisons"] if pair["method"] == "lora"]
    raw["pairs"] = {"base": [[SKIP, "baseline"], ["lora", "baseline"]], "lora": [[SKIP, "lora"]]}
    assert rows(build(raw))[SKIP]["against lora"] == "diverged at step 90 (seed 1)"


@pytest.mark.parametrize(("seeds", "start"), [(1, "Seeds: one"), (2, "t is 12.7"), (4, "t is 3.2"), (5, "A seed sets")])
def test_noise_that_the_intervals_do_not_cover_is_named(build, raw, seeds, start):
    for pair in raw["comparisons"]:
        pair["seeds"] = seeds
    assert start in next(uncovered(build(raw)))


def test_no_verdict_is_compared_with_all_others(tmp_path, monkeypatch):
    results = load_results(write_big_run(tmp_path, methods=5, tasks=1, seeds=1))
    compared = []
    monkeypatch.setattr(Verdict, "__eq__", lambda one, other: compared.append(other) or one is other)
    assert sentences(results).items
    assert not results.primary
    assert not compared
