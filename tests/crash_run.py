"""A program that is killed again and again: prints how its runs compare with one that was never stopped.

    python crash_run.py FOLDER SEED '{"probe": KILLS, "pretrain": KILLS}'

Each run is a process of its own (a fork, so that nothing is imported twice), resumed after every SIGKILL until it ends.
"""

import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from families import make_config, make_model
from training_blocks import make_blocks, metrics_of, same

from hfpatch import PreProjectionConfig, patch
from hfpatch.data.plan import draw_plan
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.recipes.training import PretrainSettings, TrainingSettings
from hfpatch.training.pretrain import pretrain
from hfpatch.training.probe import train_probe
from hfpatch.training.run import Run

STEPS = 16
SETTINGS = {
    "steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "lr": 1e-2, "warmup_steps": 2, "save_every": 1,
    "keep_checkpoints": 2, "evaluate_every": 5, "keep_best": True,
}  # fmt: skip


def train(out: Path, kind: str) -> None:
    """Run to the end from wherever ``out`` is, and leave the trained tensors."""
    blocks, held_out = make_blocks(vocabulary=96), make_blocks(vocabulary=96, documents=5, seed=1)
    plan = draw_plan(blocks=len(blocks), steps=STEPS, batch_size=4, seed=3)
    common = {"blocks": blocks, "plan": plan, "seed": 0, "folder": out, "held_out": held_out}
    if kind == "probe":
        model = patch(make_model("gpt_neox"), PreProjectionConfig(content_skip=True, dropout=0.1), seed=0)
        result = train_probe(model, Run(TrainingSettings(**SETTINGS), **common))
    else:
        config = make_config("gpt2", resid_pdrop=0.1)
        model = build_scratch(config, ScratchSettings(query={"path": "nonlinear", "fused": True}), seed=0)
        settings = PretrainSettings(**SETTINGS, diagnose_every=2, diverged_above=20.0)
        result = pretrain(model, Run(settings, **common))
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    torch.save({"trained": trained, "survival": result.update_survival, "best": result.best_step}, out / "end.pt")


def start(out: Path, kind: str, dies_at_sync: int | None = None) -> int:
    """Train in a process of its own, which kills itself at a certain fsync, that is within a save; return its id."""
    child = os.fork()
    if child == 0:
        try:
            if dies_at_sync is not None:
                sync, calls = os.fsync, itertools.count(1)
                os.fsync = lambda file: (
                    os.kill(os.getpid(), signal.SIGKILL) if next(calls) == dies_at_sync else sync(file)
                )
            train(out, kind)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def outcome(out: Path) -> dict:
    """Return everything of a finished run that must not depend on interruptions."""
    lines = metrics_of(out)
    for line in lines:
        del line["seconds"]
    checkpoints = sorted(path.name for path in (out / "checkpoints").iterdir())
    diagnosed = out / "diagnostics.jsonl"
    diagnostics = diagnosed.read_text() if diagnosed.exists() else ""
    return {**torch.load(out / "end.pt"), "lines": lines, "checkpoints": checkpoints, "diagnostics": diagnostics}


def main(root: Path, kills: int, seed: int, kind: str) -> dict:
    """Kill at ``kills`` random instants; compare each run that reaches its end with the straight one."""
    generator = random.Random(seed)
    began = time.monotonic()
    assert os.waitpid(start(root / "straight", kind), 0)[1] == 0
    lasts = time.monotonic() - began
    expected, done = outcome(root / "straight"), []
    report = {"kills": 0, "ends": 0, "equal": 0, "leftovers": 0, "steps": []}
    report["diagnostics"] = expected["diagnostics"].count("\n")
    out = root / "broken-0"
    while report["kills"] < kills or out.exists():
        in_a_save = report["kills"] < kills and report["kills"] % 3 == 0
        child = start(out, kind, generator.randint(1, 60) if in_a_save else None)
        if report["kills"] < kills and not in_a_save:
            time.sleep(generator.uniform(0.3, 0.8) * lasts)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            report["kills"] += 1
            saved = sorted((out / "checkpoints").glob("step-*")) if out.exists() else []
            report["steps"].append(int(saved[-1].name[5:]) if saved else 0)
            report["leftovers"] += len(list((out / "checkpoints").glob(".step-*"))) if out.exists() else 0
            continue
        assert status == 0, "a resumed run failed"
        report["ends"] += 1
        ended = outcome(out)
        equal = all(ended[key] == expected[key] for key in expected if key != "trained")
        report["equal"] += equal and same(ended["trained"], expected["trained"])  # to the last bit
        done.append(out)
        out = root / f"broken-{len(done)}"
        shutil.rmtree(done[-1])
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, kills = Path(sys.argv[1]), json.loads(sys.argv[3])
    for kind in kills:  # what a first run imports, the forks need not import again
        train(root / "first" / kind, kind)
    gc.collect()
    gc.freeze()  # what is imported: a run collects garbage when it ends
    print(json.dumps({kind: main(root / kind, number, int(sys.argv[2]), kind) for kind, number in kills.items()}))
