"""The page in a real browser, headless: what it asks for, and what it does."""

import gzip
import json
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from reporting.conftest import HOSTILE, example, write_run
from reporting.inspection.test_document import whole
from reporting.study_example import write_study

from hfpatch import load_results
from hfpatch.reporting import write_report
from hfpatch.reporting.explorer.page import write_explorer
from hfpatch.reporting.html import html
from hfpatch.reporting.inspection.document import inspection_document
from hfpatch.reporting.inspection.figures import figures

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra 'browser')")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path (apt-get install chromium)"),
]
RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the reports to look at, by name."""
    root = tmp_path_factory.mktemp("reports")
    run = write_run(root / 'a <img src=x onerror=alert("path")> run', example())
    other = write_run(root / "other", example())
    hostile = json.dumps(example())
    for name in ("pre_projection_skip", "tinyworld_endings"):
        hostile = hostile.replace(json.dumps(name), json.dumps(f"{name}{HOSTILE[:-2]}"))
    bad = write_run(
        root / "hostile", json.loads(hostile) | {"name": HOSTILE[:-1], "warnings": [HOSTILE[:-1]]}, curves=False
    )
    (inspected := root / "inspection.html").write_text(html(inspection_document(whole(), figures(whole()))))
    shutil.copytree(RESULTS / "quickstart", root / "quickstart")
    shutil.copytree(RESULTS, root / "results", ignore=shutil.ignore_patterns("figures", "*.csv"))
    write_explorer([root / "results"], root / "results" / "explore.html")
    write_explorer([bad, run], root / "explore.html")
    return {
        "explorer": root / "results" / "explore.html",
        "explorer of hostile": root / "explore.html",
        "run": write_report(run).html,
        "hostile": write_report(bad).html,
        "quickstart": write_report(root / "quickstart").html,
        "joint": write_report([run, other], root / "joint").html,
        "side": write_report([run, root / "quickstart"], root / "side").html,
        "study": write_report(write_study(root / "study")).html,
        "inspection": inspected,
    }


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, pages):
    """Open a report and, at the end, check that it made no request, no error and no dialogue."""
    opened = []

    def visited(name, *, width=1280, scheme="light"):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        noise = []
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("dialog", lambda dialog: (noise.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: noise.append(request.url) if not request.is_navigation_request() else None)
        page.goto(pages[name].as_uri())
        opened.append((page, noise))
        return page

    yield visited
    for page, noise in opened:
        page.close()
        assert noise == []


NAMES = ["run", "hostile", "quickstart", "joint", "side", "study", "inspection", "explorer", "explorer of hostile"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_a_phone_shows_it_without_overflow(visit, name, scheme):
    page = visit(name, width=390, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.body.scrollWidth") <= 390


def test_hostile_text_is_shown_and_never_run(visit):
    page = visit("hostile")
    assert '<script>alert("1")</script>' in page.locator("ul.warnings").first.inner_text()
    assert page.locator("script").count() == 1
    page = visit("joint")
    assert '<img src=x onerror=alert("path")>' in page.locator("p.run").first.inner_text()
    assert page.locator("img").count() == 0


def column(page, table, index):
    return page.locator(f"#{table} tbody tr:not([hidden])").evaluate_all(
        "(rows, index) => rows.map((row) => row.cells[index].textContent.trim())", index
    )


def test_a_heading_sorts_up_down_and_back(visit):
    page = visit("quickstart")
    index = page.locator("#methods thead th").all_inner_texts().index("trainable")
    before = column(page, "methods", index)
    heading = page.locator("#methods thead th").nth(index)
    numbers = sorted(int(text.replace(",", "")) for text in before)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert [int(text.replace(",", "")) for text in column(page, "methods", index)] == numbers
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert [int(text.replace(",", "")) for text in column(page, "methods", index)] == numbers[::-1]
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") is None
    assert column(page, "methods", index) == before
    page.locator("#main thead th button").first.click()
    assert column(page, "main", 0) == sorted(column(page, "main", 0))
    page.locator("#differences thead th button").nth(2).click()
    signed = [float(text.split()[0].replace("−", "-")) for text in column(page, "differences", 2)]
    assert signed == sorted(signed)
    page = visit("study")
    index = [text.split("\n")[0] for text in page.locator("#headline thead th").all_inner_texts()].index("params")
    page.locator("#headline thead th button").nth(index).click()
    assert column(page, "headline", index)[0] == "900k"  # and not "1M"


def test_filters_hide_rows_and_tell_how_many_remain(visit):
    page = visit("quickstart")
    form = page.locator("form[data-for=differences]")
    rows = len(column(page, "differences", 0))
    form.locator("select[data-attribute=task]").select_option("tinyworld_cloze")
    form.locator("select[data-attribute=measure]").select_option("bits per byte")
    form.locator("select[data-attribute=question]").select_option("is it better than LoRA?")
    assert set(column(page, "differences", 1)) == {"tinyworld_clozebits per byte"}
    assert {text.removesuffix("lora") for text in column(page, "differences", 0)} == {
        "pre_projection", "pre_projection_skip", "pre_projection_lora",
    }  # fmt: skip
    form.locator("input").fill("skip CLOZE")
    assert column(page, "differences", 0) == ["pre_projection_skiplora"]
    assert form.locator("output").inner_text() == f"1 of {rows} rows"
    form.locator("select[data-attribute=verdicts]").select_option("worse")
    assert column(page, "differences", 0) == []


def test_the_scheme_follows_the_reader_and_the_button(visit):
    page = visit("quickstart", scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.locator("#scheme").click()
    light = page.evaluate(paper)
    assert (dark, light) == ("rgb(20, 23, 27)", "rgb(255, 255, 255)")


def test_the_keyboard_reaches_and_works_everything(visit):
    page = visit("run")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    heading = page.locator("#main thead th").nth(1)
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((each) => each.tabIndex === 0)")


def test_a_figure_can_be_taken_as_svg_and_its_data_as_csv(visit):
    page = visit("quickstart")
    with page.expect_download() as taken:
        page.locator("#training button.svg").click()
    svg = Path(taken.value.path()).read_text()
    assert svg.startswith("<svg")
    assert "var(" not in svg
    assert "fill: rgb(27, 31, 36)" in svg
    with page.expect_download() as taken:
        page.locator("#answer .downloads a").dispatch_event("click")
    assert taken.value.suggested_filename == "differences.csv.gz"
    assert gzip.decompress(Path(taken.value.path()).read_bytes()).startswith(b"role,question,outcome,method,other,task")


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_explorer_has_no_overflow_and_its_filters_work(visit, width):
    page = visit("explorer", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    form, panels = page.locator(".explorer form"), page.locator(".panel")
    status = form.locator("output").inner_text
    every = status()
    assert every.endswith(f"from {len(list(RESULTS.rglob('results.json')))} runs")
    for box in panels.all():
        inside = box.evaluate(
            "(box) => [...box.querySelectorAll('svg, p')].every((e) => e.scrollWidth <= box.clientWidth)"
        )
        assert inside
    form.locator("[name=model]").select_option("SmolLM2-135M-Instruct.Q4_1.gguf")
    axes = json.loads(page.locator(".explorer-data").text_content())["axes"]
    assert panels.count() == sum(a["model"] == "SmolLM2-135M-Instruct.Q4_1.gguf" and a["primary"] for a in axes)
    form.locator("[name=task]").select_option("lambada_openai")
    runs = [load_results(RESULTS / f"smollm2-135m{suffix}", kind=None) for suffix in ("", "-queries", "-gpu")]
    verdicts = [run.verdict(name, "lambada_openai", "baseline") for run in runs for name in run.others]
    assert set(column(page, "explore .gains", 4)) == {f"{one.tone}{one.seeds} seeds" for one in verdicts}
    form.locator("[name=method]").select_option("lora")
    assert set(column(page, "explore .gains", 0)) == {"lora"}
    form.locator("[name=verdict]").select_option("better")
    assert status().startswith("0 of ")
    form.locator("button[type=reset]").click()
    page.wait_for_function("(every) => document.querySelector('.explorer output').textContent === every", arg=every)


def test_the_explorers_front_is_what_nothing_else_beats(visit):
    page = visit("explorer")
    data = json.loads(page.locator(".explorer-data").text_content())
    rows_of = Counter(row[1] for row in data["rows"])
    texts = [
        i
        for i, axis in enumerate(data["axes"])
        if (axis["task"], axis["metric"]) == ("tinyworld_text", "bits per byte")
    ]
    text = max(texts, key=lambda axis: rows_of[axis])
    better = data["verdicts"].index("better")
    points = [(row[8], row[3]) for row in data["rows"] if row[1] == text and row[7] == better]
    front = {(x, y) for x, y in points if not any((a <= x and b > y) or (a < x and b >= y) for a, b in points)}
    page.locator(".explorer [name=task]").select_option("tinyworld_text")
    panel = page.locator(".panel", has_text=data["axes"][text]["documents"])
    assert panel.locator(".front").get_attribute("d").count("V") == len(front) > 3
    drawn = panel.locator(".point").count()
    assert drawn == sum(row[1] == text and row[3] is not None for row in data["rows"])
    page.locator(".explorer [name=cost]").select_option("seconds")
    assert "on cpu" in panel.locator(".sub").inner_text()


def test_a_line_joins_the_budgets_of_a_method(visit):
    page = visit("explorer")
    page.locator(".explorer [name=run]").select_option("frontier")
    page.locator(".explorer [name=task]").select_option("held_out_text")
    lines = [path.get_attribute("d") for path in page.locator(".panel .family").all()]
    assert sorted(line.count("L") + 1 for line in lines) == [2, 4, 4, 4, 4, 4, 5]  # with skip two, LoRA five
    for line in lines:
        across = [float(x) for x in re.findall(r"[ML]([\d.]+) ", line)]
        assert across == sorted(across)
    page.locator(".explorer [name=words]").fill("@80k")
    assert page.locator(".panel .point").count() == len(lines)


def test_a_row_and_a_mark_of_the_explorer_open_the_report(visit):
    page = visit("explorer")
    page.locator(".explorer [name=run]").select_option("quickstart")
    assert "run=quickstart" in page.url
    point = page.locator(".panel .point[tabindex='0']").first
    point.focus()
    detail = page.locator(".panel .detail").first.inner_text()
    assert "(quickstart): " in detail
    page.keyboard.press("ArrowRight")
    assert page.locator(".panel .detail").first.inner_text() != detail
    page.locator(".gains thead button").nth(3).click()
    gains = [float(text.split("[")[0].replace("−", "-")) for text in column(page, "explore .gains", 3)]
    assert all(one <= other + 0.005 for one, other in pairwise(gains))  # they are rounded
    page.locator(".gains tbody tr").first.click()
    page.wait_for_url("**/quickstart/report.html")
    page.go_back()
    assert page.locator(".explorer [name=run]").input_value() == "quickstart"
