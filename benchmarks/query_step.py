"""Step time of pretraining with a nonlinear query against the linear W_Q, interleaved in one process.

    python benchmarks/query_step.py                                        # a small GPT-2 on the CPU
    python benchmarks/query_step.py --hidden 768 --layers 12 --heads 12 --rows 8 --length 1024 --device cuda \
        --autocast bfloat16

Random tokens, forward + backward + AdamW, GPT-2 without biases and with a tied head. Machines are noisy, so what counts
is the ratio to the linear query within a round; the median, smallest and largest ratio over the rounds are printed.
The linear query runs twice a round: the ratio of the second to the first says how far the machine can be trusted.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hfpatch.models import non_embedding_parameters
from hfpatch.recipes.models import GPT2_SMALL
from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.architecture import build_model

PEER = "linear"
NONLINEAR = {"path": "nonlinear"}
VARIANTS = {
    "linear": {},
    "linear_again": {},
    "identity": {"query": {"path": "identity"}},
    "nonlinear": {"query": NONLINEAR},
    "nonlinear_fused": {"query": {**NONLINEAR, "fused": True}},
    "linear_control": {"query": {**NONLINEAR, "activation": "identity"}},
    "nonlinear_no_norms": {"query": {**NONLINEAR, "input_norm": "none", "output_norm": "none"}},
    "mlp_4.75": {"mlp_width": 4.75},
}


def main() -> None:
    arguments, clock = parse_arguments(), Clock()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    tokens = torch.randint(arguments.vocabulary, (arguments.rows, arguments.length), device=arguments.device)
    steps: dict[str, Callable[[], None]] = {}
    parameters: dict[str, int] = {}
    for name, changes in VARIANTS.items():
        steps[name], parameters[name] = make_step(changes, arguments, tokens)
    for step in steps.values():  # warm-up
        timed(step, arguments)
        timed(step, arguments)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(arguments.rounds):
        for name in order.sample(list(steps), len(steps)):
            seconds[name].append(timed(steps[name], arguments))
    report(seconds, parameters, arguments, clock)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("heads", 4), ("vocabulary", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("rows", 4), ("length", 256), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="mixed precision")
    parser.add_argument("--compile", action="store_true", help="torch.compile every variant")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of this process, not wall time, on a busy machine"
    )
    parser.add_argument("--threads", type=int, help="threads of torch; all cores if not given")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def make_step(
    changes: dict[str, object], arguments: argparse.Namespace, tokens: torch.Tensor
) -> tuple[Callable[[], None], int]:
    """Return one training step of a variant on a fresh model, and its parameters outside the embeddings."""
    sizes = {"n_embd": arguments.hidden, "n_layer": arguments.layers, "n_head": arguments.heads}
    tokenwise = {"vocab_size": arguments.vocabulary, "n_positions": arguments.length}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = build_model({**GPT2_SMALL, **sizes, **tokenwise, **special, **changes}).to(arguments.device).train()
    counted = non_embedding_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if arguments.compile else model
    kind = torch.device(arguments.device).type

    def step() -> None:
        precision = contextlib.nullcontext()
        if arguments.autocast:
            precision = torch.autocast(kind, getattr(torch, arguments.autocast))
        with precision:
            loss = run(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, counted


def timed(step: Callable[[], None], arguments: argparse.Namespace) -> float:
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    start = clock()
    step()
    if arguments.device != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def report(
    seconds: dict[str, list[float]], parameters: dict[str, int], arguments: argparse.Namespace, clock: Clock
) -> None:
    rows = []
    for name, times in seconds.items():
        ratios = [taken / other for taken, other in zip(times, seconds[PEER], strict=True)]
        rows.append(
            {
                "variant": name,
                "parameters": parameters[name],
                "seconds": statistics.median(times),
                "ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    if arguments.out:
        settings = {key: value for key, value in vars(arguments).items() if key != "out"}
        write_json(arguments.out, {"provenance": provenance(clock), "settings": settings, "rows": rows})
    print(f"{'variant':<20}{'parameters':>12}{'s / step':>10}   ratio to {PEER} [lowest, highest]")
    for row in rows:
        figures = f"{row['seconds']:>10.4f}   {row['ratio']:.3f} [{row['lowest']:.3f}, {row['highest']:.3f}]"
        print(f"{row['variant']:<20}{row['parameters']:>12,}{figures}")


if __name__ == "__main__":
    main()
