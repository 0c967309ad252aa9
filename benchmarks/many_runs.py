"""Collecting and reporting a comparison of 1,000 runs: time, peak memory, and file-system operations a run.

    python benchmarks/many_runs.py --out /tmp/many-runs --json many-runs.json --count
    python benchmarks/many_runs.py --out /tmp/few-runs --methods 4 --seeds 2 --documents 40 --steps 10

A short real comparison on the embedded model gives the form of every file. From it a run folder is written as a
comparison of so many methods, all of them LoRAs, with so many seeds would leave it: recipe, results, a line for each
step, a patch, and a record of every document of four tasks. Then, each in a process of its own:

- collect: all that ``compare`` reads after its last run, with the paired tests, until results.json is written;
- update: the same after a run in the middle, without tests;
- report: ``hfpatch report`` on the folder.

With ``--count`` (which needs strace) file-system operations are counted too: those of one real training and evaluation
below its own run's folder, and those of collecting and reporting below all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TASKS = ["tinyworld_cloze", "tinyworld_endings", "tinyworld_questions", "tinyworld_text"]
FLIPPED = 0.05  # share of the documents on which a run is right where another is wrong
STAGES = ("collect", "update", "report")
CALLS = {
    "look": "stat,lstat,newfstatat,statx,access,faccessat,faccessat2,readlink,readlinkat",
    "list": "getdents64",
    "open": "open,openat,creat",
    "change": "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,utime,utimensat",
    "sync": "fsync,fdatasync",
}


def recipe_of(methods: int, seeds: int, steps: int) -> dict[str, Any]:
    loras = {f"lora_{rank:03d}": [{"type": "lora", "r": rank}] for rank in range(1, methods)}
    return {
        "name": "many-runs",
        "model": {"name": "tinyworld/gpt-neox"},
        "data": {"source": "tinyworld/shifted", "max_documents": 400, "block_size": 128},
        "training": {"steps": steps, "batch_size": 4, "lr": 1e-3, "warmup_steps": 1, "seeds": list(range(seeds))},
        "evaluation": {"tasks": TASKS, "batch_size": 16},
        "methods": {"baseline": [], **loras},
    }


def make_template(folder: Path, documents: int) -> None:
    """Compare one LoRA with the base for two steps: the form of every file."""
    from hfpatch.recipes.comparison import Recipe
    from hfpatch.runs import compare

    values = recipe_of(2, 1, 2)
    values["evaluation"] |= {"limit": min(documents, 400)}
    compare(Recipe.model_validate(values), folder)


def make(out: Path, template: Path, values: dict[str, Any], documents: int) -> None:
    """Write the folder of a recipe's complete runs, all of them made of the template's."""
    from hfpatch.recipes.comparison import Recipe
    from hfpatch.runs.plan import planned_runs
    from hfpatch.runs.setup import set_up

    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.json").write_text(json.dumps(values))
    recipe = Recipe.model_validate(values)
    setup, rng = set_up(recipe), random.Random(0)
    records = {path.stem: _records(path, documents) for path in template.glob("runs/baseline/*/*/*.jsonl")}
    for run in planned_runs(recipe, out):
        source = template / "runs" / ("baseline" if run.variant == "baseline" else "lora_001") / "seed-0"
        _write_run(run.folder, source, setup.identify(run).to_json(), records, recipe.training.steps, rng)
    (out / "recipe.yaml").write_text(recipe.to_yaml())


def _records(path: Path, documents: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the documents of a task: what is the same in all runs, as JSON, and each metric's value."""
    templates = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records = []
    for i in range(documents):
        record = dict(templates[i % len(templates)]) | {"doc_id": i}
        record["doc_hash"] = f"{i:08d}{record['doc_hash'][8:]}"
        same = {key: record.pop(key) for key in ("doc_id", "doc_hash", "target", "doc")}
        records.append((json.dumps(same, ensure_ascii=False)[:-1], record))
    return records


def _write_run(folder: Path, source: Path, identity: Any, records: Any, steps: int, rng: random.Random) -> None:
    from hfpatch.results.records import write_values

    (folder / "evaluations").mkdir(parents=True)
    result = json.loads((source / "result.json").read_text()) | {"identity": identity}
    for task, lines in records.items():
        varied = [metrics for _, metrics in lines]
        if result["train"] is not None:  # the baseline's give its scores
            varied = [{key: _varied(value, rng) for key, value in metrics.items()} for metrics in varied]
        text = (f"{same}, {json.dumps(metrics)[1:]}\n" for (same, _), metrics in zip(lines, varied, strict=True))
        path = folder / "evaluations" / f"{task}.jsonl"
        path.write_text("".join(text), encoding="utf-8")
        result["evaluation"][task] |= {"n": len(lines)}
    write_values(folder / "evaluations", records)
    if result["train"] is not None:
        losses = [3 + rng.gauss(0, 0.1) for _ in range(steps)]
        line = '{{"step": {}, "loss": {!r}, "lr": 0.001, "tokens": 512, "seconds": 0.011234567}}\n'
        text = "".join(line.format(step + 1, loss) for step, loss in enumerate(losses))
        (folder / "metrics.jsonl").write_text(text)
        shutil.copytree(source / "patch", folder / "patch")
        trained = json.loads((source / "training.json").read_text()) | {"identity": identity}
        (folder / "training.json").write_text(json.dumps(trained))
    (folder / "result.json").write_text(json.dumps(result, indent=2))


def _varied(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return [_varied(float(value[0]), rng), *value[1:]]
    if value in (0, 1):
        return 1 - value if rng.random() < FLIPPED else value
    return value * (1 + rng.gauss(0, 0.02)) if isinstance(value, float) else value


def measure(stage: str, out: Path) -> dict[str, Any]:
    """Run one stage in this process."""
    from hfpatch.recipes.comparison import Recipe
    from hfpatch.reporting import write_report

    measured: dict[str, Any] = {}
    if stage != "report":
        from hfpatch.runs.results import collect
        from hfpatch.runs.setup import set_up
        from hfpatch.support.files import write_json
        from hfpatch.support.provenance import Clock

        setup = set_up(Recipe.model_validate(json.loads((out / "recipe.json").read_text())))
        measured["loaded_mb"] = _peak_mb()
    started, spent = time.perf_counter(), time.process_time()
    if stage == "report":
        write_report(out)
    else:
        results = collect(setup, out, Clock(), complete=stage == "collect")
        write_json(out / "results.json", results.to_json())
    measured |= {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - spent, "peak_mb": _peak_mb()}
    return measured


def _peak_mb() -> float:
    """Return this process's peak; ``ru_maxrss`` would be that of the process that started it, if larger."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def in_process(stage: str, out: Path, *, counted: bool = False) -> dict[str, Any]:
    """Run one stage in a process of its own; ``counted`` with its operations on the run folders."""
    command = [sys.executable, __file__, "--stage", stage, "--out", str(out)]
    if not counted:
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return {"operations": operations(command, out / "runs")}


def operations(command: list[str], below: Path) -> dict[str, int]:
    """Return how many file-system operations of each kind a command makes below a folder."""
    log = Path(tempfile.mkstemp(suffix=".strace")[1])
    calls = ",".join(CALLS.values())
    probe = subprocess.run(["strace", "-e", f"trace={calls}", "true"], capture_output=True, text=True)
    missing = re.findall(r"invalid system call '(\w+)'", probe.stderr)  # of other processors
    calls = ",".join(name for name in calls.split(",") if name not in missing)
    tracer = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={calls}"]
    subprocess.run([*tracer, *command], check=True, capture_output=True)
    kinds, counts = {name: kind for kind, names in CALLS.items() for name in names.split(",")}, Counter()
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            call = re.match(r"\d+ +(\w+)\(", line)
            if call and str(below) + "/" in line:
                counts[kinds[call[1]]] += 1
    log.unlink()
    return dict(counts)


def one_run(out: Path) -> dict[str, int]:
    """Return the operations of one real run, of 100 steps and 5 checkpoints, below its own folder."""
    folder, recipe = out / "one", out / "one.json"
    values = recipe_of(2, 1, 100)
    values["training"] |= {"save_every": 20}
    values["evaluation"] |= {"limit": 40}
    recipe.write_text(json.dumps(values))
    command = [sys.executable, "-m", "hfpatch", "compare", str(recipe), "--out", str(folder)]
    return operations(command, folder / "runs" / "lora_001")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", type=int, default=51, help="the baseline is one of them")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--documents", type=int, default=400, help="of each of the four tasks")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--count", action="store_true", help="count file-system operations, with strace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stage", choices=STAGES, help="this alone, in this process")
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(measure(options.stage, options.out)))
        return
    if not (options.out / "recipe.yaml").is_file():
        make_template(options.out / "template", options.documents)
        values = recipe_of(options.methods, options.seeds, options.steps)
        make(options.out, options.out / "template", values, options.documents)
    runs = 1 + (options.methods - 1) * options.seeds
    measured: dict[str, Any] = {"runs": runs, "documents": 4 * options.documents, "steps": options.steps}
    measured |= {stage: in_process(stage, options.out) for stage in STAGES}
    measured["results_mb"] = (options.out / "results.json").stat().st_size / 2**20
    measured["report_mb"] = (options.out / "report.html").stat().st_size / 2**20
    if options.count:
        for stage in STAGES:
            measured[stage] |= in_process(stage, options.out, counted=True)
        measured["one_run"] = one_run(options.out)
    print(json.dumps(measured, indent=2))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
