"""The plan of a recipe as plain data: its runs, and the units of work that complete them.

A comparison is [evaluate the baseline -> check it], then, where its recipe tunes, [tune] for each method and rate, then
[train -> evaluate] for each method and seed; where the recipe asks, [retain] and [rewind] follow an evaluation. Where
seeds grow, a [look] follows all units of its seeds, and those of the next seeds need it. A study of models from scratch
is the same without a baseline that is there already: every variant is trained.
Engines execute the units in any order that their ``needs`` allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Literal, TypeAlias

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.budgets import points_of
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.tuning import Edge, Values, point_name
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.locks import WORK

Action: TypeAlias = Literal["tune", "train", "evaluate", "retain", "rewind", "check_baseline", "look"]
MEASURING = ("evaluate", "retain", "rewind")
"""The actions that measure a saved patch, or the bare base."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: a method of a comparison or a variant of a study, with one seed, in its folder.

    Attributes:
        name: how progress and messages call it.
        variant: the method or the variant.
        point: the values of a trial of tuning; empty where it is none.
        seed: the seed.
        folder: where it writes.
        lock: the name of the lock on it: its folder below ``runs``, with ``@`` for ``/``.
    """

    name: str
    variant: str
    point: Values
    seed: int
    folder: Path
    lock: str

    @property
    def paths(self) -> RunPaths:
        """The paths of its files."""
        return RunPaths(self.folder)


@dataclass(frozen=True)
class Unit:
    """A piece of work on one run.

    Attributes:
        action: ``tune`` tries a method at the values of one trial, which an extension of the rates may turn out not to
            need; ``train`` or ``evaluate`` a method, ``retain`` to measure it on the texts of ``retention``, ``rewind``
            to measure its patch at ``scale``, ``check_baseline`` to compare the baseline's scores with its known ones,
            ``look`` to test with so many ``seeds`` which primary pairs are decided.
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

    recipe: Recipe | StudyRecipe
    out: Path
    runs: tuple[PlannedRun, ...]
    units: tuple[Unit, ...]
    part: str | None = None
    tuning: tuple[Round, ...] = ()

    @property
    def locks(self) -> list[str]:
        """The locks that the command needs, each once."""
        return list(dict.fromkeys(unit.run.lock for unit in self.units))


def plan_runs(recipe: Recipe | StudyRecipe, out: Path, part: str | None = None) -> Plan:
    """Plan a comparison or a study, or a part of it: the training of one method, or the runs of one variant.

    Nothing of a comparison is trained before its baseline is evaluated and has passed its check; a method alone does
    not wait for that. The rates of a part are extended by its own trials, as the others' are not known here; the whole
    plan then adds what theirs ask for. Where seeds grow, the units of all seeds are there; the looks taken say
    which of them are wanted.

    Raises:
        HfpatchError: if there is no such part, or nothing in it to train.
    """
    runs, is_comparison = planned_runs(recipe, out), isinstance(recipe, Recipe)
    if part is not None and part not in recipe.methods:
        at_budgets = ", ".join(points_of(part, recipe.methods))
        hint = f"; of its budgets name one: {at_budgets}" if at_budgets else nearest(part, recipe.methods)
        hint = hint or f"; there are {', '.join(recipe.methods)}"
        raise HfpatchError(f"no {'method' if is_comparison else 'variant'} {part!r} in the recipe{hint}")
    if part is not None and part not in recipe.trained:
        raise HfpatchError(f"{part!r} is the unchanged model: there is nothing to train")

    units, needs = list[Unit](), tuple[Unit, ...]()
    if is_comparison and part is None:
        evaluated, *further = _measurements(recipe, runs[0])
        needs = (Unit("check_baseline", runs[0], None, (evaluated,)),)
        units = [evaluated, *needs, *further]
    of_baseline = units[:2]
    tuning, trials = _plan_tuning(recipe, out, needs, part)
    units, needs = [*units, *trials], tuple(trials) or needs

    final = [run for run in runs if run.variant in recipe.trained and part in (None, run.variant)]
    is_measured, looks = part is None or not is_comparison, recipe.training.looks
    for fewest, most in pairwise((0, *looks)) if looks else [(0, None)]:
        of_seeds = list[Unit]()
        for run in [run for run in final if most is None or fewest <= run.seed < most]:
            trained = Unit("train", run, run.paths.training, needs)
            of_seeds += [trained, *(_measurements(recipe, run, trained) if is_measured else ())]
        units += of_seeds
        if most is not None and part is None:  # the next seeds wait for it
            needs = (Unit("look", runs[0], None, (*of_baseline, *of_seeds), seeds=most),)
            units += needs
    return Plan(recipe, out, (*runs, *(run for trials in tuning for run in trials.runs)), tuple(units), part, tuning)


def _measurements(recipe: Recipe | StudyRecipe, run: PlannedRun, *needs: Unit) -> list[Unit]:
    """Return the evaluation of a run and what follows it, one after the other as they share its lock."""
    units = [Unit("evaluate", run, run.paths.result, needs)]
    if isinstance(recipe, Recipe):
        if recipe.retention is not None:
            units.append(Unit("retain", run, run.paths.retention, (units[-1],)))
        for scale in (*recipe.rewind, 1.0) if recipe.rewind and run.variant != recipe.baseline else ():
            units.append(Unit("rewind", run, run.paths.rewound(scale), (units[-1],), scale))
    return units


def planned_runs(recipe: Recipe | StudyRecipe, out: Path) -> tuple[PlannedRun, ...]:
    """Return every run of a recipe, seed by seed, so that an unfinished comparison has paired runs.

    The baseline of a comparison comes first and once: nothing in it depends on a seed. That of a study is trained.
    """
    chosen = [(name, seed) for seed in recipe.training.all_seeds for name in recipe.trained]
    if isinstance(recipe, Recipe):
        chosen.insert(0, (recipe.baseline, 0))
    return tuple(_planned(f"{name} · seed {seed}", name, {}, seed, out, f"seed-{seed}") for name, seed in chosen)


def _planned(name: str, variant: str, values: Values, seed: int, out: Path, folder: str) -> PlannedRun:
    """Return a run in a ``folder`` of its method's."""
    path = out / "runs" / variant / folder
    return PlannedRun(name, variant, values, seed, path, "@".join(path.relative_to(out / "runs").parts))


def _plan_tuning(
    recipe: Recipe | StudyRecipe, out: Path, needs: tuple[Unit, ...], part: str | None = None
) -> tuple[tuple[Round, ...], list[Unit]]:
    """Return the trials of all methods, at the recipe's rates, then lower ones, then higher ones, and their units.

    Rates, and what goes with them, are those of `tuning_of`: a variant of a study may have its own.

    Args:
        recipe: the recipe.
        out: the folder.
        needs: the units that the first round needs; each further one needs all rounds before, which decide whether it
            takes place.
        part: the one method that gets units; None for all.
    """
    if recipe.tuning is None:
        return (), []
    trained = {name: recipe.methods[name] for name in recipe.trained}
    tried = {name: settings for name in trained if (settings := recipe.tuning_of(name)) is not None}
    extend, refine, edges = recipe.tuning.extend, recipe.tuning.refine, tuple[Edge, Edge](("lowest", "highest"))
    enough = recipe.margins.get("nats_per_token", 0.0) / 2
    rounds: list[tuple[Edge | None, float | None, dict[str, list[float]]]]
    rounds = [(None, None, {name: sorted(settings.learning_rates) for name, settings in tried.items()})]
    for edge, step in product(edges, range(extend)):
        rounds.append((edge, None, {name: [settings.extension(edge)[step]] for name, settings in tried.items()}))
    for step in range(refine):
        rounds.append((None, enough, {name: settings.refinements()[step] for name, settings in tried.items()}))
    made, units = [], list[Unit]()
    for edge, least, rates_of in rounds:
        runs, before = [], tuple(units) or needs
        for method, rate in [(method, rate) for method, rates in rates_of.items() for rate in rates]:
            for values in tried[method].combinations(method, trained):
                point = {"lr": rate, **values}
                name, folder = f"{method} · {point_name(point)} · tuning", f"tuning/{point_name(point)}"
                runs.append(_planned(name, method, point, recipe.tuning_seed, out, folder))
        made.append(Round(edge, tuple(runs), least))
        units += [Unit("tune", run, run.paths.training, before) for run in runs if part in (None, run.variant)]
    return tuple(made), units
