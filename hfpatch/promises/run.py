"""Running the promises on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.promises import behaviour, residual, site
from hfpatch.promises.common import Test, example_tokens
from hfpatch.promises.report import CheckReport, Verdict
from hfpatch.sites import find_sites
from hfpatch.surgery.bases import load_base, load_config
from hfpatch.surgery.patch import patch, patch_summary, unpatch
from hfpatch.tuners import PreProjectionConfig
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.twins import twin

PROMISES: list[tuple[str, Test]] = [
    ("no-op at init", behaviour.no_op),
    ("unpatch restores, base never changes", behaviour.unpatch_restores),
    ("attention is what it is taken for", site.anatomy),
    ("pure: only the attention sees the change", site.purity),
    ("x~ reaches query, key and value", site.reach),
    ("the content skip reaches the residual", residual.arrival),
    ("projections are what they are taken for", site.query_columns),
    ("causality", site.causality),
    ("generation with and without cache", behaviour.cache),
    ("left padding", behaviour.padding),
    ("gradient checkpointing", behaviour.checkpointing),
    ("torch.compile", behaviour.compiled),
    ("gradients reach what was added, only that", behaviour.gradients_reach),
    ("save and load", behaviour.save_and_load),
    ("init independent of the rest", behaviour.init_independent),
    ("fp32 trainables", behaviour.full_precision),
]


def check(
    model_or_id: nn.Module | str,
    config: PeftConfig | None = None,
    *,
    config_only: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> CheckReport:
    """Run the promises on a model with a configuration; a model that is passed in is left as it was.

    Args:
        model_or_id: a causal language model without adapters, or what :func:`hfpatch.surgery.bases.load_base` takes.
        config: the method to inject; pre-projection with content skip by default.
        config_only: check a tiny random twin of the model's configuration, without its weights; see
            :func:`hfpatch.twins.twin`.
        watch: called with ``(promise, done, total)`` before each promise is tested.

    Raises:
        HfpatchError: if the method cannot be injected into the model at all.
    """
    model, name = _model(model_or_id, config_only)
    config = config or PreProjectionConfig(content_skip=True)
    training = model.training
    model.eval()
    random_state = torch.get_rng_state()
    try:
        changed, left_out = _reach(model, config)
        tokens = example_tokens(model)
        verdicts: list[Verdict] = []
        for promise, test in PROMISES:
            if watch is not None:
                watch(promise, len(verdicts), len(PROMISES))
            verdicts.append(_run(promise, test, model, config, tokens))
    finally:
        unpatch(model)
        model.train(training)
        torch.set_rng_state(random_state)
    return CheckReport(name, type(config).__name__, changed, left_out, verdicts)


def _model(model_or_id: nn.Module | str, config_only: bool) -> tuple[Any, str]:
    if not config_only:
        model = load_base(model_or_id).model if isinstance(model_or_id, str) else model_or_id
        return model, model_or_id if isinstance(model_or_id, str) else type(model).__name__
    config: Any = load_config(model_or_id) if isinstance(model_or_id, str) else model_or_id.config
    name = model_or_id if isinstance(model_or_id, str) else type(model_or_id).__name__
    return twin(config), f"a tiny random twin of {name}"


def _reach(model: Any, config: PeftConfig) -> tuple[int, dict[int, str]]:
    """Return how many blocks the configuration changes, and those that it leaves out."""
    left_out = patch_summary(patch(model, config)).skipped
    unpatch(model)
    layers = {found.layer for found in find_sites(model)} - left_out.keys()
    if isinstance(config, SurgeryConfig) and config.layers_to_transform is not None:
        wanted = config.layers_to_transform
        layers &= {wanted} if isinstance(wanted, int) else set(wanted)
    return len(layers), left_out


def _run(promise: str, test: Test, model: Any, config: PeftConfig, tokens: Tensor) -> Verdict:
    try:
        holds, seen = test(model, config, tokens)
    except HfpatchError:
        raise
    except Exception as error:  # a promise that breaks with an error is a verdict, not a crash
        holds, seen = False, f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        unpatch(model)
    return Verdict(promise, holds, seen)
