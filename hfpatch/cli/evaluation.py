"""The command that scores: ``eval``."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

from hfpatch.cli import options
from hfpatch.cli.options import AsJson, DataDir
from hfpatch.cli.quiet import quiet_libraries
from hfpatch.cli.running import interruptible
from hfpatch.support.lazy import collection_paused

if TYPE_CHECKING:
    from hfpatch.results.schema import EvaluationResults


def evaluate(
    model: options.Models,
    tasks: options.Tasks,
    include_path: options.IncludePath = None,
    cluster: options.Cluster = None,
    patch: options.Patches = None,
    baseline: options.Baseline = False,
    limit: options.Limit = None,
    num_fewshot: options.NumFewshot = None,
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = None,
    batch_size: options.BatchSize = 16,
    output: options.Output = None,
    cache: options.Cache = True,
    allow_unknown_base: options.AllowUnknownBase = False,
    allow_other_base: options.AllowOtherBase = False,
    data_dir: DataDir = None,
    revision: options.Revision = None,
    dtype: options.DtypeOption = "float32",
    device_map: options.DeviceMap = None,
    tp: options.TensorParallel = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks; or compare several whole models.

    On several processes, which share the work: accelerate launch -m hfpatch eval --model ...

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.recipes.strict import validate

    given = {
        "tasks": [name.strip() for name in tasks.split(",") if name.strip()],
        "include_path": str(include_path) if include_path else None,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "max_length": max_length,
        "token_budget": token_budget,
        "batch_size": batch_size,
        "allow_unknown_base": allow_unknown_base,
        "cluster": options.read_clusters(cluster),
    }
    settings = validate(given, EvaluationSettings, "hfpatch eval")
    options.check_patches_go_with(model, patches=bool(patch), baseline=baseline)
    models = options.read_models(model, revision, dtype, trust_remote_code)
    quiet_libraries()
    with collection_paused():
        from hfpatch.runs.placing import ranks_of
        from hfpatch.surgery.placement import Placement

        placement = Placement(device_map, tp)
        ranks = ranks_of(placement)  # before imports that take seconds, so that mistakes show at once
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import evaluate as run_evaluate
    gc.freeze()
    from hfpatch.support.cache import cache_folder, is_writable

    answers = cache_folder("answers")
    kept = answers if cache and output is None and is_writable(answers, "the answers") else None
    folder = output or kept
    advice = f"the same command continues from what is in {folder}" if folder else "nothing is kept with --no-cache"
    with interruptible(advice), choose_progress() as progress:
        common: dict[str, Any] = {"settings": settings, "data_dir": data_dir, "output": output, "cache_dir": kept}
        common["placement"] = placement
        of_one: dict[str, Any] = {"patches": patch or [], "allow_other_base": allow_other_base, "baseline": baseline}
        if len(models) > 1:
            from hfpatch.runs import evaluate_models

            found = evaluate_models(models, progress=progress, **common)
        else:
            found = run_evaluate(models[0], progress=progress, **of_one, **common)
    if ranks.is_first:
        _print_results(found, as_json=as_json)


def _print_results(found: EvaluationResults, *, as_json: bool) -> None:
    """Print results as tables or as JSON."""
    from hfpatch.reporting.evaluation import evaluation_document
    from hfpatch.reporting.terminal import print_document

    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_document(evaluation_document(found))
