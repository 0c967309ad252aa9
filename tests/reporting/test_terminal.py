"""Tables in a terminal of 80 columns."""

import re

import pytest

from hfpatch.reporting.document import Column, Document, Row, Table


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("columns", [1, 4, 9])
@pytest.mark.parametrize("end", [8, 22, 70])
def test_two_names_are_never_cut_to_the_same(printed, width, columns, end):
    names = [f"nonlinear_query_{'x' * end}{last}" for last in "ab"]
    rows = tuple(Row((name, *["+0.0955 [0.0910, 0.1001]"] * columns)) for name in names)
    headings = tuple(Column(f"task_{place}") for place in range(columns))
    table = Table("t", "t", (Column("method"), *headings), rows)
    lines = printed(Document("", (), summary=(table,)), width).splitlines()
    assert max(map(len, lines)) <= width
    rule = next(place for place, line in enumerate(lines) if line.startswith("──"))
    end = re.match(r"\S+\s+", lines[rule - 1]).end()
    assert "".join(line[:end].strip() for line in lines[rule + 1 :]) == "".join(names)
