import base64
import gzip
import hashlib
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from reporting.conftest import data_of, read_csv

from hfpatch.reporting.comparison.document import RunData, comparison_document
from hfpatch.reporting.comparison.figures import draw
from hfpatch.reporting.document import Cell, Column, Document, Download, Part, Row, Section, Table
from hfpatch.reporting.html import _download, html

VOID = {"meta", "br", "wbr", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Collects tags, ids, references and text, and checks that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        self.links += [values[name] for name in ("href", "src", "xlink:href") if name in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page_of(results):
    page = Page()
    text = html(comparison_document([RunData("", results, drawn=draw(results))]))
    page.feed(text)
    assert page.open == []
    return page, text


@pytest.fixture(params=["plain", "hostile"])
def page(request, build, raw):
    source = raw if request.param == "plain" else request.getfixturevalue("hostile")
    return page_of(build(source, curves=False))


def test_no_script_but_its_own_which_the_policy_knows_no_handler_no_network(page):
    parsed, text = page
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"iframe", "object", "embed", "link", "img", "base", "b"}
    assert not [attrs for _, attrs in parsed.tags if any(name.startswith("on") for name in attrs)]
    assert all(
        link.startswith(("#", "data:text/csv;charset=utf-8,", "data:application/gzip;")) for link in parsed.links
    )
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]{0,3})", text)) <= {"#di", "#qu"}
    assert "default-src 'none'" in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_downloads_hold_the_numbers_and_a_long_file_is_packed(build, raw):
    parsed, _ = page_of(build(raw, curves=False))
    files = {
        attrs["download"]: unquote(attrs["href"].partition(",")[2]) for tag, attrs in parsed.tags if "download" in attrs
    }
    assert set(files) == {"results.csv", "differences.csv"}
    assert read_csv(files["differences.csv"]) == data_of(build(raw, curves=False), "differences")
    content = "name,value\n" + "a,1\n" * 5000
    packed, plain = (str(_download(Download("x.csv", "its data", text))) for text in (content, "a,1\n"))
    name, data = re.search(r'download="([^"]*)" href="data:application/gzip;base64,([^"]*)"', packed).groups()
    assert (name, gzip.decompress(base64.b64decode(data)).decode()) == ("x.csv.gz", content)
    assert 'href="data:text/csv;charset=utf-8,a,1%0A"' in plain


def test_ids_and_sections_are_unique_in_the_order_of_reading_and_references_resolve(page):
    parsed, _ = page
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)
    sections = [attrs["id"] for tag, attrs in parsed.tags if tag == "section"]
    assert sections == ["answer", "cautions", "paired", "results", "protocol", "cite"]


def test_an_outcome_that_only_a_mark_shows_is_read_out():
    cells = Cell(("+0.20",), "better"), Cell(("+0.10",), "same"), Cell(("worse by 0.3",), "worse")
    columns = Column("1k", number=True), Column("10k", number=True), Column("verdict")
    table = Table("budgets", "Gain", (Column("method"), *columns), (Row(("lora", *cells)),))
    page = html(Document("title", (Part((Section("frontier", "Gain", (table,)),)),)))
    assert re.findall(r"</span>([^<]*)(?:<span class=\"unseen\">([^<]*)</span>)?</span></td>", page) == [
        ("+0.20", " better"), ("+0.10", " equivalent"), ("worse by 0.3", ""),
    ]  # fmt: skip
