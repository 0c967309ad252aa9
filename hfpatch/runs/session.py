"""`Session`: one command on a run folder, and how it starts or resumes there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from hfpatch.runs.folder import Changes, adds_documents, changes, check_folder, discard_failed_start, reopen
from hfpatch.runs.identity import check_measured, check_run, check_scores, check_shared, stored_library, write_shared
from hfpatch.runs.locks import RENEW_S, SHARED, STALE_S, hold
from hfpatch.runs.plan import Plan, Unit
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import ComparisonSetup, Inputs
from hfpatch.support.cpu import pinned_library
from hfpatch.support.provenance import Clock
from hfpatch.training.processes import start_processes


class Session(ABC):
    """One command on a run folder: it completes the units of a plan.

    Args:
        plan: the units.
        progress: called at every step; None shows nothing.

    Attributes:
        setup: the inputs that all runs share, which `set_up` loads. Their recipe is the plan's.
        clock: gives results.json its times.
    """

    setup: Inputs

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        self.plan, self.progress, self.clock = plan, progress or Progress(), Clock()

    def set_up(self) -> None:
        """Load and check the inputs of all runs, so that a mistake shows before any training.

        From then on the plan has the recipe of the inputs: with its epochs as steps, and without methods that reach no
        size near their budget.

        Raises:
            HfpatchError: if something cannot be loaded or used.
        """
        self.setup = self.load()
        self.plan = replace(self.plan, recipe=self.setup.recipe)

    @abstractmethod
    def load(self) -> Inputs:
        """Return the inputs of the plan's recipe; called by `set_up`."""

    @abstractmethod
    def complete(self, unit: Unit) -> None:
        """Complete a unit in this process, without repeating finished parts.

        Raises:
            HfpatchError: if it fails, naming the run.
        """

    def declare(self, added: Changes) -> None:
        """Note in the folder what the runs are to decide, before the first of them.

        Args:
            added: how the recipe differs from the one that was in the folder.
        """
        return  # only comparisons have questions

    def is_due(self, unit: Unit) -> bool:
        """Return whether completing a unit takes time; the units that it needs are complete."""
        return not unit.is_complete()

    def record(self, unit: Unit) -> None:
        """Note that a unit that took time is complete."""
        return  # a single model has one


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
def open_runs(session: Session, *, resume: bool) -> Iterator[None]:
    """Lock the runs of a plan, set them up, and continue if everything in the folder comes from the same inputs.

    Everything is compared before anything is written. A start that fails leaves no folder behind.

    Args:
        session: the command; `check_start` has accepted its folder.
        resume: whether the folder may hold runs of this recipe.

    Raises:
        HfpatchError: if another process has one of the locks, the set-up fails, or something in the folder was made
            with another base, text, plan or method.
    """
    plan, recipe, out, state = session.plan, session.plan.recipe, session.plan.out, start_processes()
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(hold(out, plan.locks))
            stack.enter_context(discard_failed_start(out, plan.locks))
        state.wait_for_everyone()
        stack.enter_context(pinned_library(stored_library(out)))
        session.set_up()
        setup = session.setup
        if state.is_main_process:
            plans = {} if plan.runs[0].folder == out else setup.plans  # the identity of a single run names its plan
            evaluates = any(unit.action == "evaluate" for unit in plan.units)
            has_scores = evaluates and any(run.paths.result.is_file() for run in plan.runs)
            scores = setup.identify_scores() if has_scores and isinstance(setup, ComparisonSetup) else {}
            with hold(out, [SHARED], wait_s=STALE_S + RENEW_S):
                check_folder(out, recipe, resume=resume, part=plan.part)  # another process may have written it
                check_shared(out, setup.shared, plans)
                added = changes(out, recipe)[0] if (out / "recipe.yaml").is_file() else {}
                methods = set[str]()
                for run in plan.runs:
                    if run.variant in methods and not run.folder.is_dir():
                        continue  # hashing a method's code takes as long as hundreds of other checks
                    methods.add(run.variant)
                    check_run(run.folder, setup.identify(run))
                    if not adds_documents(added):
                        check_scores(run.paths.result, scores)
                for unit in plan.units:
                    is_measured = unit.action in ("retain", "rewind") and unit.is_complete()
                    if is_measured and unit.marker is not None and isinstance(setup, ComparisonSetup):
                        check_measured(unit.marker, setup.identify_retention(unit.run))
                if added:
                    reopen(out, recipe, plans, added)
                write_shared(out, recipe.to_yaml(), setup.shared, plans, setup.matmul)
                session.declare(added)
        stack.enter_context(pinned_library(setup.matmul))
        yield
