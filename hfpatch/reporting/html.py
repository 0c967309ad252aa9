"""A document as one HTML page that needs no network and no other file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from importlib import resources
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hfpatch.reporting.document import WORDS, Block, Cell, Document, Download, Explorer, Figure
from hfpatch.reporting.theme import inline
from hfpatch.support.version import __version__

LONGEST_PLAIN = 4096  # characters up to which a page holds a file as plain text


def html(document: Document) -> str:
    """Return the document as one HTML page.

    All text is escaped; the page's policy lets no script run but its own, which it knows by its hash.
    """
    blocks = [block for part in document.parts for section in part.sections for block in section.blocks]
    names = ["report", "explorer"] if any(isinstance(block, Explorer) for block in blocks) else ["report"]
    folder = resources.files("hfpatch.reporting").joinpath("templates")
    script, style = (
        "\n".join(folder.joinpath(f"{name}.{kind}").read_text(encoding="utf-8") for name in names)
        for kind in ("js", "css")
    )
    return _ENVIRONMENT.get_template("report.html.jinja").render(
        document=document,
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        style=Markup(style),
        version=__version__,
    )  # fmt: skip


def _download(block: Block) -> Markup:
    """Return a link that holds a file, a download or the data of a figure, as gzip where it is long."""
    if isinstance(block, Figure):
        block = Download(f"{block.name}.csv", "its data (CSV)", block.data)
    assert isinstance(block, Download)
    if len(block.content) > LONGEST_PLAIN:
        packed = base64.b64encode(gzip.compress(block.content.encode(), mtime=0)).decode()
        link = Markup('<a download="{}.gz" href="data:application/gzip;base64,{}">{}</a>')
        return link.format(block.name, packed, block.label)
    content = quote(block.content, safe=" ,.:;/()[]+-_=|*@!?~")
    link = Markup('<a download="{}" href="data:{};charset=utf-8,{}">{}</a>')
    return link.format(block.name, block.media_type, content, block.label)


_ENVIRONMENT = Environment(
    loader=PackageLoader("hfpatch.reporting"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    # a name may be broken after underscores, and before what is in brackets
    "breakable": lambda name: Markup(re.sub(r"_| (?=[\[(])", r"\g<0><wbr>", str(escape(name)))),
    "cell": lambda value: value if isinstance(value, Cell) else Cell((value,)),
    "download": _download,
    "drawn": lambda figure, prefix: Markup(inline(figure.svg, prefix + figure.name, str(escape(figure.title)))),
    "indices": lambda row, choice: " ".join(
        str(choice.values.index(value)) for value in row.keys.get(choice.key, ()) if value in choice.values
    ),
    "type": lambda block: type(block).__name__,
    "word": lambda tone: WORDS.get(tone, tone),  # for screen readers, where a number has only a mark
}
