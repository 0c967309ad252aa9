"""A document as Markdown, for a terminal, a repository page or a diff; its figures are in ``figures/`` beside it."""

from __future__ import annotations

from collections.abc import Iterator

from hfpatch.reporting import document as doc
from hfpatch.support.markup import block as paragraph
from hfpatch.support.markup import escape, table


def markdown(document: doc.Document) -> str:
    """Return the document as Markdown; nothing that a name or a sentence holds is taken for markup."""
    texts = [f"# {escape(document.title)}", paragraph(document.description)]
    texts += [text for section in document.opening for text in _section(section, "")]
    for part in document.parts:
        texts.append(f"# Run {escape(part.title)}" if part.title else "")
        texts += [text for section in part.sections for text in _section(section, part.prefix)]
    texts += [text for section in document.closing for text in _section(section, "")]
    return "\n\n".join(text for text in texts if text) + "\n"


def _section(section: doc.Section, prefix: str) -> Iterator[str]:
    yield f"## {escape(section.title)}"
    for block in section.blocks:
        if isinstance(block, doc.Table) and all(row.page_only for row in block.rows):
            yield escape(block.caption)  # which says where the rows are
            continue
        if title := getattr(block, "title", "") if getattr(block, "heading", True) else "":
            yield "" if isinstance(block, doc.Figure) else f"### {escape(title)}"
        match block:  # downloads and explorers are for pages alone
            case doc.Text():
                yield escape(block.text) if block.style == "caption" else paragraph(block.text)
            case doc.Facts():
                yield "\n".join(f"- {paragraph(label)}: {escape(value)}" for label, value in block.items)
            case doc.Sentences():
                yield "\n".join(f"- {paragraph(sentence)}" for sentence in block.items)
            case doc.Findings():
                yield "\n".join(f"- {doc.MARKS[e.tone]} **{escape(e.subject)}** {escape(e.rest)}" for e in block.items)
            case doc.Figure():
                path = f"figures/{prefix}{block.name}"
                yield f"![{escape(block.title)}]({path}.svg)\n\n{escape(block.caption)} [Data]({path}.csv)."
            case doc.Code():
                yield f"```{block.language}\n{block.text.rstrip()}\n```"
            case doc.Table():
                yield markdown_table(block)
                yield escape(block.explained)


def markdown_table(content: doc.Table) -> str:
    """Return a table as Markdown; the lines of a heading or a cell are separated by ``<br>``."""
    lines = [[(column.name, *column.notes) for column in content.columns]]
    for row in (row for row in content.rows if not row.page_only):
        lines.append([_lines(cell, column) for cell, column in zip(row.cells, content.columns, strict=True)])
    headings, *rows = ([" <br> ".join(escape(line) for line in cell if line) for cell in row] for row in lines)
    return table(headings, rows, numbers=[column.number for column in content.columns])


def _lines(cell: str | doc.Cell, column: doc.Column) -> tuple[str, ...]:
    """Return the lines of a cell; an outcome that no word says, of a number, is a mark before the last."""
    if not isinstance(cell, doc.Cell):
        return (cell,)
    *lines, last = cell.lines
    return *lines, f"{doc.MARKS[cell.tone]} {last}" if column.number and cell.tone else last
