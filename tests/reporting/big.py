"""A run folder of many methods, tasks and seeds, with every file that a report reads."""

import json
import random
from pathlib import Path

from reporting.conftest import TASKS, comparison, task_result, train_result, with_pairs

from hfpatch.results.identity import OF_TASK

LIKE = "tinyworld_cloze"  # whose measure all tasks have


def write_big_run(folder: Path, *, methods: int, tasks: int, seeds: int, documents: int, steps: int) -> Path:
    names = [f"task_{i}" for i in range(tasks)]
    of_task = {**TASKS[LIKE], "n": documents, "version": "1", **dict.fromkeys(OF_TASK, "d" * 64)}
    rng = random.Random(0)
    raw = {
        **{"schema": 2, "kind": "comparison", "name": "big", "complete": True, "methods": {}},
        **{"model": {"name": "big/model", "sha256": "a" * 64}, "training": {"seeds": list(range(seeds))}},
        **{"tasks": dict.fromkeys(names, of_task), "comparisons": [], "warnings": []},
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
                    made = comparison(
                        name, LIKE, rng.gauss(0, 0.02), 0.03, "", reference=reference, p=rng.random() ** 2
                    )
                    raw["comparisons"].append(made | {"task": task, "n": documents, "seeds": seeds})
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
    scores = {task: task_result(LIKE, rng.random()) | {"task": task, "n": documents} for task in tasks}
    return {"train": train_result(speed=1e4) if steps else None, "evaluation": scores}
