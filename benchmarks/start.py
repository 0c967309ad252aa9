"""CPU seconds of processes: `hfpatch train` and `hfpatch compare` of next to nothing, over minimal scripts.

    python benchmarks/start.py --rounds 5 --json start.json
    python benchmarks/start.py --only "hfpatch compare --jobs 2 to units" --rounds 3 [--checkout OTHER] --json jobs.json
    python benchmarks/start.py --gguf FILE.gguf --data-dir DATA --rounds 3 --json start-gguf.json
    python benchmarks/start.py --gguf FILE.gguf --data-dir DATA --rounds 3 --checkout OTHER --json start-before.json

The scripts do what the commands cannot do without: build the same model class with transformers, put a PEFT adapter in
it and do two training steps; for the whole of `compare` they also import lm-eval's evaluator and model class, and
matplotlib. Up to its first training step, `compare` is measured over the script that trains, too; with two jobs up to
the first unit of each worker, with all its processes. The processes take
turns, the first round warms the caches up, and the smallest time of each counts, as whatever else runs on the machine
only adds to them. With ``--gguf`` it is ``eval`` of one document by a GGUF file, dequantised and then kept, and by the
model that was kept, and ``compare`` of two jobs. ``--checkout`` measures the package of another commit.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock, checkout_state, provenance

TRAIN = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPTNeoXConfig
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=512)
base = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes))
model = get_peft_model(base, LoraConfig(target_modules=["query_key_value"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
tokens = torch.randint(512, (16, 64))
for _ in range(2):
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMPARE = f"""
import matplotlib.figure
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
{TRAIN}
"""
FIRST_STEP = """
import os, sys
from hfpatch.__main__ import main
from hfpatch.training.records import MetricsFile
MetricsFile.append = lambda *_: os._exit(0)
main(sys.argv[1:])
"""
FIRST_UNITS = """
import os, sys
from contextlib import nullcontext
import hfpatch.cli.progress, psutil
from hfpatch.__main__ import main
from hfpatch.runs import Progress
class Placed(Progress):
    nodes = set()
    def placed(self, run, action, node):
        self.nodes.add(node)
        if len(self.nodes) == 2:
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            print(sum(sum(process.cpu_times()[:4]) for process in processes), flush=True)
            for process in reversed(processes):
                process.kill()
hfpatch.cli.progress.choose_progress = lambda **_: nullcontext(Placed())
main(sys.argv[1:])
"""
SMALL = ["training.steps=2", "training.warmup_steps=1", "training.seeds=[0]", "evaluation.limit=1"]
TO_UNITS = "hfpatch compare --jobs 2 to units"
COMMANDS = {
    "minimal training script": ["-c", TRAIN],
    "hfpatch train": ["-m", "hfpatch", "train", "quickstart", "--method", "pre_projection", *SMALL],
    "minimal comparison script": ["-c", COMPARE],
    "hfpatch compare": ["-m", "hfpatch", "compare", "quickstart", *SMALL],
    "hfpatch compare to a step": ["-c", FIRST_STEP, "compare", "quickstart", *SMALL],
    TO_UNITS: ["-c", FIRST_UNITS, "compare", "quickstart", *SMALL, "--jobs", "2"],
}
DEQUANTISED, KEPT, JOBS = "hfpatch eval (dequantised)", "hfpatch eval (kept)", "hfpatch compare --jobs 2"
PEERS = {
    "hfpatch train": "minimal training script",
    "hfpatch compare": "minimal comparison script",
    "hfpatch compare to a step": "minimal training script",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one more warms up")
    parser.add_argument("--only", default=",".join(COMMANDS), help="names of commands, with commas between them")
    parser.add_argument("--gguf", type=Path, help="measure commands on this file")
    parser.add_argument("--data-dir", type=Path, help="a folder with local copies of hub data, for --gguf")
    parser.add_argument("--checkout", type=Path, help="measure the package in this checkout")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    arguments = parser.parse_args()
    clock = Clock()
    if arguments.checkout:
        os.environ["PYTHONPATH"] = str(arguments.checkout.resolve())
    if arguments.gguf:
        scored = ["--tasks", "lambada_openai", "--limit", "1", "--no-cache", "--data-dir", arguments.data_dir.resolve()]
        command = list(map(str, ["-m", "hfpatch", "eval", "--model", arguments.gguf.resolve(), *scored]))
        COMMANDS.clear()
        COMMANDS.update({DEQUANTISED: command, KEPT: command})
        COMMANDS[JOBS] = ["-m", "hfpatch", "compare", "quickstart", *SMALL, "--jobs", "2"]
        arguments.only = ",".join(COMMANDS)
    seconds: dict[str, list[float]] = {name: [] for name in arguments.only.split(",")}
    for _ in range(arguments.rounds + 1):
        for name, taken in seconds.items():
            taken.append(cpu_seconds(name))
    best = {name: min(taken[1:]) for name, taken in seconds.items()}
    ratios = {name: best[name] / best[peer] for name, peer in PEERS.items() if {name, peer} <= best.keys()}
    for name, value in best.items():
        print(f"{name:<34}{value:>7.2f} s" + (f" {ratios[name]:>6.2f} x {PEERS[name]}" if name in ratios else ""))
    if arguments.json:
        report = {"seconds": {name: taken[1:] for name, taken in seconds.items()}, "ratios": ratios}
        made = provenance(clock)
        if arguments.checkout:
            made["commit"], made["dirty"] = checkout_state(arguments.checkout / "hfpatch")
        write_json(arguments.json, {**report, "provenance": made})


def cpu_seconds(name: str) -> float:
    """Return the CPU time, user and system, of a process that runs a command in a new run folder."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *COMMANDS[name]]
        if name.startswith("hfpatch"):
            words += ["--output" if "eval" in name else "--out", f"{folder}/run"]
        cache = {"HFPATCH_CACHE": f"{folder}/cache"} if name == DEQUANTISED else {}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, env={**os.environ, **cache}, cwd=folder, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if name == TO_UNITS:  # whose processes it has counted and killed
        return float(done.stdout.split()[-1])
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
