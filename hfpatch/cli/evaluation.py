"""The command that scores: ``eval``."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

from hfpatch.cli import task_lists
from hfpatch.cli.eval_options import EvalOptions
from hfpatch.cli.eval_reading import (
    check_output_options,
    device_map_of,
    read_models,
    read_scales,
    read_settings,
    with_model_args,
)
from hfpatch.cli.quiet import quiet_libraries
from hfpatch.cli.running import interruptible
from hfpatch.support.lazy import collection_paused

if TYPE_CHECKING:
    from hfpatch.results.schema import EvaluationResults


def evaluate(given: EvalOptions) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks; or compare several whole models.

    Options may be written as lm-eval's are, with underscores or dashes. On several processes, which share the work:
    accelerate launch -m hfpatch eval --model ...

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    if given.tasks in task_lists.LISTS:
        print(task_lists.task_list(given.tasks, given.include_path))
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
    from hfpatch.support.cache import cache_folder, is_writable

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
    if ranks.is_first:
        _print_results(found, given)


def _print_results(found: EvaluationResults, given: EvalOptions) -> None:
    """Print results as tables, or in the form that was asked for."""
    if given.as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    from hfpatch.reporting.evaluation import evaluation_document
    from hfpatch.reporting.terminal import print_document

    if given.as_markdown or given.as_latex:
        from hfpatch.reporting.evaluation import score_table_of
        from hfpatch.reporting.markdown import markdown_table
        from hfpatch.reporting.tabular import latex

        table = score_table_of({"": found})
        print((markdown_table(table) if given.as_markdown else latex(table)).rstrip())
    else:
        print_document(evaluation_document(found))
