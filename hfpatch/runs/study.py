"""A pretraining study: every variant at every point of its sweep with every seed, resumable run by run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.reporting import write_report
from hfpatch.runs.corpus import Corpus, load_corpus
from hfpatch.runs.folder import no_false_start
from hfpatch.runs.identity import check_run, check_shared, write_shared
from hfpatch.runs.locks import hold, hold_shared, run_lock
from hfpatch.runs.pretraining import check_folder, draw_batches, identify_run, parameter_counts, pretrain_on
from hfpatch.runs.progress import Progress
from hfpatch.runs.study_bench import PlannedRun, StudyBench, planned_runs, study_clock
from hfpatch.runs.study_results import collect_study
from hfpatch.support.files import read_json, write_json
from hfpatch.training.architecture import build_model
from hfpatch.training.loop import check_context
from hfpatch.training.pretrain import check_settings
from hfpatch.training.processes import start_processes


def pretrain_study(
    recipe: StudyRecipe,
    out: Path,
    *,
    resume: bool = False,
    variant: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train every variant of a study with every seed on the same batches, compare them and report.

    All runs with one seed see the same blocks in the same order and start from the same weights where they share
    any. A run that diverges is a result like others. Each run leaves its result.json when it is complete; with
    ``resume`` such runs are not repeated, and one that was interrupted goes on from its newest checkpoint. On several
    processes every run is shared by all of them.

    Args:
        recipe: what to compare.
        out: the folder of the study.
        resume: continue the study in ``out``.
        variant: train this one's runs alone, and leave the report to a later call; several such calls may go on in
            one folder at a time.
        progress: called at every step; None shows nothing.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` may not take this study, a variant cannot be built, or something the recipe names is
            not as it says.
    """
    if variant is not None and variant not in recipe.variants:
        hint = nearest(variant, recipe.variants) or f"; there are {', '.join(recipe.variants)}"
        raise HfpatchError(f"no variant {variant!r} in the recipe{hint}")
    state, listener = start_processes(), progress or Progress()
    planned = [run for run in planned_runs(recipe, out) if variant in (None, run.variant)]
    with ExitStack() as stack:
        if state.is_main_process:
            _check_folder(out, recipe, variant, resume=resume)
            locks = [run_lock(out, run.folder) for run in planned]
            stack.enter_context(hold(out, locks))
            stack.enter_context(no_false_start(out, locks))
        state.wait_for_everyone()
        bench = _set_up(recipe, out)
        if state.is_main_process:
            _begin(bench, variant, resume=resume)
        for run in planned:
            if not run.result.is_file():
                _complete(run, bench, progress=listener)
                _collect(bench)
        _collect(bench)  # also what other calls completed
        if state.is_main_process and variant is None:
            write_report(out)
        state.wait_for_everyone()
        results: dict[str, Any] = read_json(out / "results.json")
        return results


def _check_folder(out: Path, recipe: StudyRecipe, variant: str | None, *, resume: bool) -> None:
    elsewhere = variant is not None and not (out / "runs" / variant).exists()
    check_folder(out, recipe, resume=resume or elsewhere)


def _set_up(recipe: StudyRecipe, out: Path) -> StudyBench:
    """Load the text and try each variant on the meta device, so that a mistake shows before any training."""
    corpus = load_corpus(recipe)
    return StudyBench(
        recipe=recipe,
        out=out,
        corpus=corpus,
        plans={seed: draw_batches(recipe, corpus, seed) for seed in recipe.seeds},
        parameters={name: _tried(recipe, name, corpus) for name in recipe.variants},
        clock=study_clock(out),
    )


def _tried(recipe: StudyRecipe, variant: str, corpus: Corpus) -> dict[str, int]:
    """Build a variant without memory, refuse what it cannot be trained with, and return its parameter counts."""
    singles = [recipe.single(variant, point, recipe.seeds[0]) for point in recipe.points(variant)]
    try:
        with torch.device("meta"):
            model = build_model(singles[0].architecture, tokenizer=corpus.tokenizer, seed=recipe.seeds[0])
        check_context(model, corpus.train, corpus.evaluation)
        for single in singles:
            check_settings(single.training, model)
    except HfpatchError as error:
        raise HfpatchError(f"variants.{variant}: {error}") from error
    return parameter_counts(model)


def _begin(bench: StudyBench, variant: str | None, *, resume: bool) -> None:
    """Write what all runs share, when nothing in the folder comes from something else."""
    with hold_shared(bench.out):
        _check_folder(bench.out, bench.recipe, variant, resume=resume)  # another process may have begun meanwhile
        check_shared(bench.out, bench.corpus.identity, bench.plans)
        for run in planned_runs(bench.recipe, bench.out):
            single = bench.recipe.single(run.variant, run.point, run.seed)
            check_run(run.folder, identify_run(single, bench.corpus, bench.plans[run.seed]))
        write_shared(bench.out, bench.recipe.to_yaml(), bench.corpus.identity, bench.plans)


def _collect(bench: StudyBench) -> None:
    """Write results.json, of what all processes that share the study have completed."""
    if start_processes().is_main_process:
        with hold_shared(bench.out):
            write_json(bench.out / "results.json", collect_study(bench).to_json())


def _complete(run: PlannedRun, bench: StudyBench, *, progress: Progress) -> None:
    single = bench.recipe.single(run.variant, run.point, run.seed)
    plan = bench.plans[run.seed]
    try:
        pretrain_on(bench.corpus, plan, single, run.folder, resume=True, progress=progress, name=run.name)
    except HfpatchError as error:
        raise HfpatchError(f"{run.name}: {error}") from error
