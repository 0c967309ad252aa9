"""A program for several processes: trains a tiny patched model, once for each scenario, and saves what came of it.

    torchrun --nproc-per-node 2 train_on_processes.py ROOT '{"name": {"micro_batch_size": 1, ...}, ...}'

Besides training settings a scenario may hold ``fsdp: true``, ``dtype`` (the base's), ``stack: true``
(one of all further methods, off their initial values) and ``kill: N``: the last process ends itself by SIGKILL in its
N-th forward pass. With ``query``, a query path, a whole GPT-2 is pretrained instead; ``spoil: N`` makes the last
process's N-th forward pass return NaN there.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import torch
from families import make_config, make_model, perturb
from training_blocks import make_blocks

from hfpatch import (
    CanonConfig,
    LoReFTConfig,
    NonlinearLoraConfig,
    OutputGateConfig,
    ParallelAdapterConfig,
    PreProjectionConfig,
    ValueResidualConfig,
    patch,
    save_patch,
)
from hfpatch.data.plan import draw_plan
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.recipes.training import PretrainSettings, TrainingSettings
from hfpatch.surgery.bases import hash_weights
from hfpatch.training.pretrain import pretrain
from hfpatch.training.probe import train_probe
from hfpatch.training.processes import start_processes
from hfpatch.training.run import Run

STEPS, BATCH = 6, 4
SETTINGS = {"steps": STEPS, "batch_size": BATCH, "lr": 1e-2, "warmup_steps": 1, "evaluate_every": 3}
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}  # fmt: skip


def train(out: Path, scenario: dict) -> None:
    """Run one scenario in ``out``; the model's parts are saved and compared with what lies on disk."""
    chosen = dict(scenario)
    fsdp, kill = (chosen.pop(key, None) for key in ("fsdp", "kill"))
    os.environ.update(FSDP if fsdp else dict.fromkeys(FSDP, "false"))
    if "query" in chosen:
        train_from_scratch(out, chosen)
        return
    dtype = getattr(torch, chosen.pop("dtype", "float32"))
    state = start_processes()
    blocks, held_out = make_blocks(vocabulary=96), make_blocks(vocabulary=96, documents=7, seed=1)
    configs, stack = [PreProjectionConfig(content_skip=True, init="paper")], chosen.pop("stack", False)
    if stack:
        configs = [kind(rank=3) for kind in (NonlinearLoraConfig, ParallelAdapterConfig, LoReFTConfig)]
        configs += [OutputGateConfig(), ValueResidualConfig(), CanonConfig()]
    model = patch(make_model("gpt_neox", dtype), configs, seed=0)
    if stack:
        with torch.no_grad():
            perturb(model)
    before, kinds = hash_weights(model), set()
    model.register_forward_hook(observer(kinds, kill if state.process_index == state.num_processes - 1 else None))
    steps = chosen.get("steps", STEPS)
    plan = draw_plan(blocks=len(blocks), steps=steps, batch_size=BATCH, seed=3)
    settings = TrainingSettings(**{**SETTINGS, **chosen})
    result = train_probe(model, Run(settings, blocks, plan, 0, out, held_out=held_out))
    assert hash_weights(model) == before
    if state.is_main_process:
        save_patch(model, out / "patch")
    write_result(out, result, kinds, state)


def train_from_scratch(out: Path, chosen: dict) -> None:
    """Pretrain with the query path of a scenario, in ``out``."""
    state = start_processes()
    query, spoil = chosen.pop("query"), chosen.pop("spoil", None)
    model = build_scratch(make_config("gpt2"), ScratchSettings(biases=False, query=query), seed=3)
    kinds = set()
    model.register_forward_hook(observer(kinds))
    if state.process_index == state.num_processes - 1:
        model.transformer.ln_f.register_forward_hook(spoiler(spoil))
    blocks, held_out = make_blocks(vocabulary=96), make_blocks(vocabulary=96, documents=30, seed=1)
    plan = draw_plan(blocks=len(blocks), steps=STEPS, batch_size=BATCH, seed=3)
    settings = PretrainSettings(**{**SETTINGS, **chosen})
    result = pretrain(model, Run(settings, blocks, plan, 0, out, held_out=held_out))
    write_result(out, result, kinds, state)


def write_result(out: Path, result, kinds: set, state) -> None:
    if state.is_main_process:
        facts = {**result.to_json(), "kinds": sorted(kinds), "processes": state.num_processes}
        (out / "result.json").write_text(json.dumps(facts))
    state.wait_for_everyone()


def spoiler(call: int | None):
    """Return NaN in one forward pass of training."""
    count = 0

    def hook(module, args, output):
        nonlocal count
        count += module.training
        return output * float("nan") if module.training and count == call else output

    return hook


def observer(kinds: set, kill: int | None = None):
    """Note what kind of parameters the forward passes in training see, and end the process in one of them."""
    count = 0

    def hook(module, args, output):
        nonlocal count
        if module.training:
            kinds.update(type(parameter.data).__name__ for parameter in module.parameters())
            kinds.update("ZeRO-3" for parameter in module.parameters() if hasattr(parameter, "ds_id"))
            count += 1
            if count == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # what is imported: each run collects garbage when it ends
    for name, scenario in json.loads(sys.argv[2]).items():
        train(Path(sys.argv[1]) / name, scenario)
