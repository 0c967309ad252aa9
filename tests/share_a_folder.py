"""A program whose children run in one folder at a time: prints what became of them.

    python share_a_folder.py FOLDER

Each run is a process of its own (a fork, so that nothing is imported twice).
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_runs import GPT2, save_base

import hfpatch.reporting
import hfpatch.runs.comparison
from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import Progress, compare, train

TRAINING = {"steps": 4, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "save_every": 1}
DATA = {"source": "tinyworld/base", "max_documents": 40, "block_size": 32, "held_out": 5}
METHODS = {"baseline": [], "skip": [{"type": "pre_projection"}], "lora": [{"type": "lora", "r": 2}]}


class Log(Progress):
    """Writes down which runs were trained, and pauses after a step where that is asked for."""

    def __init__(self, file: Path, pause_after: int | None = None) -> None:
        self.file, self.left = file, pause_after

    def started(self, run, steps):
        with self.file.open("a") as stream:
            stream.write(f"{run}\n")

    def stepped(self, run, record):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.file.with_suffix(".paused").touch()
                time.sleep(100)


def fork(work, errors: Path) -> int:
    """Run ``work`` in a process of its own, its exit code that of the command line; return its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except HfpatchError as error:
            errors.write_text(str(error))
            code = 2
        finally:
            os._exit(code)
    return child


def wait(*children: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(root: Path) -> dict:
    """Two methods at once, two comparisons at once, one of them killed; then the variants of a study at once."""
    save_base(root / "base")
    recipe = Recipe.model_validate(
        {"name": "small", "model": {"name": str(root / "base")}, "data": DATA, "training": TRAINING, "methods": METHODS}
        | {"evaluation": {"tasks": ["tinyworld_cloze"], "limit": 4}}
    )
    out, report = root / "out", {}
    methods = [method for method in METHODS if method != "baseline"]
    report["train"] = wait(*(fork(lambda m=m: train(recipe, m, out), root / f"{m}.txt") for m in methods))
    (out / "runs" / "lora").rename(root / "lora")  # the comparison trains it again
    log = Log(root / "first.txt", pause_after=1)
    first = fork(lambda: compare(recipe, out, resume=True, progress=log), root / "error.txt")
    while not (root / "first.paused").exists() and not (root / "error.txt").exists():
        time.sleep(0.05)
    report["holder"] = first
    report["second"] = wait(fork(lambda: compare(recipe, out, resume=True), root / "second-error.txt"))
    report["refused"] = (root / "second-error.txt").read_text()
    os.kill(first, signal.SIGKILL)
    wait(first)
    report["third"] = wait(fork(lambda: compare(recipe, out, resume=True), root / "third-error.txt"))
    folders = [root / "lora" / "seed-0", out / "runs" / "lora" / "seed-0"]
    report["losses"] = [[json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()] for folder in folders]
    report["results"] = sorted(json.loads((out / "results.json").read_text())["methods"])
    report["first_trained"] = (root / "first.txt").read_text().splitlines()
    study = StudyRecipe.model_validate(
        {"name": "small", "architecture": GPT2, "tokenizer": {"path": str(root / "base")}, "data": DATA}
        | {"training": TRAINING, "baseline": "one", "variants": {"one": {}, "two": {}}}
    )
    out = root / "study"
    variants = (fork(lambda v=v: compare(study, out, variant=v), root / f"{v}.txt") for v in study.variants)
    report["study"] = wait(*variants)
    report["variants"] = sorted(json.loads((out / "results.json").read_text())["methods"])
    report["locks"] = [str(path) for path in root.rglob(".locks")]
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # each training collects garbage
    hfpatch.reporting.write_report = lambda _: None  # takes longer than all the rest
    print(json.dumps(main(Path(sys.argv[1]))))
