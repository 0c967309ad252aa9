"""``report.html``: one page that needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hfpatch.reporting import captions
from hfpatch.reporting.merging import Check
from hfpatch.reporting.page import FigurePart, Material, Page, page
from hfpatch.reporting.results_csv import results_csv
from hfpatch.reporting.study.data import study_csv
from hfpatch.reporting.theme import inline
from hfpatch.support.version import __version__


def html(material: Sequence[Material], checks: Sequence[Check] = ()) -> str:
    """Return the report as one HTML page.

    All text of a run is escaped; the page's policy lets no script run but its own, which it knows by its hash.

    Args:
        material: the runs that stand side by side; one where they share a table.
        checks: what several runs have in common.
    """
    return render(page(material, checks), "panel.jinja")


def render(content: Page, template: str) -> str:
    """Return a page as HTML, each of its panels by the template of that name; otherwise as :func:`html`."""
    environment = _environment()
    script = _file("report.js")
    return environment.get_template("report.html.jinja").render(
        page=content,
        template=template,
        captions=captions,
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        style=Markup(_file("report.css")),
        version=__version__,
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hfpatch.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "sentence": _sentence,
        "drawn": _drawn,
        "download": _download,
        "results_csv": results_csv,
        "study_csv": study_csv,
    }
    return environment


def _file(name: str) -> str:
    """Return a file that stands beside the templates as it is."""
    return resources.files("hfpatch.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _breakable(name: str) -> Markup:
    """Return an escaped name that may be broken after its underscores."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def _sentence(text: str) -> str:
    """Return a finding's rest with a capital, to stand as a sentence of its own."""
    return text[:1].upper() + text[1:]


def _drawn(figure: FigurePart, prefix: str) -> Markup:
    return Markup(inline(figure.svg, prefix + figure.name, figure.title))


def _download(text: str, name: str, label: str) -> Markup:
    """Return a link that holds a CSV file."""
    data = quote(text, safe=" ,.:;/()[]+-_=|*@!?~")
    return Markup('<a download="{}" href="data:text/csv;charset=utf-8,{}">{}</a>').format(name, data, label)
