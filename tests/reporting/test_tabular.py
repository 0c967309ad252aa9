import csv
import io
import re

import pytest

from hfpatch.reporting.document import Cell, Column, Row, Table
from hfpatch.reporting.tabular import csv_text, escape, latex

HOSTILE = '\\input{x} & 5 % of $a_1$ #1 ~ ^ {b} <c> | [d] *\n\\end{tabular}\r\u2028"é" −1 × ∞ – ± † ‡ …'
COMMANDS = {
    *("textbackslash", "textasciitilde", "textasciicircum", "textbar", "textless", "textgreater"),
    *("times", "infty", "dag", "ddag", "dots", "pm"),
}


def set_as(text):
    """What LaTeX sets: the reverse of escaping, which fails on anything that it would act on."""
    back = {
        r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textbar{}": "|",
        r"\textless{}": "<", r"\textgreater{}": ">", r"$-$": "−", r"$\times$": "×", r"$\infty$": "∞", "--": "–",
        r"$\pm$": "±", r"\dag{}": "†", r"\ddag{}": "‡", r"\dots{}": "…", "{[}": "[", "{]}": "]", "{*}": "*",
        **{f"\\{char}": char for char in "{}&%$#_"},
    }  # fmt: skip
    parts = re.split("(" + "|".join(map(re.escape, sorted(back, key=len, reverse=True))) + ")", text)
    assert not [part for part in parts[::2] if re.search(r"[\\{}&%$#_^~\n]", part)]
    return "".join(back.get(part, part) for part in parts)


def test_escaped_text_reads_as_it_was_and_does_nothing():
    assert set_as(escape(HOSTILE)) == " ".join(HOSTILE.split())
    assert set(re.findall(r"\\([a-zA-Z]+)", escape(HOSTILE))) <= COMMANDS


@pytest.mark.parametrize("text", ["", "plain", HOSTILE])
def test_a_table_is_a_whole_tabular(text):
    columns = (Column(f"method {text}"), Column("gain", ("%", text), number=True), Column("verdict"))
    rows = (Row((text, "+1.0 [0.5, 1.5]", Cell(("better", text), "better"))), Row((text, "−0.1", "–")))
    source = latex(Table("t", "T", columns, rows))
    lines = source.splitlines() if "\u2028" not in source else source.split("\n")[:-1]
    assert lines[0] == r"\begin{tabular}{lrl}"
    rules = [index for index, line in enumerate(lines) if re.fullmatch(r"\\(top|mid|bottom)rule", line)]
    assert [lines[index] for index in rules] == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert lines[-1] == r"\end{tabular}"
    set_lines = [line for line in lines[rules[0] + 1 : rules[2]] if line != r"\midrule"]
    assert len(set_lines) == 3 + 2  # a head of three lines, two rows
    for line in set_lines:
        assert line.endswith(r" \\")
        cells = re.split(r"(?<!\\)&", line.removesuffix(r" \\"))
        assert len(cells) == 3
        assert all(cell.strip() == "" or set_as(cell.strip()) for cell in cells)
    assert source.count("{") - source.count("\\{") == source.count("}") - source.count("\\}")


def test_a_caption_makes_it_a_table_that_floats():
    table = Table("main", "T", (Column("a"),), (Row(("1",)),))
    lines = latex(table, caption=HOSTILE).splitlines()
    assert lines[:2] == [r"\begin{table}", r"\centering"]
    assert set_as(lines[2].removeprefix(r"\caption{").removesuffix("}")) == " ".join(HOSTILE.split())
    assert lines[3] == r"\label{tab:main}"
    assert lines[4:-1] == latex(table).splitlines()
    assert lines[-1] == r"\end{table}"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_text_that_a_spreadsheet_takes_for_a_formula_is_quoted_and_numbers_are_not(start):
    text = f"{start}HYPERLINK(1)"
    made = csv_text([{"name": text, "value": -1.5, "left out": [1, 2]}])
    assert [*csv.reader(io.StringIO(made, newline=""))] == [["name", "value"], [f"'{text}", "-1.5"]]


def test_numbers_are_the_same_on_processors_whose_solvers_differ_in_the_last_digit():
    one, other = (csv_text([{"value": value}]) for value in (0.01508326224473643, 0.015083262244736433))
    assert one == other == "value\n0.01508326224\n"
