"""What makes the tests of whole runs fast."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Tiny models are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
