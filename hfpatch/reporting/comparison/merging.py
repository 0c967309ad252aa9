"""Several runs in one report: whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.recipes.questions import HELD_OUT
from hfpatch.reporting.facts import evaluation_text, settings_text
from hfpatch.reporting.numbers import NOTHING
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.identity import FREE_SETTINGS, base_identity, task_identity
from hfpatch.support.files import hash_values

SAME, DIFFERS, UNKNOWN = "same", "differs", "not recorded"
_HELD_OUT_CHECK = "Held-out text"


@dataclass(frozen=True)
class Check:
    """Whether the runs agree in one respect."""

    what: str  # the respect
    values: tuple[str, ...]  # of each run
    verdict: str  # SAME, DIFFERS or UNKNOWN
    decides: bool  # whether scores of runs that differ in it cannot be compared
    consequence: str  # of a difference


_APART = "their scores cannot be compared"
_TRAINED = "a difference between methods of different runs may come from this"
_RESPECTS: dict[str, tuple[bool | None, str]] = {
    "Frozen model": (True, _APART),
    "Its configuration and code": (None, _APART),
    "Its tokenizer and chat template": (False, "prompts and training text are compared for themselves"),
    "How it was loaded": (True, _APART),
    "Its dtype": (True, _APART),
    "Tasks and their documents": (True, _APART),
    _HELD_OUT_CHECK: (False, "losses on it cannot be compared"),
    "Prompts of the tasks": (None, _APART),
    "Metrics and code of the tasks": (None, _APART),
    "Evaluation settings": (False, "the prompts and their tokens are the same, so this changed no score"),
    "Training text": (False, _TRAINED),
    "Batch plans": (False, _TRAINED),
    "Training settings": (False, _TRAINED),
    "Tuning": (False, _TRAINED),
    "Seeds": (False, "intervals rest on different seeds"),
    "Looks": (False, "methods may have fewer seeds than others"),
    "Commit": (False, "the code that measured differs"),
    "Versions": (False, "a library may compute differently"),
    "Computing code and numbers": (False, "scores may differ by rounding"),
    "Device": (False, "tokens/s and memory cannot be compared between runs"),
}
"""Whether a difference decides (None: where all values are known), and what follows from it."""


def checks_of(runs: Sequence[ComparisonResults]) -> list[Check]:
    """Check in which respects runs agree."""
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
