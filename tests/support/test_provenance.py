"""Where a result comes from."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfpatch.support import provenance as module
from hfpatch.support.provenance import Clock, checkout_state, command_line, installed_versions, processor, provenance


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_names_its_commit_and_whether_it_was_changed(tmp_path):
    package = tmp_path / "hfpatch"
    package.mkdir()
    (package / "module.py").write_text("x = 1\n")
    assert checkout_state(package) == (None, False)
    git(tmp_path, "init")
    assert checkout_state(package) == (None, False)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert checkout_state(package) == (commit, False)
    (tmp_path / "new.txt").write_text("untracked")
    assert checkout_state(package) == (commit, False)
    (package / "module.py").write_text("x = 2\n")
    assert checkout_state(package) == (commit, True)


def test_command_versions_and_processor(tmp_path):
    home = Path.home()
    assert command_line(["/any/bin/hfpatch", "compare", "a b.yaml", "--out", f"{home}/runs"]) == (
        "hfpatch compare 'a b.yaml' --out ~/runs"
    )
    assert command_line(["hfpatch", "eval", f"{home}/my runs", "~a"]) == "hfpatch eval ~/'my runs' '~a'"
    assert command_line(["/any/hfpatch/__main__.py", "eval"]) == "python -m hfpatch eval"
    versions = installed_versions()
    assert versions["torch"] == torch.__version__  # with its build, which the package index does not name
    assert {"hfpatch", "transformers", "peft", "lm_eval", "numpy"} <= set(versions)
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9R14\nflags\t\t: a b\n\n")
    assert processor(info) == "AuthenticAMD AMD EPYC 9R14"
    info.write_text("vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 17\nmodel name : AMD EPYC\n")
    assert processor(info) == "AuthenticAMD AMD EPYC, family 25 model 17"
    assert isinstance(processor(tmp_path / "none"), str)


def test_provenance_is_complete_and_time_adds_up():
    facts = provenance(Clock(started="2026-01-01T00:00:00+00:00", before=100.0))
    assert facts["started"] == "2026-01-01T00:00:00+00:00"
    assert 100 <= facts["wall_s"] < 160
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert facts["threads"] == torch.get_num_threads()
    of_run = {"commit", "dirty", "command", "started", "wall_s", "threads", "versions"}
    assert set(facts) == of_run | {"python", "processor", "platform", "device"}


@pytest.mark.parametrize(
    ("kind", "launcher", "name"),
    [(None, "", "cpu"), ("mps", "", "mps"), ("cuda", "", "NVIDIA H100"), ("cuda", "true", "cpu")],
)
def test_the_device_is_the_accelerator_that_a_run_may_use(monkeypatch, kind, launcher, name):
    monkeypatch.setenv("ACCELERATE_USE_CPU", launcher)
    monkeypatch.setattr(module, "_CPU_ONLY", runpy.run_path(module.__file__)["_CPU_ONLY"])  # read at import
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # by the driver of workers
    device = kind and torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    assert provenance(Clock())["device"] == name
