"""Set before anything imports torch: no network, quiet, as many threads as OMP_NUM_THREADS says, one without it.

The processes that tests start inherit the environment, so that they compute with the same number of threads.
"""

import gc
import json
import logging
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MKL_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]

import hypothesis
import pytest
import torch

from hfpatch.errors import HfpatchError
from hfpatch.runs.locks import new_holder

gc.disable()  # while everything is imported; `pytest_collection_finish` enables it
os.fsync = lambda file: None  # no file of a test has to survive the machine; those that need it are processes
# How long an example takes depends on the machine; 50 of them instead of 100 keep `make test` within its minutes.
hypothesis.settings.register_profile("hfpatch", deadline=None, max_examples=50)
hypothesis.settings.load_profile("hfpatch")
_CACHE = tempfile.TemporaryDirectory(prefix="hfpatch-tests-")  # gone when Python ends
Path(_CACHE.name, "driver").write_text(json.dumps(new_holder()))  # if it is killed, the next test of --jobs removes it
os.environ["HFPATCH_CACHE"] = _CACHE.name
os.environ["HF_MODULES_CACHE"] = f"{_CACHE.name}/modules"  # transformers copies the code of an export there
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_CACHE.name}/inductor"  # kept kernels may be of another processor setting
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # several are processes, which import torch first
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # believe the processor: no trial programs are compiled

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a plugin may have imported torch before
logging.getLogger("torch.__trace").propagate = False  # pytest would record each of its many lines
for device in (torch.cuda, torch.xpu, torch.mtia):  # each keeps the stack of every seed until it is used
    device.traceback = SimpleNamespace(format_stack=list)


def _in_one_line(self, *words):
    """Check every error that a test meets: its message is one line."""
    assert "\n" not in "".join(map(str, words)), words
    super(HfpatchError, self).__init__(*words)


HfpatchError.__init__ = _in_one_line


def pytest_collection_modifyitems(items):
    """Begin with the modules with the most slow tests: other workers take over what is left at the end of the list.

    So a slow module's fixtures are set up once, by the worker that begins, and the last tests take no time.
    """
    slow = Counter(item.module for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.module])


def pytest_collection_finish():
    """Leave everything imported out of garbage collections, which would go through millions of objects each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # 700 by default; a model of a test is thousands of objects
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect():
    """Leave what earlier modules imported and cached out, too: each training and each evaluation collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _sigterm_as_before():
    """Check that no test changes the SIGTERM handler: a pool that a later test forks could wait for it forever."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Start every test from one random state, so that no test depends on those before it."""
    torch.manual_seed(0)
