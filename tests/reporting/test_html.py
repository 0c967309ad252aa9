import re
from html.parser import HTMLParser

import pytest

from hfpatch.reporting.figures import differences, quality
from hfpatch.reporting.html import html
from hfpatch.reporting.theme import house_style, to_svg

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
    with house_style():
        figures = {"differences": to_svg(differences(results)), "quality": to_svg(quality(results))}
    page = Page()
    text = html(results, figures)
    page.feed(text)
    assert page.open == []
    return page, text


@pytest.fixture(params=["plain", "hostile"])
def page(request, build, raw):
    source = raw if request.param == "plain" else request.getfixturevalue("hostile")
    return page_of(build(source, curves=False))


def test_no_script_no_handler_no_network(page):
    parsed, text = page
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "iframe", "object", "embed", "link", "img", "base", "form", "b"}
    assert not [attrs for _, attrs in parsed.tags if any(name.startswith("on") for name in attrs)]
    assert all(link.startswith("#") or link == "results.csv" for link in parsed.links)
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]{0,3})", text)) <= {"#di", "#qu"}
    assert "default-src 'none'" in text


def test_ids_are_unique_and_references_resolve(page):
    parsed, _ = page
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)


def test_sections_stand_in_the_order_of_reading(page):
    parsed, _ = page
    sections = [attrs["id"] for tag, attrs in parsed.tags if tag == "section"]
    assert sections == ["answer", "protocol", "warnings", "results", "figures", "paired", "environment"]


def test_hostile_text_is_shown(build, hostile):
    parsed, _ = page_of(build(hostile, curves=False))
    assert '<script>alert("1")</script> | `$\\frac{x}$` *b* & _c_' in "".join(parsed.text)


def test_numbers_of_the_table_are_there(build, raw):
    text = page_of(build(raw))[1]
    for part in ("45.0 %", "+5.0 [2.0, 8.0]", "−12.0 [−15.0, −9.0]", "within noise", "better*", "81,920", "2,048"):
        assert part in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "incomplete run" not in text


def test_an_empty_run_is_a_page_too(build):
    text = html(build({}), {})
    assert "incomplete run" in text
    assert "No method has a result." in text
    assert "<figure>" not in text


def test_figures_follow_the_pages_colours(build, raw):
    parsed, text = page_of(build(raw))
    drawn = text[text.index("<svg") :]
    assert "var(--ink)" in drawn
    assert "#1b1f24" not in drawn
    assert sum(attrs.get("role") == "img" and "aria-label" in attrs for tag, attrs in parsed.tags if tag == "svg") == 2
