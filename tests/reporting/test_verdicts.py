"""Random results in every rendering: no two statements on a pair and task disagree, and counts are those of tables."""

import random
import re
from html import unescape

import pytest
from reporting.conftest import comparison, method, read_csv, write_run
from scipy import stats

from hfpatch.reporting.cards import run_card
from hfpatch.reporting.explorer.entries import entries
from hfpatch.reporting.report import document_of, write_report
from hfpatch.results import load_results
from hfpatch.support.files import write_json

BASES = {"quiz": ("acc", True), "choice": ("acc_norm", True), "novel": ("word_perplexity", False), "odd": ("mcc", True)}
LORA = [{"type": "lora", "r": 4}]


def drawn(seed):
    """A run of some methods, tasks and seeds, whose differences, p-values and gaps are random."""
    rng = random.Random(seed)
    tasks = rng.sample(list(BASES), rng.randint(1, 4))
    names = ["one", "two", "three", "four"][: rng.randint(1, 4)]
    seeds, low_noise = rng.randint(1, 3), [task for task in tasks if rng.random() < 0.5]
    methods = {"baseline": [], **{name: [{"type": "pre_projection"}] for name in names}}
    methods |= {"lora": LORA} if rng.random() < 0.8 else {}
    raw = {"schema": 2, "kind": "comparison", "name": "random", "complete": True, "comparisons": [], "methods": {}}
    raw["training"] = {"seeds": list(range(seeds)), "lr": 0.01}
    raw["tasks"] = {
        task: {"primary": BASES[task][0], "higher_is_better": BASES[task][1], "n": 100, "data_sha256": "d" * 64}
        for task in tasks
    }
    for name, parts in methods.items():
        scores, speed = {"tinyworld_cloze": [0.5] * seeds}, 2048 if parts else None
        _, own = method(name, parts, 1000 if parts else 0, scores, speed=speed)
        for run in own["runs"].values():
            (score,) = run["evaluation"].values()
            run["evaluation"] = {}
            for task in tasks:
                metrics = {BASES[task][0]: rng.uniform(0.3, 0.6)} | (
                    {"bits_per_byte": 1.5} if task in low_noise else {}
                )
                known = {"task": task, "metrics": metrics, "primary": BASES[task][0], "stderr": {}}
                run["evaluation"][task] = {**score, **known, "higher_is_better": BASES[task][1], "n": 100}
        raw["methods"][name] = own
    for name in methods:
        others = ["baseline", *["lora"] * (name != "lora"), *["two"] * (name == "one")]
        for other in (each for each in others if each in methods and name != "baseline" and rng.random() < 0.9):
            for task in tasks:
                for metric in (BASES[task][0], *(["bits_per_byte", "margin"] if task in low_noise else [])):
                    raw["comparisons"].append(_random_comparison(rng, name, other, task, metric, seeds))
    return raw


def _random_comparison(rng, name, other, task, metric, seeds):
    error, freedom = 0.01, rng.choice([2, 20, 200])
    difference = rng.gauss(0, rng.choice([0.001, 0.02, 0.08]))
    made = comparison(name, "tinyworld_cloze", difference, stats.t.ppf(0.975, freedom) * error, "", reference=other)
    if rng.random() < 0.1:
        made |= {"low": None, "high": None, "p": None, "test": "none (too few documents)"}
    else:
        made |= {"p": float(2 * stats.t.sf(abs(difference) / error, freedom)), "errors": [[error, freedom]]}
    return made | {"task": task, "metric": metric, "n": 100, "seeds": seeds}


def html_rows(page, name):
    """The cells of a table of a page below its heading, each as a list of lines."""
    table = re.search(rf'<table[^>]*\bid="{name}".*?</table>', page, re.DOTALL)[0]
    rows = []
    for row in table.split("<tr")[2:]:
        cells = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", re.sub("<(span|small)", r"\n<\1", row), re.DOTALL)
        texts = [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in cells]
        rows.append([[line for line in text.split("\n") if line.strip()] for text in texts])
    return rows


def markdown_rows(text, after):
    """The cells of the first table below a heading."""
    lines = text[text.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| ---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        plain = line.replace("\\", "").replace("&lt;", "<")
        rows.append([cell.strip().split(" <br> ") for cell in plain.strip("| ").split(" | ")])
    return rows


@pytest.mark.parametrize("seed", range(25))
def test_no_two_statements_disagree_in_any_rendering(tmp_path, printed, seed):
    folder = write_run(tmp_path / "run", drawn(seed), curves=False)
    results = load_results(folder)
    report = write_report(folder)
    page, text = report.html.read_text(), report.markdown.read_text()
    made = [row for row in read_csv(report.csv.read_text()) if row["outcome"]]
    statements = [("load_results", (v.method, v.other, v.task), v.outcome) for v in results.verdicts]
    statements += [("csv", (row["method"], row["other"], row["task"]), row["outcome"]) for row in made]
    pairs = {"html": html_rows(page, "differences") if made else []}
    pairs["markdown"] = markdown_rows(text, "## Paired differences") if made else []
    for source, lines in pairs.items():
        known = [line for line in lines if line[-1] != ["no verdict"]]
        statements += [(source, (*line[0], line[1][0]), " ".join(line[-1])) for line in known]
        assert len(known) == len(made)  # each pair and task once
    gains = [(entry, entry.axis.task) for entry in entries(results) if entry.axis.primary and entry.gain is not None]
    statements += [("explorer", (entry.method, "baseline", task), entry.verdict) for entry, task in gains]
    write_json(folder / "results.json", results.to_json())  # as a run writes it
    again = load_results(folder)
    statements += [("written", (v.method, v.other, v.task), v.outcome) for v in again.verdicts]
    first = results.first_task
    headline = markdown_rows(text, "## Answer") if "| method | gain" in text else []
    statements += [("headline", (line[0][0], "baseline", first), line[1][-1]) for line in headline if line[1] != ["–"]]
    by_pair = {}  # (method, other, task) -> verdict -> the renderings that say it
    for source, key, verdict in statements:
        by_pair.setdefault(key, {}).setdefault(
            re.sub(r" \(.*", "", verdict).replace("not decided", "undecided"), []
        ).append(source)
    for key, verdicts in by_pair.items():
        assert len(verdicts) == 1, (key, verdicts)
    for row in made:  # a claim needs a test
        tested = row["outcome"] != "not tested"
        assert tested == bool(row["p_corrected"])
        leaves_out = bool(row["corrected_low"]) and (
            float(row["corrected_low"]) > 0 or float(row["corrected_high"]) < 0
        )
        assert leaves_out == (row["outcome"] in ("better", "worse"))
    known = {(row["method"], row["other"], row["task"]): row for row in made}
    _check_words(headline, known, results, first)
    _check_sentence(next(line for line in text.splitlines() if line.startswith(("Of ", "No "))), known, results, first)
    if not headline:
        return
    # HTML, LaTeX, the terminal and the card have the cells that Markdown has
    shown = [[" ".join(cell) for cell in line] for line in headline]
    assert [[" ".join(cell) for cell in line] for line in html_rows(page, "headline")] == shown
    terminal = " ".join(re.sub(r"[│\s]+", " ", printed(document_of(folder), 400)).split())
    tex = report.tex.read_text().replace("\\_", "_").replace("$-$", "−").replace("{[}", "[")
    tex, card = tex.replace("$\\times$", "×").replace("\\%", "%"), run_card(results)
    assert all(line[-1] in rendered for line in shown for rendered in (terminal, tex, card))


def _check_words(headline, known, results, first):
    """The cells of the headline say of each task what its row says, or how many rows say it, and by which measure."""
    tasks, loras = set(results.tasks), [name for name, each in results.methods.items() if each.parts == LORA]
    for line in headline:
        against = [("baseline", line[2], tasks - {first})] if len(tasks) > 1 and line[2] != ["–"] else []
        if loras and line[0][0] not in loras:
            against.append((loras[0], line[-1], tasks))
        for other, cell, where in against:
            rows = [known[key] for key in known if key[:2] == (line[0][0], other) and key[2] in where]
            for outcome, clause in re.findall(
                r"(better|worse) on (.*?)(?=, worse on|, sizes differ|; |$)", " ".join(cell)
            ):
                mine = [row for row in rows if row["outcome"] == outcome]
                said = re.findall(r"(?: and |, )?([^()]+) \(([^)]*)\)", clause)
                metrics = {metric for _, each in said for metric in each.split(", ")}
                assert metrics == {row["metric"].replace("_", " ") for row in mine}
                many = re.match(r"(\d+) of (\d+) tasks", clause)
                if many:
                    assert int(many[1]) == len(mine)
                else:
                    names = [name for each, _ in said for name in re.split(r", | and ", each)]
                    assert sorted(names) == sorted(row["task"] for row in mine)
            if "not decided" in " ".join(cell):
                assert {row["outcome"] for row in rows} <= {"not decided", "not tested"}


def _check_sentence(sentence, known, results, first):
    """Every count of the sentence is that of the rows."""
    if not sentence.startswith("Of "):
        assert not any(row["outcome"] in ("better", "worse") for row in known.values())
        return
    loras = [name for name, each in results.methods.items() if each.parts == LORA]

    def methods(other, tasks, outcome):
        return len({m for (m, o, t), row in known.items() if (o == other and t in tasks and row["outcome"] == outcome)})

    def count(pattern, part):
        found = re.search(pattern, part)
        return 0 if found is None or found[1] == "none" else int(found[1])

    clauses = sentence.rstrip(".").split("; ")
    for clause in clauses:
        if "than baseline on" in clause:
            other, tasks = "baseline", [first]
        elif clause.startswith("on the "):
            other, tasks = "baseline", [task for task in results.tasks if task != first]
        elif clause.startswith("against LoRA"):
            other, tasks = loras[0], list(results.tasks)
        else:
            assert "none was tested" in clause
            continue
        for outcome in ("better", "worse"):
            counted = count(rf"(\d+|none) (?:is|are) (?:shown to be )?{outcome}", clause)
            assert counted == methods(other, tasks, outcome), sentence
