import copy
from pathlib import Path

import pytest
from reporting.conftest import example, tuned_example, write_run

from hfpatch.errors import HfpatchError
from hfpatch.reporting import write_report
from hfpatch.reporting.comparison.merging import merge
from hfpatch.reporting.report import default_out
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.folder import load_results
from hfpatch.results.verdicts import LookTaken


@pytest.fixture
def two(tmp_path):
    """Write two runs, the second changed by the test; return their folders."""

    def written(change=lambda raw: None):
        other = copy.deepcopy(example())
        change(other)
        return write_run(tmp_path / "first", example()), write_run(tmp_path / "second", other)

    return written


def merged(folders):
    return merge({folder.name: load_results(folder) for folder in folders})


def verdicts(joined):
    return {check.what: check.verdict for check in joined.checks}


def test_the_same_model_and_documents_share_a_table(two):
    folders = two(lambda raw: raw["comparisons"].append({**raw["comparisons"][0], "metric": "margin"}))
    joined = merged(folders)
    assert set(verdicts(joined).values()) == {"same"}
    names = ["baseline", "pre_projection_skip (first)", "lora (first)", "pre_projection_skip (second)", "lora (second)"]
    assert list(joined.results.methods) == names
    assert len(joined.results.comparisons) == 15
    expected = [(v.task, v.p_corrected, v.family) for folder in folders for v in load_results(folder).verdicts]
    assert [(v.task, v.p_corrected, v.family) for v in joined.results.verdicts] == expected
    pairs = {(pair.method, pair.reference) for pair in joined.results.comparisons}
    assert pairs >= {("lora (second)", "baseline"), ("pre_projection_skip (second)", "lora (second)")}
    assert joined.results.methods["lora (second)"].match.to == "pre_projection_skip (second)"


def test_names_that_do_not_meet_stay(two):
    def other(raw):
        raw["methods"]["mine"] = raw["methods"].pop("lora")
        raw["comparisons"] = []

    joined = merged(two(other)).results
    assert {"lora", "mine"} < set(joined.methods)


@pytest.mark.parametrize(
    ("change", "what", "shared"),
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
def test_runs_that_differ_share_a_table_with_a_warning_or_are_side_by_side(two, change, what, shared):
    joined = merged(two(change))
    assert verdicts(joined)[what] == "differs"
    if shared:
        assert any(warning.startswith(f"{what} of the runs: differs;") for warning in joined.results.warnings)
    else:
        assert joined.results is None
        assert [check.what for check in joined.checks if check.verdict != "same"] == [what]


@pytest.mark.parametrize(("tokens", "shared"), [("c" * 64, True), ("d" * 64, False)])
def test_settings_that_change_the_tokens_of_the_prompts_keep_runs_apart(two, tokens, shared):
    """As another max_length does, which cuts whole texts in other windows: the texts of the prompts are the same."""

    def hashed(raw, tokens):
        for task in raw["tasks"].values():
            task.update(prompts_sha256="a" * 64, tokens_sha256=tokens, task_sha256="b" * 64)
        return raw

    first, second = (
        load_results(folder).to_json() for folder in two(lambda raw: raw["evaluation"].update(max_length=16))
    )
    pair = {"first": hashed(first, "c" * 64), "second": hashed(second, tokens)}
    joined = merge({label: ComparisonResults.model_validate(raw) for label, raw in pair.items()})
    assert verdicts(joined)["Evaluation settings"] == "differs"
    (check,) = (check for check in joined.checks if check.what == "Evaluation settings")
    assert ("changed no score" in check.consequence) == shared
    assert (joined.results is not None) == shared


def test_what_is_not_recorded_is_not_called_the_same(two):
    assert verdicts(merged(two(lambda raw: raw["provenance"].pop("versions"))))["Versions"] == "not recorded"


def test_a_joint_report_is_whole_and_touches_no_run(two, tmp_path):
    folders = two()
    report = write_report(folders, tmp_path / "joint")
    page, twin = report.html.read_text(), report.markdown.read_text()
    for text in (page, twin):
        assert "lora (second)" in text.replace("<wbr>", "")
        assert "none was tested across runs" in text
    assert twin.index("## Answer") < twin.index("## Protocol")
    assert report.csv.read_text().startswith("method,seed,")
    assert report.tex.read_text().count(r"\begin{tabular}") == 2
    assert len(report.document.parts[0].sections[0].blocks[3].rows) == 4  # one table has the methods of both
    assert not [folder for folder in folders if (folder / "report.html").exists()]


def test_reasons_have_the_names_of_the_union_and_each_run_says_how_its_rates_were_chosen(two):
    def changed(raw):
        raw["tuning"] = tuned_example()["tuning"]
        run = raw["methods"]["lora"]["runs"]["1"]
        raw["methods"]["lora"]["runs"]["1"] = {"train": {**run["train"], "diverged_step": 9}, "evaluation": {}}
        raw["questions"] = [{"question": "gain", "pairs": [["lora", "baseline"]], "on": ["tinyworld_cloze"]}]
        raw["comparisons"][3] |= {"p": 1e-5, "errors": [[0.001, 100], [0.001, 1]]}

    union = merged(two(changed)).results
    (primary,) = union.primary
    assert (primary.method, primary.why) == ("lora (second)", "seed 1 of lora (second) diverged")
    methods = union.methods | {"lora (second)": union.methods["lora (second)"].model_copy(update={"label": "Low rank"})}
    (primary,) = union.model_copy(update={"methods": methods}).labelled().primary
    assert (primary.method, primary.why) == ("Low rank", "seed 1 of Low rank diverged")
    first, second = (
        next(text for text in union.warnings if text.startswith(f"{run}: ")) for run in ("first", "second")
    )
    assert first.startswith("first: All methods at one rate (0.001)")
    assert second.startswith("second: Each method at its best of 3 rates: the choice may be worth")


@pytest.mark.parametrize(("loss", "kept"), [(2.5, {"held_out": {"base_loss": 2.5}}), (2.6, {})])
def test_held_out_text_is_that_of_the_union_where_all_runs_have_the_same(two, loss, kept):
    first, second = (load_results(folder) for folder in two())
    first = first.model_copy(update={"data": {**first.data, "held_out": {"base_loss": 2.5}}})
    second = second.model_copy(update={"data": {**second.data, "held_out": {"base_loss": loss}}})
    assert merge({"first": first, "second": second}).results.data == kept


@pytest.mark.parametrize("numbers", [[1, 3], [1, 2, 3]])
def test_looks_are_kept_where_all_runs_declare_the_same(two, numbers):
    """Else the seeds that no look asked for would count as missing."""
    first, second = (load_results(folder) for folder in two())
    gain = first.comparisons[0].model_copy(update={"method": "lora", "reference": "baseline"})
    looks = [LookTaken(seeds=1, part=0.25, comparisons=[gain], growing=["lora"])]
    first = first.model_copy(update={"training": {"seeds": {"looks": [1, 3]}}, "looks": looks})
    looks = [LookTaken(seeds=1, part=0.25, comparisons=[gain], growing=[])]
    second = second.model_copy(update={"training": {"seeds": {"looks": numbers}}, "looks": looks})
    joined = merge({"first": first, "second": second})
    if numbers == [1, 3]:
        (look,) = joined.results.looks
        assert (look.seeds, look.part, look.growing) == (1, 0.25, ["lora (first)"])
        assert [one.method for one in look.comparisons] == ["lora (first)", "lora (second)"]
        assert joined.results.seeds_asked("lora (first)") == [0, 1, 2]
        assert joined.results.seeds_asked("lora (second)") == [0]
    else:
        assert joined.results.looks is None
        assert verdicts(joined)["Looks"] == "differs"
        assert any(warning.startswith("Looks of the runs: differs") for warning in joined.results.warnings)


@pytest.mark.parametrize(("digest", "shared"), [("a" * 64, True), ("b" * 64, False), (None, False)])
def test_losses_on_other_held_out_documents_share_no_column(two, digest, shared):
    def held_out(raw, digest):
        raw["tasks"]["held_out_text"] = {**raw["tasks"]["tinyworld_text"], "n": 9, "data_sha256": digest}
        raw["comparisons"].append({**raw["comparisons"][0], "task": "held_out_text"})
        return raw

    first, second = (load_results(folder) for folder in two())
    first = type(first).model_validate(held_out(first.to_json(), "a" * 64))
    if digest:
        second = type(second).model_validate(held_out(second.to_json(), digest))
    joined = merge({"first": first, "second": second})
    assert verdicts(joined)["Held-out text"] == ("same" if shared else "differs")
    assert verdicts(joined)["Tasks and their documents"] == "same"
    assert ("held_out_text" in joined.results.tasks) == shared
    assert len([pair for pair in joined.results.comparisons if pair.task == "held_out_text"]) == 2 * shared


def test_side_by_side_each_run_has_its_own_part(two, tmp_path):
    report = write_report(two(lambda raw: raw["model"].update(sha256="f" * 64)), tmp_path / "joint")
    page = report.html.read_text()
    assert page.count('<section id="run1-') == page.count('<section id="run2-') == 6
    assert page.index("cannot share a table") < page.index('id="run1-headline"') < page.index('id="run2-headline"')
    assert report.tex.read_text().count(r"\begin{tabular}") == 4
    assert report.csv.read_text().startswith("run,method,seed,")
    assert {path.name for path in report.figures} >= {"run1-differences.svg", "run2-differences.svg"}


def test_labels_are_the_shortest_ends_that_differ_as_are_folders(tmp_path):
    folders = [write_run(tmp_path / name / "run", example()) for name in ("a", "b")]
    assert "lora (a/run)" in write_report(folders, tmp_path / "joint").markdown.read_text()
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
