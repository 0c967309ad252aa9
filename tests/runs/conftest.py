"""What makes the tests of whole runs fast."""

import gc

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Tiny models are fastest on one thread, and each training collects garbage, which takes time on a large heap."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
