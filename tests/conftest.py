"""Set before anything imports transformers: no network, one thread a worker, quiet."""

import logging
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

_CACHE = tempfile.TemporaryDirectory(prefix="hfpatch-tests-")  # gone when Python ends
os.environ["HFPATCH_CACHE"] = _CACHE.name

torch.set_num_threads(1)
logging.getLogger("torch.__trace").propagate = False  # pytest would record each of its many lines


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Start every test from one random state, so that no test depends on those before it."""
    torch.manual_seed(0)
