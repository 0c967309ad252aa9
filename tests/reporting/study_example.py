"""A small pretraining study, written as the pipeline writes it; its numbers are used by hand in the tests."""

import copy
import json
import statistics

from scipy import stats

from hfpatch.results import StudyResults

STEPS = (100, 200, 300, 400)
LINEAR = {0: 4.00, 1: 4.10, 2: 4.20}
LAYERS = 2


def improvement(base, here):
    """The statistic as the contract has it: Student's t over seeds of (L_base - L) / L_base."""
    shared = sorted(base.keys() & here.keys())
    values = [(base[seed] - here[seed]) / base[seed] for seed in shared]
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": None, "high": None, "p": None}
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    p = float(stats.ttest_1samp(values, 0).pvalue)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p}


def by_step(values):
    """A curve that ends at the values of the seeds."""
    return {step: {seed: value + 400 / step - 1 for seed, value in values.items()} for step in STEPS}


def row(variant, point, values, *, best=False, base=None, diverged=None, missing=(), seconds=0.5):
    curves = by_step(values)
    compared = base if values else None
    told = {step: improvement(by_step(base)[step], seeds) for step, seeds in curves.items()} if compared else {}
    sd = statistics.stdev(values.values()) if len(values) > 1 else None
    mean = statistics.fmean(values.values()) if values else None
    return {
        **{"variant": variant, "point": point, "best": best, "missing": list(missing), "seconds_per_step": seconds},
        "loss": {"mean": mean, "sd": sd, "values": {str(s): v for s, v in values.items()}} if values else None,
        "diverged": {str(seed): step for seed, step in (diverged or {}).items()},
        "improvement": improvement(base, values) if compared else None,
        "curve": [
            [step, statistics.fmean(seeds.values()), min(seeds.values()), max(seeds.values())]
            for step, seeds in (curves.items() if values else ())
        ],
        "improvement_by_step": [[step, each["mean"], each["low"], each["high"]] for step, each in told.items()],
    }


def run(variant, point, seed, loss, *, diverged_step=None, diagnostics=False):
    steps = [step for step in STEPS if diverged_step is None or step < diverged_step]
    cost = {"tokens": 819_200, "wall_s": 200.0, "tokens_per_s": 4096.0, "peak_memory_bytes": 2**29}
    return {
        **{"variant": variant, "point": point, "seed": seed, "diverged_step": diverged_step},
        "outcome": "complete" if diverged_step is None else "diverged",
        "train": {"steps": 400, "final_loss": 4.5, "update_survival": {}, **cost},
        "evaluation": [[step, loss + 400 / step - 1] for step in steps],
        "diagnostics": [
            {"step": step, "layer": layer, "target": "query", "size": 0.5 + 0.1 * layer + seed, "cosine": -0.25}
            for step in (steps if diagnostics else ())
            for layer in range(LAYERS)
        ],
    }


def variant(query, non_embedding, **more):
    architecture = {"model_type": "gpt2", "n_layer": LAYERS, "query": {"path": more.pop("path", "linear")}}
    parameters = {"total": non_embedding + 500_000, "non_embedding": non_embedding}
    described = {"query": query, "description": "", "architecture": architecture, "training": {}}
    return described | {"parameters": parameters, **more}


def runs_of(rows):
    found = []
    for each in rows:
        values = {int(seed): loss for seed, loss in (each["loss"] or {"values": {}})["values"].items()}
        f = each["variant"].startswith("nonlinear")
        found += [run(each["variant"], each["point"], seed, loss, diagnostics=f) for seed, loss in values.items()]
        for seed, step in each["diverged"].items():
            found.append(run(each["variant"], each["point"], int(seed), 5.0, diverged_step=step, diagnostics=f))
    return found


LOW, HIGH = {"training.lr": 0.001}, {"training.lr": 0.002}
NONLINEAR = {
    seed: loss * (1 - share) for (seed, loss), share in zip(LINEAR.items(), (0.019, 0.020, 0.021), strict=True)
}
IDENTITY = {seed: loss * (1 + share) for (seed, loss), share in zip(LINEAR.items(), (-0.01, 0.0, 0.013), strict=True)}
WIDE = {seed: loss * (1 + share) for (seed, loss), share in zip(LINEAR.items(), (0.019, 0.020, 0.021), strict=True)}


def study():
    """Four variants, two learning rates, three seeds; seed 2 of the nonlinear query diverges at the higher one."""
    variants = {
        "linear": variant("Q = x W_Q", 1_000_000),
        "nonlinear": variant("Q = (x + f(x))/2, f = LN(GELU(RMSNorm(x) W_1) W_2)", 1_000_200, path="nonlinear"),
        "identity": variant("Q = x", 900_000, path="identity", description="no query matrix"),
        "wide": variant("Q = x W_Q", 1_125_000, training={"weight_decay": 0.03125}),
    }
    worse = {seed: loss + 0.2 for seed, loss in LINEAR.items()}
    rows = [
        row("linear", LOW, LINEAR, best=True),
        row("linear", HIGH, worse, base=LINEAR),
        row("nonlinear", LOW, NONLINEAR, best=True, base=LINEAR, seconds=0.55),
        row("nonlinear", HIGH, {0: 4.0, 1: 4.0}, base=LINEAR, diverged={2: 340}),
        row("identity", LOW, worse, base=LINEAR),
        row("identity", HIGH, IDENTITY, best=True, base=LINEAR),
        row("wide", LOW, WIDE, best=True, base=LINEAR),
        row("wide", HIGH, {}, diverged={0: 120, 1: 120, 2: 40}, seconds=None),
    ]
    raw = {
        **{"schema": 2, "kind": "pretraining", "complete": True, "name": "small-study"},
        "description": "Query paths from scratch.",
        "provenance": {
            **{"commit": "c95d4b4a1b2c3d4e5f60718293a4b5c6d7e8f901", "dirty": False, "wall_s": 4800.0, "threads": 2},
            **{"command": "hfpatch pretrain study", "started": "2026-01-02T03:04:05+00:00", "python": "3.11.2"},
            **{"device": "cpu", "versions": {"torch": "2.13.0", "transformers": "5.23.0"}},
        },
        "data": {"source": "local/text", "sha256": "b" * 64, "documents": 10, "blocks": 400, "tokens": 51_200},
        "evaluation_data": {"source": "local/held", "sha256": "c" * 64, "documents": 2, "blocks": 40, "tokens": 5120},
        "tokenizer": {"vocab_size": 4096, "sha256": "d" * 64},
        "plans": {str(seed): f"{seed}" * 64 for seed in LINEAR},
        "training": {"steps": 400, "batch_size": 16, "lr": 0.001, "weight_decay": 0.1},
        "seeds": list(LINEAR),
        "sweep": {"training.lr": [0.001, 0.002]},
        "baseline": "linear",
        "variants": variants,
        "rows": rows,
        "runs": runs_of(rows),
    }
    return copy.deepcopy(raw)  # points are shared between rows and runs


def read(raw):
    return StudyResults.model_validate_json(json.dumps(raw))


def without_sweep():
    """The best rows alone, as of a recipe that sweeps nothing."""
    raw = study()
    rows = [{**each, "point": {}} for each in raw["rows"] if each["best"]]
    return raw | {"sweep": {}, "rows": rows, "runs": runs_of(rows)}


def with_one_seed():
    """As :func:`without_sweep`, with seed 0 alone."""
    raw = without_sweep()
    rows = []
    for each in raw["rows"]:
        values = {0: each["loss"]["values"]["0"]}
        base = None if each["variant"] == "linear" else {0: LINEAR[0]}
        rows.append(row(each["variant"], {}, values, best=True, base=base))
    return raw | {"seeds": [0], "rows": rows, "runs": runs_of(rows), "plans": {"0": "0" * 64}}


def write_study_run(folder, raw):
    """Write ``results.json`` and a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "recipe.yaml").write_text("name: small-study\nvariants: {}\n", encoding="utf-8")
    return folder
