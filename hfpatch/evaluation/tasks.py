"""Lm-eval tasks by name: lm-eval's own, hfpatch's own, and those of ``eval/local``, which read a local data folder."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lm_eval.api.registry import get_metric_aggregation
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from hfpatch.data.deciding import TaskDocument
from hfpatch.data.readers import read_json_lines
from hfpatch.errors import HfpatchError, first_line, listed
from hfpatch.evaluation.harness import files_by_content, quiet, templates_compiled_once
from hfpatch.evaluation.index import TASKS, AddedFolder, entries_of, file_stamp
from hfpatch.recipes.evaluation import FEWSHOT_SEED, EvaluationSettings
from hfpatch.recipes.strict import Section, read_yaml, validate
from hfpatch.support.files import check_data_dir
from hfpatch.support.folders import eval_dir

if TYPE_CHECKING:
    from datasets import DatasetDict

_SPLITS = {"train": "training_split", "validation": "validation_split", "test": "test_split"}


class LocalData(Section):
    """One file of ``eval/local``."""

    tasks: tuple[str, ...]
    """The tasks that read these files; everything else about them stays as it is."""
    data_files: dict[Literal["train", "validation", "test"], str]
    """A path below the data folder for each split; other splits are not used."""
    fields: tuple[str, ...]
    """The fields that every row must have."""


@dataclass(frozen=True)
class Named:
    """The task of a name, or the tasks of a group, a tag or a pattern.

    Attributes:
        tasks: lm-eval's task objects by name.
        groups: lm-eval's groups by name, nested ones included.
        settings: by task the values that lm-eval's ``simple_evaluate`` may overwrite in the task object.
        files: the SHA-256 of the local files that the documents were read from, by path.
    """

    tasks: dict[str, Any]
    groups: dict[str, Any]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)


def load_tasks(
    names: Iterable[str],
    *,
    data_dir: str | Path | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    fewshot_seed: int = FEWSHOT_SEED,
) -> dict[str, Any]:
    """Return lm-eval task objects by name, in the order given.

    Only the folder of a task is indexed: indexing all of lm-eval's tasks takes seconds, which only its tags and
    patterns need. A task is built once in a process and shared by later calls, unless its local data or its folder
    below ``include_path`` has changed in between.

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
        HfpatchError: if a name is unknown, a number is out of range, the data cannot be loaded, or a task file has an
            error.
    """
    given: dict[str, Any] = {"tasks": [names] if isinstance(names, str) else list(names), "num_fewshot": num_fewshot}
    given |= {"gen_kwargs": dict(gen_kwargs or {}), "seed": [None, None, None, fewshot_seed]}
    given |= {"include_path": None if include_path is None else str(include_path)}
    settings = validate(given, EvaluationSettings, "load_tasks")
    loaded = [load_named(name, settings, None if data_dir is None else Path(data_dir)) for name in settings.tasks]
    return {name: task for named in loaded for name, task in named.tasks.items()}


def load_named(name: str, settings: EvaluationSettings, data_dir: Path | None = None) -> Named:
    """Return the tasks and the groups of one name, as the settings of an evaluation ask for them."""
    check_data_dir(data_dir)
    with quiet():
        added = AddedFolder.at(settings.include_path)
        index = entries_of(name, added)
        local = {} if data_dir is None else {task: data for task, data in local_data().items() if task in index}
        alone = index[name] is not None and index[name].kind.name in TASKS
        used = [task for task in local if task not in added.index and (task == name or not alone)]
        files = [data_dir / file for task in used for file in local[task].data_files.values()] if data_dir else []
        gen_kwargs = json.dumps(settings.gen_kwargs, sort_keys=True)
        asked = (name, data_dir if used else None, tuple(used), settings.num_fewshot, added, gen_kwargs)
        named = _built.get(asked)
        if named is None or file_stamp(named.files) != tuple(named.files.values()):
            stamps = dict(zip(files, file_stamp(files), strict=False))  # of one that is missing, `_load` says so
            _built.pop(asked, None)
            named = _built[asked] = _load(*asked)
            named.files.update(stamps)
            while len(_built) > _MOST_BUILT:
                del _built[next(iter(_built))]
        for task_name, task in named.tasks.items():
            for key, value in named.settings[task_name].items():
                task.set_config(key, copy.deepcopy(value))
            task.set_fewshot_seed(settings.fewshot_seed)
    return named


def hub_dataset(name: str, include_path: Path | None = None) -> str | None:
    """Return the hub data set that a task is defined on, if any; ``include_path`` may be gone."""
    try:
        with quiet():
            added = AddedFolder.at(include_path if include_path is not None and include_path.is_dir() else None)
            dataset = (entries_of(name, added)[name].cfg or {}).get("dataset_path")
    except HfpatchError:
        return None
    return dataset if isinstance(dataset, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) else None


_built: dict[tuple[Any, ...], Named] = {}
"""What `load_named` has built, by its arguments."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in lm-eval's order
_MOST_BUILT = 32  # each holds its documents in memory; an evaluation rarely has more tasks


def _load(
    name: str,
    data_dir: Path | None,
    local: tuple[str, ...],
    num_fewshot: int | None,
    added: AddedFolder,
    gen_kwargs: str,
) -> Named:
    """Build the tasks of a name, those in ``local`` on files of ``data_dir``."""
    index, generation = entries_of(name, added), json.loads(gen_kwargs)
    local_sets = local_data() if local else {}
    with files_by_content() as files:
        named = _build(name, index, {task: _local_overrides(local_sets[task], data_dir) for task in local if data_dir})
    named.files.update(files)
    for task_name, task in named.tasks.items():
        if task.get_config("process_results") is None:  # lm-eval would leave out an unknown metric
            for metric, function in getattr(task, "_metric_fn_list", {}).items():
                if function is None:
                    where = _where(task_name, index.get(task_name))
                    raise HfpatchError(f"{where}: there is no metric {metric!r}; use one of lm-eval's, such as 'acc'")
        if num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", num_fewshot)
        if generation and task.OUTPUT_TYPE == "generate_until":
            given = {*generation, *(task.get_config("generation_kwargs") or {})}
            names = [name for name in _LENGTHS if name in given]  # of which lm-eval takes the first, whoever gave it
            if {*names[1:]} & {*generation}:
                raise HfpatchError(
                    f"task {task_name}: gen_kwargs and the task give {listed(names)}, of which only the first has an "
                    f"effect; write {names[0]} alone in gen_kwargs"
                )
            task.set_config("generation_kwargs", generation, update=True)
        kept = {key: task.get_config(key) for key in ("num_fewshot", "generation_kwargs")}
        named.settings[task_name] = copy.deepcopy(kept)
        config = task.config
        if config.process_docs is not None:  # applied once; lm-eval would do so at each access of a split
            for split in {config.training_split, config.validation_split, config.test_split} - {None}:
                task.dataset[split] = config.process_docs(task.dataset[split])
            task.set_config("process_docs", None)
    return named


def _build(name: str, index: Mapping[str, Any], overrides: Mapping[str, dict[str, Any]]) -> Named:
    """Let lm-eval build a task, a group, or the tasks of a tag or pattern; ``overrides`` has keys by task."""
    entry, manager = index[name], TaskManager(include_defaults=False)
    manager.task_index.update({key: function for key, function in index.items() if function is not None})
    try:
        if entry is not None and entry.kind.name in TASKS:
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
            is_wrong_path = isinstance(error, FileNotFoundError) and reason.startswith("Unable to find")
            advice = (
                "write data_files relative to the working directory" if is_wrong_path else "go online or set --data-dir"
            )
            raise HfpatchError(f"task {name}: its data cannot be loaded ({reason}); {advice}") from error
        where = _where(name, entry)
        for metric in ((entry.cfg if entry is not None else None) or {}).get("metric_list") or ():
            function = metric.get("metric")
            if isinstance(function, str) and "aggregation" not in metric and get_metric_aggregation(function) is None:
                raise HfpatchError(
                    f"{where}: there is no metric {function!r} with a default aggregation; use one of lm-eval's, such "
                    "as 'acc', or set its aggregation, such as 'mean'"
                ) from error
        raise HfpatchError(f"{where}: cannot be built ({reason})") from error


def _where(name: str, entry: Any) -> str:
    return f"task {name} ({entry.yaml_path})" if entry is not None and entry.yaml_path else f"task {name}"


def local_data() -> dict[str, LocalData]:
    """Return the files of ``eval/local`` by task; a mistake in one is an error."""
    declared = [
        validate(read_yaml(file), LocalData, str(file)) for file in sorted((eval_dir() / "local").glob("*.yaml"))
    ]
    return {task: data for data in declared for task in data.tasks}


def _local_overrides(data: LocalData, data_dir: Path) -> dict[str, Any]:
    """Return the keys that make an lm-eval task configuration read local files instead of the hub."""

    def load(**_metadata: Any) -> DatasetDict:
        from datasets import Dataset, DatasetDict

        splits = DatasetDict()
        for split, name in data.data_files.items():
            file = data_dir / name
            documents = read_documents(file, data.fields)
            try:
                splits[split] = Dataset.from_list(documents)
            except (ValueError, TypeError) as error:  # base classes of pyarrow's errors
                odd = 0  # the first document that makes no table with document 0
                for number, document in enumerate(documents):
                    try:
                        Dataset.from_list([documents[0], document])
                    except (ValueError, TypeError):
                        odd = number
                        break
                raise HfpatchError(
                    f"{file}, document {odd} (counted from 0): a field has another type than in document 0 ({error})"
                ) from error
        return splits

    unused = {key: None for split, key in _SPLITS.items() if split not in data.data_files}
    return {**unused, "dataset_path": "json", "dataset_name": None, "custom_dataset": load}


def read_documents(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the documents of a ``.jsonl`` or ``.jsonl.gz`` file, reduced to ``fields``.

    Raises:
        HfpatchError: if the file is missing, unreadable or empty, or a line is not UTF-8, not a JSON object or lacks a
            field; the message has the line's number, counted from 1.
    """
    if not path.is_file():
        raise HfpatchError(f"{path}: no such data file; put it there or leave out the data folder to use the hub")
    documents = []
    for where, row in read_json_lines(path):
        missing = [field for field in fields if field not in row]
        if missing:
            raise HfpatchError(f"{where}: no field {missing[0]!r}; required fields: {', '.join(fields)}")
        documents.append({field: row[field] for field in fields})
    if not documents:
        raise HfpatchError(f"{path}: contains no documents; use a file with one JSON object per line")
    return documents


def task_documents(tasks: Mapping[str, Any]) -> dict[str, list[TaskDocument]]:
    """Return every document of tasks by task, whatever the limit, and of the pool of few-shot examples."""
    with quiet(), templates_compiled_once():
        return {
            name: [
                TaskDocument(_prompts(task, document), list(_texts(document)))
                for document in (*task.eval_docs, *_other_examples(task))
            ]
            for name, task in tasks.items()
        }


def _other_examples(task: Any) -> Sequence[Mapping[str, Any]]:
    """Return the pool of a task's few-shot examples; none without examples, or where it is the scored documents."""
    if not task.get_config("num_fewshot"):
        return []
    pool = list(task.sampler.fewshot_docs() if hasattr(task, "sampler") else task.fewshot_docs())
    return [] if pool == list(task.eval_docs) else pool


def _prompts(task: Any, document: Mapping[str, Any]) -> list[str]:
    """Return the zero-shot prompt of a document with each answer."""
    try:
        prompt = task.doc_to_text(document)
        if task.OUTPUT_TYPE == "generate_until":
            answers = task.doc_to_target(document)
            between = task.config.target_delimiter
            return [f"{prompt}{between}{answer}" for answer in (answers if isinstance(answers, list) else [answers])]
        if getattr(task, "multiple_input", False):
            prompt = task.doc_to_choice(document)
        made = task.construct_requests(document, prompt)
    except Exception:  # templates can raise anything; the evaluation names the document
        return []
    requests = made if isinstance(made, list) else [made]
    given = [[argument for argument in request.arguments if isinstance(argument, str)] for request in requests]
    return ["".join(texts) for texts in given if texts[0]]  # acc_mutual_info also scores answers without the prompt


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
