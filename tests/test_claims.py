"""Claims about methods in the pages are verdicts of the committed results, and so are the numbers beside them.

A claim is a comment behind its sentence, ``RUN: METHOD < OTHER, METHOD ? OTHER on TASK``: worse, undecided, with ``>``
better, with ``=`` equivalent or kept, with ``/`` not tested.
"""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

from hfpatch import load_results

ROOT = Path(__file__).parents[1]
REAL_MODELS = "docs/what-a-real-model-shows.md"
PAGES = (
    "README.md",
    "results/README.md",
    REAL_MODELS,
    *(f"docs/methods/{path.name}" for path in sorted((ROOT / "docs" / "methods").glob("*.md"))),
)
MEANING = {"<": "worse", "=": "same", ">": "better", "?": "undecided", "/": "not tested"}
CLAIM = re.compile(r"<!-- ([\w-]+): (.+?)\s+on\s+([\w ]+?)\s*-->", re.DOTALL)
RATIO = re.compile(r"(\d+\.\d\d) \[(\d+\.\d\d), (\d+\.\d\d)\]")
NUMBER = re.compile(r"(-?\d+\.\d+) \[(-?\d+\.\d+),\s+(-?\d+\.\d+)\]")


@cache
def results_of(run):
    return load_results(ROOT / "results" / run, kind=None)


@cache
def items_of(page):
    """Return the paragraphs, list items and rows of tables of a page."""
    return re.split(r"\n\n|\n(?=\d+\. |- |\| )", (ROOT / page).read_text(encoding="utf-8"))


def claims_of(item):
    """Yield run, method, sign, other and task of each claim."""
    for run, pairs, task in CLAIM.findall(item):
        for pair in pairs.split(","):
            yield run, *pair.split(), task


def numbers_of(text):
    """Return each difference with an interval as three texts."""
    return set(NUMBER.findall(text.replace("−", "-").replace("+", "")))


def verdicts(run, method, other, task):
    return [pair for pair in results_of(run).verdicts if (pair.method, pair.other, pair.task) == (method, other, task)]


@pytest.mark.parametrize(
    ("run", "method", "sign", "other", "task"),
    [
        pytest.param(*claim, id=f"{page}: {' '.join(claim)}")
        for page in PAGES
        for item in items_of(page)
        for claim in claims_of(item)
    ],
)
def test_a_claim_is_a_verdict(run, method, sign, other, task):
    assert {pair.tone for pair in verdicts(run, method, other, task)} == {MEANING[sign]}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_marks_its_claims(page):
    """A paragraph or list item that says "worse" or "better than" of methods has a claim."""
    for item in items_of(page):
        if re.search(r"\b(worse|better) than\b", CLAIM.sub("", item)):
            assert CLAIM.search(item), item


@pytest.mark.parametrize("page", PAGES)
def test_a_number_beside_a_claim_is_the_difference_of_its_verdict(page):
    """It is a gain or, where the text says how much worse a method is, a loss, with the interval of the outcome."""
    for item in items_of(page):
        decided = set()
        for run, method, _, other, task in claims_of(item):
            for pair in verdicts(run, method, other, task):
                ends = (pair.difference, pair.corrected_low, pair.corrected_high)
                for difference, low, high in (ends, (-ends[0], -ends[2], -ends[1])):
                    decided.add((f"{difference:.3f}", f"{low:.3f}", f"{high:.3f}"))
        assert not decided or numbers_of(item) <= decided, item


@pytest.mark.parametrize("page", PAGES)
def test_a_number_without_an_interval_is_a_gain_or_a_difference_of_a_claim(page):
    """Beside claims stand differences, gains over the base, margins, and what the choice of a rate may be worth."""
    for item in items_of(page):
        stated = set(re.findall(r"\b0\.\d{2,3}\b(?! %)", NUMBER.sub("", CLAIM.sub("", item).replace("−", "-"))))
        shown = set[str]()
        for run, method, _, other, task in claims_of(item):
            results = results_of(run)
            gains = (results.verdict(name, task, results.baseline) for name in (method, other))
            made = [*verdicts(run, method, other, task), *filter(None, gains)]
            for digits in (2, 3):
                shown |= {f"{abs(pair.difference):.{digits}f}" for pair in made}
            shown |= {f"{pair.margin:g}" for pair in made if pair.margin}
            shown |= {f"{error:.3f}" for error in results.rate_errors.values() if error is not None}
        assert not shown or stated <= shown, item


@pytest.mark.parametrize("page", PAGES)
def test_a_claim_that_another_rate_may_turn_says_so(page):
    for item in items_of(page):
        for run, method, sign, other, task in claims_of(item):
            if any(pair.at_rates_tried for pair in verdicts(run, method, other, task)):
                assert "at the rates tried" in " ".join(item.split()), (method, sign, other, item)


def test_the_readme_repeats_answers_of_the_page_on_real_models():
    answers = {number: item for item in items_of(REAL_MODELS) for number in numbers_of(item)}
    rows = [re.split(r" \| ", item.strip("| ")) for item in items_of("README.md") if numbers_of(item)]
    assert len(rows) == 12
    for *_, answer, difference in rows:
        (number,) = numbers_of(difference)
        assert answer.partition(",")[0] in answers[number]


SECTIONS = {text.partition("\n")[0]: text for text in (ROOT / "results/README.md").read_text("utf-8").split("\n## ")}
MEASURED = {
    title: files for title, text in SECTIONS.items() if (files := re.findall(r"\]\((\w+/[\w-]+\.json)\)", text))
}


def ratios_of(measured):
    """Yield as three texts each number of a file that stands beside its smallest and its largest round."""
    if isinstance(measured, dict) and {"lowest", "highest"} <= measured.keys():
        ends = [f"{measured[end]:.2f}" for end in ("lowest", "highest")]
        yield from ((f"{value:.2f}", *ends) for value in measured.values() if isinstance(value, float))
    for value in measured.values() if isinstance(measured, dict) else measured if isinstance(measured, list) else ():
        yield from ratios_of(value)


@pytest.mark.parametrize("section", MEASURED)
def test_a_measured_ratio_is_in_a_file_that_its_section_links(section):
    files = (ROOT / "results" / file for file in MEASURED[section])
    measured = {ratio for file in files for ratio in ratios_of(json.loads(file.read_text(encoding="utf-8")))}
    assert set(RATIO.findall(SECTIONS[section])) <= measured


def test_the_table_of_the_frontier_is_that_of_its_results():
    results = load_results(ROOT / "results/frontier")
    rows = re.findall(r"^\| ([\w ,-]+) \| (.*) \|$", SECTIONS["At which size, and at what cost"], re.MULTILINE)
    shown = {label.replace("pre-projection with skip", "pre-projection skip"): row for label, row in rows}
    names = {"lora": "LoRA, attention", "lora_all_linear": "LoRA, all linear layers"}
    for line in results.frontier.lines:
        label = line.method.replace("pre_projection", "pre-projection").replace("_", " ")
        row = shown[names.get(line.method, label)]
        *gains, rate = row.split(" | ")
        differences = [
            results.comparison(point, "held_out_text", "baseline", "nats_per_token") for point in line.points
        ]
        assert re.findall(r"[\d.]+", " ".join(gains)) == [f"{-made.difference:.3f}" for made in differences]
        if line.exchange is not None and line.exchange.more_than:
            assert rate == f"more than {line.exchange.more_than:.0f}"
        elif line.exchange is not None:
            numbers = [float(number) for number in re.findall(r"[\d.]+", rate)]
            assert numbers == pytest.approx([line.exchange.rate, line.exchange.low, line.exchange.high], rel=0.02)


@pytest.mark.parametrize(
    ("section", "run"),
    [
        ("At which size, and at what cost", "frontier"),
        ("What tuning changes", "quickstart-tuned"),
        ("What the other methods show", "zoo"),
    ],
)
def test_the_stated_worth_of_the_choice_of_a_rate_is_that_of_the_run(section, run):
    errors = load_results(ROOT / "results" / run).rate_errors.values()
    assert f"up to {max(filter(math.isfinite, errors)):.3f}" in " ".join(SECTIONS[section].split())


@pytest.mark.parametrize("section", ["What scoring costs", "On a GPU"])
def test_the_range_of_speeds_in_the_readme_is_that_of_the_tables(section):
    tables = SECTIONS[section].split("| training |")[0]
    speeds = [float(median) for median, *_ in RATIO.findall(tables)]
    digits = 1 if max(speeds) < 2 else 0
    assert f"[{min(speeds):.1f} to {max(speeds):.{digits}f}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_a_layer_keeps_for_its_gradient_is_in_the_files():
    page, changes = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/training.md", "CHANGELOG.md"))
    for name in ("activations-smollm2-amd", "activations-smollm2-bf16-amd"):
        measured = json.loads((ROOT / f"results/training/{name}.json").read_text(encoding="utf-8"))
        kept, everything = (measured["kept_bytes_a_layer_and_token"][way] for way in ("ours", "all_kept"))
        assert f"{kept / 1000:.1f}" in page
        assert f"{everything / 1000:.1f} kB" in page
        assert f"{kept / everything:.2f}" in changes


def test_the_types_that_the_readme_counts_are_those_of_their_page():
    (types,) = re.findall(
        r"\*\*pre-projection\*\*: works on (\d+) types", (ROOT / "docs/architectures.md").read_text("utf-8")
    )
    for page in ("README.md", "CHANGELOG.md"):
        assert re.search(rf"\b{types} (model )?types\b", (ROOT / page).read_text("utf-8")), page
