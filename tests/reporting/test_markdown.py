from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from reporting.conftest import document_of
from reporting.ten_methods import ten_methods

from hfpatch.reporting.markdown import markdown
from hfpatch.support.markup import block, escape, table

FIGURES = ["differences"]


def written(results):
    return markdown(document_of(results))


def render(text):
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)


def inline(tokens, kind):
    return [child for token in tokens for child in token.children or [] if child.type == kind]


def rows_of(tokens):
    """The number of cells in each row of each table."""
    tables, row = [], 0
    for token in tokens:
        if token.type == "table_open":
            tables.append([])
        elif token.type in ("th_open", "td_open"):
            row += 1
        elif token.type == "tr_close":
            tables[-1].append(row)
            row = 0
    return tables


@pytest.fixture(params=["plain", "hostile"])
def page(request, build, raw):
    source = raw if request.param == "plain" else request.getfixturevalue("hostile")
    return written(build(source, curves=False))


def test_tables_are_whole_links_lead_to_data_and_headings_are_the_reports_own(page, request):
    tokens = render(page)
    hostile = "hostile" in request.node.name  # one of its methods has a form
    assert rows_of(tokens) == [[5] * 3, [6] * 10, [4] * 4, [6 + hostile] * 4]
    assert not [token for token in tokens if token.type == "html_block"]
    assert {child.content for child in inline(tokens, "html_inline")} == {"<br>"}
    links = [link.attrs["href"] for link in inline(tokens, "link_open")]
    assert links == [f"figures/{name}.csv" for name in FIGURES]
    assert [image.attrs["src"] for image in inline(tokens, "image")] == [f"figures/{name}.svg" for name in FIGURES]
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[1:] == [
        *("Answer", "Cautions", "What is missing", "Paired differences"),
        *("Scores", "Methods", "Protocol and provenance", "Environment", "Cite"),
    ]
    assert not [token for token in tokens if token.type == "ordered_list_open"]


def test_a_table_whose_rows_are_on_the_page_alone_says_so(build):
    text = written(build(ten_methods(), curves=False))
    section = text[text.index("## Paired differences") : text.index("## Scores")]
    assert "Markdown leaves out 45 that are in the answer" in section
    assert "|" not in section


@pytest.mark.parametrize(
    "text",
    ["<script>x</script>", "a | b", "*b* _i_ `c` ~~s~~", "[a](b)", "# h", "1. x", "1) x", "- x", "&amp;", "\\", "= y"],
)
def test_escaped_text_reads_as_it_was(text):
    class Text(HTMLParser):
        def handle_data(self, data):
            self.found = getattr(self, "found", "") + data

    parser = Text()
    parser.feed(MarkdownIt("commonmark").render(block(text)))
    assert parser.found.strip() == text


def test_identifiers_intervals_and_numbers_stay_readable():
    assert escape("pre_projection_skip +5.0 [2.0, 8.0]") == "pre_projection_skip +5.0 [2.0, 8.0]"
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
