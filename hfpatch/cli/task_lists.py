"""``--tasks list``: lm-eval's tables of tasks, kept between commands: lm-eval reads 13,000 files to make them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.support.cache import cache_folder, is_writable
from hfpatch.support.files import write_text
from hfpatch.support.resources import eval_dir

LISTS = ("list", "list_groups", "list_subtasks", "list_tags")


def task_list(what: str, include_path: Path | None = None) -> str:
    """Return lm-eval's tables of tasks, groups and tags, with hfpatch's and the user's own.

    They are kept under a hash of the names, sizes and times of all files that they are made from.

    Args:
        what: one of :data:`LISTS`.
        include_path: a folder with more task files.

    Raises:
        HfpatchError: if there is no such folder.
    """
    if include_path is not None and not include_path.is_dir():
        raise HfpatchError(f"{include_path}: no such folder; include_path is a folder with task files")
    spec = find_spec("lm_eval")
    tasks = [Path(place) / "tasks" for place in (spec.submodule_search_locations or ())] if spec is not None else []
    folders = [*tasks, eval_dir(), *([include_path] if include_path is not None else [])]
    stamp = hashlib.sha256("\n".join((version("lm_eval"), what, *_stamps(folders))).encode()).hexdigest()
    kept = cache_folder("tasks") / f"{stamp}.txt"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    from hfpatch.evaluation.index import list_tasks

    text = list_tasks(what, include_path)
    if is_writable(kept.parent, "the lists of tasks"):
        write_text(kept, text)
    return text


def _stamps(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        for place, _, files in sorted(os.walk(folder)):
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name) if files else ():
                if entry.name.endswith((".yaml", ".py")):
                    yield f"{entry.path} {entry.stat().st_size} {entry.stat().st_mtime_ns}"
