import csv
import io
import random
import re
from statistics import fmean

import pytest

from hfpatch.reporting.comparison.answer import answer
from hfpatch.reporting.comparison.data import results_csv
from hfpatch.reporting.comparison.document import Material, comparison_document
from hfpatch.reporting.comparison.headline import headline
from hfpatch.reporting.comparison.headline_table import HEADLINE_COLUMNS, headline_table
from hfpatch.reporting.comparison.samples import Samples
from hfpatch.reporting.html import html
from hfpatch.reporting.latex import latex
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.terminal import print_document

TEXT, CLOZE, ENDINGS, SKIP = "tinyworld_text", "tinyworld_cloze", "tinyworld_endings", "pre_projection_skip"
METRICS = re.compile(r"\([^)]*(?:acc|word perplexity|nats per token|bits per byte|margin)[^)]*\)")
LOWER = ("word_perplexity", "bits_per_byte")
BY_TEXT = "tinyworld_text (word perplexity)"
MARKED = "no difference shown (word perplexity)"


def cells(results):
    return [tuple(map(str, row.cells)) for row in headline_table(headline(results)).rows]


def numbers(text):
    return [float(each.replace("−", "-")) for each in re.findall(r"[+−]?\d+(?:\.\d+)?", text)]


def reference_gain(raw, name, metrics, *, percent):
    """The mean over tasks of the differences to the baseline and of their ends, from the file alone."""
    ends = []
    for task, metric in metrics.items():
        (found,) = (
            each
            for each in [*raw["comparisons"], *raw.get("low_noise", [])]
            if (each["method"], each["reference"], each["task"], each["metric"]) == (name, "baseline", task, metric)
        )
        base = raw["methods"]["baseline"]["runs"]["0"]["evaluation"][task]["metrics"].get(metric)
        unit = 100 / base if metric == "word_perplexity" else 100 if percent else 1
        three = [unit * found[key] for key in ("difference", "low", "high")]
        ends.append([-three[0], -three[2], -three[1]] if metric in LOWER else three)
    return [fmean(column) for column in zip(*ends, strict=True)]


def reference_ranks(gains):
    return {
        name: (
            1 + sum(low > high_of for _, low, _ in gains.values()),
            len(gains) - sum(high < low_of for _, _, high in gains.values()),
        )
        for name, (_, low_of, high_of) in gains.items()
    }


@pytest.fixture
def low_noise(raw):
    """The example with bits per byte and the margin of the right answers, compared as they are."""
    raw["low_noise"] = []
    sizes = {SKIP: (-0.031, 0.012), "lora": (-0.018, -0.21)}
    for name, (bits, margin) in sizes.items():
        for place, task in enumerate((CLOZE, ENDINGS, TEXT)):
            for metric, difference in (("bits_per_byte", bits * (place + 1)), ("margin", margin))[: 2 - (task == TEXT)]:
                half = abs(difference) / 2 if metric == "bits_per_byte" or name == "lora" else 0.3
                verdict = "within noise" if half > abs(difference) else "better" if metric in LOWER else "worse"
                raw["low_noise"].append(
                    {
                        **raw["comparisons"][0],
                        **{"method": name, "reference": "baseline", "task": task, "metric": metric},
                        **{"difference": difference, "low": difference - half, "high": difference + half},
                        "verdict": verdict,
                    }
                )
    return raw


def test_every_cell_is_what_the_file_says(build, raw):
    rows = cells(build(raw))
    text = {name: reference_gain(raw, name, {TEXT: "word_perplexity"}, percent=False) for name in (SKIP, "lora")}
    tasks = {
        name: reference_gain(raw, name, {CLOZE: "acc", ENDINGS: "acc_norm"}, percent=True) for name in (SKIP, "lora")
    }
    assert text[SKIP] == pytest.approx([12, 9, 15])
    assert [row[0] for row in rows] == sorted(text, key=lambda name: -text[name][0])
    for name, rank, first, second, *_ in rows:
        assert rank == {(1, 1): "1", (2, 2): "2"}[reference_ranks(text)[name]]
        assert numbers(first) == pytest.approx(text[name], abs=0.06)
        assert numbers(second) == pytest.approx(tasks[name], abs=0.06)
    assert [row[4:] for row in rows] == [
        ("80,000 (0.98 ×)", f"better on {BY_TEXT}"),
        ("81,920", "is a LoRA"),
    ]
    columns = [(column.name, *column.notes) for column in headline_table(headline(build(raw))).columns]
    assert columns[4] == ("parameters", "(× lora)")
    assert columns[2:4] == [
        ("gain on held-out text", "% lower word_perplexity", TEXT),
        ("gain on tasks", "points of acc and acc_norm", "mean of 2 tasks"),
    ]
    assert headline(build(raw)).sentence == (
        "Of 2 methods, by the corrected tests 1 gains on held-out text (word perplexity) and 1 gains on at least one "
        "task (acc, acc norm); against LoRA (word perplexity) 1 is better."
    )


def test_low_noise_metrics_come_first_and_never_without_the_margin(build, low_noise):
    results = build(low_noise)
    found = headline(results)
    table = headline_table(found)
    assert [(column.name, *column.notes) for column in table.columns[2:5]] == [
        ("gain on held-out text", "bits per byte saved", TEXT),
        ("gain on tasks", "bits per byte saved", "mean of 2 tasks"),
        ("gain in margin", "nats", "mean of 2 tasks"),
    ]
    for line, row in zip(found.lines, cells(results), strict=True):
        for place, metrics in ((2, {TEXT: "bits_per_byte"}), (3, dict.fromkeys((CLOZE, ENDINGS), "bits_per_byte")),
                               (4, dict.fromkeys((CLOZE, ENDINGS), "margin"))):  # fmt: skip
            expected = reference_gain(low_noise, line.method, metrics, percent=False)
            assert numbers(row[place]) == pytest.approx(expected, abs=0.006)
    assert [line.margin.tone for line in found.lines] == ["within noise", "worse"]
    assert re.search(r"gains? on (at least one|any) task \(bits per byte\)", found.sentence)  # not by accuracy


def test_a_verdict_rests_on_every_metric_and_names_it_where_they_disagree(build, low_noise):
    pair = {"method": SKIP, "reference": "lora"}
    low_noise["low_noise"] += [
        {**low_noise["low_noise"][0], **pair, "verdict": "better"},
        {**low_noise["low_noise"][1], **pair, "verdict": "worse"},
    ]
    found = headline(build(low_noise))
    assert (found.lines[0].verdict, found.lines[0].tone) == (
        "better on tinyworld_cloze (bits per byte), worse on tinyworld_cloze (margin)",
        "mixed",
    )
    assert "margin) none is better and 1 is better on one task and worse on another" in found.sentence


def test_methods_whose_intervals_overlap_share_a_range_of_ranks(build, raw, compared):
    ends = {"a": (-3.0, 0.5), "b": (-2.0, 0.7), "c": (-1.5, 0.7), "d": (0.5, 0.3)}
    for name in ends:
        raw["methods"][name] = raw["methods"][SKIP]
    raw["methods"] = {name: raw["methods"][name] for name in ("baseline", *ends)}
    raw["comparisons"] = [
        compared(name, TEXT, *each, "better" if each[0] < -1.8 else "within noise") for name, each in ends.items()
    ]
    results = build(raw)
    gains = {name: reference_gain(raw, name, {TEXT: "word_perplexity"}, percent=False) for name in ends}
    assert {line.method: line.rank for line in headline(results).lines} == reference_ranks(gains)
    assert [row[:2] for row in cells(results)] == [("a", "1–2"), ("b", "1–3"), ("c", "2–3"), ("d", "4")]
    found = headline(results)
    assert found.reference == "baseline"  # there is no LoRA
    assert [line.verdict for line in found.lines[1:3]] == [f"better on {BY_TEXT}", MARKED]
    assert headline_table(found).columns[-1].name == "against baseline"
    assert found.sentence == (
        "Of 4 methods, by the corrected tests 2 gain on held-out text (word perplexity); where ranks overlap, no order "
        "is claimed."
    )


def test_what_diverged_is_last_and_has_no_gain(build, raw):
    runs = raw["methods"][SKIP]["runs"]
    for seed, step in (("0", 70), ("1", 90)):
        runs[seed] = {"train": {**runs[seed]["train"], "diverged_step": step}, "evaluation": {}}
    raw["comparisons"] = [each for each in raw["comparisons"] if each["method"] == "lora"]
    found = headline(build(raw))
    assert [line.method for line in found.lines] == ["lora", SKIP]
    assert cells(build(raw))[1] == (
        *(SKIP, "–", "–", "–", "80,000 (0.98 ×)"),
        "diverged at step 70 (seed 0) and 90 (seed 1)",
    )
    assert "none was tested against a matched LoRA" in found.sentence


def test_one_seed_that_diverged_is_said(build, raw):
    run = raw["methods"][SKIP]["runs"]["1"]
    raw["methods"][SKIP]["runs"]["1"] = {"train": {**run["train"], "diverged_step": 90}, "evaluation": {}}
    assert headline(build(raw)).lines[0].verdict == f"better on {BY_TEXT}; 1 of 2 seeds diverged"


def test_a_lora_that_diverged_or_was_not_compared_gives_no_verdict(build, raw):
    raw["comparisons"] = [each for each in raw["comparisons"] if each["reference"] == "baseline"]
    assert headline(build(raw)).lines[0].verdict == "not compared"
    for run in raw["methods"]["lora"]["runs"].values():
        run["train"]["diverged_step"] = 3
    assert headline(build(raw)).lines[0].verdict == "not compared, lora diverged"


def test_a_lora_of_another_size_is_named_as_such(build, raw):
    raw["methods"]["lora"]["match"] = None
    assert cells(build(raw))[0][4:] == ("80,000 (0.98 ×)", f"better on {BY_TEXT}, sizes differ")
    raw["comparisons"] = [each for each in raw["comparisons"] if each["reference"] == "baseline"]
    assert cells(build(raw))[0][4:] == ("80,000", "no matched LoRA")


def test_where_methods_have_several_loras_each_is_named(build, raw, compared):
    raw["methods"]["other"] = raw["methods"][SKIP]
    raw["methods"]["lora_other"] = {
        **raw["methods"]["lora"],
        "match": {**raw["methods"]["lora"]["match"], "to": "other"},
    }
    raw["comparisons"].append(compared("other", TEXT, 2.0, 0.5, "worse", reference="lora_other"))
    rows = {row[0]: row[4:] for row in cells(build(raw))}
    assert rows["other"] == ("80,000 (0.98 × lora_other)", f"worse on {BY_TEXT}")
    assert rows[SKIP] == ("80,000 (0.98 × lora)", f"better on {BY_TEXT}")


def test_the_lora_of_a_match_group_is_that_of_every_method_in_it(build, raw, compared):
    """Solved for the same count as the method itself: no other size, however coarse both are."""
    sibling = {**raw["methods"]["lora"]["match"], "to": SKIP}
    raw["methods"]["other"] = {**raw["methods"][SKIP], "match": sibling}
    near = {**raw["methods"]["lora"], "match": None, "parameters": {"trainable": 80_000, "added": 0, "base": 0}}
    raw["methods"] = {"near": near, **raw["methods"]}
    raw["comparisons"].append(compared("other", TEXT, 2.0, 0.5, "worse", reference="lora"))
    rows = {row[0]: row[4:] for row in cells(build(raw))}
    assert rows["other"] == ("80,000 (0.98 ×)", f"worse on {BY_TEXT}")


def test_an_incomplete_run_shows_what_it_has_and_claims_nothing(build, raw):
    raw |= {"complete": False, "comparisons": []}
    raw["methods"]["lora"]["runs"] = {}
    rows = cells(build(raw))
    means = {task: fmean(raw["methods"][SKIP]["runs"][s]["evaluation"][task]["metrics"][metric] for s in "01")
             for task, metric in ((TEXT, "word_perplexity"), (CLOZE, "acc"), (ENDINGS, "acc_norm"))}  # fmt: skip
    tasks = fmean([100 * (means[CLOZE] - 0.4), 100 * (means[ENDINGS] - 0.5)])
    assert rows[0][:2] == (SKIP, "–")
    assert numbers(rows[0][3]) == pytest.approx([tasks], abs=0.06)
    assert [row[-1] for row in rows] == ["not tested yet", "not finished"]
    assert headline(build(raw)).sentence == (
        "The run is not complete; nothing is tested yet, so no difference is shown."
    )


def test_one_seed_and_too_few_documents_are_said(build, raw):
    for each in raw["comparisons"]:
        each["seeds"] = 1
        each |= {"low": None, "high": None, "verdict": "too few documents"}
    found = headline(build(raw))
    assert [line.verdict for line in found.lines] == ["too few documents (word perplexity)", "is a LoRA"]
    assert cells(build(raw))[0][1:3] == ("–", "+12.0")
    assert found.sentence == (
        "Of 2 methods, none was tested against baseline; none was tested against a matched LoRA; with one seed each, "
        "the intervals do not cover the variation from seed to seed."
    )


def test_without_a_task_of_text_the_loss_on_held_out_text_stands(build, raw):
    del raw["tasks"][TEXT]
    raw["comparisons"] = [each for each in raw["comparisons"] if each["task"] != TEXT]
    assert cells(build(raw))[0][2] == "–"
    raw["data"]["held_out"] = {"base_loss": 2.5}
    for name, losses in {SKIP: (2.0, 2.2), "lora": (1.9, 2.1)}.items():
        for run, loss in zip(raw["methods"][name]["runs"].values(), losses, strict=True):
            run["train"]["final_eval_loss"] = loss
    table = headline_table(headline(build(raw)))
    assert table.columns[2].notes == ("nats per token saved", "loss, without interval")
    assert [row[:3] for row in cells(build(raw))] == [("lora", "–", "+0.5000"), (SKIP, "–", "+0.4000")]


def test_nothing_to_compare_is_one_sentence(build, raw):
    raw["methods"] = {"baseline": raw["methods"]["baseline"]}
    found = headline(build(raw))
    assert (found.lines, found.sentence) == ((), "There is no method to compare with a baseline.")


def test_tasks_of_several_units_are_not_averaged(build, raw):
    raw["tasks"][ENDINGS] |= {"primary": "bleu"}
    assert headline(build(raw)).measures.tasks.tasks == (CLOZE,)
    assert headline_table(headline(build(raw))).columns[3].notes == ("points of acc", "mean of 1 of 2 tasks")


def test_page_markdown_terminal_csv_and_tex_have_the_same_table(build, raw, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    results = build(raw)
    found = headline(results)
    document = comparison_document([Material("", results, [], Samples((), {}, ()), [], {"": results})])
    text = markdown(document)
    assert text.index("## Answer") < text.index(found.sentence) < text.index("## Method by method")
    opening = text[text.index("## Answer") : text.index(found.sentence)]
    assert opening.count("\n| ") == 2 + len(found.lines)  # at most one row a method
    assert "Of 2 methods against baseline" in text[text.index("## Method by method") :]  # the sentences come later
    print_document(document)
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).endswith("1 is better. All methods at one rate (0.001), which may favour some.")
    page, tex = html(document).replace("<wbr>", ""), latex(headline_table(found))
    for row in headline_table(found).rows:
        for cell in map(str, row.cells):
            assert cell in page
            assert cell in shown
            assert cell.replace("_", "\\_") in opening or cell in opening
            assert cell.split(" ")[0].replace("_", "\\_").replace("−", "$-$") in tex


def test_a_narrow_terminal_gets_gains_and_verdicts_in_two_tables(build, raw, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    results = build(raw)
    print_document(comparison_document([Material("", results, [], Samples((), {}, ()), [], {"": results})]))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    gains, verdicts = shown.split("Gains")[1].split("Verdicts")
    assert "+12.0 [9.0, 15.0]" in gains
    assert f"better on {BY_TEXT}" in " ".join(re.sub("[│ ]+", " ", verdicts).split())


def test_csv_has_a_row_a_method_beside_every_number(build, low_noise):
    results = build(low_noise)
    rows = [row for row in csv.DictReader(io.StringIO(results_csv({"": results}))) if not row["task"]]
    for row, line in zip(rows, headline(results).lines, strict=True):
        assert (row["method"], int(row["trainable"]), row["value"]) == (line.method, line.trainable, "")
        assert (int(row["rank_best"]), int(row["rank_worst"])) == line.rank
        for name, gain in (("held_out", line.text), ("task", line.tasks), ("margin", line.margin)):
            ends = [float(row[f"{name}_{key}"]) for key in ("gain", "low", "high")]
            assert ends == [gain.change.difference, gain.change.low, gain.change.high]
        assert (row["control"], row["verdict"]) == (line.control or "", line.verdict)
    others = [row for row in csv.DictReader(io.StringIO(results_csv({"": results}))) if row["task"]]
    assert not [row for row in others if any(row[name] for name in HEADLINE_COLUMNS)]


def compared_on_held_out_text(raw):
    """Give the example the loss on held-out documents: of the base, and of each method with each seed."""
    raw["tasks"] = {"held_out_text": {**raw["tasks"][TEXT], "primary": "nats_per_token", "n": 40}, **raw["tasks"]}
    losses = {"baseline": 2.5, SKIP: 2.1, "lora": 2.0}
    for name, loss in losses.items():
        for run in raw["methods"][name]["runs"].values():
            score = {**run["evaluation"][TEXT], "task": "held_out_text", "n": 40, "primary": "nats_per_token"}
            run["evaluation"]["held_out_text"] = {**score, "metrics": {"nats_per_token": loss}, "stderr": {}}
    raw["data"]["held_out"] = {"base_loss": 2.5}
    shape = {"task": "held_out_text", "metric": "nats_per_token", "n": 40, "smallest_visible": 0.05}
    for method, reference in ((SKIP, "baseline"), ("lora", "baseline"), (SKIP, "lora")):
        difference = losses[method] - losses[reference]
        found = {"method": method, "reference": reference, "difference": difference}
        ends = {"low": difference - 0.03, "high": difference + 0.03, "verdict": "better" if difference < 0 else "worse"}
        raw["comparisons"].append({**raw["comparisons"][0], **shape, **found, **ends})
    return raw


def test_the_loss_on_held_out_documents_is_a_gain_with_interval_and_verdict(build, raw, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    results = build(compared_on_held_out_text(raw))
    found = headline(results)
    columns = [(column.name, *column.notes) for column in headline_table(found).columns]
    assert columns[2:4] == [
        ("gain on held-out text", "nats per token saved", "held_out_text"),
        ("gain on text tasks", "% lower word_perplexity", TEXT),
    ]
    rows = {row[0]: row for row in cells(results)}
    assert rows["lora"][1:3] == ("1", "+0.500 [0.470, 0.530]")
    assert rows[SKIP][1:4] == ("2", "+0.400 [0.370, 0.430]", "+12.0 [9.0, 15.0]")
    worse = "better on tinyworld_text (word perplexity), worse on held_out_text (nats per token)"
    assert rows[SKIP][-1] == worse
    assert "2 gain on held-out text (nats per token)" in found.sentence
    document = comparison_document([Material("", results, [], Samples((), {}, ()), [], {"": results})])
    print_document(document)
    shown = capsys.readouterr().out
    tex = latex(headline_table(found)).replace("\\_", "_")
    rows = list(csv.DictReader(io.StringIO(results_csv({"": results}))))
    for text in (shown, markdown(document).replace("\\_", "_"), html(document).replace("<wbr>", "")):
        assert "+0.500 [0.470, 0.530]" in text
        assert worse in text
    assert worse in tex
    (line,) = (row for row in rows if row["method"] == "lora" and not row["task"])
    assert [float(line[f"held_out_{key}"]) for key in ("gain", "low", "high")] == pytest.approx([0.5, 0.47, 0.53])
    assert line["held_out_unit"] == "nats per token saved"
    assert {row["value"] for row in rows if row["task"] == "held_out_text"} == {"2.5", "2.1", "2.0"}
    assert not [row for row in rows if row["metric"] == "held_out_loss"]  # it is told once


@pytest.mark.parametrize("seed", range(20))
def test_every_verdict_names_its_measure(build, raw, seed):
    """Whatever is found, no sentence and no cell says better or worse, or that nothing is shown, without the metric."""
    generator = random.Random(seed)
    compared_on_held_out_text(raw)
    answered = [each for each in raw["comparisons"] if each["task"] != "held_out_text"]
    raw["low_noise"] = [{**each, "metric": metric} for each in answered for metric in ("bits_per_byte", "margin")]
    for each in (*raw["comparisons"], *raw["low_noise"]):
        each["verdict"] = generator.choice(["better", "worse", "within noise", "too few documents"])
        each["difference"] = generator.choice([-0.1, 0.1])
    results = build(raw)
    found, said = headline(results), answer(results)
    sentences = [str(each) for each in (*said.against_baseline, *said.against_others)]
    for text in (*(line.verdict for line in found.lines if line.control), *sentences):
        for clause in re.split(r"; |, (?=worse on|and (?:raises|lowers))", text):
            if clause.startswith("it is worse elsewhere") or re.search(
                r"better|worse|raises|lowers|no (significant )?difference|too few", clause
            ):
                assert METRICS.search(clause), text
    for text in (found.sentence, said.headline):
        for clause in re.split(r"; | and (?=none gains|\d+ gains? on (?:held|text|at))", text):
            if re.search(r"\b(gains?|better|worse|no difference)\b", clause):
                assert METRICS.search(clause), text
