"""What makes the tests of whole runs fast, and the same whatever becomes of the checkout."""

import pytest
import torch
from tiny_runs import save_base, without_reports


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Tiny models are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A base of one layer."""
    return save_base(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module", autouse=True)
def _one_commit():
    """The checkout may move on while the tests run, and to ask git takes a while."""
    with pytest.MonkeyPatch.context() as patched:
        for module in ("train_eval", "retention"):
            patched.setattr(f"hfpatch.runs.{module}.checkout_state", lambda: ("c0ffee", False))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_report():
    with without_reports():
        yield
