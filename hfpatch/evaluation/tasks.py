"""Lm-eval tasks by name: lm-eval's own, hfpatch's own, and those that read a local data folder; their texts."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_eval.api.registry import get_metric_aggregation
from lm_eval.tasks._yaml_loader import load_yaml

from hfpatch.data.deciding import TaskDocument
from hfpatch.errors import HfpatchError, first_line
from hfpatch.evaluation.harness import quiet, templates_compiled_once
from hfpatch.evaluation.index import TASKS, AddedFolder, entries_of, kind_of, manager_of
from hfpatch.evaluation.local import Stamp, file_stamp, local_data, local_overrides
from hfpatch.recipes.evaluation import FEWSHOT_SEED
from hfpatch.support.files import check_data_dir


@dataclass(frozen=True)
class Named:
    """What one name stands for: a task, or the tasks of a group, a tag or a pattern.

    Attributes:
        tasks: lm-eval's task objects by name.
        groups: lm-eval's groups by name, with those in them.
        settings: by task what lm-eval's ``simple_evaluate`` changes in a task that it gets, as it is asked for.
    """

    tasks: dict[str, Any]
    groups: dict[str, Any]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


def load_tasks(
    names: Iterable[str],
    *,
    data_dir: Path | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    fewshot_seed: int = FEWSHOT_SEED,
) -> dict[str, Any]:
    """Return lm-eval task objects by name, in the order given.

    Only the folder of a task is indexed: indexing all of lm-eval's tasks takes seconds, which only its tags and
    patterns need. A task is built once in a process and shared by the calls that ask for it again, unless its local
    data or its folder below ``include_path`` has changed in between.

    Args:
        names: lm-eval's tasks, groups and tags, patterns of them such as ``arc_*``, and hfpatch's own (``eval/``).
        data_dir: a folder with local copies of hub data; tasks that ``eval/local`` does not know use the hub.
        num_fewshot: examples before each question; None takes each task's number, and leaves one that has none to
            lm-eval, whose ``simple_evaluate`` then takes its own ``num_fewshot``. A task that fixes it at 0 keeps 0.
        include_path: a folder with more task files in lm-eval's format, which replace others of the same name.
            Code that a task file names there is run.
        gen_kwargs: arguments of text generation that replace those of the tasks.
        fewshot_seed: for choosing few-shot examples.

    Raises:
        HfpatchError: if a name is unknown, the data cannot be loaded, or a task file has an error.
    """
    given: dict[str, Any] = {"data_dir": data_dir, "num_fewshot": num_fewshot, "include_path": include_path}
    given |= {"gen_kwargs": gen_kwargs, "fewshot_seed": fewshot_seed}
    return {task: each for name in names for task, each in load_named(name, **given).tasks.items()}


def load_named(
    name: str,
    *,
    data_dir: Path | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    fewshot_seed: int = FEWSHOT_SEED,
) -> Named:
    """Return the tasks that one name stands for, and its groups; otherwise as `load_tasks`."""
    check_data_dir(data_dir)
    with quiet():
        added = AddedFolder.at(include_path)
        index = entries_of(name, added)
        local = {} if data_dir is None else {task: data for task, data in local_data().items() if task in index}
        alone = kind_of(name, index) in TASKS
        used = [task for task in local if task not in added.index and (task == name or not alone)]
        files = [data_dir / file for task in used for file in local[task].data_files.values()] if data_dir else []
        options = json.dumps(dict(gen_kwargs or {}), sort_keys=True)
        found = _load(name, data_dir if used else None, tuple(used), num_fewshot, added, options, file_stamp(files))
        for task_name, task in found.tasks.items():
            for key, value in found.settings[task_name].items():
                task.set_config(key, copy.deepcopy(value))
            task.set_fewshot_seed(fewshot_seed)
    return found


def hub_dataset(name: str, include_path: Path | None = None) -> str | None:
    """Return the hub data set that a task is defined on, whatever local copy is read; None if there is none.

    Args:
        name: the task's name.
        include_path: a folder with more task files; it may be gone.
    """
    try:
        with quiet():
            added = AddedFolder.at(include_path if include_path is not None and include_path.is_dir() else None)
            found = (entries_of(name, added)[name].cfg or {}).get("dataset_path")
    except HfpatchError:
        return None
    return found if isinstance(found, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", found) else None


@lru_cache(maxsize=32)
def _load(
    name: str,
    data_dir: Path | None,
    local: tuple[str, ...],
    num_fewshot: int | None,
    added: AddedFolder,
    gen_kwargs: str,
    stamp: Stamp,
) -> Named:
    """Build what a name stands for, the tasks ``local`` on files of ``data_dir``.

    ``stamp`` is only part of the cache key, which changes with the data.
    """
    index, generation = entries_of(name, added), json.loads(gen_kwargs)
    known = local_data() if local else {}
    found = _build(name, index, {task: local_overrides(known[task], data_dir) for task in local if data_dir})
    for task_name, task in found.tasks.items():
        if task.get_config("process_results") is None:  # lm-eval would leave out a metric that it does not know
            for metric, function in getattr(task, "_metric_fn_list", {}).items():
                if function is None:
                    where = _where(task_name, index.get(task_name))
                    raise HfpatchError(f"{where}: there is no metric {metric!r}; use one of lm-eval's, such as 'acc'")
        if num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", num_fewshot)
        if generation and task.OUTPUT_TYPE == "generate_until":
            task.set_config("generation_kwargs", generation, update=True)
        kept = {key: task.get_config(key) for key in ("num_fewshot", "generation_kwargs")}
        found.settings[task_name] = copy.deepcopy(kept)
        config = task.config
        if config.process_docs is not None:  # applied once; lm-eval would do so at each access of a split
            for split in {config.training_split, config.validation_split, config.test_split} - {None}:
                task.dataset[split] = config.process_docs(task.dataset[split])
            task.set_config("process_docs", None)
    return found


def _build(name: str, index: Mapping[str, Any], overrides: Mapping[str, dict[str, Any]]) -> Named:
    """Let lm-eval build a task, a group, the tasks of a tag, or whatever matches a pattern.

    Args:
        name: which of them.
        index: lm-eval's entries.
        overrides: by task the keys of its configuration that are replaced.
    """
    entry, manager = index[name], manager_of(index)
    try:
        if kind_of(name, index) in TASKS:
            # A group of one is lm-eval's way of loading a task with some of its keys replaced.
            one = {"group": "hfpatch", "task": [{"task": name, **overrides.get(name, {})}]}
            return Named({name: manager.load(one)["tasks"][name]}, {})
        for task, keys in overrides.items():
            config = {**load_yaml(index[task].yaml_path, resolve_func=True), **keys}
            manager.task_index[task] = replace(index[task], yaml_path=None, cfg=config)
        loaded = manager.load([name] if entry is not None else fnmatch.filter(sorted(manager.task_index), name))
        return Named(dict(loaded["tasks"]), dict(loaded["groups"]))
    except HfpatchError:
        raise
    except Exception as error:
        reason = first_line(error)
        if isinstance(error, OSError):
            mine = isinstance(error, FileNotFoundError) and reason.startswith("Unable to find")
            advice = "write data_files relative to the working directory" if mine else "go online or set --data-dir"
            raise HfpatchError(f"task {name}: its data cannot be loaded ({reason}); {advice}") from error
        where = _where(name, entry)
        for metric in ((entry.cfg if entry is not None else None) or {}).get("metric_list") or ():
            known = metric.get("metric")
            if isinstance(known, str) and "aggregation" not in metric and get_metric_aggregation(known) is None:
                raise HfpatchError(
                    f"{where}: there is no metric {known!r} with a default aggregation; use one of lm-eval's, such as "
                    "'acc', or set its aggregation, such as 'mean'"
                ) from error
        raise HfpatchError(f"{where}: cannot be built ({reason})") from error


def _where(name: str, entry: Any) -> str:
    return f"task {name} ({entry.yaml_path})" if entry is not None and entry.yaml_path else f"task {name}"


def task_documents(tasks: Mapping[str, Any]) -> dict[str, list[TaskDocument]]:
    """Return every document that tasks evaluate, whatever the limit, by task.

    Args:
        tasks: lm-eval's tasks, as `load_tasks` returns them.
    """
    with quiet(), templates_compiled_once():
        return {
            name: [TaskDocument(_prompts(task, each), list(_texts(each))) for each in task.eval_docs]
            for name, task in tasks.items()
        }


def _prompts(task: Any, document: Mapping[str, Any]) -> list[str]:
    """Return what a model reads of a document, no examples before it: the prompt with each answer."""
    try:
        prompt = task.doc_to_text(document)
        if task.OUTPUT_TYPE == "generate_until":
            answers = task.doc_to_target(document)
            between = task.config.target_delimiter
            return [f"{prompt}{between}{each}" for each in (answers if isinstance(answers, list) else [answers])]
        if getattr(task, "multiple_input", False):
            prompt = task.doc_to_choice(document)
        made = task.construct_requests(document, prompt)
    except Exception:  # templates can raise anything; the evaluation names a document that it cannot score
        return []
    requests = made if isinstance(made, list) else [made]
    given = [[each for each in request.arguments if isinstance(each, str)] for request in requests]
    return ["".join(each) for each in given if each[0]]  # no answer without its prompt, as acc_mutual_info asks for


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
