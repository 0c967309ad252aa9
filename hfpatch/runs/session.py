"""Starting or resuming the runs of a folder: what every command does before its first unit of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hfpatch.nn.matmul import pinned_library
from hfpatch.runs.folder import check_folder, discard_failed_start
from hfpatch.runs.identity import check_run, check_scores, check_shared, stored_library, write_shared
from hfpatch.runs.locks import Holder, hold, hold_shared
from hfpatch.runs.plan import Plan
from hfpatch.runs.recipe_changes import changes, reopen
from hfpatch.runs.work import Work
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock
from hfpatch.training.processes import start_processes


def check_start(plan: Plan, *, resume: bool) -> None:
    """Refuse a folder that cannot take this plan; the first process checks, the others wait for it.

    Raises:
        HfpatchError: as `check_folder`.
    """
    state = start_processes()
    if state.is_main_process:
        check_folder(plan.out, plan.recipe, resume=resume, part=plan.part)
    state.wait_for_everyone()


@contextmanager
def open_runs(work: Work[Any], *, resume: bool, holder: Holder | None = None) -> Iterator[None]:
    """Lock the runs of a plan and set them up, and go on if everything in the folder comes from the same inputs.

    Everything is compared before anything is written. A start that fails leaves no folder behind.

    Args:
        work: what the command does; `check_start` has accepted its folder.
        resume: whether the folder may hold runs of this recipe.
        holder: what the locks name as their holder, for one that lends them to workers.

    Raises:
        HfpatchError: if another process has one of the locks, the set-up fails, or something in the folder was made
            with another base, text, plan or method.
    """
    plan, out, state = work.plan, work.plan.out, start_processes()
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(hold(out, plan.locks, own=holder))
            stack.enter_context(discard_failed_start(out, plan.locks))
        state.wait_for_everyone()
        stack.enter_context(pinned_library(stored_library(out)))
        work.set_up()
        setup = work.setup
        if state.is_main_process:
            plans = {} if plan.is_one_run else setup.plans  # the identity of a single run names its plan
            scored = any(unit.action == "evaluate" for unit in plan.units) and any(
                r.result.is_file() for r in plan.runs
            )
            scores = setup.identify_scores() if scored else {}
            with hold_shared(out):
                check_folder(out, plan.recipe, resume=resume, part=plan.part)  # another process may have written it
                check_shared(out, setup.shared, plans)
                for run in plan.runs:
                    check_run(run.folder, setup.identify(run))
                    check_scores(run.result, scores)
                if (out / "recipe.yaml").is_file() and changes(out, plan.recipe)[0]:
                    reopen(out, plan.recipe, plans)
                write_shared(out, plan.recipe.to_yaml(), setup.shared, plans, setup.matmul)
        stack.enter_context(pinned_library(setup.matmul))
        yield


def resumed_clock(out: Path) -> Clock:
    """Return a clock that continues from the wall time in a folder's results.json."""
    if not (out / "results.json").is_file():
        return Clock()
    last = read_json(out / "results.json")["provenance"]
    return Clock(started=last["started"], before=last["wall_s"])
