"""`pretrain`: a pretraining recipe in, a Hugging Face model folder out, or the report of a study."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hfpatch.data.plan import BatchPlan, draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.models import non_embedding_parameters
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe, load_pretrain_or_study
from hfpatch.runs.corpus import Corpus, load_corpus
from hfpatch.runs.folder import check_same_recipe, holds_run, no_false_start
from hfpatch.runs.identity import (
    Identity,
    check_run,
    check_shared,
    hash_values,
    identify_training,
    write_shared,
)
from hfpatch.runs.locks import WHOLE, hold
from hfpatch.runs.progress import Progress
from hfpatch.support.files import read_json, remove_leftovers, write_json
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.architecture import build_model
from hfpatch.training.loop import check_blocks
from hfpatch.training.pretrain import check_settings
from hfpatch.training.pretrain import pretrain as run_pretraining
from hfpatch.training.processes import start_processes
from hfpatch.training.records import StepRecord, TrainResult


def pretrain(
    recipe: PretrainRecipe, out: Path, *, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a model from scratch as the recipe says and write it with its tokenizer to ``out/model``.

    Beside it stand recipe.yaml, metrics.jsonl, diagnostics.jsonl where asked for and, written last, result.json. A run
    that diverges ends there; it has no ``out/model``, and its result says at which step.

    Args:
        recipe: what to train on what.
        out: the run folder.
        resume: continue the run in ``out``.
        progress: called at every step; None shows nothing.

    Returns:
        The content of ``out/result.json``.

    Raises:
        HfpatchError: if ``out`` may not take this run, or something the recipe names is not as it says.
    """
    state = start_processes()
    if state.is_main_process:
        check_folder(out, recipe, resume=resume)
    state.wait_for_everyone()
    if (out / "result.json").is_file():
        finished: dict[str, Any] = read_json(out / "result.json")
        return finished
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(hold(out, [WHOLE]))
            stack.enter_context(no_false_start(out, [WHOLE]))
        state.wait_for_everyone()
        corpus = load_corpus(recipe)
        plan = draw_batches(recipe, corpus, recipe.seed)
        if state.is_main_process:
            identity = identify_run(recipe, corpus, plan)
            check_shared(out, identity, {})
            check_run(out, identity)
        return pretrain_on(corpus, plan, recipe, out, resume=resume, progress=progress or Progress(), name=recipe.name)


def pretrain_on(
    corpus: Corpus,
    plan: BatchPlan,
    recipe: PretrainRecipe,
    out: Path,
    *,
    resume: bool,
    progress: Progress,
    name: str,
) -> dict[str, Any]:
    """Train one model on a corpus that is at hand; otherwise as `pretrain`, without its checks of the folder."""
    clock, state = Clock(), start_processes()
    identity = identify_run(recipe, corpus, plan)
    model = build_model(recipe.architecture, tokenizer=corpus.tokenizer, seed=recipe.seed)
    check_blocks(model, corpus.train, corpus.evaluation)
    check_settings(recipe.training, model)
    parameters = parameter_counts(model)
    if state.is_main_process:
        write_shared(out, recipe.to_yaml(), identity, {})
    progress.started(name, recipe.training.steps)
    outcome = run_pretraining(
        model,
        settings=recipe.training,
        blocks=corpus.train,
        plan=plan,
        evaluation_blocks=corpus.evaluation,
        tokenizer=corpus.tokenizer,
        seed=recipe.seed,
        run_dir=out,
        resume=resume,
        on_step=_teller(progress, name),
        origin=identity,
    )
    result = {
        "provenance": provenance(clock),
        "identity": identity,
        "data": corpus.train.to_json(),
        "plan": {"sha256": plan.sha256},
        "parameters": parameters,
        "train": outcome.to_json(),
    }
    if state.is_main_process:
        write_json(out / "result.json", result)
        if not recipe.training.keep_finished:  # they are of use to an interrupted run only
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
    state.wait_for_everyone()
    progress.finished(name, _summary(outcome))
    return result


def draw_batches(recipe: PretrainRecipe | StudyRecipe, corpus: Corpus, seed: int) -> BatchPlan:
    """Draw which blocks every step of a run with this seed sees."""
    settings = recipe.training
    return draw_plan(blocks=len(corpus.train), steps=settings.steps, batch_size=settings.batch_size, seed=seed)


def identify_run(recipe: PretrainRecipe, corpus: Corpus, plan: BatchPlan) -> Identity:
    """Return the identity of one model's training."""
    architecture = {"architecture": hash_values(recipe.architecture)}
    return {**corpus.identity, **architecture, **identify_training(recipe.training, plan)}


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """Return how many parameters a model has, in total and outside embeddings and head."""
    return {"total": model.num_parameters(), "non_embedding": non_embedding_parameters(model)}


def check_folder(out: Path, recipe: PretrainRecipe | StudyRecipe, *, resume: bool) -> None:
    """Refuse a folder that may not take this recipe's run.

    Raises:
        HfpatchError: if ``out`` is a file, holds something else or another recipe's run, or this recipe's and
            ``resume`` is not set.
    """
    remove_leftovers(out)
    if not holds_run(out):
        return
    check_same_recipe(out, load_pretrain_or_study(out / "recipe.yaml"), recipe)
    if not resume:
        raise HfpatchError(f"{out}: holds a run already; --resume to continue it, or choose another --out")


def _teller(progress: Progress, name: str) -> Callable[[StepRecord], None]:
    return lambda record: progress.stepped(name, record)


def _summary(outcome: TrainResult) -> str:
    if outcome.diverged_step is not None:
        return f"diverged at step {outcome.diverged_step}"
    measured = outcome.final_eval_loss
    return f"loss {outcome.final_loss:.4f}" + (f", on held-out text {measured:.4f}" if measured is not None else "")
