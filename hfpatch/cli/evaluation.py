"""The command that scores: ``eval``."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfpatch.cli.eval_options import EvalOptions
from hfpatch.cli.eval_reading import (
    check_output_options,
    device_map_of,
    read_models,
    read_scales,
    read_settings,
    with_model_args,
)
from hfpatch.cli.running import interruptible, quiet_libraries
from hfpatch.errors import HfpatchError
from hfpatch.support.files import write_text
from hfpatch.support.folders import cache_folder, eval_dir, is_writable
from hfpatch.support.lazy import collection_paused

_LISTS = ("list", "list_groups", "list_subtasks", "list_tags")


def task_list(what: str, include_path: Path | None = None) -> str:
    """Return lm-eval's tables of tasks, groups and tags, with hfpatch's and the user's own.

    lm-eval reads 13,000 files to make them, so they are kept under a hash of these files' names, sizes and times.

    Args:
        what: one of ``_LISTS``.
        include_path: a folder with more task files.

    Raises:
        HfpatchError: if there is no such folder.
    """
    if include_path is not None and not include_path.is_dir():
        raise HfpatchError(f"{include_path}: no such folder; include_path is a folder with task files")
    spec = find_spec("lm_eval")
    tasks = [Path(place) / "tasks" for place in (spec.submodule_search_locations or ())] if spec is not None else []
    folders = [*tasks, eval_dir(), *([include_path] if include_path is not None else [])]
    found = (Path(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names)
    states = [(file, file.stat()) for file in found if file.suffix in (".yaml", ".py")]
    facts = sorted(f"{file} {state.st_size} {state.st_mtime_ns}" for file, state in states)
    stamp = hashlib.sha256("\n".join((version("lm_eval"), what, *facts)).encode()).hexdigest()
    kept = cache_folder("tasks") / f"{stamp}.txt"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    from hfpatch.evaluation.index import list_tasks

    text = list_tasks(what, include_path)
    if is_writable(kept.parent, "the lists of tasks"):
        write_text(kept, text)
    return text


def evaluate(given: EvalOptions) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks; or compare several whole models.

    Options may be written as lm-eval's are, with underscores or dashes. On several processes, which share the work:
    accelerate launch -m hfpatch eval --model ...

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    if given.tasks in _LISTS:
        print(task_list(given.tasks, given.include_path))
        return
    check_output_options(given)
    given, more = with_model_args(given)
    settings, models, device_map = read_settings(given), read_models(given, more), device_map_of(given)
    quiet_libraries()
    with collection_paused():
        from hfpatch.surgery.placement import Placement
        from hfpatch.training.processes import start_ranks

        placement = Placement(device_map, given.tp)
        ranks = start_ranks(split=given.tp)  # before imports that take seconds, so that mistakes show at once
        placement.check(ranks.count)
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import evaluate as run_evaluate
    gc.freeze()
    answers = cache_folder("answers")
    kept = answers if given.cache and given.output is None and is_writable(answers, "the answers") else None
    folder = given.output or kept
    advice = f"the same command continues from what is in {folder}" if folder else "nothing is kept with --no-cache"
    with interruptible(advice), choose_progress() as progress:
        common: dict[str, Any] = {"settings": settings, "data_dir": given.data_dir, "output": given.output}
        common |= {"log_samples": given.log_samples, "cache_dir": kept, "placement": placement, "progress": progress}
        if len(models) > 1:
            from hfpatch.runs import evaluate_models

            found = evaluate_models(models, **common)
        else:
            of_one: dict[str, Any] = {"patches": given.patch or [], "baseline": given.baseline}
            of_one["scales"] = read_scales(given.scale)
            found = run_evaluate(models[0], allow_other_base=given.allow_other_base, **of_one, **common)
    if not ranks.is_first:
        return
    if given.as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif given.as_markdown or given.as_latex:
        from hfpatch.reporting.evaluation import score_table_of
        from hfpatch.reporting.markdown import markdown_table
        from hfpatch.reporting.tabular import latex

        table = score_table_of({"": found})
        print((markdown_table(table) if given.as_markdown else latex(table)).rstrip())
    else:
        from hfpatch.reporting.evaluation import evaluation_document
        from hfpatch.reporting.terminal import print_document

        print_document(evaluation_document(found))
