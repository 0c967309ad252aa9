"""Finding and building lm-eval tasks by name: lm-eval's own, hfpatch's own, and those that read a local data folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager

from hfpatch.errors import HfpatchError, nearest
from hfpatch.evaluation.local import Stamp, file_stamp, local_data, local_overrides, local_stamp
from hfpatch.evaluation.mistakes import refuse_broken_file, refuse_metrics_without_aggregation, refuse_unknown_metrics
from hfpatch.evaluation.quiet import quiet
from hfpatch.support.files import check_data_dir
from hfpatch.support.resources import eval_dir

_OWN = ("tinyworld", "paper")
_FEWSHOT_SEED = 1234  # the seed that lm-eval draws few-shot examples with


def load_tasks(
    names: Sequence[str],
    *,
    data_dir: Path | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
) -> dict[str, Any]:
    """Return lm-eval task objects by name, in the order given.

    Only the folder that a task lives in is indexed: indexing all of lm-eval's tasks takes seconds. A task is built once
    in a process and shared by the calls that ask for it again, unless its local data or its folder below
    ``include_path`` has changed in between.

    Args:
        names: lm-eval's task names and hfpatch's own (``eval/``).
        data_dir: a folder with local copies of hub data; tasks that ``eval/local`` does not know use the hub.
        num_fewshot: examples before each question; None takes each task's number. A task that fixes it at 0 keeps 0.
        include_path: a folder with more task files of lm-eval's kind, which count before others of the same name.
            Code that a task file names there is run.

    Raises:
        HfpatchError: if a name is unknown or a group, the data cannot be had, or a task file has an error.
    """
    check_data_dir(data_dir)
    local = local_data() if data_dir is not None else {}
    added = _added_folder(include_path) if include_path is not None else AddedFolder()
    tasks = {}
    with quiet():
        for name in names:
            folder = data_dir if name in local and name not in added.names else None
            stamp = local_stamp(local[name], folder) if folder is not None else ()
            tasks[name] = _task(name, folder, num_fewshot, added, stamp)
            tasks[name].set_fewshot_seed(_FEWSHOT_SEED)
    return tasks


@dataclass(frozen=True)
class AddedFolder:
    """A folder of task files beside lm-eval's and hfpatch's own; the default is none.

    Attributes:
        path: the folder.
        names: the tasks in it.
        stamp: changes when a file in it does.
    """

    path: Path | None = None
    names: frozenset[str] = frozenset()
    stamp: Stamp = ()

    @property
    def files(self) -> list[Path]:
        """The task files."""
        return sorted(self.path.rglob("*.yaml")) if self.path is not None else []


def _added_folder(path: Path) -> AddedFolder:
    if not path.is_dir():
        raise HfpatchError(f"{path}: no such folder; include_path is a folder with task files")
    files = (file for file in sorted(path.rglob("*")) if file.suffix in (".yaml", ".py"))
    return AddedFolder(path.absolute(), frozenset(_index([path]).task_index), file_stamp(files))


@lru_cache(maxsize=32)
def _task(name: str, data_dir: Path | None, num_fewshot: int | None, added: AddedFolder, stamp: Stamp) -> Any:
    """Build a task; ``stamp`` only tells the cache when the data has changed."""
    task = _build(name, added, local_overrides(local_data()[name], data_dir) if data_dir is not None else {})
    fixed = task.get_config("num_fewshot")
    if num_fewshot is not None and fixed != 0:
        task.set_config("num_fewshot", num_fewshot)
    elif fixed is None:
        task.set_config("num_fewshot", 0)
    return task


def _build(name: str, added: AddedFolder, overrides: dict[str, Any]) -> Any:
    manager = _manager(name, added)
    entry = manager.task_index[name]
    if entry.kind.name not in ("TASK", "PY_TASK"):
        raise HfpatchError(f"{name!r} is a {entry.kind.name.lower()} of tasks; name the tasks themselves")
    where = f"task {name} ({entry.yaml_path})"
    try:
        # A group of one is lm-eval's way of loading a task with some of its keys replaced.
        task = manager.load({"group": "hfpatch", "task": [{"task": name, **overrides}]})["tasks"][name]
    except HfpatchError:
        raise
    except OSError as error:
        raise HfpatchError(
            f"task {name}: its data cannot be had ({_first_line(error)}); go online or give a data folder"
        ) from error
    except Exception as error:
        refuse_metrics_without_aggregation(entry.cfg or {}, where)
        raise HfpatchError(f"{where}: cannot be built ({_first_line(error)})") from error
    refuse_unknown_metrics(task, where)
    _process_documents_once(task)
    return task


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _process_documents_once(task: Any) -> None:
    """Apply a task's ``process_docs`` to its splits for good; lm-eval would do so at each access."""
    process = task.config.process_docs
    config = task.config
    for split in {config.training_split, config.validation_split, config.test_split} - {None}:
        if process is not None:
            task.dataset[split] = process(task.dataset[split])
    task.set_config("process_docs", None)


def _manager(name: str, added: AddedFolder) -> TaskManager:
    """Return a task manager whose index holds ``name``, made from as few folders as possible."""
    if added.path is not None and name in added.names:
        return _index([added.path])
    own = _index([eval_dir() / folder for folder in _OWN])
    if name in own.task_index:
        return own
    for folders in (_folders().get(name, []), _folders_that_mention(name)):
        manager = _index(folders)
        if name in manager.task_index:
            return manager
    refuse_broken_file(name, [*added.files, *_own_files(), *_files()])
    hint = nearest(name, [*added.names, *own.task_index, *_folders()])
    raise HfpatchError(f"unknown task {name!r}{hint}; give one of lm-eval's or hfpatch's task names")


def _index(folders: Sequence[Path]) -> TaskManager:
    return TaskManager(include_defaults=False, include_path=list(folders))


def _own_files() -> list[Path]:
    return [file for folder in _OWN for file in sorted((eval_dir() / folder).rglob("*.yaml"))]


@cache
def _files() -> list[Path]:
    return sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml"))


@cache
def _folders() -> dict[str, list[Path]]:
    """Return the folders of lm-eval's task files by file name, which mostly is the task's name."""
    folders: dict[str, list[Path]] = {}
    for file in _files():
        folders.setdefault(file.stem, []).append(file.parent)
    return folders


def _folders_that_mention(name: str) -> list[Path]:
    """Return the folders of lm-eval's task files in which a key or list item has the value ``name``."""
    value = re.compile(rf"""^[^#\n]*[-:]\s+["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
    found = {file.parent for file in _files() if value.search(file.read_text(encoding="utf-8", errors="replace"))}
    return sorted(found)
