"""Made-up token blocks for training tests, short runs on them, and what tests compare of runs."""

import json
import math
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream
from hfpatch.data.plan import draw_plan
from hfpatch.data.tokenizer import TokenStream
from hfpatch.recipes.data import DataSettings, Layout
from hfpatch.recipes.training import LoopSettings, PretrainSettings, TrainingSettings
from hfpatch.results.parts import TrainResult
from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.pretrain import pretrain
from hfpatch.training.probe import train_probe
from hfpatch.training.run import Run

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def made(kind: str, **options: Any) -> PreTrainedModel:
    """Return a tiny random model of a type."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **options})).eval()


def make_blocks(
    *,
    layout: Layout = "packed",
    documents: int = 60,
    block_size: int = 24,
    seed: int = 0,
    vocabulary: int = 64,
    completions: bool = False,
    owners: bool = False,
) -> TokenBlocks:
    """Return random documents; with ``completions`` only some tokens of each are learned, in some few."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 20, size=documents)
    draws = generator.integers(1, vocabulary - 1, size=(3, lengths.sum()))
    tokens = draws.min(axis=0).astype(np.uint16)  # small tokens are frequent, so there is something to learn
    settings = DataSettings(source="made-up", block_size=block_size, layout=layout)
    learned = None
    if completions:
        learned = generator.random(len(tokens)) < np.repeat(generator.choice([0.1, 0.9], documents), lengths)
    return blocks_from_stream(TokenStream(tokens, lengths, learned), settings, pad_token_id=0, with_owners=owners)


def run_probe(model: PreTrainedModel, blocks: TokenBlocks, folder: Any, **values: Any) -> TrainResult:
    """Train a patched model for 8 steps; ``values`` are other settings or other parts of the run."""
    settings, given = _split(TrainingSettings, {"steps": 8, **values})
    plan = draw_plan(blocks=len(blocks), steps=settings.steps, batch_size=settings.batch_size, seed=3)
    return train_probe(model, Run(settings, **{"blocks": blocks, "plan": plan, "folder": folder} | given))


def run_pretrain(model: PreTrainedModel, blocks: TokenBlocks, folder: Any, **values: Any) -> TrainResult:
    """Pretrain a model for 6 steps; ``values`` are other settings, parts of the run, and arguments of `pretrain`."""
    settings, given = _split(PretrainSettings, {"steps": 6, **values})
    plan = draw_plan(blocks=len(blocks), steps=settings.steps, batch_size=settings.batch_size, seed=0)
    options = {name: given.pop(name) for name in ("tokenizer", "save") if name in given}
    return pretrain(model, Run(settings, **{"blocks": blocks, "plan": plan, "folder": folder} | given), **options)


def spoil(model: PreTrainedModel, call: int, factor: float) -> PreTrainedModel:
    """Let a GPT-NeoX's body multiply its output by ``factor`` in its ``call``-th forward pass of training."""
    calls = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        calls.extend([1] if module.training else [])
        if module.training and len(calls) == call:
            output.last_hidden_state = output.last_hidden_state * factor
        return output

    model.gpt_neox.register_forward_hook(hook)
    return model


def rates_of(settings: LoopSettings, steps: int) -> list[float]:
    """Return the learning rate of each step."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), settings)
    scheduler, rates = build_scheduler(optimizer, settings, steps=steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def _split(kind: type[LoopSettings], values: dict[str, Any]) -> tuple[LoopSettings, dict[str, Any]]:
    given = {name: value for name, value in values.items() if name not in kind.model_fields}
    chosen = {name: value for name, value in values.items() if name in kind.model_fields}
    return kind(**{"batch_size": 4, "lr": 1e-2, "warmup_steps": 2, **chosen}), {"seed": 0, **given}


class Killed(BaseException):
    """Simulates the end of a process."""


def metrics_of(folder, name="metrics"):
    """Return the records of a file of a run."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def numbers_of(folder):
    """Return every loss, evaluation loss and diagnostic of a pretraining run, in order."""
    lines = metrics_of(folder) + metrics_of(folder, "diagnostics")
    return [line[key] for line in lines for key in ("loss", "eval_loss", "size", "cosine") if key in line]


def trainables(model):
    """Return copies of what is trained, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def same(one, other):
    """Whether two dicts hold the same tensors bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain_loop(model, blocks, plan, *, lr, warmup, clip, betas=(0.9, 0.999), decay=0.0, floor=0.0):
    """Train in plain torch, one document at a time: AdamW, clipping, warm-up, a cosine to ``floor`` times the rate.

    Return the loss and the gradient's norm of each step.
    """
    parameters = [value for value in model.parameters() if value.requires_grad]
    first, second = ([torch.zeros_like(value) for value in parameters] for _ in range(2))
    losses, norms = [], []
    model.train()
    for step, rows in enumerate(plan.indices.tolist()):
        total, count = torch.zeros(()), 0
        for ids, labels in (document for row in rows for document in _documents(blocks[row])):
            scores = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), dim=-1)
            for index in (labels[1:] != -100).nonzero().flatten().tolist():
                total, count = total - scores[index, labels[index + 1]], count + 1
        gradients = torch.autograd.grad(total / count, parameters)
        losses.append((total / count).item())
        norms.append(math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients)))
        falling = floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / (plan.steps - warmup))) / 2
        rate = lr * ((step + 1) / (warmup + 1) if step < warmup else falling)
        for value, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
            scaled = gradient * min(1.0, clip / (norms[-1] + 1e-6))
            m.mul_(betas[0]).add_(scaled, alpha=1 - betas[0])
            v.mul_(betas[1]).add_(scaled.square(), alpha=1 - betas[1])
            m_hat, v_hat = m / (1 - betas[0] ** (step + 1)), v / (1 - betas[1] ** (step + 1))
            value.data *= 1 - rate * decay * (value.ndim == 2)
            value.data -= rate * m_hat / (v_hat.sqrt() + 1e-8)
    return losses, norms


def _documents(row):
    """Yield the ids and labels of each document of a row, without its padding."""
    ids = row["input_ids"]
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist() if "position_ids" in row else [0]
    ends = [*starts[1:], int(row["attention_mask"].sum()) if "attention_mask" in row else len(ids)]
    yield from ((ids[begin:end], row["labels"][begin:end]) for begin, end in zip(starts, ends, strict=True))
