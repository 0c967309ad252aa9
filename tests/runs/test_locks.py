"""Locks: one holder at a time, whoever crashes, and a line that says who it is."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest
from tiny_runs import Trained, small_recipe

from hfpatch.errors import HfpatchError
from hfpatch.runs import compare, locks, train
from hfpatch.runs.locks import FOLDER, STALE_S, UNREADABLE_S, hold, remove_lost
from hfpatch.support.files import machine_id, remove_leftovers

LOCK = "lora@seed-0"
HOLDER = """
import sys, time
from pathlib import Path
from hfpatch.runs.locks import hold
with hold(Path(sys.argv[1]), sys.argv[2:]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Start processes that hold locks in a folder until they are killed."""
    started = []

    def begin(*names):
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "out"), *names]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def files_in(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def refused(out, *names):
    with pytest.raises(HfpatchError) as caught, hold(out, names):
        pass
    return str(caught.value)


def test_the_second_process_is_told_who_the_first_one_is(tmp_path, start):
    out = tmp_path / "out"
    first = start(LOCK, "skip@seed-0")
    message = refused(out, "other@seed-0", LOCK)
    assert f"{out}/runs/lora/seed-0 is in use by process {first.pid} on {os.uname().nodename} since 20" in message
    assert "(-c " in message
    assert message.endswith("; wait for it or end it, or choose another --out")
    with hold(out, ["other@seed-0", "lora@seed-1"]):  # other runs of the folder are free, nothing was left of the try
        assert len(list((out / FOLDER).iterdir())) == 4
    first.kill()  # not waited for: a process that has ended and is not yet forgotten is gone, too
    time.sleep(0.2)
    with hold(out, [LOCK]):
        pass
    assert sorted(path.name for path in (out / FOLDER).iterdir()) == ["skip@seed-0"]


def test_nothing_is_left_of_a_lock(tmp_path):
    with hold(tmp_path / "new" / "out", [LOCK]), hold(tmp_path / "new" / "out", ["skip@seed-0"]):
        assert len(files_in(tmp_path)) == 2
    with pytest.raises(KeyError), hold(tmp_path, [LOCK]):
        raise KeyError
    assert files_in(tmp_path) == []


def put(out: Path, age_s: float, holder: dict) -> None:
    path = out / FOLDER / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(holder) if holder else "")
    moment = time.time() - age_s
    os.utime(path, (moment, moment))


ELSEWHERE = {"host": "node7", "machine": "another boot", "pid": 1, "born": "1", "since": "then", "command": "hfpatch"}
HERE = {**ELSEWHERE, "machine": machine_id(), "born": locks.birth(1)}


@pytest.mark.parametrize(
    ("holder", "age_s", "held"),
    [
        (ELSEWHERE, STALE_S - 60, True),
        (ELSEWHERE, STALE_S + 60, False),
        ({}, 0, True),  # its holder is about to write into it
        ({}, UNREADABLE_S + 5, False),
        (HERE, STALE_S + 60, True),  # seen to live, however long its thread did not run
        ({**HERE, "born": "2"}, 0, False),  # the number of an ended process was given to another one
        ({**HERE, "pid": 2**22 + 1}, 0, False),
    ],
)
def test_who_counts_as_gone(tmp_path, holder, age_s, held):
    put(tmp_path, age_s, holder)
    if held:
        who = "process 1 on node7 since then (hfpatch)" if holder else "an unknown process"
        assert f"in use by {who}" in refused(tmp_path, LOCK)
        assert (tmp_path / FOLDER / LOCK).is_file()
        return
    with hold(tmp_path, [LOCK]):
        assert json.loads((tmp_path / FOLDER / LOCK).read_text())["pid"] == os.getpid()


def test_a_machine_that_cannot_be_told_from_others_knows_of_none_that_has_ended(monkeypatch):
    """As in sandboxes, whose containers may all have the same name and see a shared folder."""
    assert locks.has_ended(locks.new_holder()) is False
    assert locks.has_ended({**locks.new_holder(), "pid": 2**22 + 1}) is True
    monkeypatch.setattr(locks, "BOOT_ID", Path("/proc/nothing"))
    assert locks.has_ended({**locks.new_holder(), "pid": 2**22 + 1}) is None


def test_a_process_killed_as_it_takes_a_lock_leaves_none_without_its_name(tmp_path):
    """Such a one would hold up the next command until it counts as abandoned."""
    killed = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
    killed += HOLDER.replace(
        "with hold", "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # at its first write\nwith hold"
    )
    assert forked.python(["-c", killed, tmp_path, LOCK]).returncode == -signal.SIGXFSZ
    assert not (tmp_path / FOLDER / LOCK).exists()
    remove_leftovers(tmp_path)
    assert list((tmp_path / FOLDER).iterdir()) == []


def no_links(path, draft):
    raise OSError(errno.EPERM, "no links")


def repeated(path, draft, link=Path.hardlink_to):
    """NFS sends a request again whose answer was lost, and then says that the file exists."""
    link(path, draft)
    link(path, draft)


@pytest.mark.parametrize("link", [no_links, repeated])
def test_file_systems_without_links_or_with_lost_answers_have_locks(link, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "hardlink_to", link)
    with hold(tmp_path, [LOCK]):
        assert files_in(tmp_path) == [LOCK]
        assert f"in use by process {os.getpid()} " in refused(tmp_path, LOCK)
    assert files_in(tmp_path) == []


def test_one_of_many_gets_a_lock_that_its_holder_left(tmp_path):
    put(tmp_path, STALE_S + 60, ELSEWHERE)
    barrier, release, results = threading.Barrier(8), threading.Event(), []

    def attempt():
        barrier.wait()
        try:
            with hold(tmp_path, [LOCK]):
                results.append("held")
                release.wait(20)
        except HfpatchError:
            results.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(results) < 8 and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["held", *["refused"] * 7]


def test_a_lock_is_renewed_and_whoever_lost_his_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "RENEW_S", 0.02)
    path = tmp_path / FOLDER / LOCK
    with hold(tmp_path, [LOCK]):
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 20
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
        content = path.read_bytes()
        path.write_bytes(b"")  # as if another process were just writing it: it is looked at again
        time.sleep(0.2)  # does not end
        path.write_bytes(content)
    assert files_in(tmp_path) == []
    theirs = json.dumps({**ELSEWHERE, "token": "theirs"})
    loser = HOLDER.replace("time.sleep", f"Path(sys.argv[1], '.locks', sys.argv[2]).write_text({theirs!r}); time.sleep")
    ended = forked.python(["-c", "import hfpatch.runs.locks as locks; locks.RENEW_S = 0.02\n" + loser, tmp_path, LOCK])
    assert ended.returncode == 2
    assert "seed-0 was taken over by process 1 on node7 since then (hfpatch)" in ended.stderr
    assert json.loads(path.read_text())["token"] == "theirs"


def test_the_lock_of_a_process_that_was_lost_on_another_machine_is_removed(tmp_path):
    with hold(tmp_path, [LOCK]) as holder:
        remove_lost(tmp_path, LOCK, holder["token"])  # here it is known to live
        assert f"in use by process {os.getpid()} " in refused(tmp_path, LOCK)
    put(tmp_path, 0, {**ELSEWHERE, "token": "lost"})
    remove_lost(tmp_path, LOCK, "another")
    assert "in use by process 1 on node7" in refused(tmp_path, LOCK)
    remove_lost(tmp_path, LOCK, "lost")
    with hold(tmp_path, [LOCK]):
        pass
    assert files_in(tmp_path) == []


def test_whoever_waits_goes_on_when_the_lock_is_released(tmp_path):
    order = []

    def second():
        with hold(tmp_path, ["folder"], wait_s=20):
            order.append("second")

    with hold(tmp_path, ["folder"]):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.2)
        order.append("first")
    waiting.join(20)
    assert order == ["first", "second"]


def test_two_methods_are_trained_in_one_folder_at_once(tmp_path, start, model_folder):
    """Whoever asks for the work of another is refused, and gets it at once when that one was killed."""
    recipe, out, log = small_recipe(model_folder), tmp_path / "out", Trained()
    other = start("pre@seed-0", "pre@seed-1")
    train(recipe, "lora", out)
    with pytest.raises(HfpatchError, match=f"runs/pre/seed-0 is in use by process {other.pid} on "):
        compare(recipe, out, resume=True)
    other.kill()
    other.wait()
    compare(recipe, out, resume=True, progress=log)
    assert log.trained == ["pre · seed 0", "pre · seed 1"]
    assert not list((out / FOLDER).iterdir())


def make_nothing(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "gone")


def make_file(tmp_path):
    (tmp_path / "out").write_text("")


def make_lock(tmp_path):
    (tmp_path / "out" / FOLDER / LOCK).mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "below", "message"),
    [
        (make_nothing, "", r"out/.locks/lora@seed-0: cannot be written \(.*out is a link to nothing\)"),
        (make_nothing, "run", r"out/run/.locks/lora@seed-0: cannot be written \(.*out is a link to nothing\)"),
        (make_file, "", r"out/.locks/lora@seed-0: cannot be written \(Not a directory\)"),
        (make_lock, "", rf"out/.locks/{LOCK}: cannot be read \(Is a directory\)"),
    ],
)
def test_a_folder_that_takes_no_lock_is_refused_at_once(make, below, message, tmp_path):
    make(tmp_path)
    assert re.search(f"/{message}; choose another --out$", refused(tmp_path / "out" / below, LOCK))


def test_nothing_is_left_of_a_lock_on_a_full_disk_or_of_an_interruption(tmp_path, monkeypatch):
    take = locks._take

    def full(path, text, encoding):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(*arguments):
        take(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert "cannot be written (No space left on device)" in refused(tmp_path, LOCK)
    monkeypatch.setattr(locks, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt), hold(tmp_path, [LOCK]):
        pass
    assert files_in(tmp_path) == []
