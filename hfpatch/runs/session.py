"""Starting or resuming the runs of a folder: what every command does before its first unit of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from hfpatch.data.plan import BatchPlan
from hfpatch.nn.matmul import MatmulLibrary, pinned_library
from hfpatch.runs.folder import check_folder, discard_failed_start
from hfpatch.runs.identity import Identity, check_run, check_scores, check_shared, stored_library, write_shared
from hfpatch.runs.locks import Holder, hold, hold_shared
from hfpatch.runs.plan import Plan, PlannedRun
from hfpatch.runs.recipe_changes import adds_documents, changes, reopen
from hfpatch.support.files import read_json
from hfpatch.support.provenance import Clock
from hfpatch.training.processes import start_processes


class Setup(Protocol):
    """What all runs of a folder share, loaded and checked before the first of them."""

    @property
    def shared(self) -> Identity:
        """The identity that all runs share."""

    @property
    def plans(self) -> Mapping[int, BatchPlan]:
        """The batch plan of each seed."""

    @property
    def matmul(self) -> MatmulLibrary | None:
        """The library for matrix products that all runs share; None where each run chooses for itself."""

    def identify(self, run: PlannedRun) -> Identity:
        """Return the identity of one run."""

    def identify_scores(self) -> Mapping[str, Mapping[str, str]]:
        """Return what scores are of, by task; takes as long as building all prompts."""


AnySetup = TypeVar("AnySetup", bound=Setup)


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
def open_runs(
    plan: Plan, set_up: Callable[[], AnySetup], *, resume: bool, holder: Holder | None = None
) -> Iterator[AnySetup]:
    """Lock the runs of a plan, set them up and, if nothing in the folder comes from elsewhere, yield what they share.

    Everything is compared before anything is written. A start that fails leaves no folder behind.

    Args:
        plan: what the command does; `check_start` has accepted its folder.
        set_up: loads and checks what the runs share.
        resume: whether the folder may hold runs of this recipe.
        holder: what the locks name as their holder, for one that lends them to workers.

    Raises:
        HfpatchError: if another process has one of the locks, the set-up fails, or something in the folder was made
            with another base, text, plan or method.
    """
    out, state = plan.out, start_processes()
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(hold(out, plan.locks, own=holder))
            stack.enter_context(discard_failed_start(out, plan.locks))
        state.wait_for_everyone()
        stack.enter_context(pinned_library(stored_library(out)))
        setup = set_up()
        if state.is_main_process:
            plans = {} if plan.is_one_run else setup.plans  # the identity of a single run names its plan
            scored = any(unit.action == "evaluate" for unit in plan.units) and any(
                r.result.is_file() for r in plan.runs
            )
            scores = setup.identify_scores() if scored else {}
            with hold_shared(out):
                check_folder(out, plan.recipe, resume=resume, part=plan.part)  # another process may have written it
                check_shared(out, setup.shared, plans)
                added = changes(out, plan.recipe)[0] if (out / "recipe.yaml").is_file() else {}
                for run in plan.runs:
                    check_run(run.folder, setup.identify(run))
                    if not adds_documents(added):
                        check_scores(run.result, scores)
                if added:
                    reopen(out, plan.recipe, plans, added)
                write_shared(out, plan.recipe.to_yaml(), setup.shared, plans, setup.matmul)
        stack.enter_context(pinned_library(setup.matmul))
        yield setup


def resumed_clock(out: Path) -> Clock:
    """Return a clock that continues from the wall time in a folder's results.json."""
    if not (out / "results.json").is_file():
        return Clock()
    last = read_json(out / "results.json")["provenance"]
    return Clock(started=last["started"], before=last["wall_s"])
