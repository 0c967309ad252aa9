"""Several runs in one report: whether they agree, and their union where they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpatch.reporting.facts import evaluation_text, settings_text
from hfpatch.reporting.numbers import NOTHING
from hfpatch.results.identity import FREE_SETTINGS, base_identity, task_identity
from hfpatch.results.parts import HELD_OUT
from hfpatch.results.schema import ComparisonResults, Method
from hfpatch.support.files import hash_values

SAME, DIFFERS, UNKNOWN = "same", "differs", "not recorded"
_HELD_OUT_CHECK = "Held-out text"


@dataclass(frozen=True)
class Check:
    """Whether the runs agree in one respect.

    Attributes:
        what: the respect.
        values: the value of each run.
        verdict: ``same``, ``differs`` or ``not recorded``.
        decides: whether runs that differ in it cannot share a table.
        consequence: of a difference.
    """

    what: str
    values: tuple[str, ...]
    verdict: str
    decides: bool
    consequence: str


@dataclass(frozen=True)
class Merged:
    """The checks, and the union of the runs; None where they are reported side by side.

    Attributes:
        checks: one for each respect.
        results: the union.
        names: label -> a method's name in its run -> its name in the union.
    """

    checks: tuple[Check, ...]
    results: ComparisonResults | None = None
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def merge(runs: Mapping[str, ComparisonResults]) -> Merged:
    """Check whether runs can be compared and, where they can, join them.

    Runs share one table where they measured the same frozen model, loaded alike, on the same tasks with the same
    documents and prompts. Each difference stays the paired one of its own run; none is made across runs.

    Args:
        runs: label -> results, at least two.
    """
    checks = tuple(_checks(list(runs.values())))
    if any(check.what == _HELD_OUT_CHECK and check.verdict != SAME for check in checks):
        # no table has it; its tests still count where they were corrected
        runs = {
            label: each.model_copy(
                update={
                    "tasks": {name: info for name, info in each.tasks.items() if name != HELD_OUT},
                    "comparisons": [one for one in each.comparisons if one.task != HELD_OUT],
                    "joined": [one for one in each.verdicts if one.task != HELD_OUT],
                }
            )
            for label, each in runs.items()
        }
    if any(check.decides and check.verdict != SAME for check in checks):
        return Merged(checks)
    shared = next(iter(runs.values())).baseline
    names: dict[str, dict[str, str]] = {}
    for label, results in runs.items():  # a name that is taken gets its run's label
        taken = {name for other, each in runs.items() if other != label for name in each.methods}
        names[label] = {name: f"{name} ({label})" if name in taken else name for name in results.methods}
        if results.baseline is not None and shared is not None:
            names[label][results.baseline] = shared  # the same frozen model on the same documents
    first, held_out = next(iter(runs.values())), [each.data.get("held_out") for each in runs.values()]
    renamed = [each.renamed(names[label]) for label, each in runs.items()]
    methods: dict[str, Method] = {}
    comparisons, verdicts = [], []
    for each in renamed:
        methods |= {name: method for name, method in each.methods.items() if name not in methods}
        comparisons += [one for one in each.comparisons if {one.method, one.reference} <= each.methods.keys()]
        verdicts += [one for one in each.verdicts if {one.method, one.other} <= each.methods.keys()]
    union = ComparisonResults(
        name=" + ".join(runs),
        description="Several runs on the same frozen model and the same documents.",
        protocol=first.protocol if len({each.protocol for each in runs.values()}) == 1 else "custom",
        complete=all(each.complete for each in runs.values()),
        model=first.model,
        data={"held_out": held_out[0]} if held_out[0] and held_out.count(held_out[0]) == len(held_out) else {},
        evaluation=first.evaluation,
        tasks=first.tasks,
        methods=methods,
        comparisons=comparisons,
        joined=verdicts,
        warnings=[
            *(f"{c.what} of the runs: {c.verdict}; {c.consequence}." for c in checks if c.verdict != SAME),
            *(f"{label}: {warning}" for label, each in runs.items() for warning in each.warnings),
        ],
    )
    return Merged(checks, union, names)


def _checks(runs: Sequence[ComparisonResults]) -> list[Check]:
    apart = "they are reported side by side; no table has both"
    trained = "a difference between methods of different runs may come from this"
    slower = "tokens/s and memory cannot be compared between runs"
    hashes = [_hash(each.model) for each in runs]
    models = hashes if all(hashes) else [each.model.get("name") for each in runs]
    tasks = [
        "; ".join(
            f"{name} {info.primary} n={info.n}{f' by {info.clusters.column}' if info.clusters else ''} "
            f"{info.data_sha256[:8]}"
            for name, info in sorted(each.tasks.items())
            if name != HELD_OUT
        )
        for each in runs
    ]
    bases = [base_identity(each.model) for each in runs]
    made = [_joint_hash([base[name] for name in ("base_buffers", "base_config", "base_code")]) for base in bases]
    shared = [task for task in runs[0].tasks if task != HELD_OUT and all(task in each.tasks for each in runs)]
    prompts = [_of_tasks(each, shared, ("prompts_sha256", "tokens_sha256")) for each in runs]
    scored = [_of_tasks(each, shared, ("task_sha256",)) for each in runs]
    settings = [
        evaluation_text({key: value for key, value in each.evaluation.items() if key not in FREE_SETTINGS})
        or "defaults"
        for each in runs
    ]
    plans = [
        "; ".join(f"seed {seed} {str(plan.get('sha256'))[:8]}" for seed, plan in sorted(each.plan.items()))
        for each in runs
    ]
    training = [settings_text({key: value for key, value in each.training.items() if key != "seeds"}) for each in runs]
    tuned = []
    for tuning in (each.tuning for each in runs):
        rates = ", ".join(f"{rate:g}" for rate in tuning.learning_rates) if tuning else ""
        tuned.append(f"{tuning.steps} steps with seed {tuning.seed} at each of {rates}" if tuning else "none")
    settled = "the prompts and their tokens are the same, so this changed no score"
    if len(set(prompts)) > 1:
        settled = "the prompts or their tokens are not the same"
    computed = []
    for each in runs:
        runs_scored = (run for method in each.methods.values() for run in method.runs.values() if run.evaluation)
        codes = [run.computed_with for run in runs_scored]
        hashes_of_run = {_joint_hash([repr(sorted(one.items()))])[:8] for one in codes if one}
        computed.append(", ".join(sorted(hashes_of_run)) if all(codes) else "")
    # the respect, its values, whether a difference decides (None: where all values are known), and what follows
    rows: list[tuple[str, list[Any], bool | None, str]] = [
        ("Frozen model", models, True, apart),
        ("Its configuration and code", made, None, apart),
        ("Its tokenizer and chat template", [base["tokenizer"] and base["tokenizer"][:16] for base in bases], False,
         "prompts and training text are compared for themselves"),
        ("How it was loaded", [settings_text(base["loading"]) or "defaults" for base in bases], True, apart),
        ("Its dtype", [each.model.get("dtype") for each in runs], True, apart),
        ("Tasks and their documents", tasks, True, apart),
        ("Prompts of the tasks", prompts, None, apart),
        ("Metrics and code of the tasks", scored, None, apart),
        ("Evaluation settings", settings, False, settled),
        ("Training text", [_hash(each.data) or settings_text(each.data) for each in runs], False, trained),
        ("Batch plans", plans, False, trained),
        ("Training settings", training, False, trained),
        ("Tuning", tuned, False, trained),
        ("Seeds", [", ".join(map(str, each.seeds)) for each in runs], False, "intervals rest on different seeds"),
        ("Commit", [each.provenance.get("commit") for each in runs], False, "the code that measured differs"),
        ("Versions", [settings_text(each.provenance.get("versions") or {}) for each in runs], False,
         "a library may compute differently"),
        ("Computing code and numbers", computed, False, "scores may differ by rounding"),
        ("Device", [each.provenance.get("device") for each in runs], False, slower),
    ]  # fmt: skip
    held_out = [each.tasks.get(HELD_OUT) for each in runs]
    if any(held_out):
        documents = [f"n={info.n} {info.data_sha256[:8]}" if info else "none" for info in held_out]
        rows.insert(6, (_HELD_OUT_CHECK, documents, False, "no table has it"))
    checks = []
    for what, values, decides, consequence in rows:
        shown = tuple(str(value) if value else NOTHING for value in values)
        if NOTHING in shown:
            verdict, follows = UNKNOWN, f"whether they agree is not known; {consequence}"
        else:
            verdict, follows = (SAME, "") if len(set(shown)) == 1 else (DIFFERS, consequence)
        checks.append(Check(what, shown, verdict, verdict == DIFFERS if decides is None else decides, follows))
    return checks


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
