"""What the site adds to the Markdown of docs/: navigation, links to the repository, notebooks and schemas as pages.

The pages are written for GitHub and for the test suite, which runs their code; nothing in them is of this site alone.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
LISTED = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\)", flags=re.MULTILINE)
LOADED = re.compile(
    r'<(?:script|img|iframe|source|video)\b[^>]*\bsrc="(?:https?:)?//|@import|url\("?https?:'
    r'|<link\b(?=[^>]*rel="(?:stylesheet|preload|icon)")[^>]*href="(?:https?:)?//'
)
PUBLISHED = {"examples/": ".ipynb", "recipes/schema/": ".json"}


def on_config(config):
    """Make the navigation from the lists of docs/index.md: a heading is a section, an item a page."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    nav = [{"Home": "index.md"}]
    for heading, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL):
        pages = [{title: _on_site(posixpath.normpath(f"docs/{link}"))} for title, link in LISTED.findall(body)]
        nav += [{heading: pages}] if pages else []
    config.nav = nav
    return config


def on_files(files, config):
    """Add the notebooks, as Markdown, and the JSON schemas of recipes."""
    for folder, suffix in PUBLISHED.items():
        for path in sorted((ROOT / folder).glob(f"*{suffix}")):
            content = path.read_text(encoding="utf-8")
            if suffix == ".ipynb":
                content = _markdown(json.loads(content), f"{config.extra['repository']}/blob/main/{folder}{path.name}")
            files.append(File.generated(config, _on_site(f"{folder}{path.name}"), content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links that leave docs/ lead to the repository, or to the page that is made of the file."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def lead(match):
        path, anchor = posixpath.normpath(posixpath.join(here, match[1])), match[2] or ""
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {match[1]} leads to {path}, which does not exist")
        if (ROOT / path).is_dir():
            return f"]({config.extra['repository']}/tree/main/{path})"
        if path.startswith("docs/"):
            return match[0]  # MkDocs checks anchors, too
        if (site := _on_site(path)) != path:
            return f"]({posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
        return f"]({config.extra['repository']}/blob/main/{path}{anchor})"

    parts = CODE.split(markdown)  # text, code, text, ...
    return "".join(part if index % 2 else LINK.sub(lead, part) for index, part in enumerate(parts))


def on_post_page(output, page, config):
    """Refuse a page that loads anything from elsewhere."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri}: loads from elsewhere: {found[0]}")
    return output


def _on_site(path):
    """Return where a file of the repository is on the site; a path that is not published stays."""
    path = path.removeprefix("docs/")
    if path.startswith("recipes/schema/"):
        return path.removeprefix("recipes/")
    return path.removesuffix(".ipynb") + ".md" if path.endswith(".ipynb") else path


def _markdown(notebook, url):
    """Return a notebook as Markdown: its text, its code in fences, and where the notebook itself is."""
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        cells.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    cells.insert(1, f"This page is made of [a notebook]({url}).")
    return "\n\n".join(cells) + "\n"
