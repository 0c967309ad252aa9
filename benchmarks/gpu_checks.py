"""What `gpu.py` measures on: models, requests and data; and whether a device computes what it should.

Each check takes the options of `gpu.py` and returns ``passed`` and the figures that decide it.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluation
import numpy as np
import torch
import training
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, LlamaConfig, PreTrainedModel

from hfpatch import PreProjectionConfig, patch, unpatch
from hfpatch.data.plan import BatchPlan
from hfpatch.recipes.training import TrainingSettings
from hfpatch.tinyworld import checkpoint
from hfpatch.training.head import loss_in_forward
from hfpatch.training.loop import switch_checkpointing
from hfpatch.training.probe import train_probe
from hfpatch.training.run import Run

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
TASKS = {  # task -> words of a context, words of an ending, endings
    "lambada_openai": (75, 1, 1),
    "hellaswag": (40, 20, 4),
    "arc_easy": (20, 4, 4),
}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def make_model(options: argparse.Namespace, shape: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return a model with random weights, as large as trained ones, made on the device and frozen."""
    torch.manual_seed(0)
    if shape == "llama-1b":
        config = LlamaConfig(**LLAMA_1B, initializer_range=0.05, max_position_embeddings=2048)
    else:
        hidden, layers, heads, words = training.SHAPES[shape]
        words = 50304 if options.data_dir else words  # of the tokenizer beside the data
        config = GPTNeoXConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
            vocab_size=words, max_position_embeddings=2048, initializer_range=0.05, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def make_tokenizer(options: argparse.Namespace) -> Any:
    return AutoTokenizer.from_pretrained(
        str(options.data_dir / "gpt-neox-tokenizer" if options.data_dir else checkpoint("gpt-neox"))
    )


def make_requests(options: argparse.Namespace, task: str) -> list[Any]:
    """Return requests of a task: its own, or random words in texts of like lengths."""
    if options.data_dir:
        return evaluation.make_requests(options, task)
    from lm_eval.api.instance import Instance

    words = [text for text in make_tokenizer(options).get_vocab() if text.isascii() and text.isalpha()]
    context, ending, endings = TASKS[task]
    draw = np.random.default_rng(0)
    made = []
    for number in range(max(1, options.requests // endings)):
        text = " ".join(draw.choice(words, max(1, draw.poisson(context))))
        for index in range(endings):
            end = " " + " ".join(draw.choice(words, max(1, draw.poisson(ending))))
            made.append(Instance("loglikelihood", {}, (text, end), index, metadata=(task, number, 1)))
    return made


def make_data(options: argparse.Namespace, shape: str, rows: int) -> training.Data:
    """Return packed rows of WikiText's paragraphs, or of random tokens in paragraphs of like lengths."""
    text = options.data_dir and next(options.data_dir.glob("wikitext/wikitext-2-raw-v1/validation.*"), None)
    tokenizer = options.data_dir and str(options.data_dir / "gpt-neox-tokenizer")
    given = {"model": None, "text": text and str(text), "tokenizer": tokenizer}
    return training.make_data(
        SimpleNamespace(shape="tiny" if shape == "tiny" else "160m", rows=rows, scratch=False, **given)
    )


def make_tokens(model: PreTrainedModel, rows: int = 2, length: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (rows, length), generator=generator).to(model.device)


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Move what is trained off its initial values."""
    torch.manual_seed(1)
    for value in model.parameters():
        if value.requires_grad:
            value.data += 0.02 * torch.randn_like(value)
    return model


def smallest(options: argparse.Namespace) -> str:
    return "tiny" if "tiny" in options.shapes else "160m"


@torch.no_grad()
def noop(options: argparse.Namespace) -> dict[str, Any]:
    """Check that a patch with default initialisation changes no bit, and that unpatching restores the model."""
    differing = 0
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(options, smallest(options), dtype)
        tokens = make_tokens(model)
        before = model(tokens).logits
        patch(model, PreProjectionConfig(content_skip=True)).requires_grad_(False)
        differing += int((model(tokens).logits != before).sum())
        differing += int((unpatch(model)(tokens).logits != before).sum())
    return {"passed": differing == 0, "differing_logits": differing}


@torch.no_grad()
def formula(options: argparse.Namespace) -> dict[str, Any]:
    """Compare what the projections read with x + W_down silu(W_up x), in fp64 from the adapter's own weights."""
    model = make_model(options, smallest(options), torch.float32)
    block = model.base_model.layers[0]
    states: dict[str, torch.Tensor] = {}
    patch(model, PreProjectionConfig())
    moved(model)
    block.input_layernorm.register_forward_hook(lambda module, given, made: states.update(x=made))
    block.attention.query_key_value.register_forward_pre_hook(lambda module, given: states.update(read=given[0]))
    model(make_tokens(model))
    up, down = (
        next(value for name, value in block.named_parameters() if f"preproj_{part}" in name).double()
        for part in ("up", "down")
    )
    x = states["x"].double()
    expected = x + torch.nn.functional.silu(x @ up.T) @ down.T
    return close(states["read"].double(), expected, 1e-3)  # TF32 passes


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> dict[str, Any]:
    """Return the largest difference over the largest value, and whether it is within a tolerance."""
    difference = float((actual - expected).abs().max() / expected.abs().max())
    return {"passed": difference <= tolerance, "largest_difference": difference, "tolerance": tolerance}


@torch.no_grad()
def attention(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the logits of a patched model by eager, sdpa and, where installed, flash attention."""
    model = moved(patch(make_model(options, smallest(options)), PreProjectionConfig(content_skip=True)))
    tokens, logits = make_tokens(model), {}
    flash = ["flash_attention_2"] if options.device == "cuda" and installed("flash_attn") else []
    for kind in ("eager", "sdpa", *flash):
        model.set_attn_implementation(kind)
        logits[kind] = model(tokens, use_cache=False).logits.float()
    compared = {kind: close(logits[kind], logits["eager"], 0.05) for kind in logits}
    return {"passed": all(result["passed"] for result in compared.values()), **compared}


def checkpointing(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the gradients with and without recomputed activations."""
    gradients = []
    for on in (False, True):
        model = moved(patch(make_model(options, smallest(options), torch.float32), PreProjectionConfig())).train()
        tokens = make_tokens(model)
        if on:
            switch_checkpointing(model, on=True)
        with loss_in_forward(model):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    return close(gradients[1], gradients[0], 1e-4)


def resume(options: argparse.Namespace) -> dict[str, Any]:
    """Compare a run that was stopped and resumed with one that was not."""
    blocks = make_data(options, smallest(options), rows=2).packed
    plan = BatchPlan(np.tile(np.arange(len(blocks), dtype=np.int64), (4, 1)), len(blocks), 0)
    sizes = {"steps": 4, "batch_size": len(blocks), "micro_batch_size": 1, "warmup_steps": 1, "save_every": 1}
    settings = TrainingSettings(**sizes, lr=1e-3)

    def stop(record: Any) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    def run(folder: Path, on_step: Any = None) -> torch.Tensor:
        model = patch(make_model(options, smallest(options)), PreProjectionConfig())
        with suppress(KeyboardInterrupt):
            train_probe(model, Run(settings, blocks, plan, 0, folder, on_step=on_step))
        return torch.cat([value.detach().flatten() for value in model.parameters() if value.requires_grad])

    with tempfile.TemporaryDirectory() as folder:
        whole = run(Path(folder, "whole"))
        run(Path(folder, "cut"), on_step=stop)
        resumed = run(Path(folder, "cut"))
    return {**close(resumed, whole, 1e-3), "bit_equal": torch.equal(resumed, whole)}


def agreement(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the log-likelihoods and decisions with HFLM's, in fp32."""
    model, tokenizer = make_model(options, smallest(options), torch.float32), make_tokenizer(options)
    requests = make_requests(options, options.tasks[-1])[:64]
    ours, theirs = (evaluation.make_scorer(name, model, tokenizer)(requests) for name in (evaluation.OWN, "hflm-8"))
    apart = evaluation.agreement(ours, theirs)
    return {"passed": apart["largest_excess"] <= 0 and not apart["other_greedy_decisions"], **apart}


CHECKS = (noop, formula, attention, checkpointing, resume, agreement)
