"""Finding and building lm-eval tasks by name: lm-eval's own, hfpatch's own, and those that read a local data folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.api.registry import get_metric_aggregation
from lm_eval.tasks import TaskManager

from hfpatch.errors import HfpatchError, nearest
from hfpatch.evaluation.harness import quiet
from hfpatch.evaluation.local import Stamp, file_stamp, local_data, local_overrides
from hfpatch.support.files import check_data_dir
from hfpatch.support.resources import eval_dir

_OWN = ("tinyworld", "paper")
_FEWSHOT_SEED = 1234  # lm-eval's seed for few-shot examples


def load_tasks(
    names: Sequence[str],
    *,
    data_dir: Path | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
) -> dict[str, Any]:
    """Return lm-eval task objects by name, in the order given.

    Only the folder of a task is indexed: indexing all of lm-eval's tasks takes seconds. A task is built once in a
    process and shared by the calls that ask for it again, unless its local data or its folder below ``include_path``
    has changed in between.

    Args:
        names: lm-eval's task names and hfpatch's own (``eval/``).
        data_dir: a folder with local copies of hub data; tasks that ``eval/local`` does not know use the hub.
        num_fewshot: examples before each question; None takes each task's number. A task that fixes it at 0 keeps 0.
        include_path: a folder with more task files in lm-eval's format, which replace others of the same name.
            Code that a task file names there is run.

    Raises:
        HfpatchError: if a name is unknown or a group, the data cannot be loaded, or a task file has an error.
    """
    check_data_dir(data_dir)
    local = local_data() if data_dir is not None else {}
    added = AddedFolder()
    if include_path is not None:
        if not include_path.is_dir():
            raise HfpatchError(f"{include_path}: no such folder; include_path is a folder with task files")
        sources = (file for file in sorted(include_path.rglob("*")) if file.suffix in (".yaml", ".py"))
        added = AddedFolder(include_path.absolute(), frozenset(_index([include_path]).task_index), file_stamp(sources))
    tasks = {}
    with quiet():
        for name in names:
            folder = data_dir if name in local and name not in added.names else None
            files = [folder / file for file in local[name].data_files.values()] if folder is not None else []
            tasks[name] = _task(name, folder, num_fewshot, added, file_stamp(files))
            tasks[name].set_fewshot_seed(_FEWSHOT_SEED)
    return tasks


def hub_dataset(name: str, include_path: Path | None = None) -> str | None:
    """Return the hub data set that a task is defined on, whatever local copy is read; None if there is none.

    Args:
        name: the task's name.
        include_path: a folder with more task files; it may be gone.
    """
    added = AddedFolder()
    if include_path is not None and include_path.is_dir():
        added = AddedFolder(include_path.absolute(), frozenset(_index([include_path]).task_index))
    try:
        with quiet():
            found = (_manager(name, added).task_index[name].cfg or {}).get("dataset_path")
    except HfpatchError:
        return None
    return found if isinstance(found, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", found) else None


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


@lru_cache(maxsize=32)
def _task(name: str, data_dir: Path | None, num_fewshot: int | None, added: AddedFolder, stamp: Stamp) -> Any:
    """Build a task; ``stamp`` is only part of the cache key, which changes with the data."""
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
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if isinstance(error, OSError):
            raise HfpatchError(
                f"task {name}: its data cannot be loaded ({reason}); go online or set a data folder"
            ) from error
        _check_aggregations(entry.cfg or {}, where)
        raise HfpatchError(f"{where}: cannot be built ({reason})") from error
    _check_metrics(task, where)
    process, config = task.config.process_docs, task.config
    if process is not None:  # lm-eval would call it at each access of a split
        for split in {config.training_split, config.validation_split, config.test_split} - {None}:
            task.dataset[split] = process(task.dataset[split])
        task.set_config("process_docs", None)
    return task


def _manager(name: str, added: AddedFolder) -> TaskManager:
    """Return a task manager whose index contains ``name``, built from as few folders as possible."""
    if added.path is not None and name in added.names:
        return _index([added.path])
    own = _index([eval_dir() / folder for folder in _OWN])
    if name in own.task_index:
        return own
    named = _lm_eval_files().get(name, [])
    if name in (manager := _index({file.parent for file in named})).task_index:
        return manager
    # Another file name: look for files in which a key or a list item has the value ``name``.
    value = re.compile(rf"""^[^#\n]*[-:]\s+["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
    mentions = [file for files in _lm_eval_files().values() for file in files if value.search(_text(file))]
    if name in (manager := _index({file.parent for file in mentions})).task_index:
        return manager
    others = [added.path] if added.path is not None else []
    others += [eval_dir() / folder for folder in _OWN]
    _check_yaml(name, [*(file for folder in others for file in sorted(folder.rglob("*.yaml"))), *named, *mentions])
    hint = nearest(name, [*added.names, *own.task_index, *_lm_eval_files()])
    raise HfpatchError(f"unknown task {name!r}{hint}; use the name of a task of lm-eval or hfpatch")


def _index(folders: Iterable[Path]) -> TaskManager:
    return TaskManager(include_defaults=False, include_path=sorted(folders))


@cache
def _lm_eval_files() -> dict[str, list[Path]]:
    """Return lm-eval's task files by file name, which usually is the task's name."""
    files: dict[str, list[Path]] = {}
    for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
        files.setdefault(file.stem, []).append(file)
    return files


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _check_yaml(name: str, files: Iterable[Path]) -> None:
    """Raise an error if the file of a task is not YAML; lm-eval skips such files without a word."""
    task_key = re.compile(rf"""^task:\s+["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
    for file in files:
        text = _text(file)
        if file.stem != name and not task_key.search(text):
            continue
        try:
            yaml.compose(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            raise HfpatchError(f"task {name}: {file}, line {line}: not valid YAML ({error.problem})") from error


def _check_metrics(task: Any, where: str) -> None:
    """Raise an error if lm-eval does not know a metric of a task; it would leave out that metric."""
    if task.get_config("process_results") is not None:
        return
    for metric, function in getattr(task, "_metric_fn_list", {}).items():
        if function is None:
            raise HfpatchError(f"{where}: there is no metric {metric!r}; use one of lm-eval's, such as 'acc'")


def _check_aggregations(config: Mapping[str, Any], where: str) -> None:
    """Raise an error if a metric has no aggregation, neither in the task's configuration nor in lm-eval."""
    for metric in config.get("metric_list") or ():
        name = metric.get("metric")
        if isinstance(name, str) and "aggregation" not in metric and get_metric_aggregation(name) is None:
            raise HfpatchError(
                f"{where}: there is no metric {name!r} with a default aggregation; use one of lm-eval's, such as "
                "'acc', or set its aggregation, such as 'mean'"
            )
