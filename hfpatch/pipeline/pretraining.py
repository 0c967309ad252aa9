"""`pretrain`: a pretraining recipe in, a Hugging Face model folder out."""

from __future__ import annotations

from pathlib import Path

from hfpatch.data.load import default_cache, load_evaluation, load_splits
from hfpatch.data.plan import draw_plan
from hfpatch.errors import HfpatchError
from hfpatch.files import write_json, write_text
from hfpatch.pipeline.folder import check_same_recipe, holds_run
from hfpatch.pipeline.progress import Progress
from hfpatch.pipeline.tokens import recipe_tokenizer
from hfpatch.provenance import Clock, provenance
from hfpatch.recipe import PretrainRecipe, load_pretrain_recipe
from hfpatch.training.architecture import build_model
from hfpatch.training.loop import check_blocks
from hfpatch.training.pretrain import pretrain as run_pretraining
from hfpatch.training.processes import start_processes


def pretrain(recipe: PretrainRecipe, out: Path, *, resume: bool = False, progress: Progress | None = None) -> Path:
    """Train a model from scratch as the recipe says and write it with its tokenizer to ``out/model``.

    Beside it stand recipe.yaml, metrics.jsonl and, written last, result.json.

    Args:
        recipe: what to train on what.
        out: the run folder.
        resume: continue the run in ``out``.
        progress: hears of every step; None tells nobody.

    Returns:
        ``out/model``.

    Raises:
        HfpatchError: if ``out`` may not take this run, or something the recipe names is not as it says.
    """
    clock, listener, state = Clock(), progress or Progress(), start_processes()
    if state.is_main_process:
        _check_folder(out, recipe, resume=resume)
    state.wait_for_everyone()
    if (out / "result.json").is_file():
        return out / "model"
    tokenizer = recipe_tokenizer(recipe)
    model = build_model(recipe.architecture, tokenizer=tokenizer, seed=recipe.seed)
    settings = recipe.training
    load = {"tokenizer": tokenizer, "data_dir": recipe.data_dir, "cache_dir": default_cache()}
    with state.local_main_process_first():  # the others find the tokens in the cache
        splits = load_splits(recipe.data, **load)
        evaluation = load_evaluation(recipe.evaluation_data, **load) if recipe.evaluation_data else splits.held_out
    blocks = splits.train
    check_blocks(model, blocks, evaluation)
    plan = draw_plan(blocks=len(blocks), steps=settings.steps, batch_size=settings.batch_size, seed=recipe.seed)
    if state.is_main_process:
        write_text(out / "recipe.yaml", recipe.to_yaml())
    listener.started(recipe.name, settings.steps)
    outcome = run_pretraining(
        model,
        settings=settings,
        blocks=blocks,
        plan=plan,
        evaluation_blocks=evaluation,
        tokenizer=tokenizer,
        seed=recipe.seed,
        run_dir=out,
        resume=resume,
        on_step=lambda record: listener.stepped(recipe.name, record),
    )
    if state.is_main_process:
        facts = {"provenance": provenance(clock), "data": blocks.to_json(), "plan": {"sha256": plan.sha256}}
        write_json(out / "result.json", {**facts, "train": outcome.to_json()})
    listener.finished(recipe.name, f"loss {outcome.final_loss:.4f}")
    return out / "model"


def _check_folder(out: Path, recipe: PretrainRecipe, *, resume: bool) -> None:
    if not holds_run(out):
        return
    check_same_recipe(out, load_pretrain_recipe(out / "recipe.yaml"), recipe)
    if not resume:
        raise HfpatchError(f"{out}: holds a run already; --resume to continue it, or choose another --out")
