"""A program for several processes: trains a tiny patched model and writes what every process may be held against.

torchrun --nproc-per-node 2 train_on_processes.py OUT [key=value ...]
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from families import make_model
from training_blocks import make_blocks

from hfpatch import PreProjectionConfig, patch, save_patch
from hfpatch.bases import hash_weights
from hfpatch.data.plan import draw_plan
from hfpatch.strict import read_override
from hfpatch.training.probe import train_probe
from hfpatch.training.processes import start_processes
from hfpatch.training.settings import TrainingSettings

STEPS, BATCH = 6, 4


def main(out: Path, *overrides: str) -> None:
    torch.set_num_threads(1)
    state = start_processes()
    chosen = dict(map(read_override, overrides))
    die, resume = chosen.pop("die", None), chosen.pop("resume", False)
    blocks = make_blocks(vocabulary=96)
    held_out = make_blocks(vocabulary=96, documents=7, seed=1)
    model = patch(make_model("gpt_neox"), PreProjectionConfig(content_skip=True, init="paper"), seed=0)
    before = hash_weights(model)

    def on_step(record):
        if die == record.step:
            os.kill(os.getpid(), signal.SIGKILL)

    if die is not None and state.process_index == 1:
        model.register_forward_hook(counter(on_step))
    plan = draw_plan(blocks=len(blocks), steps=STEPS, batch_size=BATCH, seed=3)
    settings = TrainingSettings(**{"steps": STEPS, "batch_size": BATCH, "lr": 1e-2, "warmup_steps": 2, **chosen})
    result = train_probe(
        model, settings=settings, blocks=blocks, plan=plan, seed=0, run_dir=out, held_out=held_out, resume=resume
    )
    assert hash_weights(model) == before
    if state.is_main_process:
        save_patch(model, out / "patch")
        (out / "result.json").write_text(json.dumps(result.to_json()))
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    torch.save(trained, out / f"trained-{state.process_index}.pt")
    state.wait_for_everyone()


def counter(on_step):
    """Call ``on_step`` with the number of the forward pass in training."""
    calls = []

    def hook(module, args, output):
        if module.training:
            calls.append(1)
            on_step(type("Record", (), {"step": len(calls)}))

    return hook


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
