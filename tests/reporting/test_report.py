import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reporting.big import write_big_run
from reporting.conftest import example, with_pairs, write_run
from reporting.study_example import write_study

from hfpatch.errors import HfpatchError
from hfpatch.reporting import write_report
from hfpatch.reporting.numbers import MOST_METHODS
from hfpatch.reporting.report import default_out, document_of
from hfpatch.results.folder import load_results

DRAWN = ("differences", "training")
FILES = sorted(f"figures/{name}.{kind}" for name in DRAWN for kind in ("csv", "svg"))
FILES[2:2] = ["figures/summary.pdf", "figures/summary.png"]
FILES += ["report.html", "report.md", "results.csv", "results.tex"]


def written(run_dir, report):
    return sorted(str(path.relative_to(run_dir)) for path in report.paths)


def test_every_file_is_written_and_nothing_else(run_dir):
    before = {path for path in run_dir.rglob("*") if path.is_file()}
    report = write_report(run_dir)
    assert written(run_dir, report) == FILES
    after = {path for path in run_dir.rglob("*") if path.is_file()}
    assert after - before == set(report.paths)
    assert (run_dir / "figures/summary.png").read_bytes().startswith(b"\x89PNG")
    for path in report.figures:
        if path.suffix == ".svg":
            ElementTree.parse(path)


WRITE = """
import sys
from pathlib import Path
from hfpatch.reporting import write_report
for run in sys.argv[1:]:
    write_report(Path(run))
"""


def test_the_same_results_give_the_same_bytes_in_another_process_and_under_the_users_settings(run_dir, tmp_path):
    """Of a comparison and of a study."""
    import matplotlib as mpl

    def written_in(run):
        return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    runs = [run_dir, write_study(tmp_path / "study")]
    others = [shutil.copytree(run, tmp_path / f"other-{run.name}") for run in runs]
    for run in runs:
        write_report(run)
    first = [written_in(run) for run in runs]
    command = [sys.executable, "-c", WRITE, *map(str, others)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"})
    assert [written_in(run) for run in others] == first
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "text.usetex": True}):
        for run in runs:
            write_report(run)
        assert mpl.rcParams["font.size"] == 30
    assert [written_in(run) for run in runs] == first


def test_figures_are_pdfs_too_when_asked_and_never_older_than_their_svgs(run_dir, raw):
    report = write_report(run_dir, pdf=True)
    for path in report.paths:  # no dates and no machine
        text = path.read_bytes().decode("utf-8", errors="replace")
        assert str(run_dir) not in text
        assert not re.search(r"20[3-9]\d-|<dc:date>|Matplotlib v", text)
    pdfs = sorted(path for path in report.figures if path.suffix == ".pdf")
    assert [path.name for path in pdfs] == [f"{name}.pdf" for name in ("differences", "summary", "training")]
    first = {path: path.read_bytes() for path in pdfs}
    assert all(content.startswith(b"%PDF") for content in first.values())
    assert b"DejaVuSans" in first[pdfs[0]]  # with its font, so that a minus sign is one
    raw["comparisons"][2] |= {"difference": -1.0, "low": -1.5, "high": -0.5}
    (run_dir / "results.json").write_text(json.dumps(with_pairs(raw)))
    pdfs[-1].unlink()
    again = write_report(run_dir)
    assert {path for path in again.figures if path.suffix == ".pdf"} == set(pdfs[:-1])  # summary.pdf is always there
    assert pdfs[0].read_bytes() != first[pdfs[0]]


def test_an_incomplete_run_is_reported_as_far_as_it_got(run_dir, raw, build):
    raw["complete"] = False
    raw["comparisons"] = []
    for name in ("pre_projection_skip", "lora"):
        raw["methods"][name]["runs"].pop("1")
    build(raw)
    del raw["methods"]["lora"]["curve"]
    (run_dir / "results.json").write_text(json.dumps(with_pairs(raw)))
    report = write_report(run_dir)
    assert written(run_dir, report) == [name for name in FILES if "differences" not in name and "summary" not in name]
    for page in (report.html, report.markdown):
        assert "lora: no training curve (metrics.jsonl)." in page.read_text()
        assert "lora: no finished run with seed 1." in page.read_text()


def test_a_report_of_some_methods_has_the_verdicts_of_the_whole(run_dir, raw, tmp_path):
    whole, some = load_results(run_dir), load_results(run_dir).only(["lora"])
    out = tmp_path / "some"
    report = write_report([run_dir], out, methods=["lora"])
    assert list(some.methods) == ["baseline", "lora"]
    assert whole.only(whole.others) is whole  # of which nothing is to say
    assert some.comparisons == [
        one for one in whole.comparisons if one.method == "lora" and one.reference == "baseline"
    ]
    note = f"Shown are 1 of {len(whole.others)} methods: p-values and verdicts are those of the whole comparison"
    assert all(note in path.read_text() for path in (report.markdown, report.html))
    assert not any(f"| {name} |" in report.markdown.read_text() for name in whole.others if name != "lora")
    assert {row.split(",")[0] for row in report.csv.read_text().splitlines()[1:]} == {"baseline", "lora"}
    assert not (run_dir / "report.html").exists()
    assert report.tex.read_text().count("Shown are 1 of") == 2
    with pytest.raises(HfpatchError, match=r"no method 'loar' in .* \(did you mean 'lora'"):
        write_report([run_dir], out, methods=["loar"])
    with pytest.raises(HfpatchError, match="there are 2; report each by itself"):
        write_report([run_dir, run_dir], out, methods=["lora"])


def test_several_runs_have_their_parts_below_what_differs(tmp_path):
    first, other = example(), example()
    other["model"]["sha256"] = "f" * 64
    other["training"]["lr"] = 1.0
    folders = [write_run(tmp_path / name, raw) for name, raw in (("first", first), ("second", other))]
    report = write_report(folders, tmp_path / "joint")
    page, text = report.html.read_text(), report.markdown.read_text()
    assert page.count('<section id="run1-') == page.count('<section id="run2-') == 6
    assert page.index('id="differing"') < page.index('id="run1-headline"') < page.index('id="run2-headline"')
    assert text.index("How they were measured") < text.index("How they were trained") < text.index("# Run first")
    assert "none was tested across runs" in text
    assert not [folder for folder in folders if (folder / "report.html").exists()]
    assert report.tex.read_text().count(r"\begin{tabular}") == 4
    assert report.csv.read_text().startswith("run,method,seed,")
    assert {path.name for path in report.figures} >= {"run1-differences.svg", "run2-differences.svg"}


def test_labels_are_the_shortest_ends_that_differ_as_are_folders(tmp_path):
    folders = [write_run(tmp_path / name / "run", example()) for name in ("a", "b")]
    assert "# Run a/run" in write_report(folders, tmp_path / "joint").markdown.read_text()
    assert default_out([tmp_path / "first-1", tmp_path / "a b<c>"]) == Path("runs/report-first-1+a_b_c_")


def test_refusals(tmp_path):
    first, second = (write_run(tmp_path / name, example()) for name in ("first", "second"))
    with pytest.raises(HfpatchError, match="named twice"):
        write_report([first, first], tmp_path / "joint")
    with pytest.raises(HfpatchError, match="no folder of a run"):
        write_report([], tmp_path / "joint")
    with pytest.raises(HfpatchError, match="is a run"):
        write_report([first, second], first)
    with pytest.raises(HfpatchError, match="no run here"):
        write_report([first, tmp_path], tmp_path / "joint")


def test_labels_are_shown_and_are_no_keys(run_dir, raw):
    plain = {path.name: path.read_bytes() for path in write_report(run_dir).paths}
    raw["methods"]["lora"]["label"] = "Low rank"
    (run_dir / "results.json").write_text(json.dumps(with_pairs(raw)))
    results = load_results(run_dir)
    assert results.comparison("lora", "tinyworld_cloze", "baseline", "acc") is not None
    assert results.labelled().comparison("lora", "tinyworld_cloze", "baseline", "acc") is None
    relabelled = results.labelled().comparison("Low rank", "tinyworld_cloze", "baseline", "acc")
    assert relabelled.p == pytest.approx(results.comparison("lora", "tinyworld_cloze", "baseline", "acc").p)
    report = write_report(run_dir)
    assert "Low rank &" in report.tex.read_text()
    assert report.tex.read_text().count(r"\caption{") == report.tex.read_text().count(r"\end{table}") == 2
    for path in (report.markdown, report.html, *(path for path in report.figures if path.suffix == ".svg")):
        assert "Low rank" in path.read_text(), path
    assert "Low rank = lora" in report.markdown.read_text()
    for path in report.paths:
        assert path.suffix != ".csv" or path.read_bytes() == plain[path.name]
    (headline,) = (block for block in document_of(run_dir).summary if getattr(block, "name", "") == "headline")
    assert {row.cells[0] for row in headline.rows} == {"Low rank", "pre_projection_skip"}


def test_reporting_loads_no_torch():
    code = "import sys, hfpatch.reporting; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_two_hundred_methods_take_seconds_and_few_megabytes(tmp_path):
    folder = write_big_run(tmp_path, methods=200, tasks=5, seeds=3, steps=50)
    started = time.process_time()
    report = write_report(folder)
    assert time.process_time() - started < 20
    assert report.html.stat().st_size < 10e6
    text = report.html.read_text()
    assert "method_199_with_a_name" in text.replace("<wbr>", "")
    assert f"Drawn are the {MOST_METHODS} of 199 methods" in text
