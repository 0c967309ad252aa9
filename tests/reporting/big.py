"""A run folder of many methods, tasks and seeds, with every file that a report reads."""

import json
import random
from pathlib import Path

from reporting.conftest import with_pairs

from hfpatch.results.identity import OF_TASK


def write_big_run(folder: Path, *, methods: int, tasks: int, seeds: int, documents: int, steps: int) -> Path:
    names = [f"task_{i}" for i in range(tasks)]
    hashes = dict.fromkeys(OF_TASK, "d" * 64)
    info = {
        name: {"primary": "acc", "higher_is_better": True, "n": documents, "version": "1", **hashes} for name in names
    }
    rng = random.Random(0)
    raw = {
        **{"schema": 2, "kind": "comparison", "name": "big", "complete": True, "tasks": info, "methods": {}},
        **{"model": {"name": "big/model", "sha256": "a" * 64}, "training": {"seeds": list(range(seeds))}},
        **{"comparisons": [], "warnings": []},
    }
    for i in range(methods):
        name = "baseline" if i == 0 else f"method_{i:03d}_with_a_name"
        parts = [{"type": "lora", "r": i}] if i else []
        runs = {}
        for seed in range(seeds if i else 1):
            home = folder / "runs" / name / f"seed-{seed}"
            runs[str(seed)] = _run(home, names, documents, steps if i else 0, rng)
        parameters = {"trainable": 1000 * i, "added": 1000 * i, "base": 1000}
        raw["methods"][name] = {"parts": parts, "parameters": parameters, "runs": runs}
        if i and steps:
            losses = [3 + rng.random() for _ in range(steps)]
            raw["methods"][name]["curve"] = {"steps": list(range(1, steps + 1)), "loss": losses, "seeds": seeds}
        for task in names if i else ():
            for reference in ("baseline", "method_001_with_a_name"):
                if name != reference:
                    raw["comparisons"].append(_comparison(name, reference, task, documents, seeds, rng))
    (folder / "results.json").write_text(json.dumps(with_pairs(raw)))
    return folder


def _run(home, tasks, documents, steps, rng):
    (home / "evaluations").mkdir(parents=True)
    for task in tasks:
        lines = (
            json.dumps({"doc_id": i, "doc_hash": f"{i:064d}", "target": f" word {i}", "acc": int(rng.random() < 0.5)})
            for i in range(documents)
        )
        (home / "evaluations" / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    train = {"steps": steps, "final_loss": 3.1, "tokens": 100 * steps, "tokens_per_s": 1e4, "wall_s": 10.0}
    train["peak_memory_bytes"] = 2**29
    info = {"n": documents, "stderr": {"acc": 0.02}, "primary": "acc", "higher_is_better": True, "num_fewshot": 0}
    info |= {**dict.fromkeys(OF_TASK, "d" * 64), "version": "1"}
    scores = {task: {"task": task, "metrics": {"acc": rng.random()}, **info} for task in tasks}
    return {"train": train if steps else None, "evaluation": scores}


def _comparison(method, reference, task, documents, seeds, rng):
    difference = rng.gauss(0, 0.02)
    low, high = difference - 0.03, difference + 0.03
    p = rng.random() ** 2
    return {
        **{"method": method, "reference": reference, "task": task, "metric": "acc", "n": documents, "seeds": seeds},
        **{"difference": difference, "low": low, "high": high, "p": p, "test": "paired t"},
        "errors": [[0.015, 60]],
    }
