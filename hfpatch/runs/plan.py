"""The plan of a recipe as plain data: its runs, and the units of work that complete them.

A comparison is [evaluate the baseline -> check it], then, where its recipe tunes, [tune] for each method and rate, then
[train -> evaluate] for each method and seed; where the recipe asks, [retain] and [rewind] follow an evaluation. Where
seeds grow, a [look] follows all units of its seeds, and those of the next seeds need it. A study is [pretrain] for each
variant, point of its sweep and seed.
Engines execute the units in any order that their ``needs`` allow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Literal, TypeAlias

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import Point, PretrainRecipe, StudyRecipe, point_name
from hfpatch.recipes.questions import margins_of
from hfpatch.recipes.training import LoopSettings
from hfpatch.recipes.tuning import Edge
from hfpatch.runs.folder import AnyRecipe, RunPaths
from hfpatch.runs.locks import WHOLE, WORK

Action: TypeAlias = Literal["tune", "train", "evaluate", "retain", "rewind", "check_baseline", "look", "pretrain"]
MEASURING = ("evaluate", "retain", "rewind")
"""The actions that measure a saved patch, or the bare base."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: a method of a comparison or a variant of a study, with one seed, in its folder.

    Attributes:
        name: how progress and messages call it.
        variant: the method or the variant; the recipe's name where it has neither.
        point: the point of a study's sweep, or the values of a trial of tuning; empty where there is neither.
        seed: the seed.
        folder: where it writes.
        lock: the name of the lock on it: its folder below ``runs``, with ``@`` for ``/``.
    """

    name: str
    variant: str
    point: Point
    seed: int
    folder: Path
    lock: str

    @property
    def result(self) -> Path:
        """The run's outcome; written last, so that it marks the run as complete."""
        return self.folder / "result.json"


@dataclass(frozen=True)
class Unit:
    """A piece of work on one run.

    Attributes:
        action: ``tune`` tries a method at the values of one trial, which an extension of the rates may turn out not to
            need; ``train`` or ``evaluate`` a method, ``retain`` to measure it on the texts of ``retention``, ``rewind``
            to measure its patch at ``scale``, ``check_baseline`` to compare the baseline's scores with its known ones,
            ``look`` to test with so many ``seeds`` which primary pairs are decided, ``pretrain`` a model from scratch.
        run: the run, with its name, its folder and its lock.
        marker: the file that is written last, so that it marks the unit as complete; None for a check or a look, which
            are repeated in every session.
        needs: the units that must be complete before this one starts.
        scale: the factor of the patch's change in a ``rewind``.
        seeds: the number of seeds of a ``look``.
    """

    action: Action
    run: PlannedRun
    marker: Path | None
    needs: tuple[Unit, ...] = ()
    scale: float = 1.0
    seeds: int = 0

    @property
    def work_lock(self) -> str:
        """The name of the lock that whoever completes the unit holds."""
        return WORK.format(self.run.lock)

    def is_complete(self) -> bool:
        """Return whether nothing is left to do."""
        return self.marker is not None and self.marker.is_file()


@dataclass(frozen=True)
class Round:
    """Trials of tuning that are decided on together: at the recipe's rates, at one beyond them, or at rates between.

    Attributes:
        edge: where it is one, the round is needed where a method's best rate of the rounds before is this edge of the
            rates tried so far; all or none of its trials take place.
        runs: the trials, equally many of each method.
        enough: of a refinement, what the choice of a rate may be worth for each method, in nats per token, without it;
            else each method has its trials at the two rates beside its best one.
    """

    edge: Edge | None
    runs: tuple[PlannedRun, ...]
    enough: float | None = None


@dataclass(frozen=True)
class Plan:
    """The runs of a recipe in one folder, and the units of one command.

    Attributes:
        recipe: the recipe.
        out: the folder.
        runs: all runs of the recipe.
        units: the units of the command, each after the units that it needs.
        part: the method or variant that the command is limited to; None for all.
        tuning: the trials of all methods, in the order in which they are decided on.
    """

    recipe: AnyRecipe
    out: Path
    runs: tuple[PlannedRun, ...]
    units: tuple[Unit, ...]
    part: str | None = None
    tuning: tuple[Round, ...] = ()

    @property
    def locks(self) -> list[str]:
        """The locks that the command needs, each once."""
        return list(dict.fromkeys(unit.run.lock for unit in self.units))


def training_steps(recipe: AnyRecipe, unit: Unit) -> int | None:
    """Return how many steps a unit trains; None where epochs decide that, until the set-up makes them steps."""
    training: LoopSettings = recipe.training
    if isinstance(recipe, StudyRecipe):
        training = recipe.single(unit.run.variant, unit.run.point, unit.run.seed).training
    elif isinstance(recipe, Recipe) and recipe.tuning and recipe.tuning.steps and unit.action == "tune":
        return recipe.tuning.steps
    return training.steps if training.epochs is None else None


def plan_comparison(recipe: Recipe, out: Path) -> Plan:
    """Plan all of a comparison: nothing is trained before the baseline is evaluated and has passed its check.

    Where seeds grow, the units of all seeds are there; `hfpatch.runs.looks` says which of them are wanted.
    """
    baseline, *others = runs = planned_runs(recipe, out)
    evaluated = Unit("evaluate", baseline, baseline.result)
    checked = Unit("check_baseline", baseline, None, (evaluated,))
    tuning, trials = _plan_tuning(recipe, out, (checked,))
    units = [evaluated, checked, *_further(recipe, evaluated), *trials]
    needs, looks = tuple(trials) or (checked,), recipe.training.looks
    for fewest, most in pairwise((0, *looks)) if looks else [(0, None)]:
        own = []
        for run in [run for run in others if most is None or fewest <= run.seed < most]:
            trained = Unit("train", run, RunPaths(run.folder).training, needs)
            evaluated = Unit("evaluate", run, run.result, (trained,))
            own += [trained, evaluated, *_further(recipe, evaluated)]
        units += own
        if most is not None:  # the next seeds wait for it
            units.append(Unit("look", baseline, None, (*units[:2], *own), seeds=most))
            needs = (units[-1],)
    return Plan(recipe, out, (*runs, *(run for each in tuning for run in each.runs)), tuple(units), tuning=tuning)


def _further(recipe: Recipe, evaluated: Unit) -> list[Unit]:
    """Return the units that follow an evaluation, one after the other as they share its lock."""
    run, paths = evaluated.run, RunPaths(evaluated.run.folder)
    units = [evaluated]
    if recipe.retention is not None:
        units.append(Unit("retain", run, paths.retention, (units[-1],)))
    for scale in (*recipe.rewind, 1.0) if recipe.rewind and run.variant != recipe.baseline else ():
        units.append(Unit("rewind", run, paths.rewound(scale), (units[-1],), scale))
    return units[1:]


def plan_training(recipe: Recipe, out: Path, method: str) -> Plan:
    """Plan the training of one method of a comparison with every seed; it does not wait for the baseline.

    Where the recipe tunes, the method is tuned first, and its rates are extended by its own trials alone: the other
    methods' are not known here. `plan_comparison` then adds what theirs ask for.

    Raises:
        HfpatchError: if there is no such method, or nothing in it to train.
    """
    _check_known("method", method, recipe.methods)
    if method == recipe.baseline:
        raise HfpatchError(f"{method!r} is the unchanged model: there is nothing to train")
    runs, (tuning, trials) = planned_runs(recipe, out), _plan_tuning(recipe, out, (), recipe.tuned_at(method))
    units = (Unit("train", run, RunPaths(run.folder).training, tuple(trials)) for run in runs if run.variant == method)
    all_runs = (*runs, *(run for each in tuning for run in each.runs))
    return Plan(recipe, out, all_runs, (*trials, *units), part=method, tuning=tuning)


def plan_pretraining(recipe: PretrainRecipe | StudyRecipe, out: Path, variant: str | None = None) -> Plan:
    """Plan the training of one model, of all runs of a study or of those of one variant.

    Raises:
        HfpatchError: if there is no such variant.
    """
    if isinstance(recipe, StudyRecipe) and variant is not None:
        _check_known("variant", variant, recipe.variants)
    runs = planned_runs(recipe, out)
    units = (Unit("pretrain", run, run.result) for run in runs if variant in (None, run.variant))
    return Plan(recipe, out, runs, tuple(units), part=variant)


def planned_runs(recipe: AnyRecipe, out: Path) -> tuple[PlannedRun, ...]:
    """Return every run of a recipe, seed by seed, so that an unfinished comparison has paired runs.

    A comparison's baseline comes first and once: nothing in it depends on a seed.
    """
    if isinstance(recipe, PretrainRecipe):
        return (PlannedRun(recipe.name, recipe.name, {}, recipe.seed, out, WHOLE),)
    chosen: list[tuple[str, Point, int]]
    if isinstance(recipe, Recipe):
        others = [name for name in recipe.methods if name != recipe.baseline]
        chosen = [
            (recipe.baseline, {}, 0),
            *((name, {}, seed) for seed in recipe.training.all_seeds for name in others),
        ]
    else:
        variants = [(variant, point) for variant in recipe.variants for point in recipe.points(variant)]
        chosen = [(*each, seed) for seed in recipe.seeds for each in variants]
    runs = []
    for variant, point, seed in chosen:
        name = " · ".join(part for part in (variant, point_name(point), f"seed {seed}") if part)
        folder = out / "runs" / variant / point_name(point) / f"seed-{seed}"
        runs.append(PlannedRun(name, variant, point, seed, folder, "@".join(folder.relative_to(out / "runs").parts)))
    return tuple(runs)


def _plan_tuning(
    recipe: Recipe, out: Path, needs: tuple[Unit, ...], part: str | None = None
) -> tuple[tuple[Round, ...], list[Unit]]:
    """Return the trials of all methods, at the recipe's rates, then lower ones, then higher ones, and their units.

    With ``tuning.at: middle`` those of a method's middle budget serve all its budgets.

    Args:
        recipe: the recipe.
        out: the folder.
        needs: the units that the first round needs; each further one needs all rounds before, which decide whether it
            takes place.
        part: the one method that gets units; None for all.
    """
    tuning = recipe.tuning
    if tuning is None:
        return (), []
    rounds: list[tuple[Edge | None, list[float], float | None]] = [(None, sorted(tuning.learning_rates), None)]
    edges: tuple[Edge, Edge] = ("lowest", "highest")
    rounds += [(edge, [rate], None) for edge in edges for rate in tuning.extension(edge)]
    enough = margins_of(recipe).get("nats_per_token", 0.0) / 2
    rounds += [(None, rates, enough) for rates in tuning.refinements()]
    trained = {name: recipe.methods[name] for name in recipe.trained}
    tried = dict.fromkeys(map(recipe.tuned_at, recipe.trained))
    found, units = [], list[Unit]()
    for edge, rates, least in rounds:
        runs, before = [], tuple(units) or needs
        for method, rate in product(tried, rates):
            for values in tuning.combinations(method, trained):
                point = {"lr": rate, **values}
                name, folder = f"{method} · {point_name(point)} · tuning", out / "runs" / method / "tuning"
                folder /= point_name(point)
                lock = "@".join(folder.relative_to(out / "runs").parts)
                runs.append(PlannedRun(name, method, point, recipe.tuning_seed, folder, lock))
        found.append(Round(edge, tuple(runs), least))
        own = [run for run in runs if part in (None, run.variant)]
        units += [Unit("tune", run, RunPaths(run.folder).training, before) for run in own]
    return tuple(found), units


def _check_known(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = nearest(name, known) or f"; there are {', '.join(known)}"
        raise HfpatchError(f"no {kind} {name!r} in the recipe{hint}")
