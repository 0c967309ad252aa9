"""`pretrain_study`: every variant at every point of its sweep with every seed, and statistics over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hfpatch import reporting
from hfpatch.data.tokenizer import hash_tokenizer
from hfpatch.evaluation.stats import Estimate, over_seeds
from hfpatch.models.plan import describe_query
from hfpatch.recipes.models import split_architecture
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.results.decision import ALPHA
from hfpatch.results.schema import AtStep, Improvement, Loss, Row, StudyResults, StudyRun, Variant
from hfpatch.runs.engines import make_engine
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.locks import hold_shared
from hfpatch.runs.plan import plan_pretraining, planned_runs
from hfpatch.runs.pretraining import PretrainingSession, PretrainingSetup
from hfpatch.runs.progress import Progress
from hfpatch.runs.session import check_start, open_runs
from hfpatch.support.files import read_json, write_json
from hfpatch.support.paths import takes_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.diagnostics import DiagnosticsFile
from hfpatch.training.processes import start_processes
from hfpatch.training.records import MetricsFile

Curve = dict[int, float]
"""The evaluation loss after each step at which it was measured."""


class StudySession(PretrainingSession):
    """The trainings of a study."""

    def write_results(self, *, complete: bool = False) -> None:
        """Write results.json with the complete runs of all processes that share the study."""
        if start_processes().is_main_process:
            with hold_shared(self.plan.out):
                write_json(self.plan.out / "results.json", collect_study(self.setup, self.clock).to_json())


@takes_text
def pretrain_study(
    recipe: StudyRecipe,
    out: Path,
    *,
    resume: bool = False,
    variant: str | None = None,
    progress: Progress | None = None,
    engine: EngineSettings | None = None,
) -> dict[str, Any]:
    """Train every variant of a study with every seed on the same batches, compare them and report.

    All runs with one seed see the same blocks in the same order and start from the same weights where they share
    any. A run that diverges is a result like others. Each run leaves its result.json when it is complete; with
    ``resume`` such runs are not repeated, and one that was interrupted continues from its newest checkpoint. On several
    processes every run is shared by all of them.

    Args:
        recipe: what to compare.
        out: the folder of the study.
        resume: continue the study in ``out``.
        variant: train this one's runs alone, and leave the report to a later call; several such calls may work in
            one folder at a time.
        progress: called at every step; None shows nothing.
        engine: where the runs take place; None is one after the other in this process.

    Returns:
        The content of ``out/results.json``.

    Raises:
        HfpatchError: if ``out`` cannot take this study, a variant cannot be built, or something that the recipe names
            cannot be loaded or used.
    """
    state, plan = start_processes(), plan_pretraining(recipe, out, variant)
    check_start(plan, resume=resume)
    session = StudySession(plan, progress)
    with closing(make_engine(engine or EngineSettings())) as executor:
        executor.connect(session.progress)
        with open_runs(session, resume=resume):
            with session.throttle:
                executor.execute(session)
            session.write_results(complete=True)  # also what other calls completed
            if state.is_main_process and variant is None:
                reporting.write_report(out)
            state.wait_for_everyone()
    results: dict[str, Any] = read_json(out / "results.json")
    return results


def collect_study(setup: PretrainingSetup, clock: Clock) -> StudyResults:
    """Return the results of all runs that are complete.

    For each variant the best point of its sweep is the one of lowest mean loss at which every seed came to the end.
    Every row is compared with the baseline's best point by its relative improvement with each seed,

        r_s = (L_baseline,s - L_s) / L_baseline,s,

    whose mean over seeds has a 95 % interval and a p-value from Student's t. Both are corrected for the points that a
    variant was chosen from beyond those of the baseline, or the baseline beyond those of the variant (see
    `improvement`). The verdicts correct for the number of variants.
    """
    recipe, corpus = setup.recipe, setup.corpus
    assert isinstance(recipe, StudyRecipe)
    planned = list(planned_runs(recipe, setup.out))
    runs = []
    for run in planned:
        if run.result.is_file():
            result, records = read_json(run.result), MetricsFile(run.folder / "metrics.jsonl").read()
            step = result["train"]["diverged_step"]
            found = {
                "variant": run.variant,
                "point": run.point,
                "seed": run.seed,
                "outcome": "complete" if step is None else "diverged",
                "diverged_step": step,
                "commit": result["provenance"]["commit"],
                "seconds_per_step": statistics.median(record.seconds for record in records if record.step),
                "train": result["train"],
                "evaluation": [(record.step, record.eval_loss) for record in records if record.eval_loss is not None],
                "diagnostics": DiagnosticsFile(run.folder / "diagnostics.jsonl").values(),
            }
            runs.append(StudyRun.model_validate(found))
    values = recipe.model_dump(mode="json")
    variants = {}
    for name, variant in recipe.variants.items():
        single = recipe.single(name, {}, recipe.seeds[0])
        known = {
            "query": describe_query(split_architecture(single.architecture)[0].query),
            "description": variant.description,
            "architecture": single.architecture,
            "training": variant.training,
            "parameters": setup.parameters[name],
        }
        variants[name] = Variant.model_validate(known)
    return StudyResults(
        complete=len(runs) == len(planned),
        name=recipe.name,
        description=recipe.description,
        provenance=provenance(clock),
        data=corpus.train.to_json(),
        evaluation_data=corpus.evaluation.to_json() if corpus.evaluation else None,
        tokenizer={"vocab_size": len(corpus.tokenizer), "sha256": hash_tokenizer(corpus.tokenizer)},
        plans={str(seed): plan.sha256 for seed, plan in setup.plans.items()},
        training=values["training"],
        seeds=list(recipe.seeds),
        sweep=values["sweep"],
        baseline=recipe.baseline,
        variants=variants,
        rows=_rows(recipe, runs),
        runs=runs,
    )


def _rows(recipe: StudyRecipe, runs: Sequence[StudyRun]) -> list[Row]:
    """Return a row for each variant and point, in the recipe's order, compared with the baseline's best."""
    rows: list[Row] = []
    curves: list[dict[int, Curve]] = []
    for variant, point in [(name, point) for name in recipe.variants for point in recipe.points(name)]:
        its = [run for run in runs if (run.variant, run.point) == (variant, point)]
        ends = [(run.seed, run.train.final_eval_loss) for run in its if run.outcome == "complete" and run.train]
        losses = {seed: loss for seed, loss in ends if loss is not None}
        mean = float(np.mean(list(losses.values()))) if losses else None
        sd = float(np.std(list(losses.values()), ddof=1)) if len(losses) > 1 else None
        curves.append({run.seed: {step: loss for step, loss in run.evaluation if loss is not None} for run in its})
        steps = sorted(set.intersection(*map(set, curves[-1].values()))) if curves[-1] else []
        by_step = [(step, [curve[step] for curve in curves[-1].values()]) for step in steps]
        seconds = [run.seconds_per_step for run in its if run.seconds_per_step is not None]
        row = Row(
            variant=variant,
            point=point,
            loss=None if mean is None else Loss(mean=mean, sd=sd, values=losses),
            diverged={run.seed: run.diverged_step for run in its if run.diverged_step is not None},
            missing=[seed for seed in recipe.seeds if all(run.seed != seed for run in its)],
            curve=[(step, float(np.mean(each)), min(each), max(each)) for step, each in by_step],
            seconds_per_step=statistics.median(seconds) if seconds else None,
        )
        rows.append(row)

    # The best row of each variant; of several, one that all seeds came to the end of
    choices, best = dict[str, int](), dict[str, int]()
    for variant in recipe.variants:
        places = [i for i, row in enumerate(rows) if row.variant == variant]
        whole = [i for i in places if len(places) == 1 or not (rows[i].diverged or rows[i].missing)]
        means = [(loss.mean, i) for i in whole if (loss := rows[i].loss) is not None]
        choices[variant] = len(means)
        if means:
            best[variant] = min(means)[1]
    rows = [row.model_copy(update={"best": i in best.values()}) for i, row in enumerate(rows)]
    if recipe.baseline not in best:
        return rows

    # Every row's improvement over the baseline's best one
    baseline = best[recipe.baseline]
    for i, row in enumerate(rows):
        if i == baseline:
            continue
        fewer, more = sorted((max(1, choices[row.variant]), choices[recipe.baseline]))
        chosen = math.ceil(more / fewer)
        first, own_losses = (each.loss.values if each.loss is not None else {} for each in (rows[baseline], row))
        shared = [seed for seed in curves[i] if seed in curves[baseline]]
        improved: list[AtStep] = []
        measured = [set(each[seed]) for each in (curves[baseline], curves[i]) for seed in shared]
        for step in sorted(set.intersection(*measured)) if measured else ():
            there, here = ({seed: each[seed][step] for seed in shared} for each in (curves[baseline], curves[i]))
            one = improvement(there, here, chosen)
            improved += [(step, one.mean, one.low, one.high)] if one else []
        found = {"improvement": improvement(first, own_losses, chosen), "improvement_by_step": improved}
        rows[i] = row.model_copy(update=found)
    return rows


def improvement(baseline: Mapping[int, float], losses: Mapping[int, float], choices: int = 1) -> Improvement | None:
    """Return the relative improvement over the baseline, paired by seed; None without a common seed.

    The best of k points looks better than the best of m < k by chance alone. Divide the k into ⌈k/m⌉ groups of m at
    most: with no true difference, the best of each group is as likely to be above the other side's best as below it,
    so that by Bonferroni's inequality the level holds where p is multiplied by ⌈k/m⌉ and the interval widened alike.

    Args:
        baseline: the baseline's loss with each seed.
        losses: the other's.
        choices: ⌈k/m⌉, k and m the larger and the smaller number of points that the two are the best of.

    Returns:
        The mean; its 95 % interval and p, which are None with one seed, or where seeds do not differ at all.
    """
    ratios = np.array([(baseline[seed] - losses[seed]) / baseline[seed] for seed in losses if seed in baseline])
    if len(ratios) == 0:
        return None
    mean = float(ratios.mean())
    part = over_seeds(ratios, np.zeros(1), paired=True)
    if part is None or (part.error == 0 and ratios[0] != 0):
        return Improvement(mean=mean, choices=choices)
    estimate = Estimate(mean, (part,))
    reach, p = float(estimate.reach(ALPHA / choices)), min(1.0, choices * estimate.p)
    return Improvement(mean=mean, low=mean - reach, high=mean + reach, p=p, choices=choices)
