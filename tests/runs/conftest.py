"""What makes the tests of whole runs fast, and the same whatever becomes of the checkout."""

import pytest
import torch
from tiny_runs import without_reports


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Tiny models are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_commit():
    """The checkout may move on while the tests run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hfpatch.runs.train_eval.checkout_state", lambda: ("c0ffee", False))
        yield


@pytest.fixture
def no_report():
    with without_reports():
        yield
