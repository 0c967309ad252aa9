"""What the pre-projection costs at inference: a patched forward pass over the bare one, and the multiply-adds of both.

    python benchmarks/inference.py --json inference.json
    python benchmarks/inference.py --shapes tiny --seconds 1

Random weights of Pythia shapes, fp32 on the CPU, no gradients. Prefill is one row of 512 tokens of which the last
position reaches the head, as in ``generate``; decoding is one token after 128 in the key-value cache. The same
arithmetic written by hand, a module around the attention without any hook, shows what the hooks cost; the bare model a
second time shows the noise. Variants take turns, forward pass by forward pass, and the time of a variant is the fastest
tenth's largest (10th percentile), as whatever else runs on the machine only adds to the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from training import SHAPES
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel

from hfpatch import PreProjectionConfig, patch
from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock, provenance

PREFILL, CONTEXT = 512, 128
VARIANTS = ("bare", "bare again", "pre", "pre by hand", "pre + skip", "pre + skip by hand")
Run = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tiny,70m,160m", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each shape and each of prefill and decoding")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock, rows = Clock(), []
    print(f"{'shape':<6}{'what':<10}{'variant':<20}{'ms':>9}{'/ bare':>8}{'multiply-adds':>15}{'over them':>11}")
    for shape in arguments.shapes.split(","):
        models = {name: make_model(shape, name) for name in VARIANTS}
        for what, make_run in (("prefill", make_prefill), ("decoding", make_decoding)):
            times = take_turns({name: make_run(model) for name, model in models.items()}, arguments.seconds)
            for name, seconds in times.items():
                rows.append(figures(shape, what, name, seconds, times["bare"]))
                print_row(rows[-1])
    if arguments.json:
        write_json(arguments.json, {"rows": rows, "provenance": provenance(clock)})


class ByHand(nn.Module):
    """An attention that reads x~ = x + W_down silu(W_up x), plus x~ W_skip where asked for."""

    def __init__(self, attention: nn.Module, hidden: int, *, skip: bool) -> None:
        super().__init__()
        self.attention = attention
        self.up = nn.Linear(hidden, int(1.25 * hidden), bias=False)
        self.down = nn.Linear(int(1.25 * hidden), hidden, bias=False)
        self.skip = nn.Linear(hidden, hidden, bias=False) if skip else None

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        """Map (batch, seq, hidden) to what the attention returns."""
        x = hidden_states + self.down(F.silu(self.up(hidden_states)))
        branch, *rest = self.attention(x, **options)
        return (branch if self.skip is None else branch + self.skip(x), *rest)


def make_model(shape: str, variant: str) -> PreTrainedModel:
    """Return a frozen model of a shape, patched as a variant says."""
    hidden, layers, heads, vocabulary = SHAPES[shape]
    config = GPTNeoXConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
        vocab_size=vocabulary,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    skip = "skip" in variant
    if "hand" in variant:
        for layer in model.gpt_neox.layers:
            layer.attention = ByHand(layer.attention, hidden, skip=skip)
    elif "pre" in variant:
        patch(model, PreProjectionConfig(content_skip=skip))
    return model.eval().requires_grad_(False)


def make_prefill(model: PreTrainedModel) -> Run:
    tokens = torch.arange(PREFILL)[None] % model.config.vocab_size

    def run() -> None:
        model(tokens, use_cache=False, logits_to_keep=1)

    return run


def make_decoding(model: PreTrainedModel) -> Run:
    tokens = torch.arange(CONTEXT)[None] % model.config.vocab_size
    with torch.no_grad():
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values

    def run() -> None:
        model(tokens[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return run


def take_turns(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Return the CPU seconds of every forward pass but the first of each variant."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    start = time.process_time()
    with torch.no_grad():
        while time.process_time() - start < seconds or len(taken["bare"]) < 4:
            for name, run in runs.items():
                begin = time.process_time()
                run()
                taken[name].append(time.process_time() - begin)
    return {name: passes[1:] for name, passes in taken.items()}


def figures(shape: str, what: str, variant: str, seconds: list[float], bare: list[float]) -> dict[str, Any]:
    """Return the time of a variant, its ratio to the bare model's, and that of their multiply-adds."""
    ratio, arithmetic = fastest(seconds) / fastest(bare), multiply_adds(shape, what, variant)
    return {
        "shape": shape,
        "what": what,
        "variant": variant,
        "passes": len(seconds),
        "milliseconds": fastest(seconds) * 1e3,
        "ratio": ratio,
        "multiply_adds": arithmetic,
        "over_multiply_adds": ratio / arithmetic,
    }


def fastest(seconds: list[float]) -> float:
    """Return the 10th percentile."""
    return sorted(seconds)[len(seconds) // 10]


def multiply_adds(shape: str, what: str, variant: str) -> float:
    """Return the multiply-adds of a variant's forward pass over the bare model's.

    A layer has 12 d² for each token, the attention 2 n d for a token that sees n, and the head V d for one token.
    """
    hidden, layers, _, vocabulary = SHAPES[shape]
    tokens, pairs = (PREFILL, PREFILL * (PREFILL + 1) // 2) if what == "prefill" else (1, CONTEXT + 1)
    base = layers * (12 * hidden**2 * tokens + 2 * hidden * pairs) + vocabulary * hidden
    inner = int(1.25 * hidden)
    added = 0 if "bare" in variant else 2 * hidden * inner + ("skip" in variant) * hidden**2
    return 1 + layers * added * tokens / base


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['shape']:<6}{row['what']:<10}{row['variant']:<20}{row['milliseconds']:>9.3f}{row['ratio']:>8.3f}"
        f"{row['multiply_adds']:>15.3f}{row['over_multiply_adds']:>11.3f}"
    )


if __name__ == "__main__":
    main()
