"""How a command starts on a run folder, or resumes there: what it locks, and what it compares before it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from hfpatch.runs.folder import Changes, adds_documents, changes, check_folder, discard_failed_start, reopen
from hfpatch.runs.identity import check_measured, check_run, check_scores, check_shared, stored_library, write_shared
from hfpatch.runs.locks import RENEW_S, SHARED, STALE_S, hold
from hfpatch.runs.plan import Plan
from hfpatch.runs.setup import ComparisonSetup, Setup
from hfpatch.support.cpu import pinned_library
from hfpatch.training.processes import start_processes

Loaded = TypeVar("Loaded", bound=Setup)


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
    plan: Plan,
    load: Callable[[], Loaded],
    *,
    resume: bool,
    declare: Callable[[Loaded, Changes], None] = lambda setup, added: None,
) -> Iterator[Loaded]:
    """Lock the runs of a plan, load their inputs, and continue if everything in the folder comes from the same ones.

    Everything is compared before anything is written. A start that fails leaves an empty folder.

    Args:
        plan: the runs; `check_start` has accepted its folder.
        load: returns the inputs that all runs share, checked so that a mistake shows before any training.
        resume: whether the folder may hold runs of this recipe.
        declare: notes in the folder what the runs are to decide, before the first of them; it gets the inputs, and how
            the recipe differs from the one that was in the folder.

    Raises:
        HfpatchError: if another process has one of the locks, the inputs cannot be loaded or used, or something in the
            folder was made with another base, text, plan or method.
    """
    recipe, out, state = plan.recipe, plan.out, start_processes()
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(hold(out, plan.locks))
            stack.enter_context(discard_failed_start(out, plan.locks))
        state.wait_for_everyone()
        stack.enter_context(pinned_library(stored_library(out)))
        setup = load()
        if state.is_main_process:
            evaluates = any(unit.action == "evaluate" for unit in plan.units)
            has_scores = evaluates and any(run.paths.result.is_file() for run in plan.runs)
            scores = setup.identify_scores() if has_scores and isinstance(setup, ComparisonSetup) else {}
            with hold(out, [SHARED], wait_s=STALE_S + RENEW_S):
                check_folder(out, recipe, resume=resume, part=plan.part)  # another process may have written it
                check_shared(out, setup.shared, setup.plans)
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
                    declare(setup, added)  # before recipe.yaml says so: a kill in between would hide the addition
                    reopen(out, recipe, setup.plans, added)
                write_shared(out, recipe.to_yaml(), setup.shared, setup.plans, setup.matmul)
                if not added:
                    declare(setup, added)
        stack.enter_context(pinned_library(setup.matmul))
        yield setup
