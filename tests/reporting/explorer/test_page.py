"""The explorer's page as a file: what it is made of, where its links go, what it leaves out."""

import json
import re
import shutil
from pathlib import Path

import pytest
from reporting.conftest import HOSTILE, example, write_run
from reporting.study_example import write_study
from typer.testing import CliRunner

from hfpatch import HfpatchError
from hfpatch.cli.app import app
from hfpatch.reporting.explorer.page import Source, explorer_document, write_explorer
from hfpatch.reporting.html import html
from hfpatch.results.comparison import ComparisonResults

RESULTS = Path(__file__).parents[3] / "results"


def data_of(page):
    return json.loads(re.search(r'class="explorer-data">(.*?)</script>', page, re.DOTALL)[1])


def test_runs_are_found_below_a_folder_and_links_are_relative(tmp_path):
    runs = tmp_path / "my runs"
    for folder in (write_run(runs / "a", example()), write_study(runs / "deep" / "b")):
        (folder / "report.html").write_text("")
    write_run(runs / "a" / "runs" / "nested", example())  # below a run
    write_run(runs / "c", example())
    (runs / "note.txt").write_text("")
    (summary, *_) = write_explorer([runs, runs / "a"], tmp_path / "out" / "explore.html").summary
    text = (tmp_path / "out" / "explore.html").read_text()
    data = data_of(text)
    assert [(run["label"], run["href"]) for run in data["runs"]] == [
        ("a", "../my%20runs/a/report.html"),
        ("c", ""),
        ("b", "../my%20runs/deep/b/report.html"),
    ]
    assert summary.text == f"Differences: {sum(row[3] is not None for row in data['rows'])}, runs: 3"
    assert "c: it has no report.html" in text
    assert '<a href="../my%20runs/a/report.html">a</a>' in text  # without the script, too


def test_what_cannot_be_read_is_named_and_nothing_at_all_is_an_error(tmp_path):
    write_run(tmp_path / "good", example())
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "recipe.yaml").write_text("")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.json").write_text('{"schema": 1, "kind": "comparison"}')
    done = CliRunner().invoke(app, ["explore", str(tmp_path), "--out", str(tmp_path / "x.html")])
    assert done.exit_code == 0
    assert "has layout 1, this version reads 2" in done.output.replace("\n", " ")
    page = (tmp_path / "x.html").read_text()
    assert "has layout 1, this version reads 2" in page
    assert "begun: no results yet" in page
    for folder, message in (("bad", "has layout 1"), ("none", "no such folder"), ("x.html", "no such folder")):
        with pytest.raises(HfpatchError, match=message):
            write_explorer([tmp_path / folder], tmp_path / "y.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HfpatchError, match=r"no results.json there or below"):
        write_explorer([tmp_path / "empty"], tmp_path / "y.html")
    assert not (tmp_path / "y.html").exists()


def test_models_of_one_name_have_axes_of_their_own(raw):
    other = json.loads(json.dumps(raw))
    other["model"]["sha256"] = "f" * 64
    runs = [ComparisonResults.model_validate(run) for run in (raw, raw, other)]
    data = data_of(html(explorer_document([Source(str(index), run) for index, run in enumerate(runs)])))
    assert len(data["axes"]) == 2 * 3
    assert {axis["model"].rpartition(" ")[0] for axis in data["axes"]} == {
        f"tinyworld/gpt-neox ({letter * 12} float32" for letter in "af"
    }
    assert {row[1] for row in data["rows"] if row[0] == 0} == {row[1] for row in data["rows"] if row[0] == 1}


def test_hostile_text_stays_text(hostile, tmp_path):
    write_explorer([write_run(tmp_path / "run", hostile, curves=False)], tmp_path / "explore.html")
    page = (tmp_path / "explore.html").read_text()
    assert '<script>alert("1")' not in page
    assert page.count("<script") == 2  # the page's own, and its data
    assert any(HOSTILE[:8] in str(row) for row in data_of(page)["rows"])
    assert not re.search(r"(src|href)=\"(https?:)?//", page)


def test_the_committed_results_are_shown_whole(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.csv", "*.svg", "*.html"))
    (summary,) = write_explorer([tmp_path / "results"], tmp_path / "explore.html").summary  # nothing is left out
    assert summary.text.endswith(f", runs: {len(list(RESULTS.glob('**/results.json')))}")
