"""Run folders: what several are called in one report, and those that lie below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.results.folder import RESULTS
from hfpatch.support.files import printable


def labels(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the shortest end of its path that is different from the others'.

    Raises:
        HfpatchError: if one is named twice.
    """
    paths = [path.resolve() for path in run_dirs]
    twice = next((path for path in paths if paths.count(path) > 1), None) if len(set(paths)) < len(paths) else None
    if twice is not None:
        raise HfpatchError(f"{twice}: named twice; name each run once")
    names: list[str] = []
    for length in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(map(printable, names), run_dirs, strict=True))


def run_folders(places: Sequence[Path]) -> list[Path]:
    """Return the run folders among ``places`` and below them, each once; a run's own folders are not entered.

    A run that has no results yet is one too.

    Raises:
        HfpatchError: if a place is not there, or none is or has a run.
    """
    found: dict[Path, Path] = {}
    for place in places:
        if not place.exists():
            raise HfpatchError(f"{place}: no such folder; give folders that compare, pretrain or eval wrote")
        for folder in _below(place):
            found.setdefault(folder.resolve(), folder)
    if not found:
        names = ", ".join(map(str, places[:3])) + (", ..." if len(places) > 3 else "")
        raise HfpatchError(f"{names}: no {RESULTS} there or below; give folders that compare, pretrain or eval wrote")
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(place):
        folders.sort()
        if RESULTS in files or "recipe.yaml" in files:
            yield Path(root)
            folders.clear()
