"""``report.html``: one page that needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hfpatch.reporting import captions
from hfpatch.reporting.answer import answer
from hfpatch.reporting.facts import environment_facts, protocol_facts
from hfpatch.reporting.results import Results
from hfpatch.reporting.tables import main_table, method_table, paired_table
from hfpatch.reporting.theme import inline


def html(results: Results, figures: Mapping[str, str]) -> str:
    """Return the report as one HTML page.

    Args:
        results: the run; all of its text is escaped.
        figures: figure name -> SVG document, in the order in which they are shown.
    """
    environment = Environment(
        loader=PackageLoader("hfpatch.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template("report.html.jinja").render(
        results=results,
        answer=answer(results),
        protocol=protocol_facts(results),
        environment=environment_facts(results),
        main=main_table(results),
        methods=method_table(results),
        paired=paired_table(results),
        captions=captions,
        figures=[_figure(name, svg) for name, svg in figures.items()],
    )


def _breakable(name: str) -> Markup:
    """Return an escaped name that may be broken after its underscores."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def _figure(name: str, svg: str) -> dict[str, str]:
    title, caption = captions.FIGURES[name]
    return {"name": name, "title": title, "caption": caption, "svg": Markup(inline(svg, name, title))}
