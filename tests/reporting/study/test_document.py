"""The report of a pretraining study as a whole: its files, its page, and what becomes of bad results."""

import json
import re
from html import unescape

import pytest
from markdown_it import MarkdownIt
from reporting.conftest import HOSTILE, example, read_csv, write_run
from reporting.study_example import LOW, study, with_one_seed, without_sweep, write_study_run
from reporting.test_html import Page

from hfpatch.__main__ import main
from hfpatch.errors import HfpatchError
from hfpatch.reporting import write_joint_report, write_report
from hfpatch.results import load_results

DRAWN = ("differences", "loss", "improvement", "diagnostics", "spread")
FILES = sorted(f"figures/{name}.{kind}" for name in DRAWN for kind in ("csv", "svg"))
FILES += ["figures/summary.pdf", "figures/summary.png", "report.html", "report.md", "results.csv"]
SECTIONS = ["answer", "protocol", "warnings", "results", "differences", "loss", "improvement", "sweep", "diagnostics"]


@pytest.fixture
def run_dir(tmp_path):
    return write_study_run(tmp_path / "study", study())


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report that is only read."""
    return write_report(write_study_run(tmp_path_factory.mktemp("read") / "study", study()))


def written(report, folder):
    return sorted(path.relative_to(folder).as_posix() for path in report.paths)


def parsed(text):
    page = Page()
    page.feed(text)
    assert page.open == []
    return page


def test_sections_are_in_the_order_of_reading(report):
    page = parsed(report.html.read_text())
    sections = [attrs["id"] for tag, attrs in page.tags if tag == "section"]
    assert sections == [*SECTIONS, "spread", "environment", "cite"]
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert all(link.startswith(("#", "data:text/csv;charset=utf-8,", "data:application/gzip;")) for link in page.links)
    assert sum(tag == "svg" for tag, _ in page.tags) == len(DRAWN)
    downloads = {attrs["download"] for _, attrs in page.tags if "download" in attrs}
    assert {name.removesuffix(".gz") for name in downloads} == {"results.csv", *(f"{name}.csv" for name in DRAWN)}


def test_html_and_markdown_have_the_same_tables(report):
    def cells(page):
        found = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", page, re.DOTALL)
        return [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in found]

    page = cells(report.html.read_text())
    assert page == cells(MarkdownIt("commonmark", {"html": True}).enable("table").render(report.markdown.read_text()))
    assert "Q = (x + f(x))/2, f = LN(GELU(RMSNorm(x) W_1) W_2)" in page


def test_results_csv_has_a_line_a_run(report):
    rows = read_csv(report.csv.read_text())
    assert len(rows) == 8 * 3
    assert [(row["seed"], row["outcome"], row["diverged_step"], row["validation_loss"]) for row in rows[9:12]] == [
        ("0", "complete", "", "4.0"),
        ("1", "complete", "", "4.0"),
        ("2", "diverged", "340", ""),
    ]
    assert {row["training.lr"] for row in rows} == {"0.001", "0.002"}
    assert [row["non_embedding"] for row in rows if row["variant"] == "wide"] == ["1125000"] * 6


def test_one_seed_and_no_sweep(tmp_path):
    plain = write_study_run(tmp_path / "plain", without_sweep())
    assert written(write_report(plain), plain) == FILES
    text = (plain / "report.md").read_text()
    assert "nothing was swept" in text
    assert "| best point |" not in text
    one = write_study_run(tmp_path / "one", with_one_seed())
    assert written(write_report(one), one) == [name for name in FILES if "spread" not in name]


def test_an_incomplete_study_is_reported_as_far_as_it_got(tmp_path):
    raw = study()
    raw["complete"] = False
    for row in raw["rows"][2:]:
        row.update(best=False, loss=None, improvement=None, curve=[], improvement_by_step=[], seconds_per_step=None)
        row.update(diverged={}, missing=[0, 1, 2])
    raw["runs"] = [run for run in raw["runs"] if run["variant"] == "linear"]
    run_dir = write_study_run(tmp_path / "run", raw)
    report = write_report(run_dir)
    assert written(report, run_dir) == [
        name for name in FILES if not re.search("differences|improvement|diagnostics|summary", name)
    ]
    for text in (report.html.read_text(), report.markdown.read_text().replace("\\", "")):
        assert "--resume" in text
        assert "nonlinear, lr 0.002: seeds 0, 1 and 2" in text
        assert "3 are not compared (nonlinear, identity and wide)" in text
    assert "incomplete run" in report.html.read_text()


def test_a_study_without_any_run_is_a_page_too(tmp_path):
    raw = study() | {"complete": False, "rows": [], "runs": []}
    run_dir = write_study_run(tmp_path / "run", raw)
    report = write_report(run_dir)
    assert written(report, run_dir) == ["report.html", "report.md", "results.csv"]
    assert "linear: no run is finished." in report.markdown.read_text()


def test_hostile_text_is_shown_and_is_no_markup(tmp_path):
    text = json.dumps(study()).replace('"nonlinear"', json.dumps("nonlinear" + HOSTILE))
    raw = json.loads(text)
    raw["name"] = raw["description"] = raw["provenance"]["command"] = HOSTILE
    for variant in raw["variants"].values():
        variant["query"] = variant["description"] = HOSTILE
        variant["architecture"]["query"] = {HOSTILE: HOSTILE}
    raw["training"][HOSTILE] = HOSTILE
    report = write_report(write_study_run(tmp_path / "run", raw))
    page = report.html.read_text()
    assert "<script>alert" not in page.lower()
    assert page.lower().count("<script") == 1
    assert '<script>alert("1")</script> | `$\\frac{x}$` *b* & _c_' in "".join(parsed(page).text)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(report.markdown.read_text())
    assert not [token for token in tokens if token.type == "html_block"]
    assert not [child for token in tokens for child in token.children or [] if child.type == "html_inline"]
    links = [child.attrs["href"] for token in tokens for child in token.children or [] if child.type == "link_open"]
    assert links == [f"figures/{name}.csv" for name in DRAWN]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"variants": {}}, "variants"),
        ({"baseline": "other"}, "baseline is 'other', which is not among variants"),
        ({"rows": [{"variant": "other"}]}, "rows names 'other', which is not among variants"),
        ({"seeds": "0"}, 'seeds is "0"'),
        ({"rows": [{"variant": "linear", "loss": {"mean": None}}]}, "rows.0.loss.mean is null"),
    ],
)
def test_damaged_results_are_one_line_and_nothing_is_written(tmp_path, change, line):
    run_dir = write_study_run(tmp_path / "run", study() | change)
    with pytest.raises(HfpatchError) as raised:
        write_report(run_dir)
    assert line in str(raised.value)
    assert "results.json" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in run_dir.iterdir()) == ["recipe.yaml", "results.json"]


def test_a_joint_report_of_studies_is_refused_and_of_one_is_its_own(report, run_dir, tmp_path):
    comparison = write_run(tmp_path / "comparison", example())
    with pytest.raises(HfpatchError, match="study: these are the results of hfpatch pretrain, not of hfpatch compare"):
        write_joint_report([comparison, run_dir], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    joint = write_joint_report([run_dir], tmp_path / "out")
    assert written(joint, tmp_path / "out") == FILES
    assert joint.markdown.read_bytes() == report.markdown.read_bytes()


def test_the_command_writes_and_prints_it(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "+2.00 [1.75, 2.25]" in shown
    assert "1 is better" in " ".join(shown.split())
    assert f"report: {run_dir / 'report.html'}" in shown
    assert (run_dir / "report.html").is_file()
    assert main(["report", str(run_dir), str(run_dir.parent)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_numbers_that_are_not_finite_are_read_as_unknown(tmp_path):
    raw = study()
    raw["runs"][-1]["evaluation"] = [[100, float("nan")], [200, float("inf")]]
    raw["rows"][3]["curve"] = [[100, float("nan"), None, None]]
    read = load_results(write_study_run(tmp_path / "run", raw), "pretraining")
    assert read.runs[-1].evaluation == [(100, None), (200, None)]
    assert read.rows[3].point == {"training.lr": 0.002}
    assert read.chosen["nonlinear"].point == LOW
