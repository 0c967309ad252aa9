"""Made-up token blocks for training tests."""

import numpy as np

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
