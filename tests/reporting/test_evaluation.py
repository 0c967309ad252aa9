"""The report of an evaluation: what a terminal shows of it, and its files."""

import json

import pytest
from reporting.conftest import read_csv
from reporting.evaluation_example import comparison, score

from hfpatch.reporting import write_report
from hfpatch.reporting.document import Sentences, Table
from hfpatch.reporting.evaluation import evaluation_document
from hfpatch.results import load_results
from hfpatch.results.evaluation import EvaluatedVariant


def cells(table):
    return [tuple(map(str, row.cells)) for row in table.rows]


def test_tables_have_every_score_and_every_comparison(evaluated):
    tables = [block for block in evaluation_document(evaluated).summary if isinstance(block, Table)]
    assert [table.title for table in tables] == ["Scores", "Differences from the base"]
    assert cells(tables[0]) == [
        ("cloze", "1.0", "2", "acc", "1,234", "0.5000 ± 0.0123", "0.2500 ± 0.0123"),
        ("cloze", "1.0", "2", "perplexity", "1,234", "2,500,000", "2,500,000"),
    ]
    assert cells(tables[1]) == [
        ("one", "cloze\nacc, n = 1,234", "−0.25\n[−0.30, −0.20]", "[−0.30, −0.20]", "< 0.0001", "0.071",
         "worse"),
        ("two", "cloze\nacc, n = 1,234 in 300 groups of passage", "+0.100\n", *"–––", "not tested (too few groups)"),
        ("one", "cloze\nmargin, n = 1,234", "−0.50\n[−0.60, −0.40]", *"–––", "no verdict"),
    ]  # fmt: skip


def test_tiny_numbers_are_not_rounded_to_0_and_one_test_is_one(evaluated):
    tiny = comparison("one", difference=2.1e-5, low=1.0e-5, high=3.2e-5, p=0.003, metric="bits_per_byte")
    made = evaluated.model_copy(update={"comparisons": [tiny]})
    made.variants["base"].scores["cloze"].stderr["acc"] = 0.000031
    scores, differences = (block for block in evaluation_document(made).summary if isinstance(block, Table))
    assert cells(scores)[0][5] == "0.5000 ± 3.1e−05"
    assert cells(differences)[0][2:4] == ("+0.000021\n[0.000010, 0.000032]", "[0.000010, 0.000032]")
    assert "(1 test);" in differences.caption


def test_several_models_have_their_names_and_what_each_is_compared_with(evaluated):
    models = {
        label: {**evaluated.model, "name": f"small/{label}", "tokenizer_sha256": "e" * 64} for label in ("x", "y")
    }
    variants = {label: EvaluatedVariant(model=model, scores={"cloze": score(0.5)}) for label, model in models.items()}
    compared = [comparison("y", difference=0.0, reference="x", low=-0.1, high=0.1, p=1.0)]
    document = evaluation_document(evaluated.model_copy(update={"variants": variants, "comparisons": compared}))
    tables = [block for block in document.summary if isinstance(block, Table)]
    assert document.title == "x and y"
    assert document.glance[0] == ("Models", "2")
    assert [table.title for table in tables] == ["Scores", "Differences between the models"]
    assert cells(tables[1])[0][:3] == ("y", "x", "cloze\nacc, n = 1,234")
    (protocol,) = (dict(part.blocks[0].items) for part in document.parts[0].sections if part.name == "protocol")
    assert protocol["Model y"].startswith("small/y, dtype float32, model_type llama, SHA-256 abab")
    assert protocol["Model y"].endswith("tokenizer SHA-256 eeeeeeeeeeeeeeee…")


def test_a_terminal_shows_what_was_reused_and_the_warnings_last(evaluated, printed):
    lines = printed(evaluation_document(evaluated)).splitlines()
    assert lines[0].strip() == "Scores"
    assert lines[-2:] == ["· 8 answers were kept from an earlier call and not scored again", "· The base is odd."]


@pytest.mark.parametrize(("matmul", "shown"), [("bf16", "weights in bfloat16"), ("fp32", "in float32"), ("mkl", None)])
def test_how_a_bf16_model_was_computed_is_said(evaluated, matmul, shown):
    document = evaluation_document(
        evaluated.model_copy(update={"provenance": {**evaluated.provenance, "matmul": matmul}})
    )
    (notes,) = (block.items for block in document.summary if isinstance(block, Sentences))
    (environment,) = (section for section in document.parts[0].sections if section.name == "environment")
    facts = dict(environment.blocks[0].items)
    assert [shown in note for note in notes if "Matrix products" in note] == ([True] if shown else [])
    assert (shown is not None and shown in facts["Matrix products"]) or "Matrix products" not in facts


def test_the_files_of_a_report_name_what_was_measured_and_are_the_same_again(evaluated, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(evaluated.to_json()))
    loaded = load_results(tmp_path, "evaluation")
    assert loaded == evaluated
    report = write_report(tmp_path, tmp_path / "report")
    before = [path.read_bytes() for path in report.paths]
    page, text = report.html.read_text(encoding="utf-8"), report.markdown.read_text(encoding="utf-8")
    assert page.count("<script>") == 1
    assert "<title>small/llama: hfpatch evaluation</title>" in page
    for shown in ("The base is odd.", "1,200 parameters", "few-shot examples 2", "dddddddddddddddd…", "limit 1234"):
        assert shown in page
        assert shown in text
    assert "answers were kept" not in text  # how the evaluated were obtained is not in them
    rows = read_csv(report.csv.read_text(encoding="utf-8"))
    keys = "model", "added", "metric", "value", "stderr", "groups"
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("base", "0", "acc", "0.5", "0.0123", ""),
        ("base", "0", "perplexity", "2500000.5", "", ""),
        ("one", "1200", "acc", "0.25", "0.0123", "300"),
        ("one", "1200", "perplexity", "2500000.5", "", "300"),
    ]
    write_report(tmp_path, tmp_path / "report")
    assert [path.read_bytes() for path in report.paths] == before
