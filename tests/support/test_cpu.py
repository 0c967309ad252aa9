import ctypes
import os
import platform
import subprocess
import sys
from itertools import accumulate, cycle

import pytest

from hfpatch.support import cpu
from hfpatch.support.cpu import keep_freed_memory

PROGRAM = """
import resource, sys
from unittest.mock import MagicMock
sys.modules |= {name: MagicMock() for name in ("torch", "torch.nn")}  # which take seconds, and have no part in this
from hfpatch.support.cpu import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [bytearray(1 << 20) for _ in range(64)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
faults()  # the first blocks are new
print(kept, faults())
"""
PAGES = 5 * 64 * 256


def run(**variables):
    """Whether freed memory is kept, and the pages handed out for blocks that were freed before."""
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
def test_freed_memory_is_used_again_without_the_system_and_a_threshold_set_by_hand_stays():
    kept, faults = run()
    assert (kept, faults < PAGES / 50) == (True, True), faults
    kept, faults = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert (kept, faults > PAGES / 2) == (False, True), faults


@pytest.mark.parametrize("problem", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_alone(problem, monkeypatch):
    def load(name):
        if problem is AttributeError:
            return object()
        raise problem(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    keep_freed_memory.cache_clear()
    try:
        assert not keep_freed_memory()
    finally:
        keep_freed_memory.cache_clear()


def test_time_that_other_processes_take_does_not_count(monkeypatch):
    """On a busy machine wall times once chose the library that is half as fast."""
    clock = accumulate(cycle([0.0, 2.0, 0.0, 1.0]))  # before and after MKL's product, before and after the other
    monkeypatch.setattr(cpu.time, "thread_time", lambda: next(clock))
    cpu.measured_gain.cache_clear()
    assert cpu.measured_gain(((8, 4), (4, 8)), 1, lambda x, weight: x @ weight.t()) == 2.0
    cpu.measured_gain.cache_clear()
