"""The paths of this machine that a run names in its recipe, results and report, cut down to their last parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape as html

from hfpatch.recipes.strict import read_yaml, write_yaml
from hfpatch.reporting.tabular import escape as latex
from hfpatch.support.files import read_json
from hfpatch.support.markup import escape as markdown
from hfpatch.surgery.card import shown_base

VALUES = {"recipe.yaml": read_yaml, "plan.json": read_json, "results.json": read_json}
"""The files of a run that name paths, and their readers."""
_WITHIN = re.compile(r"(?:^|(?<=[\s='\"\[(,]))(?:/|~/|[A-Za-z]:\\)[^\s'\"\[\](),]*[\\/][^\s'\"\[\](),]+")
"""A path of two parts or more in a text, such as the command of a run; not that of a URL."""
_QUOTED = re.compile(r"'(?:[^'/]*=)?((?:/|~/)[^'/]*/[^']+)'")
"""One with spaces, as a shell quotes it, alone or behind the key of an override."""


def paths_in(*values: Any) -> list[str]:
    """Return the absolute paths that texts in values of JSON name, the longest first."""
    paths: set[str] = set()
    for text in {text for value in values for text in _texts(value) if "/" in text or "\\" in text}:  # few have one
        is_one = not re.search(r"\n|[:,] ", text) and len(Path(text).parts) > 2  # as a whole, with spaces in it
        is_one = is_one and (Path(text).is_absolute() or text.startswith("~/"))
        paths.update([text] if is_one else [*_QUOTED.findall(text), *_WITHIN.findall(text)])
    return sorted(paths, key=len, reverse=True)


def without_paths(file: Path, paths: Sequence[str]) -> Path | bytes:
    """Return a file of a run's report, or its content without these paths where it has one of them.

    Raises:
        HfpatchError: if it cannot be read.
    """
    if file.suffix == ".safetensors":
        return file
    if file.name in VALUES:
        value = VALUES[file.name](file)
        changed = _mapped(value, lambda text: cut_paths(text, paths))
        written = write_yaml(changed) if file.suffix == ".yaml" else json.dumps(changed, indent=1, ensure_ascii=False)
        return file if changed == value else written.encode()
    text = file.read_text(encoding="utf-8")
    cut = cut_paths(text, paths)
    return file if cut == text else cut.encode()


def cut_paths(text: str, paths: Sequence[str]) -> str:
    """Return a text with the last part of each of these paths in its place, also where a report has escaped it."""
    for path in paths:
        for spelt in (path, str(html(path)), latex(path), markdown(path), json.dumps(path)[1:-1]):
            text = text.replace(spelt, shown_base(path))
    return text


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with every text in it, keys too, changed."""
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(item)
