"""One report of several evaluations: their scores in one table, and what differs between them."""

import json
import re

import pytest
from reporting.conftest import example, read_csv
from reporting.evaluation_example import score
from reporting.test_evaluation import cells

from hfpatch import HfpatchError
from hfpatch.__main__ import main
from hfpatch.reporting import write_report
from hfpatch.reporting.evaluation import joint_evaluation_document, score_table_of
from hfpatch.reporting.explorer.entries import entries
from hfpatch.reporting.facts import evaluation_text
from hfpatch.results.evaluation import EvaluatedVariant
from hfpatch.results.parts import GroupResult

GROUP = GroupResult(group="both", tasks=["cloze", "page"], n=1244, metrics={"acc": 0.45}, stderr={"acc": 0.01})


@pytest.fixture
def alone(evaluated):
    """One model, evaluated by itself on one task more, with a group's score."""
    scores = {
        "cloze": score(0.75),
        "page": score(0.125).model_copy(update={"task": "page", "data_sha256": "e" * 64, "n": 10}),
    }
    variants = {"base": EvaluatedVariant(scores=scores, groups={"both": GROUP})}
    changed = {"variants": variants, "comparisons": [], "low_noise": [], "warnings": []}
    settings = {**evaluated.settings, "limit": 7, "system_instruction": "Brief"}
    return evaluated.model_copy(update={**changed, "settings": settings})


def differing(*results):
    document = joint_evaluation_document(dict(zip("xyz", results, strict=False)))
    return [text for section in document.opening[1:] for block in section.blocks for text in block.items]


def test_scores_of_the_same_documents_share_a_line(evaluated, alone):
    table = score_table_of({"x": evaluated, "y": alone})
    assert [column.name for column in table.columns][5:] == ["x: base", "x: one", "y"]
    assert cells(table) == [
        ("cloze", "1.0", "2", "acc", "1,234", "0.5000 ± 0.0123", "0.2500 ± 0.0123", "0.7500 ± 0.0123"),
        ("cloze", "1.0", "2", "perplexity", "1,234", "2,500,000", "2,500,000", "2,500,000"),
        ("both", "N/A", "", "acc", "1,244", "–", "–", "0.4500 ± 0.0100"),
        ("page", "1.0", "2", "acc", "10", "–", "–", "0.1250 ± 0.0123"),
        ("page", "1.0", "2", "perplexity", "10", "–", "–", "2,500,000"),
    ]
    assert [row.strong for row in table.rows] == [False, False, True, False, False]
    assert [column.name for column in score_table_of({"y": alone}).columns][5:] == ["small/llama"]
    other = {"base": EvaluatedVariant(scores={"cloze": score(0.75).model_copy(update={"data_sha256": "f" * 64})})}
    changed = alone.model_copy(update={"variants": other})
    rows = cells(score_table_of({"x": alone, "y": changed}))
    shown = [row[5:] for row in rows if row[0] == "cloze" and row[3] == "acc"]
    assert shown == [("0.7500 ± 0.0123", "–"), ("–", "0.7500 ± 0.0123")]
    assert differing(alone, changed) == [
        "Tasks: cloze, page (x); cloze (y).",
        f"cloze, documents: {'d' * 16}… (x); {'f' * 16}… (y).",
    ]


@pytest.mark.parametrize(("tokenizers", "lines"), [(("t", "t"), 2), (("t", "u"), 1)])
def test_prompts_that_became_other_tokens_of_one_tokenizer_have_lines_of_their_own(alone, tokenizers, lines):
    """As another max_length makes them; models with tokenizers of their own share a line."""
    both = []
    for tokenizer, tokens in zip(tokenizers, "ab", strict=True):
        one = score(0.5).model_copy(update={"prompts_sha256": "p" * 64, "tokens_sha256": tokens * 64})
        model = {**alone.model, "identity": {"tokenizer": tokenizer}}
        both.append(
            alone.model_copy(update={"model": model, "variants": {"base": EvaluatedVariant(scores={"cloze": one})}})
        )
    rows = [row for row in cells(score_table_of(dict(zip("xy", both, strict=True)))) if row[3] == "acc"]
    assert len(rows) == lines
    assert sum("cloze, tokens of the prompts: " in text for text in differing(*both)) == lines - 1


def test_limits_of_tasks_and_what_differs(evaluated, alone):
    settings = {"tasks": {"cloze": None, "page": {"limit": 5}}, "limit": 40, "seed": None}
    assert evaluation_text(settings) == "tasks [cloze, page (limit 5)], limit 40"
    other = {**evaluated.model, "name": "other", "dtype": "bfloat16"}
    assert differing(evaluated, alone, alone.model_copy(update={"model": other})) == [
        f"Frozen model: small/llama, float32, {'ab' * 8}… (x and y); other, bfloat16, {'ab' * 8}… (z).",
        "Tasks: cloze (x); cloze, page (y and z).",
        "cloze, measure: acc on 1234 documents by passage (x); acc on 1234 documents (y and z).",
        "Evaluation, limit: 1234 (x); 7 (y and z).",
        "Evaluation, system_instruction: none (x); Brief (y and z).",
    ]
    assert differing(alone, alone) == []


def test_the_files_of_a_joint_report(evaluated, alone, tmp_path, capsys):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, results in zip(folders, (evaluated, alone), strict=True):
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(results.to_json()))
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'both' / 'report.html'}\n"
    written = write_report(folders, tmp_path / "both")
    rows = read_csv(written.csv.read_text())
    assert [(row["evaluation"], row["model"], row["task"]) for row in rows if row["metric"] == "acc"] == [
        ("first", "base", "cloze"), ("first", "one", "cloze"), ("second", "base", "both"), ("second", "base", "cloze"),
        ("second", "base", "page"),
    ]  # fmt: skip
    tex = written.tex.read_text().replace("  ", " ")
    assert r"both & N/A & & acc & 1,244 & -- & -- & 0.4500 $\pm$ 0.0100 \\" in tex
    page, text = written.html.read_text(), written.markdown.read_text()
    assert "alert(1)</script>" not in page
    for shown in ("# first and second", "What differs between the evaluations", "# Run first", "# Run second"):
        assert shown in text
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))  # a section and its table with one id break the page's links
    assert {"scores", "run1-results", "run2-results"} <= set(ids)
    alone_written = write_report(folders[1:], tmp_path / "one")
    assert "small/llama" in alone_written.tex.read_text()


def test_evaluations_and_comparisons_have_no_joint_report(evaluated, tmp_path):
    for name, results in (("one", evaluated.to_json()), ("two", example())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    for order in (("one", "two"), ("two", "one")):
        with pytest.raises(HfpatchError, match=r"results of hfpatch (compare or pretrain|eval), not of hfpatch"):
            write_report([tmp_path / name for name in order], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_explorer_lists_scores_that_were_compared_with_nothing(alone):
    listed = entries(alone)
    assert [(entry.method, entry.axis.task, entry.gain, entry.text, entry.verdict) for entry in listed] == [
        ("base", "cloze", None, "0.7500 ± 0.0123, compared with nothing", "not tested"),
        ("base", "page", None, "0.1250 ± 0.0123, compared with nothing", "not tested"),
    ]
