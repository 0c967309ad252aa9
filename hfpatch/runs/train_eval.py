"""The units of a comparison: tune a method, train it, evaluate it, check the baseline's scores, look what is decided.

lm-eval, whose import takes seconds, is imported when an evaluation starts.
"""

from __future__ import annotations

import math
import shutil
import time
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
from accelerate import PartialState

from hfpatch.errors import HfpatchError, listed
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.recipes.tuning import point_name
from hfpatch.results.folder import RESULTS
from hfpatch.results.identity import task_identity
from hfpatch.results.parts import TaskResult
from hfpatch.results.records import loss_of, write_values
from hfpatch.results.series import patch_norms
from hfpatch.runs.folder import COSTS
from hfpatch.runs.identity import check_run, check_scores, check_seeds
from hfpatch.runs.locks import STALE_S, hold
from hfpatch.runs.plan import MEASURING, Plan, PlannedRun, Unit
from hfpatch.runs.pretraining import StudySetup, set_up_study, train_model
from hfpatch.runs.progress import Progress
from hfpatch.runs.records import Costs, Looks, Losses, RunResult, Trained
from hfpatch.runs.retention import by_document, measure_further, measure_held_out
from hfpatch.runs.setup import ComparisonSetup, set_up
from hfpatch.runs.tuning import Tuning
from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock, checkout_state
from hfpatch.surgery.folder import save_patch
from hfpatch.training.probe import train_probe
from hfpatch.training.processes import start_ranks
from hfpatch.training.validation import document_losses

EVERY_S = 30.0
"""Seconds between two writes of results.json while runs finish."""
SHARE = 0.05
"""The largest share of the time that writing may take; with very many runs it is written less often."""
COST_SHARE = 0.05
"""The share of a run's time that measuring the cost of each method may take."""


class TrainEvalSession:
    """One command on a run folder: it completes the units of a comparison of patches or of models from scratch.

    Args:
        plan: the units, of all methods or variants, or of one.
        progress: called at every step; None shows nothing.

    Attributes:
        setup: the inputs that all runs share, which `set_up` loads. Their recipe is the plan's.
        clock: gives results.json its times.
    """

    setup: ComparisonSetup | StudySetup
    is_unwritten = False
    """Whether a unit is complete that results.json does not have yet."""
    _next_write = -math.inf

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        self.plan, self.progress, self.clock = plan, progress or Progress(), Clock()

    def set_up(self) -> ComparisonSetup | StudySetup:
        """Load what the recipe names, and try each method or variant, so that a mistake shows before any training.

        From then on the plan has the recipe of the inputs: with its epochs as steps, and without methods that reach no
        size near their budget.

        Raises:
            HfpatchError: if something cannot be loaded or used.
        """
        recipe, rounds, part = self.plan.recipe, self.plan.tuning, self.plan.part
        if isinstance(recipe, StudyRecipe):
            self.setup = set_up_study(recipe, Tuning(rounds, part), self.progress)
        else:
            base = self.plan.runs[0].paths.tuning_losses
            self.setup = set_up(recipe, Tuning(rounds, part, base), self.progress)
        self.plan = replace(self.plan, recipe=self.setup.recipe)
        return self.setup

    def record(self, unit: Unit) -> None:
        """Note that a unit is complete, and write results.json unless that was done a short while ago.

        This affects only readers during the run: every run has its own result, from which the next call, or the next
        command after a kill, collects everything. A training changes nothing in it until it is evaluated.
        """
        begin = time.monotonic()
        self.is_unwritten |= unit.action in ("tune", *MEASURING)
        if self.is_unwritten and begin >= self._next_write:
            self.write_results()
            end = time.monotonic()
            self.is_unwritten, self._next_write = False, end + max(EVERY_S, (end - begin) / SHARE)

    def write_results(self, *, complete: bool = False) -> None:
        """Write results.json, of the runs that are complete so far; ``complete`` says that these are all.

        Of several processes the first does.
        """
        if PartialState().is_main_process:
            from hfpatch.runs.results import collect, publish_values

            out = self.plan.out
            results = collect(self.setup, out, self.clock, complete=complete)
            if complete and results.comparisons:
                publish_values(out, results, self.setup.tuning.losses(self.setup.recipe.baseline))
            write_json(out / RESULTS, results.to_json())

    def is_due(self, unit: Unit) -> bool:
        """Return whether `complete` would train or evaluate something; the units that this one needs are complete."""
        if unit.action in ("check_baseline", "look") or unit.is_complete() or not self.is_wanted(unit.run):
            return False
        if unit.action == "tune":
            return self.setup.tuning.needs(unit.run)
        return unit.action in MEASURING or not unit.run.paths.result.is_file()

    def is_wanted(self, run: PlannedRun) -> bool:
        """Return whether a run is needed: its method is not left out, and its seed is one of the first or asked for.

        After each look only the methods of undecided primary pairs, and their references, get the seeds up to the next.
        """
        training = self.setup.recipe.training
        if run.variant in self.setup.left_out:
            return False
        if run.point or not training.looks or run.seed in training.first_seeds:
            return True
        before = max(seeds for seeds in training.looks if seeds <= run.seed)
        return any(look.seeds == before and run.variant in look.growing for look in Looks.of(self.plan.out))

    def complete_alone(self, unit: Unit) -> bool:
        """Complete a unit, after a worker of a killed command that has not ended yet; return whether it was due."""
        is_due = self.is_due(unit)
        takes = is_due and PartialState().is_main_process
        with hold(self.plan.out, [unit.work_lock], wait_s=2 * STALE_S) if takes else nullcontext():
            self.complete(unit)
        return is_due

    def complete(self, unit: Unit) -> None:
        """Complete a unit; a run that is not needed has none."""
        run, setup, progress = unit.run, self.setup, self.progress
        if not self.is_wanted(run):
            return
        try:
            if unit.action == "look":
                self._look(unit.seeds)
            elif unit.action == "evaluate":
                if not unit.is_complete():
                    self._evaluate(run)
                progress.finished(run.name, RunResult.read(run.paths.result).summary)
            elif unit.action == "tune":
                if setup.tuning.needs(run):
                    if not unit.is_complete():
                        self.train(run)
                        trained = Trained.read(run.paths.training)
                        if trained.diverged_step is None:
                            summary = f"loss on the text of tuning {trained.final_eval_loss:.4f}"
                        else:
                            summary = f"diverged at step {trained.diverged_step}"
                        progress.finished(run.name, summary)
                    if PartialState().is_main_process:
                        shutil.rmtree(run.paths.checkpoints, ignore_errors=True)
            elif unit.action == "train":
                self._complete_training(unit)
            elif isinstance(setup, ComparisonSetup):
                if unit.action == "check_baseline":
                    self._check_baseline(setup, run)
                else:
                    progress.finished(run.name, measure_further(unit, setup, progress))
        except HfpatchError as error:
            name = f"look at {unit.seeds} seeds" if unit.action == "look" else run.name
            raise HfpatchError(f"{name}: {error}") from error

    def measure_costs(self) -> None:
        """Measure what a training step of each method costs, once, for at most a twentieth of the run's time.

        A study needs none of that: its runs' own steps say it.
        """
        path, setup = self.plan.out / COSTS, self.setup
        if not isinstance(setup, ComparisonSetup) or PartialState().num_processes > 1:
            return
        names = {name for name, method in setup.methods.items() if method.configs}
        if path.is_file() and Costs.read(path).methods.keys() == names:
            return
        from hfpatch.runs.costs import measure_costs

        if costs := measure_costs(setup, COST_SHARE * self.clock.seconds):
            Costs(methods=costs).write(path)

    def _look(self, seeds: int) -> None:
        """Test which primary pairs are decided with so many seeds, unless the looks before ask for no more."""
        from hfpatch.runs.results import take_look

        out = self.plan.out
        before = [look for look in Looks.of(out) if look.seeds < seeds]
        if before and not before[-1].growing:
            return
        if PartialState().is_main_process:
            results, look = take_look(self.setup, out, self.clock, before, seeds)
            Looks(looks=[*before, look]).write(out / Looks.file)
            outcomes: dict[str, list[str]] = {}
            for verdict in results.primary:
                outcome = f"{verdict.outcome} ({verdict.why})" if verdict.why else verdict.outcome
                pairs = outcomes.setdefault(outcome, [])
                pairs.append(f"{verdict.method} against {verdict.other} on {verdict.task}")
            parts = [f"{outcome}: {listed(pairs)}" for outcome, pairs in outcomes.items()]
            parts += [f"more seeds for {listed(look.growing)}"] if look.growing else []
            self.progress.finished(f"look at {seeds} seeds", "; ".join(parts))
        PartialState().wait_for_everyone()

    def _complete_training(self, unit: Unit) -> None:
        """Train a final run unless it is trained already, remove its checkpoints, and warn if it diverged.

        Raises:
            HfpatchError: if it was trained at other values than tuning chooses.
        """
        run, setup, training = unit.run, self.setup, unit.run.paths.training
        is_tuned = unit.is_complete() and setup.recipe.tuning is not None
        if is_tuned and Trained.read(training).identity != setup.identify(run):
            chosen = point_name(setup.tuning.chosen(run.variant)).replace(",", ", ")
            raise HfpatchError(
                f"was trained before the rates were extended, and tuning now chooses {chosen}; delete {run.folder} "
                "and resume to train it again"
            )
        if run.paths.result.is_file():
            return
        if not unit.is_complete():
            self.train(run)
        if not PartialState().is_main_process:
            return
        if not setup.recipe.training.keep_finished:
            shutil.rmtree(run.paths.checkpoints, ignore_errors=True)
        if (step := Trained.read(training).diverged_step) is not None:
            is_patch = isinstance(setup.recipe, Recipe)
            stop = ", and training.on_bad_loss=stop names the blocks of the step" if is_patch else ""
            warnings.warn(
                f"{run.name}: diverged at step {step}: it has no {'patch' if is_patch else 'model'} and no scores, and "
                f"is left out of the comparisons; a lower learning rate may help{stop}",
                stacklevel=2,
            )

    def train(self, run: PlannedRun) -> None:
        """Train a method or a variant, save it unless it diverged or is a trial, and write its outcome.

        A trial's outcome has its loss on the text of tuning, and its commit. Afterwards a base is as it was.
        """
        setup, progress = self.setup, self.progress
        identity = setup.identify(run)  # of now: files that a method's code names may change while it trains
        if not run.point:
            check_seeds(run.folder.parent, identity)
        with ExitStack() as stack:
            if isinstance(setup, ComparisonSetup):
                settings = setup.recipe_of(run).training
                progress.started(run.name, settings.steps)
                model = stack.enter_context(setup.patched(run))
                outcome = train_probe(model, setup.training(run, settings, identity, progress))
                if PartialState().is_main_process and outcome.diverged_step is None and not run.point:
                    save_patch(model, run.paths.patch)
            else:
                model, outcome = train_model(setup, setup.single(run), run, identity, progress)
            trained = Trained(**dict(outcome), identity=identity)
            if run.point:
                trained = trained.model_copy(update={"commit": checkout_state()[0]})
                if trained.diverged_step is None:
                    assert setup.tuning_text is not None
                    losses = by_document(document_losses, model, setup, setup.tuning_text, start_ranks())
                    measured = {"final_eval_loss": loss_of(losses.tolist()), "losses": losses.tolist()}
                    diverged = {"diverged_step": outcome.steps}
                    trained = trained.model_copy(update=measured if np.isfinite(losses).all() else diverged)
        if PartialState().is_main_process:  # last, as the base may turn out to have changed
            trained.write(run.paths.training)
        PartialState().wait_for_everyone()

    def _evaluate(self, run: PlannedRun) -> None:
        """Evaluate the bare base or what was saved, and write the run's result; a run that diverged has no scores.

        A patch whose model gives a document no finite log-likelihood counts as diverged. (On several processes that is
        an error, as the others wait for its scores.)
        """
        from hfpatch.evaluation.model import BrokenModelError

        paths, identity = run.paths, self.setup.identify(run)
        trained = Trained.read(paths.training) if paths.training.is_file() else None
        if trained is not None:
            check_run(run.folder, identity)  # code may have changed since, in another process
        scored = RunResult()
        if trained is None or trained.diverged_step is None:
            try:
                scored = self._score(run)
            except BrokenModelError as error:
                if trained is None or start_ranks().count > 1:
                    raise
                trained = trained.model_copy(update={"diverged_step": trained.steps})
                trained.write(paths.training)
                warnings.warn(
                    f"{run.name}: {error}: it counts as diverged, has no patch and no scores, and is left out of the "
                    "comparisons; a lower learning rate may help",
                    stacklevel=2,
                )
        if PartialState().is_main_process:
            if trained is not None and trained.diverged_step is not None:
                shutil.rmtree(paths.patch, ignore_errors=True)
            facts = {"commit": checkout_state()[0], "identity": identity, "train": trained}
            scored.model_copy(update={**facts, "layers": patch_norms(paths.patch)}).write(paths.result)
        PartialState().wait_for_everyone()

    def _score(self, run: PlannedRun) -> RunResult:
        """Return the scores on the tasks, of a study on held-out text alone, and how they were computed."""
        from hfpatch.evaluation.cache import computed_with
        from hfpatch.evaluation.run import Storage, evaluate
        from hfpatch.evaluation.selection import select

        setup, progress, paths, ranks = self.setup, self.progress, run.paths, start_ranks()
        recipe, records = setup.recipe, paths.evaluations if ranks.is_first else None
        is_base = isinstance(setup, ComparisonSetup) and run.variant == recipe.baseline
        scores: dict[str, TaskResult] = {}
        with setup.saved(run) as model:
            model.eval()
            if is_base and setup.tuning_text is not None:  # which bounds the losses of trials
                losses = by_document(document_losses, model, setup, setup.tuning_text, ranks)
                if ranks.is_first:
                    Losses(losses=losses.tolist()).write(paths.tuning_losses)
            if setup.held_out is not None:
                progress.evaluating(run.name, HELD_OUT)
                scores[HELD_OUT] = measure_held_out(model, setup, records, ranks, with_starts=is_base)
            if isinstance(setup, ComparisonSetup):
                scores = evaluate(
                    model,
                    setup.base.tokenizer,
                    select(setup.recipe.evaluation, recipe.data_dir),
                    storage=Storage(paths.evaluations, answers=paths.answers, base_sha256=setup.base.sha256),
                    scored=scores,
                    on_task=partial(progress.evaluating, run.name),
                    on_scored=partial(progress.scored, run.name),
                    ranks=ranks,
                )
                baseline, *_ = self.plan.runs
                check_scores(baseline.paths.result, {task: task_identity(score) for task, score in scores.items()})
            elif records is not None:
                write_values(records, scores)
            return RunResult(evaluation=scores, computed_with=computed_with(model))

    def _check_baseline(self, setup: ComparisonSetup, run: PlannedRun) -> None:
        """Stop if a metric allows no comparison, or the base's scores are not the published ones."""
        from hfpatch.evaluation import all_aggregations, check_comparable, check_known_scores
        from hfpatch.evaluation.selection import select

        recipe, scores = setup.recipe, RunResult.read(run.paths.result).evaluation
        tasks = select(recipe.evaluation, recipe.data_dir).tasks
        check_comparable(run.paths.evaluations, scores, all_aggregations(tasks))
        surprises, _ = check_known_scores(recipe.model, scores, plain=recipe.evaluation.plain)
        if surprises and not recipe.evaluation.allow_unknown_base:
            raise HfpatchError(f"{' '.join(surprises)} evaluation.allow_unknown_base=true continues anyway")
