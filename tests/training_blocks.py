"""Made-up token blocks for training tests, and what they compare of runs."""

import json

import numpy as np
import torch

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream
from hfpatch.data.tokenizer import TokenStream
from hfpatch.recipes.data import DataSettings, Layout


def make_blocks(
    *,
    layout: Layout = "packed",
    documents: int = 60,
    block_size: int = 24,
    seed: int = 0,
    vocabulary: int = 64,
    completions: bool = False,
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
    return blocks_from_stream(TokenStream(tokens, lengths, learned), settings, pad_token_id=0)


class Killed(BaseException):
    """Stands for the end of a process."""


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
