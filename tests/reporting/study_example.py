"""A small study of models from scratch, as its results have it; its numbers are used by hand in the tests."""

from reporting.conftest import train_result, write_run

TEXT, STEPS, LAYERS = "held_out_text", (100, 200, 300, 400), 2
LOSSES = {"linear": (4.0, 4.1, 4.2), "nonlinear": (3.9, 3.98, 4.1), "identity": (4.1, 4.2, 4.3)}
QUERIES = {"linear": "Q = x W_Q", "nonlinear": "Q = (x + f(x))/2", "identity": "Q = x"}
SIZES = {"linear": 1_000_000, "nonlinear": 1_005_000, "identity": 900_000}


def curve(losses):
    """The mean over seeds, which ends at the last loss."""
    last = sum(losses) / len(losses)
    steps = [1, *STEPS]
    held_out = {str(step): last + 400 / step - 1 for step in STEPS}
    return {"steps": steps, "loss": [last + 1 / step for step in steps], "seeds": 3, "held_out": held_out}


def variant(name):
    info = {"primary": "nats_per_token", "higher_is_better": False, "n": 60}
    runs = {}
    for seed, loss in enumerate(LOSSES[name]):
        score = {"task": TEXT, **info, "metrics": {"nats_per_token": loss}, "stderr": {}, "data_sha256": "d" * 64}
        score |= dict.fromkeys(("prompts_sha256", "tokens_sha256", "task_sha256"), "e" * 64)
        train = {**train_result(2048.0), "wall_s": 100.0}  # of 200 steps
        runs[str(seed)] = {"train": train, "evaluation": {TEXT: score | {"num_fewshot": 0, "version": "1"}}}
    diagnostics = [
        {"step": step, "layer": layer, "target": "query", "size": 1.0, "size_beside_x": 0.5 + layer, "cosine": -0.5}
        for step in (STEPS if name == "nonlinear" else ())
        for layer in range(LAYERS)
    ]
    architecture = {"model_type": "gpt2", "n_layer": LAYERS, "query": {"path": name}}
    return {
        "parts": [],
        "parameters": {"trainable": SIZES[name] + 500_000, "added": 0, "base": 0, "non_embedding": SIZES[name]},
        "runs": runs,
        "curve": curve(LOSSES[name]),
        "variant": {"query": QUERIES[name], "architecture": architecture, "diagnostics": diagnostics},
    }


def difference(name, value):
    error, freedom = 0.004, 40
    return {
        **{"method": name, "reference": "linear", "task": TEXT, "metric": "nats_per_token", "n": 60, "seeds": 3},
        **{"difference": value, "low": value - 0.02, "high": value + 0.02, "p": 1e-6 if value else 0.9, "test": "t"},
        "errors": [[error, freedom], [error, 2]],
    }


def study():
    """Two variants against a baseline, tuned by two values; one is better, one is worse."""
    values = [{"lr": lr, "weight_decay": decay} for lr in (1e-3, 2e-3) for decay in (0.03125, 0.1)]
    losses = {"linear": (4.4, 4.3, None, 4.5), "nonlinear": (4.3, 4.2, 4.1, None), "identity": (4.5, 4.6, 4.7, 4.8)}
    trials = [
        {"method": name, "seed": 1000, "values": value, "loss": loss, "plan": "e" * 64}
        for name, by_trial in losses.items()
        for value, loss in zip(values, by_trial, strict=True)
    ]
    best = {"linear": 1, "nonlinear": 2, "identity": 0}
    chosen = {
        name: {"values": values[i], "loss": losses[name][i], "trials": 4, "edge": "lowest"} for name, i in best.items()
    }
    names = ("linear", "nonlinear", "identity")
    return {
        **{"schema": 2, "kind": "comparison", "name": "queries", "complete": True, "description": "Query paths."},
        "study": {"baseline": "linear", "architecture": {"model_type": "gpt2", "n_layer": LAYERS}, "tokenizer": {}},
        "data": {"source": "books", "sha256": "b" * 64, "held_out": {"documents": 60}},
        "training": {"steps": 400, "seeds": [0, 1, 2]},
        "tuning": {
            **{"seed": 1000, "steps": 100, "learning_rates": [1e-3, 2e-3], "trials": trials, "chosen": chosen},
            "text": {"documents": 20, "tokens": 999},
        },
        "tasks": {
            TEXT: {"primary": "nats_per_token", "higher_is_better": False, "n": 60, "data_sha256": "d" * 64}
            | dict.fromkeys(("prompts_sha256", "tokens_sha256", "task_sha256"), "e" * 64)
            | {"version": "1"}
        },
        "methods": {name: variant(name) for name in names},
        "questions": [{"question": "gain", "pairs": [["nonlinear", "linear"], ["identity", "linear"]], "on": [TEXT]}],
        "margin": {TEXT: 0.01},
        "comparisons": [difference("nonlinear", -0.1), difference("identity", 0.1)],
        "provenance": {"commit": "c" * 40},
    }


def write_study(folder):
    """Write ``results.json`` of the study."""
    return write_run(folder, study(), curves=False)
