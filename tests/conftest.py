"""Set before anything imports transformers: no network, one thread a worker, quiet."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Start every test from one random state, so that no test depends on those before it."""
    torch.manual_seed(0)
