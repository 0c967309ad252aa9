"""Find task definitions by name: lm-eval's, hfpatch's (``eval/``), and those in a folder of the user."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from hfpatch.errors import HfpatchError, nearest
from hfpatch.evaluation.harness import quiet
from hfpatch.support.files import sha256_file
from hfpatch.support.folders import eval_dir

TASKS = ("TASK", "PY_TASK")
_DEFINED = re.compile(r"""^(?:task|group|tag):[ \t]+["']?([\w.:-]+)["']?[ \t]*$""", re.MULTILINE)
_HFPATCH_FOLDERS = tuple(eval_dir() / folder for folder in ("tinyworld", "paper", "metamath"))
Index = dict[str, Any]
Stamp = tuple[str, ...]


@dataclass(frozen=True)
class AddedFolder:
    """A folder of task files beside lm-eval's and hfpatch's own; the default is none.

    ``stamp`` changes when a file in it does; ``index`` has lm-eval's entries by the names of tasks, groups and tags.
    """

    path: Path | None = None
    stamp: Stamp = ()
    index: Index = field(default_factory=dict, compare=False)

    @classmethod
    def at(cls, path: Path | None) -> AddedFolder:
        """Return the folder at a path, which may be None.

        Raises:
            HfpatchError: if there is none.
        """
        if path is None:
            return cls()
        if not path.is_dir():
            raise HfpatchError(f"{path}: no such folder; include_path is a folder with task files")
        stamp = file_stamp(file for file in sorted(path.rglob("*")) if file.suffix in (".yaml", ".py"))
        return cls(path.absolute(), stamp, _index((path.absolute(),), stamp))


def file_stamp(files: Iterable[Path]) -> Stamp:
    """Return the SHA-256 of each file that exists; a copy may keep the time and size of what it replaces."""
    return tuple(sha256_file(file) for file in files if file.is_file())


def list_tasks(what: str, include_path: Path | None = None) -> str:
    """Return lm-eval's tables of tasks, groups and tags, with hfpatch's and the user's: all, or that of ``what``."""
    added = AddedFolder.at(include_path).path
    folders = [*_HFPATCH_FOLDERS, *([added] if added is not None else [])]
    shown = {name: what in ("list", name) for name in ("list_groups", "list_subtasks", "list_tags")}
    with quiet():
        return str(TaskManager(include_path=folders).list_all_tasks(**shown))


@lru_cache(maxsize=64)
def entries_of(name: str, added: AddedFolder) -> Index:
    """Return the index entries, by name, that lm-eval needs to load a task, a group, a tag or a pattern.

    They come from as few folders as possible; lm-eval's tags, and patterns, need the index of all tasks.

    Raises:
        HfpatchError: if the name is unknown.
    """
    ours = _index(_HFPATCH_FOLDERS)
    if not set("*?[").isdisjoint(name):
        everything = {**_everything(), **ours, **added.index}
        if not fnmatch.filter(everything, name):
            raise HfpatchError(f"--tasks {name}: no task, group or tag has this name")
        return {**everything, name: None}
    for entries in (added.index, ours):
        if name in entries:
            return _with_members(name, entries, added)

    # lm-eval's: a file of this name, else files in which a key or a list item has the value ``name``
    files = _files().get(name, [])
    index = _index(tuple({file.parent for file in files}))
    if name not in index:
        value = re.compile(rf"""^[^#\n]*[-:]\s+["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
        mentions = [file for file, text in _texts().items() if name in text and value.search(text)]
        index, files = _index(tuple({file.parent for file in mentions})), [*files, *mentions]

    # a file of the task that is not YAML, which lm-eval skips silently
    if name not in index:
        folders = [*([added.path] if added.path is not None else []), *_HFPATCH_FOLDERS]
        added_files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
        task_key = re.compile(rf"""^task:\s+["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
        for file in [*added_files, *files]:
            text = file.read_text(encoding="utf-8", errors="replace")
            try:
                if file.stem == name or task_key.search(text):
                    yaml.compose(text)
            except yaml.MarkedYAMLError as error:
                line = error.problem_mark.line + 1 if error.problem_mark else 0
                raise HfpatchError(f"task {name}: {file}, line {line}: not valid YAML ({error.problem})") from error
    if name in index and index[name].kind.name != "TAG":
        return _with_members(name, index, added)
    if any(name in text for text in _texts().values()) and name in _everything():
        return {**_everything(), **ours, **added.index}
    if name.endswith((".yaml", ".yml")):
        folder = Path(name).parent
        raise HfpatchError(f"--tasks {name}: name the task as the file does, with its folder as include_path {folder}")

    # suggest the nearest of all names, and the nearest of the user's own
    defined = {defined_name for text in _texts().values() for defined_name in _DEFINED.findall(text)}
    hints = (nearest(name, [*sorted(added.index), *ours, *_files(), *sorted(defined)]), nearest(name, added.index))
    meant = dict.fromkeys(re.findall(r"'([^']+)'", "".join(hints)))
    hint = f" (did you mean {' or '.join(map(repr, meant))}?)" if meant else ""
    raise HfpatchError(
        f"unknown task {name!r}{hint}; use one of lm-eval or hfpatch, or give the folder of your task's YAML file "
        "as include_path"
    )


def _with_members(name: str, index: Index, added: AddedFolder) -> Index:
    """Add the members of a group, at any depth, to an index; an unknown member is defined in the group itself."""
    for member in _members((index[name].cfg or {}).get("task")) if index[name].kind.name == "GROUP" else ():
        if member == name:
            continue
        try:
            index = _with_members(member, index, added) if member in index else {**entries_of(member, added), **index}
        except HfpatchError:
            continue
    return index


def _members(listed: Any) -> Iterator[str]:
    """Yield the names of the tasks and groups in a group's list, those of groups within it included."""
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            if isinstance(item.get("task"), list):
                yield from _members(item["task"])
            for key in ("task", "group"):
                if isinstance(item.get(key), str):
                    yield item[key]


@lru_cache(maxsize=64)
def _index(folders: tuple[Path, ...], stamp: Stamp = ()) -> Index:
    """Return the entries of folders; ``stamp`` is only part of the cache key."""
    return dict(TaskManager(include_defaults=False, include_path=sorted(folders)).task_index)


@cache
def _everything() -> Index:
    """Return lm-eval's whole index; reading it takes seconds."""
    return dict(TaskManager().task_index)


@cache
def _files() -> dict[str, list[Path]]:
    """Return lm-eval's task files by file name, which usually is the task's name."""
    files: dict[str, list[Path]] = {}
    for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
        files.setdefault(file.stem, []).append(file)
    return files


@cache
def _texts() -> dict[Path, str]:
    """Return the text of lm-eval's task files and of the templates that they include."""
    files = sorted(file for file in Path(lm_eval.tasks.__file__).parent.rglob("*yaml*") if file.is_file())
    return {file: file.read_text(encoding="utf-8", errors="replace") for file in files}
