"""Run the promises on a model and report the verdicts."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn

from hfpatch.errors import first_line
from hfpatch.methods import PreProjectionConfig
from hfpatch.promises import behaviour, catalogue, method, residual, site
from hfpatch.promises.common import Test, changed_by
from hfpatch.promises.inputs import Inputs, checked_inputs, example_inputs
from hfpatch.support.modes import evaluating
from hfpatch.surgery.bases import load_config
from hfpatch.surgery.model_class import load_model, other_class, own_class
from hfpatch.surgery.patch import patch, patch_summary, unpatch
from hfpatch.twins import twin

PROMISES: list[tuple[str, Test]] = [
    ("no-op at init", behaviour.no_op),
    ("each place keeps dtype and input", method.results),
    ("each place leaves nothing behind", method.leftovers),
    ("each place works on any device", method.devices),
    ("each place has the right gradient", method.derivatives),
    ("unpatch restores, base never changes", behaviour.unpatch_restores),
    ("attention is where it is declared", site.anatomy),
    ("pure: only the attention sees the change", site.purity),
    ("x~ reaches query, key and value", site.reach),
    ("the content skip reaches the residual", residual.arrival),
    ("projections are as declared", site.projections),
    ("temperatures scale their own heads", site.own_heads),
    ("equal results in every call", behaviour.repeatable),
    ("causality", site.causality),
    ("rows of a batch are independent", behaviour.rows),
    ("generation with and without cache", behaviour.cache),
    ("left padding", behaviour.padding),
    ("gradient checkpointing", behaviour.checkpointing),
    ("torch.compile", behaviour.compiled),
    ("gradients reach exactly the added tensors", behaviour.gradients_reach),
    ("save and load", behaviour.save_and_load),
    ("init independent of the rest", method.init_independent),
    ("fp32 trainables", behaviour.full_precision),
    ("PEFT's features", catalogue.peft_calls),
]


@dataclass(frozen=True)
class Verdict:
    """A promise's name, whether it holds, and the measurement."""

    promise: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class CheckReport:
    """The verdicts on one model and one configuration; ``str()`` is a table.

    Args:
        model: name of the model.
        method: the configuration's class.
        changed: number of blocks that the method changes.
        left_out: the reasons for other blocks, by index.
        verdicts: one for each promise.
    """

    model: str
    method: str
    changed: int
    left_out: dict[int, str]
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        """Whether every promise is kept."""
        return all(verdict.holds for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        width = max(len(verdict.promise) for verdict in self.verdicts)
        where = f"{self.changed} blocks" + (f", {len(self.left_out)} left out" if self.left_out else "")
        lines = [f"{self.model}: {self.method} in {where}"]
        lines += [f"  {'ok  ' if v.holds else 'FAIL'}  {v.promise:<{width}}  {v.measured}" for v in self.verdicts]
        return "\n".join(lines)

    __repr__ = __str__  # as a notebook shows it


def check(
    model_or_id: nn.Module | str,
    config: PeftConfig | None = None,
    *,
    inputs: Tensor | Inputs | None = None,
    config_only: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> CheckReport:
    """Run the promises on a model with a configuration; a given model is left unchanged.

    Args:
        model_or_id: a model of transformers of any kind, without adapters, or the name of one, which is loaded as the
            class that it was saved as.
        config: the method to inject; pre-projection with content skip by default.
        inputs: token ids ``(batch, seq)``, or the arguments of its ``forward`` by name; None makes them from its
            configuration. Its logits are compared, or its last hidden state.
        config_only: check a tiny random twin of the model's configuration; see :func:`hfpatch.twins.twin`.
        watch: called with ``(promise, done, total)`` before each promise is tested.

    Raises:
        HfpatchError: if the method cannot be injected into the model at all, or the model does not run with the inputs.
    """
    model: Any
    name = model_or_id if isinstance(model_or_id, str) else type(model_or_id).__name__
    if config_only:
        of = load_config(model_or_id) if isinstance(model_or_id, str) else model_or_id.config
        model = twin(of, own_class(of) if isinstance(model_or_id, str) else other_class(type(model_or_id)))
        name = f"a tiny random twin of {name}"
    else:
        model = load_model(model_or_id) if isinstance(model_or_id, str) else model_or_id
    config = config or PreProjectionConfig(content_skip=True)
    with ExitStack() as afterwards:
        afterwards.callback(torch.set_rng_state, torch.get_rng_state())
        afterwards.enter_context(evaluating(model))
        afterwards.callback(unpatch, model)
        left_out = patch_summary(patch(model, config)).skipped
        unpatch(model)
        sites = changed_by(model, config)
        given = example_inputs(model, sites) if inputs is None else checked_inputs(model, inputs)
        verdicts: list[Verdict] = []
        for promise, test in PROMISES:
            if watch is not None:
                watch(promise, len(verdicts), len(PROMISES))
            try:
                holds, measured = test(model, config, given)
            except Exception as error:  # a verdict, too
                holds, measured = False, first_line(error, kind=True)
                file = getattr(sys.modules.get(type(config).__module__), "__file__", None)
                lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
                if lines:  # in the method's own file
                    measured += f" ({Path(str(file)).name}, line {lines[-1]})"
            finally:
                unpatch(model)
            verdicts.append(Verdict(promise, holds, measured))
    return CheckReport(name, type(config).__name__, len(sites), left_out, verdicts)
