"""`evaluate`: one model, patched or not, on lm-eval tasks."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState

from hfpatch.evaluation import TaskResult
from hfpatch.evaluation import evaluate as run_tasks
from hfpatch.evaluation.settings import EvaluationSettings
from hfpatch.pipeline.inspection import load_patched
from hfpatch.pipeline.progress import Progress
from hfpatch.recipe import ModelSettings


def evaluate(
    model: ModelSettings,
    *,
    patch: Path | None,
    settings: EvaluationSettings,
    data_dir: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskResult]:
    """Evaluate a model on the tasks of ``settings``.

    Args:
        model: the base.
        patch: a folder that `save_patch` or PEFT wrote; None evaluates the base.
        settings: the tasks.
        data_dir: a folder that holds local copies of hub data sets.
        progress: hears of every task; None tells nobody.

    Raises:
        HfpatchError: if the model, the patch, a task or its data cannot be had.
    """
    listener = progress or Progress()
    base = load_patched(model, patch)
    base.model.to(PartialState().device)
    return run_tasks(
        base.model,
        base.tokenizer,
        settings=settings,
        data_dir=data_dir,
        on_task=lambda task: listener.evaluating(model.name, task),
    )
