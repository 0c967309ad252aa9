"""The committed reports are what the code writes from the committed results."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hfpatch.evaluation import compare_again
from hfpatch.reporting import write_report
from hfpatch.results import load_results

RESULTS = Path(__file__).parents[2] / "results"
REPORTS = sorted(path.parent for path in RESULTS.glob("**/report.md"))
DECIMAL = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


def compared(path):
    """Return what must be equal: the tenth digit in a CSV file depends on SciPy's quantiles, so on its version."""
    text = path.read_text()
    if path.suffix == ".md":
        return text, []
    return DECIMAL.sub("#", text), [float(number) for number in DECIMAL.findall(text)]


@pytest.mark.parametrize("folder", REPORTS, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_committed_report_follows_from_its_results(folder, tmp_path):
    shutil.copy(folder / "results.json", tmp_path)
    report = write_report(tmp_path)
    for path in (report.markdown, report.csv, *(path for path in report.figures if path.suffix == ".csv")):
        text, numbers = compared(folder / path.relative_to(tmp_path))
        assert compared(path) == (text, pytest.approx(numbers, rel=2e-9)), path.name
    ids = re.findall(r' id="([^"]+)"', report.html.read_text())
    assert len(ids) == len(set(ids))  # a section and its table with one id break the page's filters


@pytest.mark.parametrize("folder", REPORTS, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_the_page_has_the_numbers_of_the_markdown(folder):
    """Two renderers of one document: every number in a table of one is in the other."""
    number = re.compile(r"[−+]?\d[\d,]*\.\d+")
    rows = [line for line in (folder / "report.md").read_text().splitlines() if line.startswith("| ")]
    page = (folder / "report.html").read_text()
    assert set(number.findall("\n".join(rows))) <= set(number.findall(page))
    assert len(page) < {"frontier": 1_200_000}.get(folder.name, 600_000)  # 27 methods


COMPARED = sorted(path.parent for path in RESULTS.glob("**/results.json") if '"kind": "comparison"' in path.read_text())


LONG = {"frontier": pytest.mark.slow}  # 525 comparisons


@pytest.mark.parametrize(
    "folder",
    [pytest.param(path, marks=LONG.get(path.name, ()), id=path.relative_to(RESULTS).as_posix()) for path in COMPARED],
)
def test_every_committed_difference_follows_from_the_documents(folder):
    def key_of(one):
        return one.method, one.reference, one.task, one.metric

    computed, results = compare_again(folder), load_results(folder)
    again = {key_of(one): one for one in computed.comparisons}
    committed = {key_of(one): one for one in results.comparisons}
    assert again
    assert again.keys() == committed.keys()
    for key, one in committed.items():
        for name in ("difference", "low", "high", "p"):
            value = getattr(one, name)  # None where too few documents are tested
            expected = value if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)
            assert getattr(again[key], name) == expected, (key, name)
        assert (again[key].n, again[key].seeds, again[key].test) == (one.n, one.seeds, one.test)
    for one, kept in zip(computed.kept or (), results.kept or (), strict=True):  # none of a study, which has no base
        assert (one.method, one.task, one.right, one.wrong) == (kept.method, kept.task, kept.right, kept.wrong)
        assert (one.kept, one.won) == pytest.approx((kept.kept, kept.won))
    assert [verdict.outcome for verdict in computed.verdicts] == [verdict.outcome for verdict in results.verdicts]


def test_what_a_task_s_own_function_computed_stays(tmp_path):
    """The function is not in the folder: the differences by it have no score of the reference."""
    shutil.copy(RESULTS / "frontier" / "values.safetensors", tmp_path)
    raw = json.loads((RESULTS / "frontier" / "results.json").read_text())
    task, metric = raw["frontier"]["task"], raw["frontier"]["metric"]
    raw["comparisons"] = [pair for pair in raw["comparisons"] if pair["task"] == task]
    for pair in raw["comparisons"]:
        if (pair["task"], pair["metric"]) == (task, metric):
            pair["reference_score"] = None
    for line in raw["frontier"]["lines"]:
        line["exchange"] = line["exchange"] and {"why": f"{metric} is no mean of documents"}
    (tmp_path / "results.json").write_text(json.dumps(raw))
    computed, results = compare_again(tmp_path), load_results(tmp_path)
    assert computed.frontier == results.frontier
    assert [line.exchange.why for line in computed.frontier.lines if line.exchange]
