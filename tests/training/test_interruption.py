"""Processes whose launcher is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""
WORKER = """
import os, signal, sys, time
from hfpatch.training import interruption
interruption._POLL_S = interruption._GRACE_S = 0.2
interruption.end_with_launcher()
if KEEPS_ON:
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
if WAS_ASKED:  # as schedulers ask each process
    (watch := interruption.watch_sigterm()).__enter__()
    os.kill(os.getpid(), signal.SIGTERM)
print(os.getpid(), flush=True)
time.sleep(3)
time.sleep(3)
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("launched", "keeps_on", "was_asked", "expected"),
    [
        (True, False, False, ""),
        (True, True, False, "asked\n"),
        (True, True, True, ""),  # a second time would end the step
        (False, False, False, None),
    ],
)
def test_what_a_launcher_started_ends_with_it(launched, keeps_on, was_asked, expected):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": "none"} if launched else {}
    worker_code = WORKER.replace("KEEPS_ON", str(keeps_on)).replace("WAS_ASKED", str(was_asked))
    command = [sys.executable, "-c", LAUNCHER, worker_code]
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    began = time.monotonic()
    if not launched:
        time.sleep(1)
        os.kill(worker, signal.SIGKILL)  # it was still there
        launcher.communicate()
        return
    output, errors = launcher.communicate(timeout=30)  # ends when the worker does
    assert time.monotonic() - began < 5
    assert output == expected
    assert f"the launcher (process {launcher.pid}) is gone, so this process ends" in errors
