"""An inspection as one HTML page that needs no network, no script and no other file."""

from __future__ import annotations

import base64
import json

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hfpatch.reporting.theme import inline, report_style, to_svg
from hfpatch.runs.inspection import Inspection
from hfpatch.runs.inspection_figures import DRAWINGS
from hfpatch.runs.inspection_tables import inspection_tables, opening


def inspection_page(found: Inspection) -> str:
    """Return the page: figures as inline SVG, tables, and all data as a download inside it; text is escaped."""
    environment = Environment(
        loader=PackageLoader("hfpatch.runs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = base64.b64encode(json.dumps(found.to_json()).encode()).decode()
    return environment.get_template("inspection.html.jinja").render(
        name=found.base.name,
        opening=opening(found),
        tables=inspection_tables(found),
        figures=_figures(found),
        notes=found.notes,
        data=Markup(f"data:application/json;base64,{data}"),
    )


def _figures(found: Inspection) -> list[dict[str, str]]:
    drawn: list[dict[str, str]] = []
    with report_style():
        for drawing in DRAWINGS:
            figure = drawing.draw(found)
            if figure is not None:
                svg = inline(to_svg(figure), drawing.name, str(escape(drawing.title)))
                texts = {"name": drawing.name, "title": drawing.title, "caption": drawing.caption}
                drawn.append({**texts, "svg": Markup(svg)})
    return drawn
