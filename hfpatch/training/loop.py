"""A run from its folder to its result: checked, resumed, trained, and the model left whole."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.packing import packing_is_exact
from hfpatch.errors import HfpatchError
from hfpatch.models.listening import paths_with_f
from hfpatch.nn.hidden import HiddenProjection
from hfpatch.training.checkpoint import (
    checkpoint_at,
    load_trainables,
    newest_checkpoint,
    remove_leftovers,
    remove_old,
)
from hfpatch.training.head import loss_in_forward
from hfpatch.training.interruption import SigtermWatch
from hfpatch.training.memory import peak_memory_bytes, reset_peak_memory
from hfpatch.training.precision import trainable_parameters
from hfpatch.training.processes import start_processes
from hfpatch.training.records import TrainResult, summarise
from hfpatch.training.run import Run
from hfpatch.training.sharding import cuts_tensors, under_deepspeed, whole_tensors
from hfpatch.training.survival import UpdateSurvival
from hfpatch.training.throughput import tokens_per_s_at_most
from hfpatch.training.trainer import PlanTrainer, prepared


def run_training(model: PreTrainedModel, run: Run, *, resume: bool) -> TrainResult:
    """Train to the end of the plan, from the newest checkpoint where there is one and ``resume`` is set.

    Raises:
        HfpatchError: if the launcher asks for mixed precision, the folder holds another run, the batch cannot be
            divided, the model cannot keep packed documents apart, take blocks as long as these or recompute its
            activations as asked, or the loss is not finite.
        Terminated: if the process was sent SIGTERM; a checkpoint has been written then.
    """
    start_processes()
    _check_plan(run)
    check_blocks(model, run.blocks, run.held_out)
    _check_checkpointing(model, run)
    _open_folder(run, resume=resume)
    if run.checkpoint is not None:
        load_trainables(run.checkpoint, trainable_parameters(model))
    reset_peak_memory()
    if not run.is_finished():
        _check_deepspeed(run)
        _train(model, run)
    if run.settings.keep_best and run.state.best_step is not None:
        load_trainables(checkpoint_at(run.checkpoints, run.state.best_step), trainable_parameters(model))
    shares = UpdateSurvival(run.state.survival).shares() if run.measure_survival else {}
    return summarise(
        run.records,
        peak_memory_bytes=peak_memory_bytes(),
        update_survival=shares,
        state=run.state,
        speed_limit=tokens_per_s_at_most(model, PartialState(), run.settings.autocast),
    )


def _train(model: PreTrainedModel, run: Run) -> None:
    with _whole_afterwards(model) as trained, prepared(trained, run), loss_in_forward(trained), SigtermWatch() as watch:
        trainer = PlanTrainer(trained, run, watch)
        trainer.train()
        trainer.accelerator.free_memory()


@contextlib.contextmanager
def _whole_afterwards(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield the model, or a copy of it where training cuts tensors in pieces; then copy back what was trained."""
    if not cuts_tensors():
        yield model
        return
    twin = copy.deepcopy(model)
    yield twin
    found = whole_tensors(trainable_parameters(twin))
    for name, parameter in trainable_parameters(model).items():
        parameter.data.copy_(found[name])


def _check_plan(run: Run) -> None:
    run.plan.check(len(run.blocks))
    planned, asked = (run.plan.steps, run.plan.batch_size), (run.settings.steps, run.settings.batch_size)
    if planned != asked:
        raise HfpatchError(
            f"the batch plan has {planned[0]} steps of {planned[1]} blocks, the settings ask for {asked[0]} of "
            f"{asked[1]}; start a new run or set steps and batch_size as planned"
        )
    if run.held_out is None and (run.settings.patience or run.settings.keep_best):
        raise HfpatchError(
            "patience and keep_best need the loss on held-out text, and there is none; set data.held_out"
        )
    if run.held_out is None and run.diagnose_every is not None:
        raise HfpatchError(
            "training.diagnose_every measures on evaluation blocks, and there are none; set data.held_out or "
            "evaluation_data"
        )


def _check_deepspeed(run: Run) -> None:
    """Refuse what needs the optimiser's state or the gradients, which DeepSpeed does not show."""
    if run.checkpoint is not None and not (run.checkpoint.resumable and not under_deepspeed()):
        raise HfpatchError(
            f"{run.checkpoint.folder}: a run under DeepSpeed cannot be resumed, as the optimiser's state stays inside "
            "DeepSpeed; start it again, or use FSDP2, which can be resumed"
        )
    if under_deepspeed() and (run.on_bad_loss == "skip" or run.settings.save_every is not None):
        key = "save_every" if run.settings.save_every is not None else "on_bad_loss=skip"
        raise HfpatchError(f"training.{key} does not work under DeepSpeed; leave it out, or use FSDP2")


def _open_folder(run: Run, *, resume: bool) -> None:
    """Find the checkpoint to go on from; the first process alone changes the folder, the others read what it left."""
    state = PartialState()
    if not resume and run.metrics.path.exists():
        raise HfpatchError(f"{run.folder}: holds a run already; resume it or choose another folder")
    if state.is_main_process:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_leftovers(run.checkpoints)
    state.wait_for_everyone()
    run.checkpoint = newest_checkpoint(run.checkpoints, run.identity)
    if run.checkpoint is not None:
        run.state = run.checkpoint.state
    if state.is_main_process:
        if run.start:  # a kill may have left some of what was to be removed
            keep = run.settings.keep_checkpoints
            remove_old(run.checkpoints, run.start, best_step=run.state.best_step, keep=keep)
        if run.start or run.metrics.path.exists():
            run.metrics.truncate(run.start)
        run.diagnostics.truncate(run.start, run.diagnosed_steps())
    state.wait_for_everyone()
    run.records = run.metrics.read()
    _check_agreement(run, state)


def _check_agreement(run: Run, state: PartialState) -> None:
    """Refuse processes that see another checkpoint or other data, as machines without a shared folder would."""
    if state.num_processes == 1:
        return
    seen = gather_object([(run.start, run.blocks.sha256, run.plan.sha256)])
    for what, values in zip(("checkpoint", "training blocks", "batch plan"), zip(*seen, strict=True), strict=True):
        if len(set(values)) > 1:
            raise HfpatchError(
                f"the processes see different things ({what}: {', '.join(sorted({str(value) for value in values}))}); "
                f"every machine must see the same {run.folder} and the same data"
            )


def check_blocks(model: PreTrainedModel, blocks: TokenBlocks, held_out: TokenBlocks | None = None) -> None:
    """Refuse blocks that the model cannot take.

    Raises:
        HfpatchError: if they are longer than its context, or it cannot keep packed documents apart.
    """
    check_context(model, blocks, held_out)
    several = len(blocks.sizes) > len(blocks)
    if blocks.layout == "packed" and several and not packing_is_exact(model, blocks.block_size):
        raise HfpatchError(
            f"{model.config.model_type} models cannot keep packed documents apart: attention crosses from one to the "
            "next; set data.layout=padded"
        )


def check_context(model: PreTrainedModel, blocks: TokenBlocks, held_out: TokenBlocks | None = None) -> None:
    """Refuse blocks that are longer than the context of the model, which may lie on the meta device.

    Raises:
        HfpatchError: if they are.
    """
    longest = max(each.block_size for each in (blocks, held_out) if each is not None)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise HfpatchError(
            f"blocks of {longest} tokens (data.block_size) are longer than the model's context of {limit} "
            "(max_position_embeddings, n_positions); take shorter blocks or a model of a longer context"
        )


def _check_checkpointing(model: PreTrainedModel, run: Run) -> None:
    if run.settings.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
        reads = any(isinstance(each.path.f, HiddenProjection) for each in paths_with_f(model))
        why = "its query reads another block's MLP" if reads else f"{model.config.model_type} does not support it"
        raise HfpatchError(f"training.gradient_checkpointing: a block cannot be computed again, as {why}; leave it out")
