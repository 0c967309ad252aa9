"""The pretrainer: every parameter trained, from the first step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from accelerate import PartialState
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.errors import HfpatchError
from hfpatch.models import inner_width
from hfpatch.models.classes import FILE
from hfpatch.models.paths import query_paths_with_f
from hfpatch.recipes.training import PretrainSettings
from hfpatch.results.parts import TrainResult
from hfpatch.support.files import atomic_directory, write_text
from hfpatch.surgery.card import model_card, shown_base
from hfpatch.training.loop import run_training
from hfpatch.training.optim import cast_trainables
from hfpatch.training.run import Run
from hfpatch.training.trackers import check_trackers


def pretrain(
    model: PreTrainedModel,
    run: Run,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    save: bool = True,
) -> TrainResult:
    """Train all of ``model`` in float32, in place, and with ``save`` write it, with a card, as ``model/``.

    Training continues from the newest checkpoint in the run's folder. The evaluation loss is measured before the first
    step too. A run that diverges ends there, with a result: ``diverged_step`` names the step, its line is the last of
    metrics.jsonl, no model is written, and resuming returns the same result at once.

    Args:
        model: one of :func:`hfpatch.training.architecture.build_model`, or one to train further.
        run: the training, whose settings are `PretrainSettings`; ``origin`` has the hashes of the tokenizer and of the
            architecture.
        tokenizer: is saved beside the model.
        save: whether to write the model.

    Raises:
        HfpatchError: as :func:`hfpatch.training.loop.run_training`, though never for a loss, or as
            :func:`check_settings`; or if diagnostics are asked for without evaluation blocks.
    """
    settings = run.settings
    assert isinstance(settings, PretrainSettings)
    check_settings(settings, model)
    model.requires_grad_(True)
    cast_trainables(model, torch.float32)
    run = replace(
        run,
        settings=scale_rates(settings, model.config),
        measure_survival=False,
        diagnose_every=settings.diagnose_every if query_paths_with_f(model) else None,
    )
    result = run_training(model, run)
    if save and result.diverged_step is None and PartialState().is_main_process:
        with atomic_directory(run.folder / "model") as temporary:
            model.save_pretrained(temporary)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            write_text(temporary / "README.md", _card(model, run, result))
    return result


def _card(model: PreTrainedModel, run: Run, result: TrainResult) -> str:
    sources = [part.source for part in run.blocks.parts] or [run.blocks.source]
    training = [
        ("Parameters", f"{model.num_parameters():,}"),
        ("Text", ", ".join(map(shown_base, sources))),
        ("Steps", f"{result.steps:,}"),
        ("Tokens", f"{result.tokens:,}"),
        ("Loss of the last step", f"{result.final_loss:.4f} nats per token"),
    ]
    loss = result.final_eval_loss
    if run.settings.keep_best and result.best_step is not None:
        loss = result.best_eval_loss
        training.append(("Weights", f"those after step {result.best_step:,}, the best on held-out text"))
    if loss is not None:
        training.append(("Loss on held-out text", f"{loss:.4f} nats per token"))
    return model_card(type(model).__name__, training, code=FILE if hasattr(model.config, "auto_map") else None)


def scale_rates(settings: PretrainSettings, config: PreTrainedConfig) -> PretrainSettings:
    """Return the settings with learning rates scaled to the model's width by ``lr_scaling``.

    With ``width`` each is multiplied by 4d / w, w the inner width of the MLP: an MLP of 4.75d trains at 4 / 4.75 of the
    rate. Recipes state their rates for 4d in every architecture, so a gated MLP of 8/3 d trains at 1.5 times the rate.

    Raises:
        HfpatchError: if the configuration does not say what w is.
    """
    if settings.lr_scaling == "none":
        return settings
    config = config.get_text_config()
    width = inner_width(config)
    if width is None:
        raise HfpatchError(
            f"training.lr_scaling: width needs the inner width of the MLP, and {config.model_type} has no key that "
            "hfpatch recognises; leave it out and set training.lr itself"
        )
    factor = 4 * config.hidden_size / width
    rates = {group: rate * factor for group, rate in settings.learning_rates.items()}
    return settings.model_copy(update={"lr": settings.lr * factor, "learning_rates": rates})


def check_settings(settings: PretrainSettings, model: PreTrainedModel) -> None:
    """Refuse settings that this model, which may be on the meta device, cannot be pretrained with.

    Raises:
        HfpatchError: if the bound of divergence is not above ln V, a tracker is not installed, or as
            :func:`scale_rates`.
    """
    check_trackers(settings.report_to)
    scale_rates(settings, model.config)
    vocabulary = model.config.get_text_config().vocab_size
    bound, untrained = settings.diverged_above, math.log(vocabulary)
    if bound is not None and bound <= untrained:
        raise HfpatchError(
            f"training.diverged_above is {bound:g} nats a token; must be above ln V = {untrained:.2f}, the loss with "
            f"which a model of {vocabulary} tokens begins"
        )
