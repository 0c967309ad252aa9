"""``report.md`` of a study."""

from __future__ import annotations

from collections.abc import Iterator

from hfpatch.reporting.markdown import facts_list, findings_list, sentences_list
from hfpatch.reporting.page import Page
from hfpatch.reporting.study.page import Section, StudyPanel
from hfpatch.reporting.study.tables import TextTable
from hfpatch.support.markdown import block, escape, table


def study_markdown(page: Page) -> str:
    """Return a study's page as Markdown; its figures stand in ``figures/`` beside it."""
    blocks = [f"# {escape(page.title)}", block(page.description)]
    for panel in page.panels:
        if isinstance(panel, StudyPanel):
            blocks += [f"## Answer\n\n{block(panel.answer.headline)}", findings_list(panel.answer.against_baseline)]
            blocks += [each for section in panel.parts for each in _blocks(section)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _blocks(section: Section) -> Iterator[str]:
    yield f"## {escape(section.title)}"
    yield facts_list(section.facts)
    yield block(section.text)
    yield sentences_list(section.sentences)
    if section.missing:
        yield f"### What is missing\n\n{sentences_list(section.missing)}"
    if section.figure is not None:
        name, title = section.figure.name, section.figure.title
        yield f"![{title}](figures/{name}.svg)\n\n{escape(section.figure.caption)} [Data](figures/{name}.csv)."
    for i, each in enumerate(section.tables):
        yield f"### {escape(each.title)}" if i or section.figure is not None else ""
        yield _table(each)
        yield escape(each.caption)


def _table(each: TextTable) -> str:
    rows = [[escape(cell) for cell in row.cells] for row in each.rows]
    return table([escape(heading) for heading in each.headings], rows, numbers_from=min(each.numbers, default=1))
