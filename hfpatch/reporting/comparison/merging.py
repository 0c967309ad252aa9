"""Several runs in one report: whether they agree, and their union where they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from hfpatch.recipes.questions import HELD_OUT
from hfpatch.reporting.facts import evaluation_text, settings_text
from hfpatch.reporting.numbers import NOTHING
from hfpatch.results.cautions import rates_sentence
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.identity import FREE_SETTINGS, base_identity, task_identity
from hfpatch.results.layout import Method
from hfpatch.results.parts import Comparison
from hfpatch.results.verdicts import LookTaken, Verdict
from hfpatch.support.files import hash_values

SAME, DIFFERS, UNKNOWN = "same", "differs", "not recorded"
_HELD_OUT_CHECK = "Held-out text"
_Pair = TypeVar("_Pair", Comparison, Verdict)


@dataclass(frozen=True)
class Check:
    """Whether the runs agree in one respect."""

    what: str  # the respect
    values: tuple[str, ...]  # of each run
    verdict: str  # SAME, DIFFERS or UNKNOWN
    decides: bool  # whether runs that differ in it cannot share a table
    consequence: str  # of a difference


@dataclass(frozen=True)
class Merged:
    """The checks, one for each respect, and the union of the runs; None where they are reported side by side."""

    checks: tuple[Check, ...]
    results: ComparisonResults | None = None
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # label -> name in the run -> in the union


def merge(runs: Mapping[str, ComparisonResults]) -> Merged:
    """Check whether runs can be compared and, where they can, join them.

    Runs share one table where they measured the same frozen model, loaded alike, on the same tasks with the same
    documents and prompts. Each difference stays the paired one of its own run; none is made across runs.

    Args:
        runs: label -> results, at least two.
    """
    checks = tuple(_checks(list(runs.values())))
    if any(check.what == _HELD_OUT_CHECK and check.verdict != SAME for check in checks):
        runs = {label: _without_held_out(run) for label, run in runs.items()}
    if any(check.decides and check.verdict != SAME for check in checks):
        return Merged(checks)
    shared = next(iter(runs.values())).baseline
    names: dict[str, dict[str, str]] = {}
    for label, results in runs.items():  # a name that is taken gets its run's label
        taken = {name for other, run in runs.items() if other != label for name in run.methods}
        names[label] = {name: f"{name} ({label})" if name in taken else name for name in results.methods}
        if results.baseline is not None and shared is not None:
            names[label][results.baseline] = shared  # the same frozen model on the same documents
    first, held_out = next(iter(runs.values())), [run.data.get("held_out") for run in runs.values()]
    renamed = [run.renamed(names[label]) for label, run in runs.items()]
    methods: dict[str, Method] = {}
    comparisons, verdicts = [], []
    for run in renamed:
        methods |= {name: method for name, method in run.methods.items() if name not in methods}
        comparisons += [one for one in run.comparisons if {one.method, one.reference} <= run.methods.keys()]
        verdicts += [one for one in run.verdicts if {one.method, one.other} <= run.methods.keys()]
    seeds = [run.training.get("seeds") for run in renamed]
    looks = _joint_looks(renamed) if seeds.count(seeds[0]) == len(seeds) else None
    union = ComparisonResults(
        name=" + ".join(runs),
        description="Several runs on the same frozen model and the same documents.",
        protocol=first.protocol if len({run.protocol for run in runs.values()}) == 1 else "custom",
        complete=all(run.complete for run in runs.values()),
        model=first.model,
        data={"held_out": held_out[0]} if held_out[0] and held_out.count(held_out[0]) == len(held_out) else {},
        training={"seeds": seeds[0]} if looks else {},
        evaluation=first.evaluation,
        tasks=first.tasks,
        methods=methods,
        looks=looks,
        comparisons=comparisons,
        joined=verdicts,
        warnings=[
            *(f"{c.what} of the runs: {c.verdict}; {c.consequence}." for c in checks if c.verdict != SAME),
            *(
                f"{label}: {warning}"
                for label, run in runs.items()
                for warning in dict.fromkeys(filter(None, [rates_sentence(run), *run.warnings]))
            ),
        ],
    )
    return Merged(checks, union, names)


def _without_held_out(run: ComparisonResults) -> ComparisonResults:
    """Return a run that has the held-out text in no table; its tests still count where they were corrected."""

    def others(pairs: Sequence[_Pair]) -> list[_Pair]:
        return [pair for pair in pairs if pair.task != HELD_OUT]

    looks = run.looks and [look.model_copy(update={"comparisons": others(look.comparisons)}) for look in run.looks]
    tasks = {name: info for name, info in run.tasks.items() if name != HELD_OUT}
    changed = {"tasks": tasks, "comparisons": others(run.comparisons), "joined": others(run.verdicts), "looks": looks}
    return run.model_copy(update=changed)


def _joint_looks(runs: Sequence[ComparisonResults]) -> list[LookTaken] | None:
    """Return the looks of runs that declare the same ones; a run need not have taken all of them."""
    joint = []
    for looks in zip_longest(*(run.looks or () for run in runs)):
        taken = [look for look in looks if look is not None]
        comparisons = [one for look in taken for one in look.comparisons]
        growing = [name for look in taken for name in look.growing]
        joint.append(taken[0].model_copy(update={"comparisons": comparisons, "growing": growing}))
    return joint or None


_APART = "they are reported side by side; no table has both"
_TRAINED = "a difference between methods of different runs may come from this"
_RESPECTS: dict[str, tuple[bool | None, str]] = {
    "Frozen model": (True, _APART),
    "Its configuration and code": (None, _APART),
    "Its tokenizer and chat template": (False, "prompts and training text are compared for themselves"),
    "How it was loaded": (True, _APART),
    "Its dtype": (True, _APART),
    "Tasks and their documents": (True, _APART),
    _HELD_OUT_CHECK: (False, "no table has it"),
    "Prompts of the tasks": (None, _APART),
    "Metrics and code of the tasks": (None, _APART),
    "Evaluation settings": (False, "the prompts and their tokens are the same, so this changed no score"),
    "Training text": (False, _TRAINED),
    "Batch plans": (False, _TRAINED),
    "Training settings": (False, _TRAINED),
    "Tuning": (False, _TRAINED),
    "Seeds": (False, "intervals rest on different seeds"),
    "Looks": (False, "methods may have fewer seeds than others without that any is missing"),
    "Commit": (False, "the code that measured differs"),
    "Versions": (False, "a library may compute differently"),
    "Computing code and numbers": (False, "scores may differ by rounding"),
    "Device": (False, "tokens/s and memory cannot be compared between runs"),
}
"""Whether a difference decides (None: where all values are known), and what follows from it."""


def _checks(runs: Sequence[ComparisonResults]) -> list[Check]:
    shared = [task for task in runs[0].tasks if task != HELD_OUT and all(task in run.tasks for run in runs)]
    values_of, checks = [_respects(run, shared) for run in runs], []
    prompts = {values["Prompts of the tasks"] for values in values_of}
    for what, (decides, consequence) in _RESPECTS.items():
        if what == _HELD_OUT_CHECK and not any(HELD_OUT in run.tasks for run in runs):
            continue
        if what == "Evaluation settings" and len(prompts) > 1:
            consequence = "the prompts or their tokens are not the same"
        shown = tuple(str(values[what]) if values[what] else NOTHING for values in values_of)
        if NOTHING in shown:
            verdict, follows = UNKNOWN, f"whether they agree is not known; {consequence}"
        else:
            verdict, follows = (SAME, "") if len(set(shown)) == 1 else (DIFFERS, consequence)
        checks.append(Check(what, shown, verdict, verdict == DIFFERS if decides is None else decides, follows))
    return checks


def _respects(results: ComparisonResults, shared: Sequence[str]) -> dict[str, Any]:
    """Return the values of a run in all respects; ``shared`` are the tasks of all runs."""
    base, tuning, held_out = base_identity(results.model), results.tuning, results.tasks.get(HELD_OUT)
    tasks = []
    for name, info in sorted(results.tasks.items()):
        groups = f" by {info.clusters.column}" if info.clusters else ""
        tasks += [f"{name} {info.primary} n={info.n}{groups} {info.data_sha256[:8]}"] * (name != HELD_OUT)
    rates = ", ".join(f"{rate:g}" for rate in tuning.learning_rates) if tuning else ""
    seeds = results.training.get("seeds")
    scored = (run for method in results.methods.values() for run in method.runs.values() if run.evaluation)
    codes = [run.computed_with for run in scored]
    hashes = {_joint_hash([repr(sorted(one.items()))])[:8] for one in codes if one}
    plans = (f"seed {seed} {str(plan.get('sha256'))[:8]}" for seed, plan in sorted(results.plan.items()))
    settings = {key: value for key, value in results.evaluation.items() if key not in FREE_SETTINGS}
    return {
        "Frozen model": _hash(results.model) or results.model.get("name"),
        "Its configuration and code": _joint_hash(
            [base[name] for name in ("base_buffers", "base_config", "base_code")]
        ),
        "Its tokenizer and chat template": base["tokenizer"] and base["tokenizer"][:16],
        "How it was loaded": settings_text(base["loading"]) or "defaults",
        "Its dtype": results.model.get("dtype"),
        "Tasks and their documents": "; ".join(tasks),
        _HELD_OUT_CHECK: f"n={held_out.n} {held_out.data_sha256[:8]}" if held_out else "none",
        "Prompts of the tasks": _of_tasks(results, shared, ("prompts_sha256", "tokens_sha256")),
        "Metrics and code of the tasks": _of_tasks(results, shared, ("task_sha256",)),
        "Evaluation settings": evaluation_text(settings) or "defaults",
        "Training text": _hash(results.data) or settings_text(results.data),
        "Batch plans": "; ".join(plans),
        "Training settings": settings_text({key: v for key, v in results.training.items() if key != "seeds"}),
        "Tuning": f"{tuning.steps} steps with seed {tuning.seed} at each of {rates}" if tuning else "none",
        "Seeds": ", ".join(map(str, results.seeds)),
        "Looks": ", ".join(map(str, seeds["looks"])) if isinstance(seeds, dict) else "none",
        "Commit": results.provenance.get("commit"),
        "Versions": settings_text(results.provenance.get("versions") or {}),
        "Computing code and numbers": ", ".join(sorted(hashes)) if all(codes) else "",
        "Device": results.provenance.get("device"),
    }


def _joint_hash(values: Sequence[str | None]) -> str:
    """Return one short hash of several; nothing where one is not known."""
    return hash_values(values)[:16] if all(values) else ""


def _of_tasks(results: ComparisonResults, tasks: Sequence[str], names: Sequence[str]) -> str:
    """Return short hashes of the named identities of tasks."""
    identities = {task: task_identity(results.tasks[task]) for task in tasks}
    hashes = {task: _joint_hash([identity[name] for name in names]) for task, identity in identities.items()}
    return "; ".join(f"{task} {digest[:8]}" for task, digest in sorted(hashes.items()))


def _hash(section: Mapping[str, Any]) -> str:
    value = section.get("sha256")
    return f"SHA-256 {value[:16]}…" if isinstance(value, str) else ""
