"""A pretraining study: every variant at every point of its sweep with every seed, resumable run by run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs.engines.settings import EngineSettings, make_engine
from hfpatch.runs.locks import hold_shared
from hfpatch.runs.plan import plan_pretraining
from hfpatch.runs.pretraining import PretrainingSession
from hfpatch.runs.progress import Progress
from hfpatch.runs.reports import write_report
from hfpatch.runs.session import check_start, open_runs
from hfpatch.runs.study_results import collect_study
from hfpatch.support.files import read_json, write_json
from hfpatch.training.processes import start_processes


class StudySession(PretrainingSession[StudyRecipe]):
    """The trainings of a study."""

    def write_results(self, *, complete: bool = False) -> None:
        """Write results.json, of what all processes that share the study have completed."""
        if start_processes().is_main_process:
            with hold_shared(self.plan.out):
                write_json(self.plan.out / "results.json", collect_study(self.setup).to_json())


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
    session = StudySession(recipe, plan, progress)
    with closing(make_engine(engine or EngineSettings())) as executor:
        executor.connect()
        with open_runs(session, resume=resume, holder=executor.holder):
            with session.throttle:
                executor.execute(session)
            session.write_results(complete=True)  # also what other calls completed
            if state.is_main_process and variant is None:
                write_report(out)
            state.wait_for_everyone()
    results: dict[str, Any] = read_json(out / "results.json")
    return results
