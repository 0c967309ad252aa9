"""Step time of every method against parameter-matched LoRA, interleaved in one process.

    python benchmarks/step_time.py --hidden 512 --layers 6 --rounds 5

A random-weight Pythia shape, one batch of full rows, forward + backward + AdamW in fp32. Machines are noisy, so what
counts is the ratio to LoRA within a round; the median, smallest and largest ratio over the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from hfpatch.surgery.methods import build_method
from hfpatch.surgery.patch import patch, patch_summary

PEER = "lora"
METHODS = {
    "lora": [{"type": "lora", "match": "pre_projection"}],
    "pre_projection": [{"type": "pre_projection"}],
    "pre_projection_skip": [{"type": "pre_projection", "content_skip": True}],
    "nonlinear_query": [{"type": "nonlinear_query"}],
    "linear_control": [{"type": "nonlinear_query", "activation": "identity"}],
}


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    tokens = torch.randint(arguments.vocabulary, (arguments.rows, arguments.length))
    steps: dict[str, Callable[[], None]] = {}
    trainable: dict[str, int] = {}
    for name in METHODS:
        steps[name], trainable[name] = make_step(name, arguments, tokens)
    seconds = {name: [timed(step)] for name, step in steps.items()}  # warm-up
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    report(seconds, trainable, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 6), ("heads", 8), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("rows", 2), ("length", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def make_step(name: str, arguments: argparse.Namespace, tokens: torch.Tensor) -> tuple[Callable[[], None], int]:
    """Return one training step of a method on a fresh model, and its number of trainable parameters."""
    model = AutoModelForCausalLM.from_config(
        GPTNeoXConfig(
            hidden_size=arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            intermediate_size=4 * arguments.hidden,
            vocab_size=arguments.vocabulary,
        )
    )
    patch(model, build_method(model, METHODS, name).configs)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, patch_summary(model).trainable


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def report(seconds: dict[str, list[float]], trainable: dict[str, int], arguments: argparse.Namespace) -> None:
    peer = seconds[PEER][1:]
    rows = []
    for name, times in seconds.items():
        ratios = [value / other for value, other in zip(times[1:], peer, strict=True)]
        rows.append(
            {
                "method": name,
                "trainable": trainable[name],
                "seconds": statistics.median(times[1:]),
                "ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    if arguments.json:
        where = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        print(json.dumps({"settings": vars(arguments), "environment": where, "rows": rows}, indent=2))
        return
    print(f"{'method':<22}{'trainable':>12}{'s / step':>10}   ratio to {PEER} [lowest, highest]")
    for row in rows:
        figures = f"{row['seconds']:>10.3f}   {row['ratio']:.2f} [{row['lowest']:.2f}, {row['highest']:.2f}]"
        print(f"{row['method']:<22}{row['trainable']:>12,}{figures}")


if __name__ == "__main__":
    main()
