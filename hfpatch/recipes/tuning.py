"""The section ``tuning`` of a recipe: rates and other values to try for every method before the comparison."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import Parts
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.strict import Section, check_once, read_override, shown
from hfpatch.recipes.training import NOT_IDENTITY, LoopSettings, PretrainSettings, TrainingSettings

Values: TypeAlias = dict[str, Any]
"""The values of a trial: ``lr``, other keys of training, options of the method's parts as ``0.lora_alpha``."""
Edge: TypeAlias = Literal["lowest", "highest"]

_FIRST_SEED = 1000
_NEAR = 1.01
_SAME_FOR_ALL = (
    *("steps", "epochs", "batch_size", "seeds", "evaluate_every", "diagnose_every"),
    *("patience", "keep_best", "on_bad_loss"),
)
_BY_GROUP = ("learning_rates", "trainable_dtypes")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")


class TuningSettings(Section):
    """Trials of every method at the same learning rates, on the same batches, before any final run."""

    learning_rates: tuple[PositiveFloat, ...]
    """The rates that every trained method is tried at; they replace ``training.lr``."""
    steps: PositiveInt | None = None
    """Optimiser steps of a trial; None takes ``training.steps``."""
    held_out: PositiveInt = 256
    """So many groups of documents (``data.group``) are taken away from the training text, and the loss on them decides.
    Each document occurs once in the text and in no task. They are drawn over the whole text by ``data.seed``."""
    extend: NonNegativeInt = 2
    """Where a method's best rate is the lowest or the highest, up to so many more rates on that side, for every
    method."""
    refine: Annotated[int, Field(ge=0, le=4)] = 0
    """Up to so many times, two more rates for every method, halfway between its best and its neighbours, while the
    choice of a rate may be worth half the margin of ``nats_per_token``, or more, for some method; always without
    that margin."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """More values to try, in every combination with the rates: keys of training (``training.weight_decay``,
    ``training.learning_rates.skip``) for all methods, options of a method's parts (``methods.lora.0.lora_alpha``) for
    that one. Every method must have as many trials."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> TuningSettings:
        rates = sorted(self.learning_rates)
        if len(rates) < 2:
            raise ValueError(
                f"learning_rates lists {len(rates)} rate{'' if rates else 's'}, and tuning chooses between several; "
                "list two or more, or set training.lr and leave tuning out"
            )
        check_once("learning_rates", rates)
        if near := next((pair for pair in pairwise(rates) if pair[1] < _NEAR * pair[0]), None):
            raise ValueError(f"learning_rates lists {near[0]} and {near[1]}, which are nearly the same; leave one out")
        for key, values in self.grid.items():
            if len(values) < 2:
                count = f"{len(values)} value{'' if values else 's'}"
                raise ValueError(f"grid.{key} has {count}; list two or more, or set {key} itself")
            for value in values:
                if isinstance(value, dict | list) or (isinstance(value, str) and not _WORD.fullmatch(value)):
                    raise ValueError(
                        f"grid.{key} contains {shown(value)}; use numbers, truth values, null or single words"
                    )
            texts = list(map(shown, values))
            if repeated := next((text for text in texts if texts.count(text) > 1), None):
                raise ValueError(f"grid.{key} lists {repeated} twice; name each once")
        return self

    def extension(self, edge: Edge) -> list[float]:
        """Return the rates beyond an edge, the nearest first.

        They continue the ratio of the two outermost rates, to three digits.
        """
        rates = sorted(self.learning_rates, reverse=edge == "lowest")
        inner, outer = rates[-2:]
        return [float(f"{outer * (outer / inner) ** step:.2e}") for step in range(1, self.extend + 1)]

    def refinements(self) -> list[list[float]]:
        """Return the rates that each refinement chooses from: halfway between all before, and beyond them."""
        rates = sorted({*self.learning_rates, *self.extension("lowest"), *self.extension("highest")})
        refined = []
        for _ in range(self.refine):
            ends = rates[0] * rates[0] / rates[1], rates[-1] * rates[-1] / rates[-2]
            halfway = [math.sqrt(one * other) for one, other in pairwise([ends[0], *rates, ends[1]])]
            refined.append([float(f"{rate:.2e}") for rate in halfway])
            rates = sorted({*rates, *refined[-1]})
        return refined

    def combinations(self, method: str, methods: Mapping[str, Any]) -> list[Values]:
        """Return the values of the grid that a method is tried at with each rate, the last key varying fastest."""
        axes: dict[str, list[Any]] = {}
        for key, values in self.grid.items():
            owner, short = split_key(key, methods)
            if owner in (None, method):
                axes[short] = values
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def split_key(key: str, methods: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the method that a key of a grid belongs to, None for all, and the key within it or within training."""
    kind, _, rest = key.partition(".")
    if kind == "training":
        return None, rest
    owner = max((name for name in methods if rest.startswith(f"{name}.")), key=len, default="")
    return owner, rest.removeprefix(f"{owner}.")


def tuning_seed(seeds: Sequence[int]) -> int:
    """Return the seed of all trials: 1000, or the next one that no final run uses."""
    return next(seed for seed in itertools.count(_FIRST_SEED) if seed not in seeds)


def point_name(point: Mapping[str, Any]) -> str:
    """Return the values of a trial as a folder's name: ``lr=0.001,weight_decay=0.1``."""
    return ",".join(f"{key}={value}" for key, value in point.items())


def trial_changes(training: LoopSettings, tuning: TuningSettings) -> dict[str, Any]:
    """Return how a trial trains: its own steps, one measurement at the end, no trackers, divergence a result."""
    changes: dict[str, Any] = {"evaluate_every": None, "patience": None, "keep_best": False, "report_to": ()}
    if training.save_every is None:
        changes |= {"keep_checkpoints": 1}
    if tuning.steps is not None:
        changes |= {"steps": tuning.steps, "epochs": None}
    if isinstance(training, PretrainSettings):  # which always records divergence
        changes |= {"diagnose_every": None}
    elif isinstance(training, TrainingSettings) and training.on_bad_loss == "stop":
        changes |= {"on_bad_loss": "record"}
    return changes


def refuse_rate(overrides: Sequence[str], *, is_tuned: bool) -> None:
    """Refuse an override of the learning rate where tuning chooses all rates."""
    for override in overrides if is_tuned else ():
        if read_override(override)[0] == "training.lr":
            raise HfpatchError(
                f"override {override!r}: this recipe tunes the rate, so it has no effect; set "
                "tuning.learning_rates, or add tuning=null"
            )


def check_tuning(
    tuning: TuningSettings, training: LoopSettings, data: DataSettings, methods: Mapping[str, Parts]
) -> None:
    """Refuse a contradiction with the rest of the recipe; ``methods`` are the trained ones."""
    if tokens := [part.source for part in data.parts() if part.is_token_file]:
        raise HfpatchError(
            f"tuning sets documents of a text aside, and data.source {tokens[0]} contains tokens; use the text"
        )
    taken = tuning.held_out + (data.held_out or 0)
    if data.max_documents is not None and taken >= data.max_documents:
        also = f" with data.held_out ({data.held_out})" if data.held_out else ""
        raise HfpatchError(
            f"tuning.held_out is {tuning.held_out}; must{also} be below data.max_documents ({data.max_documents}), of "
            "which it is a part"
        )
    if tuning.steps is not None and training.warmup_steps >= tuning.steps:
        raise HfpatchError(
            f"tuning.steps is {tuning.steps}; must be above training.warmup_steps ({training.warmup_steps})"
        )
    if training.learning_rates:
        group = next(iter(training.learning_rates))
        raise HfpatchError(
            f"training.learning_rates.{group} fixes a rate that tuning would choose; leave it out, or tune it by "
            f"tuning.grid: {{training.learning_rates.{group}: [...]}}"
        )
    for key in tuning.grid:
        _check_key(key, training, methods)
    counts = {name: len(tuning.combinations(name, methods)) for name in methods}
    if len(set(counts.values())) < 2:
        return
    most, fewest = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    raise HfpatchError(
        f"tuning.grid gives {most} {counts[most]} settings and {fewest} {counts[fewest]}; every method must have as "
        "many trials: use keys of training, or options of every method with as many values"
    )


def _check_key(key: str, training: LoopSettings, methods: Mapping[str, Parts]) -> None:
    """Refuse a key of the grid that is neither a key of training that trials may differ in, nor an option of a part."""
    kind, _, rest = key.partition(".")
    if kind == "training":
        name, _, inner = rest.partition(".")
        if name == "lr":
            raise HfpatchError(f"tuning.grid: {key!r} is what tuning.learning_rates lists; name the rates there")
        if name in _SAME_FOR_ALL or name in NOT_IDENTITY:
            raise HfpatchError(f"tuning.grid: {key!r} must be the same for all trials; leave it out")
        keys = [key for key in type(training).model_fields if key not in (*_SAME_FOR_ALL, *NOT_IDENTITY, "lr")]
        if name not in keys or (inner and name not in _BY_GROUP):
            raise HfpatchError(f"tuning.grid: training has no key {rest!r}{nearest(name, keys)}")
        return
    if kind != "methods":
        raise HfpatchError(
            f"tuning.grid: {key!r} is neither a key of training nor an option of a method; write training.KEY or "
            "methods.METHOD.PART.OPTION, such as methods.lora.0.lora_alpha"
        )
    owner, short = split_key(key, methods)
    if not owner:
        name = rest.partition(".")[0]
        raise HfpatchError(f"tuning.grid: {key!r} names no method that is trained{nearest(name, methods)}")
    part, _, option = short.partition(".")
    count = len(methods[owner])
    if not part.isdigit() or int(part) >= count or not option:
        last = f"0 to {count - 1}" if count > 1 else "0"
        raise HfpatchError(
            f"tuning.grid: {key!r} must name a part of {owner} by its number ({last}) and an option of it"
        )
    if option in ("type", "match"):
        raise HfpatchError(f"tuning.grid: {key!r} changes the method {owner}; tune options that keep its type and size")
