"""Tables and answers in terminals."""

import re
from pathlib import Path

import pytest
from reporting.ten_methods import ten_methods

from hfpatch.reporting.document import Column, Document, Row, Sentences, Table
from hfpatch.reporting.forecast import forecast_document
from hfpatch.reporting.report import document_of
from hfpatch.results import load_results
from hfpatch.results.forecast import Forecast

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("**/results.json"))


def table(headings, *rows, details=()):
    columns = [Column(name, detail=i in details) for i, name in enumerate(headings)]
    return Document("", (), summary=(Table("t", "t", tuple(columns), tuple(map(Row, rows)), heading=False),))


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("columns", [1, 4, 9])
@pytest.mark.parametrize("end", [8, 22, 70])
def test_two_names_are_never_cut_to_the_same(printed, width, columns, end):
    names = [f"nonlinear_query_{'x' * end}{last}" for last in "ab"]
    rows = [(name, *["+0.0955 [0.0910, 0.1001]"] * columns) for name in names]
    lines = printed(table(["method", *map(str, range(columns))], *rows), width).splitlines()
    assert max(map(len, lines)) <= width
    tables = "\n".join(lines).count("method")
    assert re.sub(r"[^a-z_]", "", "".join(lines)) == ("method" + "".join(names)) * tables
    assert "\n".join(lines).count("[0.0910, 0.1001]") == 2 * columns


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("cell", ["1.7752 ± 0.0123", "+12,345.6 [12,340.1, 12,350.2]†"])
def test_a_table_that_is_too_wide_goes_on_below_with_every_number_whole(printed, width, cell):
    headings = [f"a_model_{i}" for i in range(12)]
    rows = [(task, *[cell] * 12) for task in ("lambada_openai", "held-out text")]
    text = printed(table(["task", *headings], *rows), width)
    assert max(map(len, text.splitlines())) <= width
    assert re.findall(r"a_model_\d+", text) == headings
    assert text.count("task") == text.count("lambada_openai") > 1
    for part in re.findall(r"\[.*\]†|[^ ]+", cell.replace("±", "")):
        assert text.count(part) == 24


def test_a_part_of_a_table_has_all_columns_that_tell_its_rows_apart(printed):
    headings = ["task", "metric", *(f"a_model_{i}" for i in range(12))]
    rows = [("cloze", metric, *["1.7752 ± 0.0123"] * 12) for metric in ("acc", "perplexity")]
    text = printed(table(headings, *rows), 60)
    assert text.count("cloze acc") == text.count("cloze perplexity") == text.count("task  metric") > 1


def test_details_are_left_out_and_named_where_a_row_would_need_more_lines(printed):
    document = table(["method", "gain", "cost"], ("lora", "+0.1 [0.0, 0.2]", "a measured cost"), details=[2])
    assert "a measured cost" in printed(document, 40)
    narrow = printed(document, 24)
    assert "measured" not in narrow
    assert "The report has also: cost." in " ".join(narrow.split())
    assert "+0.1 [0.0, 0.2]" in narrow
    assert re.search(r"\+0\.1 *\n *\[0\.0, 0\.2\]", printed(document, 20))


def test_marks_are_explained_where_a_column_that_is_shown_has_them(printed):
    columns = Column("method"), Column("gain"), Column("time", detail=True)
    footnotes = {"†": "†: exploratory.", "*": "*: other programs."}
    rows = (Row(("lora", "+0.1†", "1.5 × *")),)
    content = Table("t", "t", columns, rows, "Gains.", heading=False, footnotes=footnotes)
    document = Document("", (), summary=(content,))
    assert printed(document, 60).endswith("Gains. †: exploratory. *: other programs.\n")
    narrow = " ".join(printed(document, 14).split())
    assert narrow.endswith("Gains. †: exploratory. The report has also: time.")


def test_a_heading_is_no_markup_and_an_interval_of_numbers_stays_whole(printed):
    columns = Column("method"), Column("of [bold] tasks", number=True), Column("words")
    rows = (Row(("lora", "+0.0955 [0.0910, 0.1001]", "word " * 30)),)
    text = printed(Document("", (), summary=(Table("t", "t", columns, rows, heading=False),)), 40)
    assert "[bold] tasks" in text
    assert "[0.0910, 0.1001]" in text


def test_brief_sentences_have_a_line_each_and_a_number_for_the_others(printed):
    sentences = tuple(f"{i} {'word ' * 40}" for i in range(9))
    lines = printed(Document("", (), summary=(Sentences(sentences, brief=True),)), 80).splitlines()
    assert [line[2] for line in lines] == ["0", "1", "7"]  # and 7 more
    assert max(map(len, lines)) <= 80
    (whole,) = printed(Document("", (), summary=(Sentences(("short",), brief=True),)), 80).splitlines()
    assert whole == "· short"


def words_of(document):
    """The words of tables: of headings, and of the cells of the columns that a terminal always shows."""
    for content in (block for block in document.summary if isinstance(block, Table)):
        for i, column in enumerate(content.columns):
            if not column.detail:
                cells = (row.cells[i] for row in content.rows)
                yield from (word for cell in (column.name, *column.notes, *cells) for word in str(cell).split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_committed_answer_is_short_and_breaks_no_word_and_no_interval(printed, folder, width):
    document = document_of(folder)
    text = printed(document, width)
    assert max(map(len, text.splitlines())) <= width
    assert set(words_of(document)) <= set(text.split())
    assert not re.search(r"\[[^\]]*,\s*$", text, re.MULTILINE)  # nor an interval
    if width == 120:
        more = max(0, len(load_results(folder).others) - 10)
        assert len(text.splitlines()) <= 40 + more


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_plan_breaks_no_word(printed, width):
    base, name, task = "linear_pre_projection", "pre_projection_skip", "lambada_openai"
    question = {"method": name, "task": task, "seeds": 5, "documents": 1200, "metric": "nats_per_token"}
    numbers = {"difference": 0.0123, "smallest_margin": 0.0234, "margin": 0.02, "seeds_needed": 12}
    kind = {"method": name, "step_s": 1.25, "training_memory_bytes": 2**31, "evaluation_s": {task: 125.0}}
    planned = Forecast(
        name="plan",
        model={"name": "SmolLM2-135M-Instruct.Q4_1.gguf"},
        seeds=[0, 1, 2],
        methods={name: {"kind": "pre_projection", "trainable": 34_800_000}},
        kinds={"base": {"method": "baseline", "evaluation_s": {task: 125.0}}, "pre_projection + lora": kind},
        tasks={task: {"metric": "word_perplexity", "documents": 5153, "requests": 5153, "tokens": 1, "score": 0.51}},
        work={"train": {"units": 65, "steps": 6500, "tokens": 123_456_789, "seconds": 9_000.0}},
        questions=[
            question | {"question": "gain", "other": base, "like": [name, base], "documents_needed": 4_800} | numbers,
            question | {"question": "keep", "other": "baseline"},
        ],
    )
    document = forecast_document(planned)
    text = printed(document, width)
    assert max(map(len, text.splitlines())) <= width
    assert set(words_of(document)) <= set(text.split())


def test_ten_methods_are_answered_in_forty_lines(build, printed, tmp_path):
    results = build(ten_methods(), curves=False)
    lines = printed(document_of(tmp_path / "run"), 120).splitlines()
    assert len(lines) <= 40
    first = next(index for index, line in enumerate(lines) if line.startswith("On tinyworld_text"))
    shown = "\n".join(lines[first:])
    assert all(shown.count(name) >= 2 for name in results.others)
    assert all(mark in shown for mark in "●◆■○")
