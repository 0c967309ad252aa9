"""A run folder of many methods, tasks and seeds."""

import random
from pathlib import Path

from reporting.conftest import TASKS, comparison, task_result, train_result, write_run

from hfpatch.results.identity import OF_TASK

LIKE = "tinyworld_cloze"  # whose measure all tasks have


def write_big_run(folder: Path, *, methods: int, tasks: int, seeds: int, steps: int = 0) -> Path:
    """Write LoRAs compared with the base and the first of them; with steps they are trained and have a curve."""
    rng, names = random.Random(0), [f"task_{i}" for i in range(tasks)]
    of_task = {**TASKS[LIKE], "version": "1", **dict.fromkeys(OF_TASK, "d" * 64)}
    raw = {
        **{"schema": 2, "kind": "comparison", "name": "big", "complete": True, "methods": {}},
        **{"model": {"name": "big/model", "sha256": "a" * 64}, "training": {"seeds": list(range(seeds))}},
        **{"tasks": dict.fromkeys(names, of_task), "comparisons": [], "warnings": []},
    }
    for i in range(methods):
        name = f"method_{i:03d}_with_a_name" if i else "baseline"
        train = train_result(speed=1e4) if i and steps else None
        runs = {
            str(seed): {
                "train": train,
                "evaluation": {task: task_result(LIKE, rng.random()) | {"task": task} for task in names},
            }
            for seed in range(seeds if i else 1)
        }
        parameters = {"trainable": 1000 * i, "added": 1000 * i, "base": 1000}
        parts = [{"type": "lora", "r": i}] if i else []
        raw["methods"][name] = {"parts": parts, "parameters": parameters, "runs": runs}
        if train:
            losses = [3 + rng.random() for _ in range(steps)]
            raw["methods"][name]["curve"] = {"steps": list(range(1, steps + 1)), "loss": losses, "seeds": seeds}
        for reference in ("baseline", "method_001_with_a_name")[: min(i, 2)]:
            for task in names:
                p = rng.random() ** 2
                made = comparison(name, LIKE, rng.gauss(0, 0.02), 0.03, "", reference=reference, p=p)
                raw["comparisons"].append(made | {"task": task, "seeds": seeds})
    return write_run(folder, raw, curves=False)
