"""A training step against its peers and its arithmetic, interleaved step by step.

    python benchmarks/training.py --shape 70m --text wikitext.jsonl --tokenizer pythia-70m --json training-70m.json
    python benchmarks/training.py --shape tiny --rounds 2
    python benchmarks/training.py --shape 160m --profile --json profile-160m.json
    python benchmarks/training.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext.jsonl --autocast bfloat16

Random weights of a Pythia shape, or a model's own; pre-projection with content skip, and the LoRA nearest to it in
parameters. A step sees the same paragraphs in every variant: packed rows of 512, or each paragraph padded to 512.

    published   padded, full logits, gradient checkpointing, 4 rows at a time, under HF Trainer, as the paper's scripts
    ours        packed, hfpatch's loop and loss
    lora        LoRA under HF Trainer's defaults on the packed rows, as many at a time as ours
    lora_ours   LoRA in hfpatch's loop
    forward     the base's forward pass on the packed rows, without gradients

Printed: (a) tokens a second of ours over published, and its peak memory above the model and the optimizer's state;
(b) seconds of ours over lora; (c) seconds of ours over the least that arithmetic allows, 2 + 3A/(P + H) forward passes
with A added, P body and H head parameters. Medians over rounds of the ratio within a round, smallest and largest in
brackets. On CPUs each variant has a process of its own, as hfpatch changes how much freed memory a process keeps, and
the clock is the process's CPU time, which others on the machine disturb least (``--clock wall``).
``--activations`` instead compares ours with itself where autograd keeps everything (all_kept), in time, in peak memory
over lora's, and in the bytes kept a layer and token. ``--scratch`` compares pretraining a GPT-2 of 5.8 million
parameters (``--shape 5.8m``: d 256, 6 layers; 16 rows of 256 tokens) with a plain loop over a plain model of its shape,
eager and under torch.compile, and needs no other option.

With ``--profile`` alone: a step of ours by kind of operator, and one by shape of matrix product, with its rate.
Without ``--text``, random tokens with lengths like those of WikiText-103's paragraphs stand in.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from profiling import ProductTimes, profiler, seconds_by_kind
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream, collate
from hfpatch.data.load import load_blocks
from hfpatch.data.plan import BatchPlan
from hfpatch.data.tokenizer import TokenStream
from hfpatch.models.attention import fast_attention
from hfpatch.nn.matmul import fast_matmul
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.training import TrainingSettings
from hfpatch.support.cpu import keep_freed_memory
from hfpatch.support.files import write_json
from hfpatch.support.provenance import Clock, provenance
from hfpatch.surgery.bases import load_base, load_config, load_tokenizer
from hfpatch.surgery.methods import build_method
from hfpatch.surgery.patch import patch, patch_summary
from hfpatch.training import loop
from hfpatch.training.activations import CheapRecomputation
from hfpatch.training.architecture import build_model
from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory, resident_memory_bytes
from hfpatch.training.head import loss_in_forward
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run
from hfpatch.training.validation import autocast_context

SHAPES = {  # hidden, layers, heads, vocabulary
    "tiny": (32, 2, 4, 512),
    "5.8m": (256, 6, 8, 4096),
    "70m": (512, 6, 8, 50304),
    "160m": (768, 12, 12, 50304),
    "410m": (1024, 24, 16, 50304),
    "1.4b": (2048, 24, 16, 50304),
}
METHODS = {
    "pre_projection_skip": [{"type": "pre_projection", "content_skip": True}],
    "lora": [{"type": "lora", "match": "pre_projection_skip"}],
}
VARIANTS = ("published", "ours", "lora", "lora_ours", "forward")
MEASURED = ("published", "ours", "lora")
ACTIVATIONS = ("all_kept", "ours", "lora")
SCRATCH = ("scratch", "plain", "plain_compiled")
SCRATCH_ROWS, SCRATCH_BLOCK = 16, 256
BLOCK = 512
PUBLISHED_ROWS = 4
PARAGRAPHS = 2000
IMPORTED = ["transformers.trainer", "transformers.models.gpt_neox.modeling_gpt_neox", "hfpatch.training.loop"]
PRINTED = 12  # shapes of products


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    clock, data = Clock(), make_data(arguments)
    if arguments.memory_of:
        print(json.dumps({"extra_bytes": extra_memory(arguments, data)}))
        return
    if arguments.profile:
        profile_step(arguments, data, clock)
        return
    times = measure(arguments, data)
    if arguments.scratch or arguments.activations:
        report = compare(arguments, data, times) | {"provenance": provenance(clock)}
        print(json.dumps({key: value for key, value in report.items() if key != "provenance"}, indent=2))
        if arguments.json:
            write_json(arguments.json, report)
        return
    report = {**summarise(arguments, data, times), "memory": {}, "provenance": provenance(clock)}
    if arguments.json:
        write_json(arguments.json, report)  # what a run that is cut short leaves
    if not arguments.no_memory:
        report |= {"memory": {name: memory_in_a_process(name) for name in MEASURED}, "provenance": provenance(clock)}
    print_report(report)
    if arguments.json:
        write_json(arguments.json, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="70m if not given; with --scratch 5.8m")
    parser.add_argument("--model", help="measure this model: an id, a folder or a GGUF file")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one more warms up")
    parser.add_argument("--rows", type=int, default=4, help="packed rows in a step")
    parser.add_argument("--micro", type=int, default=1, help="packed rows in one forward pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", help="a .jsonl, .txt or .parquet file of paragraphs")
    parser.add_argument("--tokenizer", help="the tokenizer for --text: a folder or a hub id")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="the base's dtype")
    parser.add_argument("--autocast", choices=("bfloat16",), help="mixed precision, of HF Trainer's too (bf16=True)")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="wall" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--profile", action="store_true", help="only profile two of ours' steps, on the CPU")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, in processes of their own")
    parser.add_argument("--activations", action="store_true", help="compare with keeping all activations, on CPUs")
    parser.add_argument("--scratch", action="store_true", help="compare pretraining with a plain loop, on CPUs")
    parser.add_argument("--memory-of", choices=(*MEASURED, "all_kept"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.profile or arguments.activations or arguments.scratch) and torch.cuda.is_available():
        parser.error(
            "--profile, --activations and --scratch time the CPU alone; set CUDA_VISIBLE_DEVICES= to leave the GPU out"
        )
    arguments.shape = arguments.shape or ("5.8m" if arguments.scratch else "70m")
    return arguments


@dataclass(frozen=True)
class Data:
    """The paragraphs of one step, packed and padded; rows beyond those repeat them."""

    packed: TokenBlocks
    padded: TokenBlocks

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.packed.tokens


def make_data(arguments: argparse.Namespace) -> Data:
    """Pack the corpus, take the first rows, and pad the pieces that they hold."""
    if arguments.scratch:
        settings = DataSettings(source="made-up", block_size=SCRATCH_BLOCK, layout="stream")
        stream = made_up(SHAPES[arguments.shape][3])
        rows = blocks_from_stream(stream, settings, pad_token_id=0).head(SCRATCH_ROWS)
        return Data(rows, rows)
    settings = DataSettings(
        source=arguments.text or "made-up", block_size=BLOCK, min_characters=51, max_documents=PARAGRAPHS
    )
    if arguments.text:
        load = load_tokenizer if arguments.tokenizer is None else AutoTokenizer.from_pretrained
        corpus = load_blocks(settings, load(arguments.tokenizer or arguments.model))
    else:
        words = load_config(arguments.model).vocab_size if arguments.model else SHAPES[arguments.shape][3]
        corpus = blocks_from_stream(made_up(words), settings, pad_token_id=0)
    rows = np.random.default_rng(0).choice(len(corpus), size=arguments.rows, replace=False).tolist()
    pieces = [piece for row in rows for piece in split_row(corpus, row)]
    stream = TokenStream(np.concatenate(pieces), np.array([len(piece) for piece in pieces]))
    packed = blocks_from_stream(stream, settings, pad_token_id=0)
    padded = blocks_from_stream(stream, settings.model_copy(update={"layout": "padded"}), pad_token_id=0)
    return Data(packed, padded)


def split_row(blocks: TokenBlocks, row: int) -> Iterator[Any]:
    sizes = blocks.sizes[blocks.offsets[row] : blocks.offsets[row + 1]]
    for begin, end in pairwise(np.cumsum([0, *sizes]).tolist()):
        yield blocks.rows[row, begin:end]


def made_up(vocabulary: int) -> TokenStream:
    """Random tokens in paragraphs whose lengths have the mean (131) and the spread of WikiText-103's."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(4.6, 0.75, PARAGRAPHS).astype(np.int64), 12, BLOCK)
    return TokenStream(generator.integers(1, vocabulary, lengths.sum()).astype(np.uint16), lengths)


def make_model(arguments: argparse.Namespace, method: str | None) -> PreTrainedModel:
    if arguments.scratch:
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        architecture = {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0, **no_dropout}
        return build_model(architecture | scratch_sizes(arguments))
    if arguments.model:
        model = load_base(arguments.model, dtype=arguments.dtype).model
    else:
        hidden, layers, heads, vocabulary = SHAPES[arguments.shape]
        config = GPTNeoXConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
            vocab_size=vocabulary, max_position_embeddings=2 * BLOCK, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return patch(model, build_method(model, METHODS, method).configs) if method else model.requires_grad_(False)


def scratch_sizes(arguments: argparse.Namespace) -> dict[str, int]:
    names = ("n_embd", "n_layer", "n_head", "vocab_size")
    return dict(zip(names, SHAPES[arguments.shape], strict=True)) | {"n_positions": SCRATCH_BLOCK}


@dataclass
class Turns:
    """Lets the variants do one step each in turn, and times the steps."""

    names: list[str]
    clock: Callable[[], float]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    holder: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: bool = False

    def take(self, name: str) -> None:
        """Wait for the turn of ``name``."""
        with self.changed:
            self.changed.wait_for(lambda: self.failed or self.names[self.holder] == name)

    def give(self) -> None:
        """Let the next one work."""
        with self.changed:
            self.holder = (self.holder + 1) % len(self.names)
            self.changed.notify_all()

    def leave(self, name: str, *, failed: bool) -> None:
        """Take part no more."""
        with self.changed:
            at = self.names.index(name)
            self.names.remove(name)
            self.holder -= at < self.holder
            self.holder %= max(1, len(self.names))
            self.failed = self.failed or failed
            self.changed.notify_all()


class TakeTurns(TrainerCallback):
    """Does each step of a Trainer in its turn."""

    def __init__(self, turns: Turns, name: str) -> None:
        self.turns, self.name, self.began = turns, name, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn and start the clock."""
        self.turns.take(self.name)
        if self.turns.failed:
            raise SystemExit(f"{self.name}: another variant failed")
        wait_for_device()
        self.began = self.turns.clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock and pass the turn on."""
        wait_for_device()
        self.turns.seconds.setdefault(self.name, []).append(self.turns.clock() - self.began)
        self.turns.give()


class StepWhenTold(TrainerCallback):
    """Does a step for each word that comes in, and answers how long it took."""

    def __init__(self, clock: Callable[[], float], others: Connection) -> None:
        self.clock, self.others, self.began = clock, others, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for a word and start the clock."""
        try:
            self.others.recv()
        except EOFError:
            raise SystemExit("the benchmark has ended") from None
        self.began = self.clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Answer the seconds since."""
        self.others.send(self.clock() - self.began)


class MeasureMemory(TrainerCallback):
    """Notes what the second step needs above the model and the optimizer's state."""

    def __init__(self, model: PreTrainedModel) -> None:
        trained = sum(value.nbytes for value in model.parameters() if value.requires_grad)
        give_back_memory()
        self.needed, self.extra = resident_memory_bytes() + 2 * trained, 0  # two moments, which the first step makes

    def on_step_begin(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        """Forget the peak so far, and what was freed and is kept for reuse."""
        give_back_memory()
        reset_peak_memory()

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        """Note what the second step came to need."""
        if state.global_step == 2:
            self.extra = peak_memory_bytes() - self.needed


def give_back_memory() -> None:
    """Return freed memory to the system, where the C library can."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, data: Data) -> dict[str, list[float]]:
    """Return the seconds of every variant in every round that counts."""
    if not torch.cuda.is_available():
        return tell_processes(arguments, data)
    models = {name: make_model(arguments, method_of(name)) for name in VARIANTS}

    def run(name: str, callback: TrainerCallback) -> None:
        run_variant(name, models[name], arguments, data, steps_of(arguments), callback)

    return take_turns({name: partial(run, name) for name in VARIANTS}, clock_of(arguments))


def steps_of(arguments: argparse.Namespace) -> int:
    return int(arguments.rounds) + 2  # the first warms up, the last also writes hfpatch's checkpoint


def clock_of(arguments: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if arguments.clock == "cpu" else time.perf_counter


def tell_processes(arguments: argparse.Namespace, data: Data) -> dict[str, list[float]]:
    """Let a process for each variant do one step each in turn; return the seconds of all steps but the ends.

    The processes are forked from one that has imported the libraries.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    names = SCRATCH if arguments.scratch else ACTIVATIONS if arguments.activations else VARIANTS
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        connections = {}
        for name in seconds:
            connections[name], others = context.Pipe()
            process = context.Process(target=run_when_told, args=(name, arguments, data, others))
            process.start()
            others.close()
            stack.callback(process.join)
            stack.enter_context(connections[name])  # closing it ends one that waits for a word
        for _ in range(steps_of(arguments)):
            for name, connection in connections.items():
                seconds[name].append(step_of(name, connection))
    return {name: taken[1:-1] for name, taken in seconds.items()}


def step_of(name: str, connection: Connection) -> float:
    try:
        connection.send("step")
        return float(connection.recv())
    except (EOFError, OSError):
        raise SystemExit(f"{name}: its process has ended; what it says stands above") from None


def run_when_told(name: str, arguments: argparse.Namespace, data: Data, others: Connection) -> None:
    sys.stdout = sys.stderr  # what the libraries print is no result
    torch.set_num_threads(arguments.threads)
    callback = StepWhenTold(clock_of(arguments), others)
    run_variant(name, make_model(arguments, method_of(name)), arguments, data, steps_of(arguments), callback)


def take_turns(
    variants: dict[str, Callable[[TrainerCallback], None]], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Run variants that call back at each step, one step each in turn; return the seconds of all steps but the ends."""
    turns = Turns(list(variants), clock)

    def work(name: str) -> None:
        turns.take(name)
        try:
            variants[name](TakeTurns(turns, name))
        except BaseException:
            turns.leave(name, failed=True)
            raise
        turns.leave(name, failed=False)

    threads = [threading.Thread(target=work, args=(name,)) for name in variants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failed:
        raise SystemExit("a variant failed; its traceback stands above")
    return {name: seconds[1:-1] for name, seconds in turns.seconds.items()}


def method_of(name: str) -> str | None:
    return {**dict.fromkeys(("published", "ours", "all_kept"), "pre_projection_skip"), "forward": None}.get(
        name, "lora"
    )


def run_variant(
    name: str, model: PreTrainedModel, arguments: argparse.Namespace, data: Data, steps: int, callback: TrainerCallback
) -> None:
    bf16 = arguments.autocast is not None
    if name == "forward":
        run_forward(model, arguments, data, steps, callback)
    elif name in ("plain", "plain_compiled"):
        run_plain(arguments, data.packed, steps, callback, compiled=name == "plain_compiled")
    elif name == "published":
        run_hf_trainer(model, data.padded, PUBLISHED_ROWS, steps, callback, gradient_checkpointing=True, bf16=bf16)
    elif name == "lora":
        run_hf_trainer(model, data.packed, arguments.micro, steps, callback, gradient_checkpointing=False, bf16=bf16)
    else:
        if name == "all_kept":  # in a process of its own
            loop.CheapRecomputation = lambda model: nullcontext()
        micro = len(data.packed) if name == "scratch" else arguments.micro
        run_hfpatch(model, data.packed, micro, steps, callback, autocast=arguments.autocast)


def run_forward(
    model: PreTrainedModel, arguments: argparse.Namespace, data: Data, steps: int, callback: TrainerCallback
) -> None:
    rows = [data.packed[row] for row in range(len(data.packed))]
    parts = [collate(rows[at : at + arguments.micro]) for at in range(0, len(rows), arguments.micro)]
    batches = [{name: value.to(model.device) for name, value in part.items() if name != "labels"} for part in parts]
    model.eval()
    keep_freed_memory()
    for _ in range(steps):
        callback.on_step_begin(None, None, None)
        with torch.no_grad(), fast_matmul(model), autocast_context(arguments.autocast, model.device):
            for batch in batches:
                model(**batch, use_cache=False)
        callback.on_step_end(None, None, None)


def run_hf_trainer(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    micro: int,
    steps: int,
    callback: TrainerCallback,
    *,
    gradient_checkpointing: bool,
    bf16: bool = False,
) -> None:
    """Train under transformers' Trainer: its loss, its optimiser, its clipping; only logging and saving are off."""
    rows = [blocks[row] for row in range(len(blocks))]
    accumulation = -(-len(rows) // micro)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        report_to="none", disable_tqdm=True, logging_strategy="no", save_strategy="no", remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def run_hfpatch(
    model: PreTrainedModel, blocks: TokenBlocks, micro: int, steps: int, callback: TrainerCallback, **options: Any
) -> None:
    """Train in hfpatch's loop, with all its bookkeeping; the first step includes the preparations."""
    sizes = {"steps": steps, "batch_size": len(blocks), "micro_batch_size": micro, "warmup_steps": 1}
    settings = TrainingSettings(**sizes, **options)
    every = np.tile(np.arange(len(blocks), dtype=np.int64), (steps, 1))

    def on_step(record: StepRecord) -> None:
        callback.on_step_end(None, TrainerState(global_step=record.step), None)
        if record.step < steps:
            callback.on_step_begin(None, None, None)

    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            settings=settings, blocks=blocks, plan=BatchPlan(every, len(blocks), 0), seed=0, folder=Path(folder),
            measure_survival=False, on_step=on_step,
        )  # fmt: skip
        callback.on_step_begin(None, None, None)
        loop.run_training(model, run)


class PlainBlock(nn.Module):
    """A block of GPT-2 without dropout, as nanoGPT writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to itself."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class PlainModel(nn.Module):
    """GPT-2 with a tied head; returns the mean loss."""

    def __init__(self, *, vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(n_embd, n_head) for _ in range(n_layer)))
        self.norm = nn.LayerNorm(n_embd)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of (batch, seq) ids, each predicted from those before it."""
        x = self.norm(self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]]))
        return F.cross_entropy(F.linear(x, self.tokens.weight)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def run_plain(
    arguments: argparse.Namespace, blocks: TokenBlocks, steps: int, callback: TrainerCallback, *, compiled: bool
) -> None:
    """Pretrain a plain model in a plain loop: forward, backward, clipping, fused AdamW."""
    torch.manual_seed(0)
    model = PlainModel(**scratch_sizes(arguments))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of = torch.compile(model) if compiled else model
    ids = collate([blocks[row] for row in range(len(blocks))])["input_ids"]
    for _ in range(steps):
        callback.on_step_begin(None, None, None)
        with autocast_context(arguments.autocast, ids.device):
            loss = loss_of(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(None, None, None)


def kept_by_layer(arguments: argparse.Namespace, data: Data) -> dict[str, float]:
    """Return the bytes that autograd keeps of one row, by layer and token, with ours and where all is kept."""
    model, batch = make_model(arguments, "pre_projection_skip").train(), collate([data.packed[0]])
    places = model.config.num_hidden_layers * batch["input_ids"].numel()
    cheap, held = CheapRecomputation(model), dict[torch.UntypedStorage, torch.Tensor]()
    all_kept = saved_tensors_hooks(lambda value: held.setdefault(value.untyped_storage(), value), lambda value: value)
    for context in (cheap, all_kept):
        autocast = autocast_context(arguments.autocast, model.device)
        with fast_matmul(model), loss_in_forward(model), fast_attention(), autocast, context:
            model(**batch, use_cache=False)
    kept = held.keys() - {value.untyped_storage() for value in (*model.parameters(), *model.buffers())}
    return {"ours": cheap.kept_bytes / places, "all_kept": sum(storage.nbytes() for storage in kept) / places}


def compare(arguments: argparse.Namespace, data: Data, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return what --activations or --scratch reports: times, their ratios, and memory."""
    report: dict[str, Any] = {"settings": settings_of(arguments), "tokens": data.tokens, "seconds": times}
    if arguments.scratch:
        peers = ("plain", "plain_compiled")
        return report | {"ratios": {f"scratch_over_{peer}": ratio(times["scratch"], times[peer]) for peer in peers}}
    report["ratios"] = {f"ours_over_{peer}": ratio(times["ours"], times[peer]) for peer in ("all_kept", "lora")}
    report["kept_bytes_a_layer_and_token"] = kept_by_layer(arguments, data)
    if not arguments.no_memory:
        memory = {name: memory_in_a_process(name) for name in ACTIVATIONS}
        report |= {"memory": memory, "memory_over_lora": memory["ours"] / memory["lora"]}
    return report


class ProfileSteps(TrainerCallback):
    """Profiles the third step by kind of operator, as those before warm up, and the fourth by shape of product."""

    def __init__(self) -> None:
        self.step, self.seconds = 0, 0.0
        self.run, self.products = profiler(), ProductTimes()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start what looks at the step."""
        self.step += 1
        if self.step == 3:
            self.run.start()
            self.seconds = -time.perf_counter()  # as the profiler times
        elif self.step == 4:
            self.products.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it."""
        if self.step == 3:
            self.seconds += time.perf_counter()
            self.run.stop()
        elif self.step == 4:
            self.products.__exit__(None, None, None)


def profile_step(arguments: argparse.Namespace, data: Data, clock: Clock) -> None:
    """Print, and write, where the time of one of ours' steps goes; hfpatch's last step also writes a checkpoint."""
    callback = ProfileSteps()
    run_variant("ours", make_model(arguments, method_of("ours")), arguments, data, 5, callback)
    kinds, products = seconds_by_kind(callback.run, callback.seconds), callback.products.by_shape()
    in_products = sum(product["seconds"] for product in products)
    report = {
        "settings": settings_of(arguments),
        "tokens": data.tokens,
        "seconds": callback.seconds,
        "share": {kind: seconds / callback.seconds for kind, seconds in kinds.items()},
        "gflops": sum(product["gflops"] * product["seconds"] for product in products) / in_products,
        "products": products,
        "provenance": provenance(clock),
    }
    print(f"{callback.seconds:.3f} s under the profiler, products at {report['gflops']:.0f} GFLOP/s")
    for kind, share in report["share"].items():
        print(f"  {kind:<24}{share:>6.1%}")
    for product in products[:PRINTED]:
        shape = f"{product['rows']} x {product['in']} -> {product['out']}"
        print(f"  {shape:<24}{product['seconds']:>9.3f} s {product['gflops']:>6.0f} GFLOP/s")
    if arguments.json:
        write_json(arguments.json, report)


def extra_memory(arguments: argparse.Namespace, data: Data) -> int:
    """Return the bytes that a step of one variant needs above the model and the optimizer's state."""
    name = arguments.memory_of
    model = make_model(arguments, method_of(name))
    callback = MeasureMemory(model)
    steps = 2 if name in ("published", "lora") else 3  # hfpatch's last step also writes a checkpoint
    run_variant(name, model, arguments, data, steps, callback)
    return callback.extra


def memory_in_a_process(name: str) -> int:
    command = [sys.executable, *sys.argv, "--memory-of", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout.splitlines()[-1])["extra_bytes"])


def summarise(arguments: argparse.Namespace, data: Data, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the settings, the facts and the ratios that the goals are about."""
    model = make_model(arguments, "pre_projection_skip")
    counts, lora = patch_summary(model), patch_summary(make_model(arguments, "lora"))
    embedded = model.get_input_embeddings().weight.numel()
    least = 2 + 3 * counts.added / (counts.base - embedded)
    return {
        "settings": settings_of(arguments),
        "data": {
            "source": data.packed.source,
            "tokens": data.tokens,
            "paragraphs": len(data.padded),
            "fill_padded": data.tokens / (len(data.padded) * BLOCK),
            "fill_packed": data.tokens / (len(data.packed) * BLOCK),
        },
        "parameters": {"base": counts.base, "ours": counts.trainable, "lora": lora.trainable},
        "seconds": times,
        "arithmetic": least,
        "ratios": {
            "a_speed": ratio(times["published"], times["ours"]),
            "b_step": ratio(times["ours"], times["lora"]),
            "b_step_same_trainer": ratio(times["ours"], times["lora_ours"]),
            "c_bound": ratio(times["ours"], [least * value for value in times["forward"]]),
        },
    }


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    return {key: str(value) for key, value in vars(arguments).items() if value not in (None, False)}


def ratio(one: list[float], other: list[float]) -> dict[str, float]:
    values = [value / peer for value, peer in zip(one, other, strict=True)]
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def print_report(report: dict[str, Any]) -> None:
    facts, ratios, memory = report["data"], report["ratios"], report["memory"]
    print(
        f"{facts['tokens']} tokens of {facts['paragraphs']} paragraphs a step, {facts['fill_padded']:.0%} of 512 each"
    )
    for name, seconds in report["seconds"].items():
        speed = facts["tokens"] / statistics.median(seconds)
        extra = f", {memory[name] / 1e6:,.0f} MB above the model" if name in memory else ""
        print(f"  {name:<10}{statistics.median(seconds):>9.3f} s a step {speed:>9,.0f} tokens/s{extra}")
    wording = {
        "a_speed": "(a) tokens/s of ours over published",
        "b_step": "(b) step of ours over LoRA under HF Trainer",
        "b_step_same_trainer": "    the same, both in hfpatch's loop",
        "c_bound": f"(c) step of ours over {report['arithmetic']:.2f} forward passes",
    }
    for key, words in wording.items():
        value = ratios[key]
        print(f"{words:<46} {value['median']:.2f} [{value['lowest']:.2f}, {value['highest']:.2f}]")
    if memory:
        print(f"{'(a) peak memory of ours over published':<46} {memory['ours'] / max(1, memory['published']):.2f}")


if __name__ == "__main__":
    main()
