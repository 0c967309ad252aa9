"""Several runs in one report: what they have in common, and their union where they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpatch.reporting.facts import settings_text
from hfpatch.reporting.numbers import NOTHING
from hfpatch.results.schema import Comparison, ComparisonResults, Method

SAME, DIFFERS, UNKNOWN = "same", "differs", "not recorded"


@dataclass(frozen=True)
class Check:
    """Whether the runs agree in one respect.

    Attributes:
        what: the respect.
        values: what each run has.
        verdict: ``same``, ``differs`` or ``not recorded``.
        decides: whether runs that differ in it cannot share a table.
        consequence: what follows where they differ.
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
        checks: in what the runs agree.
        results: the union.
        names: label -> a method's name in its run -> its name in the union.
    """

    checks: tuple[Check, ...]
    results: ComparisonResults | None = None
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def merge(runs: Mapping[str, ComparisonResults]) -> Merged:
    """Check whether runs can be compared and, where they can, join them.

    Runs share one table where they measured the same frozen model, in the same dtype, on the same documents. Each
    difference stays the paired one that its own run tested; none is made across runs.

    Args:
        runs: label -> results, at least two.
    """
    checks = tuple(_checks(list(runs.values())))
    if any(check.decides and check.verdict != SAME for check in checks):
        return Merged(checks)
    shared = next(iter(runs.values())).baseline
    names = {label: _names(label, results, shared, runs) for label, results in runs.items()}
    return Merged(checks, _union(runs, names, checks), names)


def _checks(runs: Sequence[ComparisonResults]) -> list[Check]:
    apart = "they are reported side by side; no table has both"
    trained = "a difference between methods of different runs may come from this"
    slower = "tokens/s and memory cannot be compared between runs"
    hashes = [_hash(each.model) for each in runs]
    models = hashes if all(hashes) else [each.model.get("name") for each in runs]
    tasks = [
        "; ".join(
            f"{name} {info.primary} n={info.n}{f' by {info.clusters.column}' if info.clusters else ''} "
            f"{(info.data_sha256 or '')[:8]}"
            for name, info in sorted(each.tasks.items())
        )
        for each in runs
    ]
    plans = [
        "; ".join(f"seed {seed} {str(plan.get('sha256'))[:8]}" for seed, plan in sorted(each.plan.items()))
        for each in runs
    ]
    training = [settings_text({key: value for key, value in each.training.items() if key != "seeds"}) for each in runs]
    rows: list[tuple[str, list[Any], bool, str]] = [
        ("Frozen model", models, True, apart),
        ("Its dtype", [each.model.get("dtype") for each in runs], True, apart),
        ("Tasks and their documents", tasks, True, apart),
        ("Training text", [_hash(each.data) or settings_text(each.data) for each in runs], False, trained),
        ("Batch plans", plans, False, trained),
        ("Training settings", training, False, trained),
        ("Tuning", [_tuned(each) for each in runs], False, trained),
        ("Seeds", [", ".join(map(str, each.seeds)) for each in runs], False, "intervals rest on different seeds"),
        ("Commit", [each.provenance.get("commit") for each in runs], False, "the code that measured differs"),
        ("Versions", [settings_text(each.provenance.get("versions") or {}) for each in runs], False,
         "a library may compute differently"),
        ("Device", [each.provenance.get("device") for each in runs], False, slower),
    ]  # fmt: skip
    checks = []
    for what, values, decides, consequence in rows:
        shown = tuple(str(value) if value else NOTHING for value in values)
        if NOTHING in shown:
            verdict, follows = UNKNOWN, f"whether they agree is not known; {consequence}"
        else:
            verdict, follows = (SAME, "") if len(set(shown)) == 1 else (DIFFERS, consequence)
        checks.append(Check(what, shown, verdict, decides, follows))
    return checks


def _tuned(results: ComparisonResults) -> str:
    if results.tuning is None:
        return "none"
    rates = ", ".join(f"{rate:g}" for rate in results.tuning.learning_rates)
    return f"{results.tuning.steps} steps with seed {results.tuning.seed} at each of {rates}"


def _hash(section: Mapping[str, Any]) -> str:
    value = section.get("sha256")
    return f"SHA-256 {value[:16]}…" if isinstance(value, str) else ""


def _union(
    runs: Mapping[str, ComparisonResults], names: Mapping[str, Mapping[str, str]], checks: Sequence[Check]
) -> ComparisonResults:
    first, held_out = next(iter(runs.values())), [each.data.get("held_out") for each in runs.values()]
    methods: dict[str, Method] = {}
    comparisons: list[Comparison] = []
    low_noise: list[Comparison] = []
    for label, results in runs.items():
        new = names[label]
        for name, method in results.methods.items():
            match = method.match
            renamed = None if match is None else match.model_copy(update={"to": new.get(match.to, match.to)})
            methods.setdefault(new[name], method.model_copy(update={"match": renamed}))
        comparisons += _renamed(results.comparisons, new)
        low_noise += _renamed(results.low_noise, new)
    return ComparisonResults(
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
        low_noise=low_noise,
        correction="the comparisons of each run by itself",
        warnings=[
            *(f"{c.what} of the runs: {c.verdict}; {c.consequence}." for c in checks if c.verdict != SAME),
            *(f"{label}: {warning}" for label, each in runs.items() for warning in each.warnings),
        ],
    )


def _renamed(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> list[Comparison]:
    return [
        each.model_copy(update={"method": names[each.method], "reference": names[each.reference]})
        for each in comparisons
        if each.method in names and each.reference in names
    ]


def _names(
    label: str, results: ComparisonResults, shared: str | None, runs: Mapping[str, ComparisonResults]
) -> dict[str, str]:
    """Return what each method of a run is called in the union: with its run's label where the name is taken."""
    taken = {name for other, each in runs.items() if other != label for name in each.methods}
    names = {name: f"{name} ({label})" if name in taken else name for name in results.methods}
    if results.baseline is not None and shared is not None:
        names[results.baseline] = shared  # the same frozen model on the same documents
    return names
