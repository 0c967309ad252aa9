"""Scoring time and memory against lm-eval's own Hugging Face model at its best batch size, interleaved in one run.

    python benchmarks/evaluation.py --data-dir DATA --out results/evaluation-speed.json
    python benchmarks/evaluation.py --data-dir DATA --shapes 70m --requests 32 --rounds 1
    python benchmarks/evaluation.py --data-dir DATA --device cuda --dtype bfloat16 --shapes 160m,1.4b --requests 4000
    python benchmarks/evaluation.py --data-dir DATA --model SmolLM2-135M-Instruct.Q4_1.gguf --requests 200

Random-weight Pythia shapes, or a model's own weights, on real texts, in fp32 if nothing else is asked. On a GPU
lm-eval's model class also looks for its batch size itself (``auto``), at each call as it does in use, and only the wall
time counts. Machines are noisy, so that what counts is the ratio within a round; the median, smallest and largest ratio
over the rounds are given, by wall time and by processor time. Also measured:

- the ratio to the arithmetic bound: the operations of each distinct token of a context and its endings through the
  body once, attention to what precedes it, and the head at scored positions, over the rate of a product of a batch's
  tokens with the MLP's first matrix measured between the rounds. Of the last block's MLP only scored positions are
  needed, so that less than the bound is possible;
- peak memory above the loaded model, each method in a process of its own, which gives back at once what it frees:
  otherwise what the allocator happens to keep makes half of it;
- with ``--profile``, where the time goes: each kind of operator as a share of the bound;
- the time to start, against ``import torch``;
- whether the two scorers agree, and how far lm-eval's own is from itself at another batch size; of a model in bfloat16
  or float16 also how far each scorer is from float32 with the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "70m": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
    "160m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1.4b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16},
}
PEERS = {"cpu": ["1", "8", "16"], "cuda": ["auto", "8", "32", "128"]}
PEER_OF_MEMORY = "8"
OWN = "hfpatch"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
STARTS = {
    "torch": "import torch",
    "lm-eval's model class": "from lm_eval.models.huggingface import HFLM",
    "hfpatch's model class": "from hfpatch.evaluation.model import HfpatchLM",
    "transformers' GPT-NeoX class": "from transformers import AutoTokenizer, GPTNeoXForCausalLM",
    "hfpatch eval of one tinyworld document": "import sys; from hfpatch.__main__ import main; "
    "sys.argv = 'hfpatch eval --model tinyworld/gpt-neox --tasks tinyworld_cloze --limit 1 --no-cache'.split(); main()",
}
GIVING_BACK = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}  # of glibc
Times = dict[str, list[float]]


def main() -> None:
    arguments = parse_arguments()
    if arguments.peak:
        print(json.dumps({"peak_bytes": peak_memory(arguments)}))
        return
    from hfpatch.support.files import write_json
    from hfpatch.support.provenance import Clock, provenance

    clock = Clock()
    measured = {
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        "scoring": [measure(arguments, shape, task) for shape in arguments.shapes for task in arguments.tasks],
        "start": start_times(arguments.rounds) if arguments.start and arguments.device == "cpu" else [],
    }
    report(measured)
    if arguments.out:
        write_json(arguments.out, {"provenance": provenance(clock), **measured})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--data-dir", type=Path, help="a folder with local copies of hub data; the hub if not given")
    parser.add_argument("--tokenizer", help="an id or folder; DATA_DIR/gpt-neox-tokenizer if not given")
    parser.add_argument("--shapes", **names, help=f"out of {', '.join(SHAPES)}; 70m and 160m if no model is given")
    parser.add_argument("--model", help="a model to measure too: an id, a folder or a GGUF file")
    parser.add_argument("--tasks", **names, default=["lambada_openai", "hellaswag", "arc_easy"])
    parser.add_argument("--requests", type=int, default=256, help="the first so many requests of each task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=sorted(PEERS), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--peers", **names, help="lm-eval's batch sizes; what suits the device if not given")
    parser.add_argument("--threads", type=int, help="threads of torch; all cores if not given")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave peak memory out")
    parser.add_argument("--no-start", dest="start", action="store_false", help="leave the time to start out")
    parser.add_argument("--profile", action="store_true", help="add each kind of operator's time over the bound")
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # one method's peak memory, in a process of its own
    arguments = parser.parse_args()
    arguments.peers = arguments.peers or PEERS[arguments.device]
    named = [Path(arguments.model).name] if arguments.model else []
    arguments.shapes = [*(arguments.shapes or ([] if named else ["70m", "160m"])), *named]
    return arguments


def measure(arguments: argparse.Namespace, shape: str, task: str) -> dict[str, Any]:
    """Return everything about one shape and task."""
    from hfpatch.evaluation.harness import quiet

    model, tokenizer = make_model(arguments, shape)
    requests = make_requests(arguments, task)
    peers = list(map(peer_name, arguments.peers))
    scorers = {name: make_scorer(name, model, tokenizer) for name in (OWN, *peers)}
    seconds = {name: {clock: [] for clock in CLOCKS} for name in scorers}
    rates: Times = {clock: [] for clock in CLOCKS}
    with quiet():  # around all calls, as around an evaluation: for a few requests it takes a noticeable time
        answers = {name: scorer(requests) for name, scorer in scorers.items()}  # warm-up
        for _ in range(arguments.rounds):
            for name, scorer in scorers.items():
                take(seconds[name], lambda scorer=scorer: scorer(requests))
            for clock, rate in matrix_rate(model).items():
                rates[clock].append(rate)
    operations = bound_operations(model, tokenizer, requests)
    result = {
        "shape": shape,
        "task": task,
        "requests": len(requests),
        **{clock: compare(seconds, operations, rates, clock) for clock in CLOCKS},
        "dtype": arguments.dtype,
        "operations": operations,
        "agreement": agreement(answers[OWN], answers[peers[0]]),
        "agreement_of_peers": agreement(answers[peers[-1]], answers[peers[0]]),
    }
    if arguments.profile:
        least = operations / result["cpu"]["matrix_rate"]
        result["profile"] = {kind: taken / least for kind, taken in profile(scorers[OWN], requests).items()}
    if arguments.memory:
        result["peak_bytes"] = {
            name: peak_in_own_process(arguments, shape, task, name) for name in (OWN, peer_name(PEER_OF_MEMORY))
        }
    if arguments.dtype != "float32":
        with quiet():
            exact = make_scorer(OWN, model.float(), tokenizer)(requests)
        result["distance_to_float32"] = {name: distance(answers[name], exact) for name in scorers}
    return result


def make_model(arguments: argparse.Namespace, shape: str) -> tuple[Any, Any]:
    """Return a random-weight GPT-NeoX of a Pythia shape, with weights as large as trained ones, and a tokenizer.

    For another shape that is the model of ``--model`` with its own tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if shape not in SHAPES:
        from hfpatch.surgery.bases import load_base

        base = load_base(arguments.model, dtype=arguments.dtype)
        return base.model.to(arguments.device), base.tokenizer
    sizes = SHAPES[shape]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(arguments))
    vocabulary = 50304 if shape != "tiny" else len(tokenizer)
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        **sizes, intermediate_size=4 * sizes["hidden_size"], vocab_size=vocabulary, initializer_range=0.05
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model.to(device=arguments.device, dtype=getattr(torch, arguments.dtype)), tokenizer


def tokenizer_of(arguments: argparse.Namespace) -> str:
    if arguments.tokenizer == "tinyworld":
        from hfpatch.tinyworld import checkpoint

        return str(checkpoint("gpt-neox"))
    local = arguments.data_dir / "gpt-neox-tokenizer" if arguments.data_dir else None
    return arguments.tokenizer or (str(local) if local and local.is_dir() else "EleutherAI/pythia-160m")


def make_requests(arguments: argparse.Namespace, name: str) -> list[Any]:
    """Return the first requests of a task, whole documents of them."""
    from hfpatch.evaluation.harness import quiet
    from hfpatch.evaluation.tasks import load_tasks

    with quiet():
        task = load_tasks([name], data_dir=arguments.data_dir)[name]
        task.build_all_requests(limit=min(arguments.requests, len(task.eval_docs)), rank=0, world_size=1)
    requests = task.instances
    last = requests[min(arguments.requests, len(requests)) - 1].doc_id
    return [request for request in requests if request.doc_id <= last]


def peer_name(batch_size: str) -> str:
    return f"hflm-{batch_size}"


def make_scorer(name: str, model: Any, tokenizer: Any) -> Callable[[list[Any]], list[tuple[float, bool]]]:
    """Return the function that answers requests by one method."""
    import logging

    from lm_eval.models.huggingface import HFLM

    from hfpatch.evaluation.model import HfpatchLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    batch_size = name.partition("-")[2] or 1
    scorer = (HfpatchLM if name == OWN else HFLM)(model, tokenizer=tokenizer, batch_size=batch_size)

    def answer(requests: list[Any]) -> list[tuple[float, bool]]:
        return scorer.loglikelihood(requests, disable_tqdm=True)

    return answer


def take(seconds: Times, run: Callable[[], object]) -> None:
    """Append the time that a call takes by every clock, until a GPU is done with it too."""
    import torch

    finish = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    finish()
    before = {clock: read() for clock, read in CLOCKS.items()}
    run()
    finish()
    for clock, read in CLOCKS.items():
        seconds[clock].append(read() - before[clock])


def profile(scorer: Callable[[list[Any]], object], requests: list[Any]) -> dict[str, float]:
    """Return the seconds that one call spends in each kind of operator, in other operators, and between operators."""
    from profiling import profiler, seconds_by_kind

    with profiler() as run:
        begin = time.perf_counter()
        scorer(requests)
        seconds = time.perf_counter() - begin
    return seconds_by_kind(run, seconds)


def matrix_rate(model: Any, repeats: int = 40) -> dict[str, float]:
    """Return the operations a second of a (tokens of a batch, d) x (d, MLP) product by the library that is faster."""
    import torch

    from hfpatch.evaluation.scorer.batching import BatchLimits
    from hfpatch.nn.matmul import fast_matmul, linear
    from hfpatch.support.cpu import has_onednn

    hidden, tokens = model.config.hidden_size, BatchLimits.for_device(model.device).tokens
    inner = getattr(model.config, "intermediate_size", None) or 4 * hidden
    kind = {"device": model.device, "dtype": model.dtype}
    left, right = torch.randn(tokens, hidden, **kind), torch.randn(inner, hidden, **kind)
    seconds: Times = {clock: [] for clock in CLOCKS}

    def multiply() -> None:
        for _ in range(repeats):
            linear(left, right)  # the result is not kept, so that all products go to the same memory

    for library in ("mkl", "onednn") if has_onednn() else ("mkl",):
        with torch.no_grad(), fast_matmul(torch.nn.Identity(), library=library):
            linear(left, right)
            take(seconds, multiply)
    return {clock: repeats * 2 * tokens * inner * hidden / min(taken) for clock, taken in seconds.items()}


def bound_operations(model: Any, tokenizer: Any, requests: list[Any]) -> float:
    """Return the floating-point operations that no exact scorer of these requests can avoid."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from hfpatch.evaluation.model import HfpatchLM
    from hfpatch.evaluation.scorer import TokenRequest
    from hfpatch.evaluation.scorer.trees import group

    lm = HfpatchLM(model, tokenizer=tokenizer)
    asked = [TokenRequest.cut(*lm._encode_pair(*request.args), lm.max_length) for request in requests]
    trees = group(asked, longest=10**9, endings=10**9)
    linear = (module for module in model.base_model.modules() if isinstance(module, nn.Linear | Conv1D))
    body = sum(module.weight.numel() for module in linear)
    tokens = sum(len(tree) for tree in trees)
    attended = sum(depth + 1 for tree in trees for depth in tree.depths)
    scored = sum(len({node for _, nodes in tree.scored for node in nodes}) for tree in trees)
    config = model.config
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    attention = 4 * width * config.num_hidden_layers * attended
    return float(2 * body * tokens + attention + 2 * config.hidden_size * config.vocab_size * scored)


def compare(seconds: dict[str, dict[str, list[float]]], operations: float, rates: Times, clock: str) -> dict[str, Any]:
    """Return the figures by one clock; the best batch size is the one with the smallest median."""
    medians = {name: statistics.median(taken[clock]) for name, taken in seconds.items()}
    best = min((name for name in seconds if name != OWN), key=medians.__getitem__)
    ratios = [peer / ours for peer, ours in zip(seconds[best][clock], seconds[OWN][clock], strict=True)]
    rate = statistics.median(rates[clock])
    return {
        "seconds": medians,
        "best_peer": best,
        "times_faster": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "matrix_rate": rate,
        "ratio_to_bound": medians[OWN] * rate / operations,
    }


def agreement(ours: Sequence[tuple[float, bool]], theirs: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Return how far two scorers' answers are apart."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "largest_difference": max(abs(value - other) for (value, _), (other, _) in pairs),
        "largest_excess": max(abs(value - other) - 1e-4 - 1e-6 * abs(other) for (value, _), (other, _) in pairs),
        "other_greedy_decisions": sum(value != other for (_, value), (_, other) in pairs),
    }


def distance(answers: Sequence[tuple[float, bool]], exact: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Return how far answers are from those in float32, and how many greedy decisions differ."""
    apart = [abs(value - other) for (value, _), (other, _) in zip(answers, exact, strict=True)]
    decisions = sum(value != other for (_, value), (_, other) in zip(answers, exact, strict=True))
    return {"mean": statistics.fmean(apart), "largest": max(apart), "other_greedy_decisions": decisions}


def peak_in_own_process(arguments: argparse.Namespace, shape: str, task: str, name: str) -> int:
    selected = ["--shapes", shape] if shape in SHAPES else ["--model", arguments.model]
    selected += ["--tasks", task, "--requests", str(arguments.requests), "--peak", name]
    selected += ["--device", arguments.device, "--dtype", arguments.dtype]
    options = {"--data-dir": arguments.data_dir, "--tokenizer": arguments.tokenizer, "--threads": arguments.threads}
    given = [text for key, value in options.items() if value for text in (key, str(value))]
    command = [sys.executable, __file__, *selected, *given]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **GIVING_BACK})
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def peak_memory(arguments: argparse.Namespace) -> int:
    """Return by how many bytes this process grows above its loaded model while it scores.

    On a GPU that is what torch allocates there, on a CPU the whole process (Linux only).
    """
    model, tokenizer = make_model(arguments, arguments.shapes[0])
    requests = make_requests(arguments, arguments.tasks[0])
    scorer = make_scorer(arguments.peak, model, tokenizer)
    scorer(requests[:1])  # what is allocated once does not count
    if arguments.device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        scorer(requests)
        return torch.cuda.max_memory_allocated() - held
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory_line("VmRSS")
    scorer(requests)
    return memory_line("VmHWM") - before


def memory_line(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def start_times(rounds: int) -> list[dict[str, Any]]:
    """Return the wall time of processes that do nothing but start, and its ratio to ``import torch`` in the round."""
    seconds: Times = {name: [] for name in STARTS}
    for _ in range(rounds + 1):
        for name, code in STARTS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - begin)
    ratios = {name: [value / base for value, base in zip(taken[1:], seconds["torch"][1:], strict=True)]
              for name, taken in seconds.items()}  # fmt: skip
    return [
        {"what": name, "seconds": statistics.median(taken[1:]), "ratio": statistics.median(ratios[name])}
        for name, taken in seconds.items()
    ]


def report(measured: dict[str, Any]) -> None:
    head = f"{'shape':<15}{'task':<18}{'clock':<6}{'best peer':<10}{'times faster':>24}{'/ bound':>9}{'memory':>22}"
    print(head)
    for row in measured["scoring"]:
        for clock in CLOCKS:
            figures = row[clock]
            ratio = f"{figures['times_faster']:.2f} [{figures['lowest']:.2f}, {figures['highest']:.2f}]"
            print(f"{row['shape'][:14]:<15}{row['task']:<18}{clock:<6}{figures['best_peer']:<10}{ratio:>24}"
                  f"{figures['ratio_to_bound']:>9.2f}{memory(row):>22}")  # fmt: skip
        if "profile" in row:
            print("      over the bound:", ", ".join(f"{kind} {part:.3f}" for kind, part in row["profile"].items()))
        print(f"      agreement: {row['agreement']}; of lm-eval's with itself: {row['agreement_of_peers']}")
        for name, values in row.get("distance_to_float32", {}).items():
            print(f"      {name} from float32: {values}")
    for row in measured["start"]:
        print(f"{row['what']:<42}{row['seconds']:>7.2f} s {row['ratio']:>6.2f} x import torch")


def memory(row: dict[str, Any]) -> str:
    if "peak_bytes" not in row:
        return ""
    ours, peer = (row["peak_bytes"][name] / 2**20 for name in (OWN, peer_name(PEER_OF_MEMORY)))
    return f"{ours:.0f} of {peer:.0f} MiB ({peer / ours:.1f}x)"


if __name__ == "__main__":
    main()
