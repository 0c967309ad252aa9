"""Random results in every rendering: no two statements on a pair and task disagree, and counts are those of tables."""

import random
import re
from html import unescape

import pytest
from reporting.conftest import comparison, method, read_csv, write_run
from scipy import stats

from hfpatch.reporting.cards import run_card
from hfpatch.reporting.comparison.forest import asked, control_for
from hfpatch.reporting.explorer.entries import entries
from hfpatch.reporting.report import document_of, write_report
from hfpatch.results import load_results
from hfpatch.results.identity import OF_TASK
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
        task: {"primary": BASES[task][0], "higher_is_better": BASES[task][1], "n": 100, "version": "1"}
        | dict.fromkeys(OF_TASK, "d" * 64)
        for task in tasks
    }
    for name, parts in methods.items():
        scores, speed = {"tinyworld_cloze": [0.5] * seeds}, 2048 if parts else None
        _, made = method(name, parts, 1000 if parts else 0, scores, speed=speed)
        for run in made["runs"].values():
            (score,) = run["evaluation"].values()
            run["evaluation"] = {}
            for task in tasks:
                metrics = {BASES[task][0]: rng.uniform(0.3, 0.6)} | (
                    {"bits_per_byte": 1.5} if task in low_noise else {}
                )
                fields = {"task": task, "metrics": metrics, "primary": BASES[task][0], "stderr": {}}
                run["evaluation"][task] = {**score, **fields, "higher_is_better": BASES[task][1], "n": 100}
        raw["methods"][name] = made
    for name in methods:
        others = ["baseline", *["lora"] * (name != "lora"), *["two"] * (name == "one")]
        for other in others if name != "baseline" else ():
            if other not in methods or rng.random() >= 0.9:
                continue
            for task in tasks:
                for metric in (BASES[task][0], *(["bits_per_byte", "margin"] if task in low_noise else [])):
                    raw["comparisons"].append(_random_comparison(rng, name, other, task, metric, seeds))
    if seed % 4 and "lora" in methods and seeds > 1:
        raw["questions"] = [{"question": "gain", "pairs": [[name, "lora"] for name in names], "on": [tasks[-1]]}]
    if seed % 2:  # each at an edge, so that nothing bounds what another rate is worth, or at a sure best
        rates, trained = [0.001, 0.01, 0.1], [name for name in methods if name != "baseline"]
        best = {name: rng.choice(rates) for name in trained}
        given = [(name, rate, 1.0 if rate == best[name] else 1.0001) for name in trained for rate in rates]
        trials = [{"method": name, "seed": 9, "values": {"lr": rate}, "loss": loss} for name, rate, loss in given]
        chosen = {name: {"values": {"lr": rate}, "loss": 1.0, "trials": 3} for name, rate in best.items()}
        raw["tuning"] = {"seed": 9, "steps": 5, "learning_rates": rates, "trials": trials, "chosen": chosen}
        raw["tuning"]["text"] = {"documents": 4, "tokens": 60, "predicted_tokens": 56, "bytes": 200}
    return raw


def said(outcome, tried):
    return f"{outcome} at the rates tried" if tried in (True, "True", "true", "yes") else outcome


def _random_comparison(rng, name, other, task, metric, seeds):
    error, freedom = 0.01, rng.choice([2, 20, 200])
    difference = rng.gauss(0, rng.choice([0.001, 0.02, 0.08]))
    made = comparison(name, "tinyworld_cloze", difference, stats.t.ppf(0.975, freedom) * error, "", reference=other)
    if rng.random() < 0.1:
        made |= {"low": None, "high": None, "p": None, "test": "none (too few documents)"}
    else:
        made |= {
            "p": float(2 * stats.t.sf(abs(difference) / error, freedom)),
            "errors": [[error, freedom], [1e-9, 1e9]],
        }
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
    statements = [
        ("load_results", (v.method, v.other, v.task), said(v.outcome, v.at_rates_tried)) for v in results.verdicts
    ]
    statements += [
        ("csv", (row["method"], row["other"], row["task"]), said(row["outcome"], row["at_rates_tried"])) for row in made
    ]
    pairs = {"html": html_rows(page, "differences") if made else []}
    pairs["markdown"] = markdown_rows(text, "## Paired differences") if made else []
    for source, lines in pairs.items():
        decided = [line for line in lines if line[-1] != ["no verdict"]]
        statements += [(source, (*line[0], line[1][0]), " ".join(line[-1])) for line in decided]
        assert len(decided) == len(made)  # each pair and task once
    gains = [(entry, entry.axis.task) for entry in entries(results) if entry.axis.primary and entry.gain is not None]
    statements += [
        ("explorer", (entry.method, "baseline", task), said(entry.verdict, "rates tried" in entry.text))
        for entry, task in gains
    ]
    write_json(folder / "results.json", results.to_json())  # as a run writes it
    again = load_results(folder)
    statements += [("written", (v.method, v.other, v.task), said(v.outcome, v.at_rates_tried)) for v in again.verdicts]
    first = next((verdict.task for verdict in asked(results)), results.first_task)
    headline = markdown_rows(text, "## Answer") if "| method | gain" in text else []
    columns = [] if not headline else [cell.strip() for cell in text[text.index("| method | gain") :].split("|")[1:8]]
    for line in headline:
        for name, cell in zip(columns, line, strict=False):
            if name.startswith("against ") and (
                outcome := re.match("better|worse|undecided|not decided|not tested", cell[0])
            ):
                control = control_for(results, line[0][0])
                statements.append(("headline", (line[0][0], control, first), said(outcome[0], "‡" in cell[0])))
    renderings = {}  # (method, other, task) -> verdict -> the renderings that say it
    for source, key, verdict in statements:
        renderings.setdefault(key, {}).setdefault(
            re.sub(r" \(.*", "", verdict).replace("not decided", "undecided"), []
        ).append(source)
    for key, verdicts in renderings.items():
        assert len(verdicts) == 1, (key, verdicts)
    for row in made:  # a claim needs a test
        tested = row["outcome"] != "not tested"
        assert tested == bool(row["p_corrected"])
        leaves_out = bool(row["corrected_low"]) and (
            float(row["corrected_low"]) > 0 or float(row["corrected_high"]) < 0
        )
        assert leaves_out == (row["outcome"] in ("better", "worse"))
    by_pair = {(row["method"], row["other"], row["task"]): row for row in made}
    _check_sentences(text, by_pair, first)
    if not headline:
        return

    # HTML, LaTeX, the terminal and the card have the cells that Markdown has
    def joined(lines):
        return [[" ".join(cell).replace("\u00a0", " ") for cell in line] for line in lines]

    shown = joined(headline)
    assert joined(html_rows(page, "headline")) == shown
    terminal = " ".join(re.sub(r"[│\s]+", " ", printed(document_of(folder), 400)).split())
    tex = report.tex.read_text().replace("\\_", "_").replace("$-$", "−").replace("{[}", "[").replace("--", "–")
    tex, card = tex.replace("$\\times$", "×").replace("\\%", "%"), run_card(results)
    assert all(line[-1] in rendered for line in shown for rendered in (terminal, tex, card))


def _check_sentences(text, by_pair, first):
    """Every sentence names pairs with its outcome; each primary pair has one, or each difference from the base."""
    text = text.replace("\\", "")
    sides, decided = "ahead of|behind|apart from", "better|worse|undecided"
    primary = re.findall(rf"- . \*\*(\w+)\*\* is .* (?:{sides}) (\w+) .*: ({decided})( at the rates tried)?", text)
    outcomes = {(method, other, first): said(outcome, bool(tried)) for method, other, outcome, tried in primary}
    exploratory = re.findall(
        r"- . \*\*Exploratory, (\S+) \((.*)\): (better|worse) than (\S+?)( at the rates tried)?\*\* – (.*)\.", text
    )
    for task, measure, outcome, other, tried, names in exploratory:
        for name in re.split(", | and ", names):
            outcomes[name, other, task] = said(outcome, bool(tried))
            assert by_pair[name, other, task]["metric"].replace("_", " ") == measure
    for key, outcome in outcomes.items():
        assert said(by_pair[key]["outcome"], by_pair[key]["at_rates_tried"]) == outcome
    asked_of = {key for key, row in by_pair.items() if row["role"] == "primary"}
    answers = asked_of or {key for key in by_pair if key[1:] == ("baseline", first)}
    named = decided.split("|") if asked_of else ("better", "worse")
    assert {key for key in answers if by_pair[key]["outcome"] in named} == outcomes.keys()
    lead = text[text.index("## Answer") :].split("\n\n")[1]
    assert ("beat" in lead) == any(by_pair[key]["outcome"] == "better" for key in answers)
    assert all(key[0] in lead for key in answers if by_pair[key]["outcome"] == "better")
