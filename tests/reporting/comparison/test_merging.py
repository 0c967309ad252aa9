import copy
from pathlib import Path

import pytest
from reporting.conftest import example, write_run

from hfpatch.errors import HfpatchError
from hfpatch.reporting import write_report
from hfpatch.reporting.comparison.merging import checks_of
from hfpatch.reporting.report import default_out
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.folder import load_results


@pytest.fixture
def two(tmp_path):
    """Write two runs, the second changed by the test; return their folders."""

    def written(change=lambda raw: None):
        other = copy.deepcopy(example())
        change(other)
        return write_run(tmp_path / "first", example()), write_run(tmp_path / "second", other)

    return written


def checked(folders):
    return {check.what: check for check in checks_of([load_results(folder) for folder in folders])}


@pytest.mark.parametrize(
    ("change", "what", "comparable"),
    [
        (lambda raw: raw["model"].update(sha256="f" * 64), "Frozen model", False),
        (lambda raw: raw["model"].update(dtype="bfloat16"), "Its dtype", False),
        (lambda raw: raw["tasks"]["tinyworld_cloze"].update(data_sha256="e" * 64), "Tasks and their documents", False),
        (lambda raw: raw["tasks"].pop("tinyworld_text"), "Tasks and their documents", False),
        (lambda raw: raw["training"].update(lr=1.0), "Training settings", True),
        (lambda raw: raw["data"].update(sha256="f" * 64), "Training text", True),
        (lambda raw: raw["plan"]["0"].update(sha256="f" * 64), "Batch plans", True),
        (lambda raw: raw["provenance"].update(commit="f" * 40), "Commit", True),
    ],
)
def test_what_differs_is_named_alone_and_whether_scores_can_be_compared(two, change, what, comparable):
    (check,) = (check for check in checked(two(change)).values() if check.verdict != "same")
    assert (check.what, check.verdict, check.decides) == (what, "differs", not comparable)


@pytest.mark.parametrize(("tokens", "alike"), [("c" * 64, True), ("d" * 64, False)])
def test_settings_that_change_the_tokens_of_the_prompts_are_told_apart(two, tokens, alike):
    """As another max_length does, which cuts whole texts in other windows: the texts of the prompts are the same."""

    def hashed(raw, tokens):
        for task in raw["tasks"].values():
            task.update(prompts_sha256="a" * 64, tokens_sha256=tokens, task_sha256="b" * 64)
        return raw

    first, second = (
        load_results(folder).to_json() for folder in two(lambda raw: raw["evaluation"].update(max_length=16))
    )
    pair = hashed(first, "c" * 64), hashed(second, tokens)
    checks = {check.what: check for check in checks_of([ComparisonResults.model_validate(raw) for raw in pair])}
    assert checks["Evaluation settings"].verdict == "differs"
    assert ("changed no score" in checks["Evaluation settings"].consequence) == alike
    assert (checks["Prompts of the tasks"].verdict == "same") == alike


def test_runs_that_agree_in_all_say_so(two, tmp_path):
    folders = two()
    assert {check.verdict for check in checked(folders).values()} == {"same"}
    text = write_report(folders, tmp_path / "joint").markdown.read_text()
    assert "none was tested across runs. They agree in all else." in text
    assert text.index("## Comparability") < text.index("# Run first") < text.index("# Run second")


def test_what_is_not_recorded_is_not_called_the_same(two):
    assert checked(two(lambda raw: raw["provenance"].pop("versions")))["Versions"].verdict == "not recorded"


@pytest.mark.parametrize(("digest", "shared"), [("a" * 64, True), ("b" * 64, False), (None, False)])
def test_losses_on_other_held_out_documents_are_told_apart(two, digest, shared):
    def held_out(raw, digest):
        raw["tasks"]["held_out_text"] = {**raw["tasks"]["tinyworld_text"], "n": 9, "data_sha256": digest}
        raw["comparisons"].append({**raw["comparisons"][0], "task": "held_out_text"})
        return raw

    first, second = (load_results(folder) for folder in two())
    first = type(first).model_validate(held_out(first.to_json(), "a" * 64))
    if digest:
        second = type(second).model_validate(held_out(second.to_json(), digest))
    checks = {check.what: check.verdict for check in checks_of([first, second])}
    assert checks["Held-out text"] == ("same" if shared else "differs")
    assert checks["Tasks and their documents"] == "same"


def test_side_by_side_each_run_has_its_own_part(two, tmp_path):
    folders = two(lambda raw: raw["model"].update(sha256="f" * 64))
    report = write_report(folders, tmp_path / "joint")
    page = report.html.read_text()
    assert page.count('<section id="run1-') == page.count('<section id="run2-') == 6
    assert page.index("cannot be compared") < page.index('id="run1-headline"') < page.index('id="run2-headline"')
    assert not [folder for folder in folders if (folder / "report.html").exists()]
    assert report.tex.read_text().count(r"\begin{tabular}") == 4
    assert report.csv.read_text().startswith("run,method,seed,")
    assert {path.name for path in report.figures} >= {"run1-differences.svg", "run2-differences.svg"}


def test_labels_are_the_shortest_ends_that_differ_as_are_folders(tmp_path):
    folders = [write_run(tmp_path / name / "run", example()) for name in ("a", "b")]
    assert "# Run a/run" in write_report(folders, tmp_path / "joint").markdown.read_text()
    assert default_out([tmp_path / "first-1", tmp_path / "a b<c>"]) == Path("runs/report-first-1+a_b_c_")


def test_refusals(two, tmp_path):
    first, second = two()
    with pytest.raises(HfpatchError, match="named twice"):
        write_report([first, first], tmp_path / "joint")
    with pytest.raises(HfpatchError, match="no folder of a run"):
        write_report([], tmp_path / "joint")
    with pytest.raises(HfpatchError, match="is a run"):
        write_report([first, second], first)
    with pytest.raises(HfpatchError, match="no run here"):
        write_report([first, tmp_path], tmp_path / "joint")
