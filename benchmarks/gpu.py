"""Everything that only a GPU can show, in one command without network: scoring, training, correctness.

    python benchmarks/gpu.py --minutes 20 --out results/gpu
    python benchmarks/gpu.py --minutes 2 --out /tmp/gpu --device cpu --shapes tiny --no-compile

Random weights of Pythia and Llama shapes, made on the device; the texts of ``--data-dir``, or made-up ones of like
lengths. In bf16, interleaved in one process after a warm-up; each time is read when the device is done. Measured:

correctness  an untrained patch changes no bit; the formula; eager, sdpa and flash attention; gradient checkpointing;
             a resumed run; log-likelihoods against lm-eval's HFLM in fp32; the tests that are marked ``cuda``
training     a step of a bf16 base with fp32 adapters, their products in bf16 (autocast) or fp32, and (where
             installed) with Liger: model FLOPs utilisation and peak memory, against LoRA of equal parameters under HF
             Trainer (bf16=True)
compiled     the same with torch.compile, which takes most of its time
profile      where the time of a step and of scoring goes: how long the GPU computes, by kind of kernel, how many
             kernels are launched, and how often the host waits for them
scoring      tokens a second and the share of the dense rate, against HFLM with ``auto`` (which looks for its batch
             size at each call, as it does in use), HFLM at 64 and at 256 and, where installed, vLLM

Each shape is trained, profiled and scored on the first task; then come compiled steps, steps of more rows and other
tasks. The dense rate is that of a large matrix product; its share counts only operations that no exact scorer or step
can avoid.
``OUT/gpu.json`` is written after each measurement, so that a run that is cut keeps what it has; one that fails
is written down with its reason. On a GPU a table goes into results/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import evaluation
import torch
import training
from gpu_checks import CHECKS, TASKS, installed, make_data, make_model, make_requests, make_tokenizer
from profiling import device_profiler, device_times
from transformers import PreTrainedModel, TrainerCallback

from hfpatch import patch
from hfpatch.support.files import write_json, write_text
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.methods import build_method
from hfpatch.surgery.patch import patch_summary
from hfpatch.training import loss
from hfpatch.training.hardware import (
    flops_per_token,
    matrix_rate,
    peak_memory_bytes,
    reset_peak_memory,
    resident_memory_bytes,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "results" / "README.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
SHAPES = ("160m", "1.4b", "llama-1b", "410m")
PEERS = ("hflm-auto", "hflm-64", "hflm-256")
IN_FP32, LORA = "pre_projection, products in fp32", "lora, HF Trainer"
Measurement = tuple[str, Callable[[], dict[str, Any]]]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    clock, rows = Clock(), list[dict[str, Any]]()
    ends = time.perf_counter() + 60 * options.minutes
    for name, measure in measurements(options, ends):
        began = time.perf_counter()
        made = {"skipped": "no time was left"} if began >= ends else tried(measure)
        rows.append({"name": name, **made, "took_s": round(time.perf_counter() - began, 1)})
        settings = {key: str(value) for key, value in vars(options).items()}
        facts = {"provenance": provenance(clock), "device": device_facts(options), "settings": settings}
        write_json(options.out / "gpu.json", {**facts, "measurements": rows})
        print(json.dumps(rows[-1]), flush=True)
        training.give_back_memory()
    if options.readme is not None:
        text = options.readme.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        write_text(options.readme, "".join([before, BEGIN, "\n", table(facts, rows), END, after]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--minutes", type=float, default=20, help="no measurement begins after that")
    parser.add_argument("--out", type=Path, required=True, help="a folder for gpu.json")
    parser.add_argument("--data-dir", type=Path, help="local copies of hub data and gpt-neox-tokenizer")
    parser.add_argument("--shapes", **names, default=list(SHAPES), help=f"out of tiny, {', '.join(SHAPES)}")
    parser.add_argument("--tasks", **names, default=list(TASKS), help=f"out of {', '.join(TASKS)}")
    parser.add_argument("--requests", type=int, default=4000, help="requests of each task")
    parser.add_argument("--rounds", type=int, default=5)
    counts = {"type": lambda text: list(map(int, text.split(","))), "metavar": "N,M"}
    parser.add_argument("--rows", **counts, default=[16, 64], help="packed rows of 512 tokens in a step, all at once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="leave the tests marked cuda out")
    parser.add_argument("--readme", type=Path, help="where the table goes; results/README.md on a GPU")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; give --device cpu to try the script at a tiny shape")
    if options.readme is None and options.device == "cuda":
        options.readme = README
    if options.readme is not None and not re.search(f"{BEGIN}.*{END}", options.readme.read_text("utf-8"), re.DOTALL):
        parser.error(f"{options.readme} needs the lines {BEGIN} and {END}, between which the table goes")
    return options


def measurements(options: argparse.Namespace, ends: float) -> Iterator[Measurement]:
    """Yield what is measured, the most important first."""
    for check in CHECKS:
        yield f"correctness {check.__name__}", partial(check, options)
    if options.tests and options.device == "cuda":
        yield "correctness tests", marked_tests
    rows, *more = options.rows
    for shape in options.shapes:
        for liger in [True, False] if installed("liger_kernel") else [False]:
            yield f"training {shape}{' with Liger' if liger else ''}", partial(train, options, shape, rows, liger=liger)
        yield f"profile {shape}", partial(profile, options, shape, rows)
        for task in options.tasks[:1]:
            yield f"scoring {shape} {task}", partial(score, options, shape, task, ends)
    for shape in options.shapes if options.compile else []:
        yield f"training {shape}, compiled", partial(train, options, shape, rows, compiled=True)
    for count in more:
        for shape in options.shapes:
            yield f"training {shape}, {count} rows", partial(train, options, shape, count)
    for task in options.tasks[1:]:
        for shape in options.shapes:
            yield f"scoring {shape} {task}", partial(score, options, shape, task, ends)


def tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a measurement, or why it failed: the others go on."""
    try:
        return measure()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def device_facts(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    facts = {"dense_bf16_rate": matrix_rate(device, torch.bfloat16)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    packages = ("vllm", "liger_kernel", "flash_attn")
    return {**facts, "installed": [name for name in packages if installed(name)]}


def marked_tests() -> dict[str, Any]:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "cuda", "-p", "no:cacheprovider", str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    return {"passed": done.returncode == 0, "output": done.stdout[-2000:]}


def score(options: argparse.Namespace, shape: str, task: str, ends: float) -> dict[str, Any]:
    """Measure the scoring of one task; after ``ends`` no other round begins."""
    model, tokenizer, requests = make_model(options, shape), make_tokenizer(options), make_requests(options, task)
    names = (evaluation.OWN, *PEERS)
    scorers = {name: evaluation.make_scorer(name, model, tokenizer) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda" and installed("vllm"):
            scorers["vllm"] = vllm_scorer(model, tokenizer, folder)
        for scorer in scorers.values():
            scorer(requests)  # warm-up
        seconds: dict[str, evaluation.Times] = {name: {clock: [] for clock in evaluation.CLOCKS} for name in scorers}
        for number in range(options.rounds):
            if number and time.perf_counter() >= ends:
                break
            for name, scorer in scorers.items():
                evaluation.take(seconds[name], partial(scorer, requests))
    wall = {name: taken["wall"] for name, taken in seconds.items()}
    tokens = sum(len(tokenizer(a + b)["input_ids"]) for a, b in (request.args for request in requests))
    ours = wall[evaluation.OWN]
    least = evaluation.bound_operations(model, tokenizer, requests) / matrix_rate(model.device, model.dtype)
    return {
        "kind": "scoring", "shape": shape, "task": task, "requests": len(requests), "tokens": tokens, "seconds": wall,
        "tokens_per_s": {name: tokens / statistics.median(taken) for name, taken in wall.items()},
        "share_of_dense_rate": {name: least / statistics.median(taken) for name, taken in wall.items()},
        "times_faster": {name: training.ratio(taken, ours) for name, taken in wall.items() if taken is not ours},
    }  # fmt: skip


def vllm_scorer(model: PreTrainedModel, tokenizer: Any, folder: str) -> Callable[[list[Any]], Any]:
    """Return lm-eval's vLLM model on the same weights, in a part of the memory."""
    from lm_eval.models.vllm_causallms import VLLM

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    scorer = VLLM(pretrained=folder, dtype="bfloat16", gpu_memory_utilization=0.5, max_model_len=2048)
    return partial(scorer.loglikelihood, disable_tqdm=True)


class MeasureMemory(TrainerCallback):
    """Notes what a step needs above what lies in the device's memory before it, beside another callback."""

    def __init__(self, other: TrainerCallback) -> None:
        self.other, self.held, self.extra = other, 0, 0

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        """Let the other one begin, as it may wait, and note what lies in memory."""
        self.other.on_step_begin(*given, **more)
        reset_peak_memory()
        self.held = resident_memory_bytes()

    def on_step_end(self, *given: Any, **more: Any) -> None:
        """Note the peak, and let the other one end."""
        training.wait_for_device()
        self.extra = peak_memory_bytes() - self.held
        self.other.on_step_end(*given, **more)


def train(
    options: argparse.Namespace, shape: str, rows: int, *, liger: bool = False, compiled: bool = False
) -> dict[str, Any]:
    """Measure a training step of so many rows, with Liger's loss or without it, compiled or not."""
    data, steps = make_data(options, shape, rows), options.rounds + 2
    variants: dict[str, dict[str, Any]] = {"pre_projection": {"autocast": "bfloat16", "compile": compiled}}
    if not compiled:
        variants[IN_FP32] = {}
    models: dict[str, PreTrainedModel] = {}
    memory: dict[str, MeasureMemory] = {}

    def run(name: str, callback: TrainerCallback) -> None:
        model = models[name] = make_patched(options, shape, "lora" if name == LORA else "pre_projection_skip")
        memory[name] = MeasureMemory(callback)
        if name == LORA:
            settings = {"gradient_checkpointing": False, "bf16": True}
            training.run_hf_trainer(model, data.packed, rows, steps, memory[name], **settings)
        else:
            training.run_hfpatch(model, data.packed, rows, steps, memory[name], **variants[name])

    with replaced.object(loss, "_liger", loss._liger if liger else lambda: None):
        seconds = training.take_turns({name: partial(run, name) for name in (*variants, LORA)}, time.perf_counter)
    rate = matrix_rate(torch.device(options.device), torch.bfloat16)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        "kind": "training", "shape": shape, "liger": liger, "tokens": data.tokens, "seconds": seconds,
        "mfu": {name: data.tokens * flops_per_token(models[name]) / medians[name] / rate for name in seconds},
        "tokens_per_s": {name: data.tokens / median for name, median in medians.items()},
        "extra_bytes": {name: measurer.extra for name, measurer in memory.items()},
        "trainable": {name: patch_summary(model).trainable for name, model in models.items()},
        "ratio_to_lora": {name: training.ratio(seconds[name], seconds[LORA]) for name in variants},
    }  # fmt: skip


def make_patched(options: argparse.Namespace, shape: str, method: str) -> PreTrainedModel:
    model = make_model(options, shape)
    return patch(model, build_method(model, training.METHODS, method).configs)


def profile(options: argparse.Namespace, shape: str, rows: int) -> dict[str, Any]:
    """Profile a step of pre-projection with content skip, not compiled, and the scoring of the first task."""
    data, step = make_data(options, shape, rows), ProfiledStep()
    model = make_patched(options, shape, "pre_projection_skip")
    training.run_hfpatch(model, data.packed, rows, step.last + 1, step, autocast="bfloat16")
    requests = make_requests(options, options.tasks[0])
    scorer = evaluation.make_scorer(evaluation.OWN, make_model(options, shape), make_tokenizer(options))
    scorer(requests)  # warm-up
    begin = time.perf_counter()
    scorer(requests)
    seconds = time.perf_counter() - begin
    with device_profiler() as run:
        scorer(requests)
        training.wait_for_device()
    return {
        "kind": "profile", "shape": shape, "tokens": data.tokens,
        "step": device_times(step.run, step.seconds), "scoring": device_times(run, seconds),
    }  # fmt: skip


class ProfiledStep(TrainerCallback):
    """Times a step after those that warm up, and profiles the next one."""

    last = 5

    def __init__(self) -> None:
        self.step, self.seconds, self.run = 0, 0.0, device_profiler()

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        """Start the clock, or the profiler."""
        training.wait_for_device()
        self.step += 1
        if self.step == self.last - 1:
            self.seconds = -time.perf_counter()
        elif self.step == self.last:
            self.run.start()

    def on_step_end(self, *given: Any, **more: Any) -> None:
        """Stop it."""
        training.wait_for_device()
        if self.step == self.last - 1:
            self.seconds += time.perf_counter()
        elif self.step == self.last:
            self.run.stop()


def table(facts: dict[str, Any], measured: list[dict[str, Any]]) -> str:
    """Return the measurements in Markdown."""
    device, rate = facts["device"].get("name", "cpu"), facts["device"]["dense_bf16_rate"]
    lines = [f"On {device}, dense bf16 {rate / 1e12:.3g} TFLOP/s, at commit {facts['provenance']['commit']}:", ""]
    lines += ["| scoring | tokens/s | share of the dense rate | hfpatch's speed over it |", "|---|---|---|---|"]
    for row in (row for row in measured if row.get("kind") == "scoring"):
        for name, speed in row["tokens_per_s"].items():
            figures = f"{speed:,.0f} | {row['share_of_dense_rate'][name]:.1%} | {spread(row['times_faster'].get(name))}"
            lines.append(f"| {row['shape']}, {row['task']}, {name} | {figures} |")
    lines += ["", "| training | MFU | peak above the model | step over LoRA's |", "|---|---|---|---|"]
    for row in (row for row in measured if row.get("kind") == "training"):
        for name, share in row["mfu"].items():
            memory = f"{row['extra_bytes'][name] / 2**20:,.0f} MiB"
            what = f"{row['name'].removeprefix('training ')}, {name}"
            lines.append(f"| {what} | {share:.1%} | {memory} | {spread(row['ratio_to_lora'].get(name))} |")
    lines += [
        "",
        "| profile | seconds | GPU computes | launches | host waits | longest kinds |",
        "|---|---|---|---|---|---|",
    ]
    for row in (row for row in measured if row.get("kind") == "profile"):
        for what in ("step", "scoring"):
            taken = row[what]
            kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in list(taken["share_of_device"].items())[:4])
            figures = (
                f"{taken['seconds']:.3f} | {taken['device_share']:.0%} | {taken['launches']:,} | {taken['waits']:,}"
            )
            lines.append(f"| {row['shape']}, {what} | {figures} | {kinds} |")
    lines += ["", "| check | result |", "|---|---|"]
    checks = [row for row in measured if "passed" in row]
    lines += [f"| {row['name'].split(' ', 1)[1]} | {'passed' if row['passed'] else 'FAILED'} |" for row in checks]
    for row in measured:
        if why := row.get("failed") or row.get("skipped"):
            lines += ["", f"Not measured: {row['name']} ({why})."]
    return "\n".join(lines) + "\n"


def spread(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.2f} [{ratio['lowest']:.2f}, {ratio['highest']:.2f}]" if ratio else ""


if __name__ == "__main__":
    main()
