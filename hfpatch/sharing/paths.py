"""Paths of this machine, which are nobody else's business: those that a run names, cut down to names."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from hfpatch.surgery.card import shown_base

_WITHIN = re.compile(r"(?:^|(?<=[\s='\"\[(,]))(?:/|~/|[A-Za-z]:\\)[^\s'\"\[\](),]*[\\/][^\s'\"\[\](),]+")
"""A path of two parts or more in a text, such as the command of a run; not that of a URL."""


def paths_in(folder: Path) -> list[str]:
    """Return the absolute paths that the recipe, the plan and the results of a run name, the longest first."""
    found: set[str] = set()
    for name in ("recipe.yaml", "plan.json", "results.json"):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            values = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
            found |= {path for each in _texts(values) for path in _paths(each)}
    return sorted(found, key=len, reverse=True)


def without(text: str, paths: Iterable[str]) -> str:
    """Return a text in which the last part stands for each of the paths, also as JSON and HTML write them."""
    for path in paths:
        for spelt in (path, json.dumps(path, ensure_ascii=False)[1:-1], json.dumps(path)[1:-1], html.escape(path)):
            text = text.replace(spelt, shown_base(path))
    return text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from (*_texts(key), *_texts(each))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _paths(text: str) -> list[str]:
    is_one = not re.search(r"\n|[:,] ", text) and len(Path(text).parts) > 2
    return [text] if is_one and (Path(text).is_absolute() or text.startswith("~/")) else _WITHIN.findall(text)
