"""Engines: whoever works on which unit in whatever order, the numbers are those of one process."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_runs import GPT2, lines, numbers, small_recipe

from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import Progress, compare
from hfpatch.runs.engines import processes, work
from hfpatch.runs.engines.driver import Engine, open_engine
from hfpatch.runs.engines.ray import work_there
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.folder import COSTS
from hfpatch.runs.locks import FOLDER, birth
from hfpatch.runs.plan import Plan, PlannedRun, Unit
from hfpatch.runs.records import Entry, Identity
from hfpatch.support.files import read_json
from hfpatch.support.signals import sigterm_kept
from hfpatch.training.records import MetricsFile

SECONDS = 30
"""Within these a command that was interrupted has ended all its workers, on a busy machine."""
EDITED = {**work.current_versions(), "hfpatch's code": "0"}
"""The versions of a driver that started before an edit."""


@pytest.fixture(scope="module")
def recipe(model_folder):
    training = {"steps": 3, "warmup_steps": 1, "batch_size": 4, "seeds": [0, 1], "save_every": 1}
    return small_recipe(
        model_folder, training=training, tuning={"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 1}
    )


@pytest.fixture(scope="module", autouse=True)
def _one_commit():
    """Workers ask git, which no fixture here can answer for: this process asks it as well."""


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    compare(recipe, out)
    return out


def content(out: Path) -> dict:
    """Return every file of a run folder but kept answers and times: numbers of JSON files, the bytes of others."""
    contents = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file() and path.parent.name != ".answers"):
        if path.name == COSTS:  # measured where there is time for it
            continue
        if path.suffix == ".json":
            contents[str(path.relative_to(out))] = numbers(read_json(path))
        elif path.suffix == ".jsonl":
            contents[str(path.relative_to(out))] = numbers(lines(path))
        else:
            contents[str(path.relative_to(out))] = path.read_bytes()
    return contents


def assert_equal(out: Path, other: Path) -> None:
    contents, expected = content(out), content(other)
    assert contents.keys() == expected.keys()
    for name in expected:
        assert contents[name] == expected[name], name


class Log(Progress):
    def __init__(self):
        self.opened_with, self.nodes, self.done, self.errors, self.steps, self.scored_to = None, [], {}, [], {}, {}
        self.prepared = []

    def preparing(self, what):
        self.prepared.append((what, len(self.nodes)))

    def opened(self, engine, units):
        self.opened_with = engine

    def placed(self, run, action, node):
        self.nodes.append((run, action, node))

    def finished(self, run, summary):
        self.done[run] = summary

    def stepped(self, run, record):
        self.steps[run] = record.step

    def scored(self, run, task, done, total):
        self.scored_to[run] = (done, total)

    def left(self, run, units, error=None):
        self.errors += [error] if error else []


class Break(Log):
    """Puts a file in the place of a folder that one run makes, once the run folder is there."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def opened(self, engine, units):
        super().opened(engine, units)
        self.folder.mkdir(parents=True)
        (self.folder / "checkpoints").write_text("")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "--jobs 0: must be positive"),
        ({"jobs": 2, "gpus_per_run": 1.5}, "more than one GPU must be a whole number"),
        ({"jobs": 2, "gpus_per_run": float("inf")}, "more than one GPU must be a whole number"),
        ({"gpus_per_run": 1.0}, "go with --jobs N or --ray"),
        ({"jobs": 1, "gpus_per_run": 4.0, "processes_per_run": 2}, "one process for each of its GPUs"),
        ({"jobs": 1, "gpus_per_run": 0.5, "processes_per_run": 2}, "one process for each of its GPUs"),
        ({"jobs": 1, "launch_config": "no.yaml"}, "a training of one process has none"),
        ({"jobs": 1, "processes_per_run": 2, "launch_config": "no.yaml"}, "there is no such file"),
    ],
)
def test_options_that_contradict_are_one_line(options, message):
    with pytest.raises(HfpatchError, match=message):
        EngineSettings(**options)


def test_processes_that_share_a_run_share_its_threads(monkeypatch):
    monkeypatch.setattr(processes, "count_cores", lambda: 8)
    torch.set_num_threads(8)
    with open_engine(EngineSettings(jobs=1, processes_per_run=2)) as engine:
        assert (torch.get_num_threads(), engine.workers.most) == (4, 1)
    assert torch.get_num_threads() == 8
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["4", "6", "4", "6"]),
        ({"gpus_per_run": 0.5}, ["4", "4", "6", "6"]),
        ({"gpus_per_run": 0.25}, ["4", "4", "4", "4"]),
        ({"gpus_per_run": 0.0}, ["", "", "", ""]),
        ({"gpus_per_run": 2, "jobs": 1}, ["4,6"]),
    ],
)
def test_which_gpus_processes_share(options, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(processes, "WorkerProcess", lambda folder, task, env: env["CUDA_VISIBLE_DEVICES"])
    monkeypatch.setattr(processes, "runs_on_cpu", lambda: False)
    with ExitStack() as stack:
        workers = processes.Processes(EngineSettings(**{"jobs": 4, **options}), stack)
        job = SimpleNamespace(queue=Path())
        assert [workers.start(job, slot, slot) for slot in range(workers.most)] == expected
        with pytest.raises(HfpatchError, match="this machine has 2 GPUs, enough for 4 runs at a time"):
            processes.Processes(EngineSettings(jobs=5, gpus_per_run=0.5), stack)
        with pytest.raises(HfpatchError, match="--processes-per-run 2: a run has one GPU here"):
            processes.Processes(EngineSettings(jobs=1, processes_per_run=2), stack)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [("echo loaded; echo 'no disk'; echo ===; exit 3", "exit code 3: no disk"), ("kill -9 $$", "exit code -9")],
)
def test_how_a_worker_ended(ends, reason, tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f"#!/bin/sh\n{ends}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    worker = processes.WorkerProcess(tmp_path / "worker", None)
    worker.wait()
    assert worker.ended() == reason


def test_a_worker_whose_parent_was_killed_is_ended_and_writes_no_more(tmp_path):
    parent = SimpleNamespace(stdin=BytesIO(), ended=lambda: "exit code -9")
    worker = processes.ForkedWorker(tmp_path / "worker", (None, 0), parent)
    with subprocess.Popen(["sleep", "60"]) as orphan:
        (worker.folder / f"{orphan.pid}.born").write_text(birth(orphan.pid))
        (worker.folder / f"{os.getpid()}.born").write_text("0")  # of a process that had this id before
        assert worker.ended() == "exit code -9"
        worker.end()
        work.begin(worker.folder)  # in a process that was still loading: there is no task
        assert orphan.poll() == -signal.SIGKILL  # at once: the next worker may take its unit


FORKS = """
import os, sys
from pathlib import Path
from hfpatch.runs.engines.forking import fork_workers
is_new = len(sys.argv) > 1
folder = Path(sys.argv[1]) if is_new else fork_workers()
import json, torch
from accelerate import PartialState
tasks = f"/proc/{os.getppid()}/task"
threads = [open(f"{tasks}/{thread}/comm").read() for thread in os.listdir(tasks)]
clean = not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork() and not PartialState._shared_state
torch.set_num_threads(2)
torch.manual_seed(0)
x = torch.randn(600, 600, requires_grad=True)
(x @ x).square().mean().backward()
values = {"clean": clean, "threads": threads.count("python\\n"), "session": os.getsid(0) == os.getpid()}
values |= {"product": (x.detach().numpy() @ x.detach().numpy()).tobytes().hex()[:99], "gradient": x.grad.sum().item()}
(folder / "values").write_text(json.dumps(values))
print("done", flush=True)
if folder.name == "1":
    os.kill(os.getpid(), 9)
sys.exit(0 if is_new else int(folder.name))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_forked_workers_compute_as_new_processes_do(tmp_path):
    folders, new = [tmp_path / str(number) for number in range(4)], tmp_path / "new"
    for folder in (*folders, new):
        folder.mkdir()
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    start = partial(subprocess.run, text=True, env=env, timeout=200, check=True)
    start([sys.executable, "-c", FORKS], input="".join(f"{folder}\n" for folder in folders))
    start([sys.executable, "-c", FORKS, str(new)])
    computed = {name: read_json(new / "values")[name] for name in ("product", "gradient")}
    for folder in folders:
        assert read_json(folder / "values") == {"clean": True, "threads": 1, "session": True, **computed}
        assert (folder / "output").read_text() == "done\n"
    assert [(folder / "code").read_text() for folder in folders] == ["0", "-9", "2", "3"]


def session_of(tmp_path, names):
    """A session whose units take no time to record, and its list of those that were recorded."""
    runs = [PlannedRun(name, name, {}, 0, tmp_path / name, name) for name in names]
    units, done = tuple(Unit("train", run, None) for run in runs), []
    plan = Plan(None, tmp_path, tuple(runs), units)
    return SimpleNamespace(plan=plan, progress=Progress(), is_due=bool, record=done.append), done


class Seats:
    """Three workers at a time; ``looks`` says after how many looks the one in a seat is seen to have ended, if it does.

    The others complete a unit at each look from the fifth on.
    """

    settings, threads, most, description = EngineSettings(jobs=3), 1, 3, ""

    def __init__(self, looks):
        self.looks, self.started = looks, 0

    def start(self, job, seat, slot):
        self.started += 1
        looks, last = itertools.count(1), self.looks(seat)

        def ended():
            look = next(looks)
            if last is not None:
                return "exit code -9" if look >= last else None
            waiting = [file for file in sorted(job.queue.glob("*.json")) if Entry.find(file).waits]
            if waiting and look >= 5:
                Entry(attempts=1, seat=seat, ended=True).write(waiting[0])
            return None

        return SimpleNamespace(ended=ended, end=lambda: None)


def test_a_unit_that_fails_hands_its_inputs_to_no_other(tmp_path, monkeypatch):
    """Its method may have changed the base."""

    class Session:
        setup, loaded = SimpleNamespace(shared=Identity(), plans={}, matmul=None), 0

        def __init__(self, plan):
            Session.loaded += 1

        def set_up(self):
            pass

        def complete(self, unit):
            if unit.run.name == "a":
                raise HfpatchError("changed the base")

    monkeypatch.setattr(work, "TrainEvalSession", Session)
    plan, queue = session_of(tmp_path, "abc")[0].plan, tmp_path / ".queue"
    queue.mkdir()
    worker = work.Worker(work.Job(plan, queue, {}, tmp_path, 1, EngineSettings(jobs=1)), 0)
    for number, error in enumerate(("changed the base", None, None)):
        Entry().write(queue / f"{number}.json")
        assert worker.attempt(number)
        assert Entry.find(queue / f"{number}.json").error == error
    assert Session.loaded == 2

    # A worker that starts after an edit of hfpatch ends, and leaves the units to the others
    Entry().write(queue / "0.json")
    edited = work.Job(plan, queue, {}, tmp_path, 1, EngineSettings(jobs=1), EDITED)
    (queue / work.OPEN).touch()
    for start in (work.work, work_there):
        with pytest.raises(HfpatchError, match=r"^hfpatch's code is .* and 0 where the command was given: it was"):
            start(edited, 0)
    assert Entry.find(queue / "0.json").waits


@pytest.mark.parametrize(
    ("looks", "started", "completed", "outcome"),
    [
        (lambda seat: None if seat in (0, 2) else 1, 3, 3, pytest.warns(UserWarning, match="fewer workers are left")),
        (lambda seat: 1, 3, 0, pytest.raises(HfpatchError, match=r"^workers cannot be started \(exit code -9\)$")),
    ],
)
def test_no_worker_takes_the_place_of_one_that_ended_before_it_began_a_unit(
    looks, started, completed, outcome, tmp_path
):
    (session, done), workers = session_of(tmp_path, "abc"), Seats(looks)
    with outcome:
        Engine(workers).execute(session)
    assert (workers.started, len(done)) == (started, completed)


def test_an_interruption_leaves_neither_workers_nor_locks(tmp_path):
    """The worker has a unit, and begins another one in the last moment; the user interrupts again while it saves."""
    session, _ = session_of(tmp_path, "ab")
    locks, ends = tmp_path / FOLDER, []

    class AtWork(Seats):
        def start(self, job, seat, slot):
            def interrupted():
                Entry(attempts=1, seat=seat, lock="there").write(job.queue / "1.json")
                locks.mkdir(exist_ok=True)
                (locks / session.plan.units[1].work_lock).write_text('{"machine": "another", "token": "there"}')
                raise KeyboardInterrupt

            Entry(attempts=1, seat=seat).write(job.queue / "0.json")
            return SimpleNamespace(ended=interrupted, end=lambda: ends.append(seat))

    workers = AtWork(None)
    workers.most = 1
    with pytest.raises(KeyboardInterrupt):
        Engine(workers).execute(session)
    assert ends == [0]
    assert list(locks.iterdir()) == []


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one_and_finish_all_but_what_fails(recipe, straight, tmp_path):
    out = tmp_path / "out"
    broken = out / "runs" / "lora" / "seed-1"
    log = Break(broken)
    with pytest.raises(HfpatchError) as caught:
        compare(recipe, out, engine=EngineSettings(jobs=2), progress=log)
    why = rf"lora · seed 1: FileExistsError: .*; its traceback is in {broken}/error.txt"
    assert re.fullmatch(rf"{why} \(1 unit that needs it left out\)", str(caught.value))
    assert log.errors == [str(caught.value).partition(" (1 unit")[0]]
    assert "Traceback" in (broken / "error.txt").read_text()
    assert log.opened_with == "2 runs at a time, each on 1 thread of this machine"
    assert [begun for what, begun in log.prepared if what.startswith("workers start: ")] == [0, 0]
    assert len(log.nodes) == len({unit[:2] for unit in log.nodes}) == 1 + 6 + 4 + 3
    assert len(log.done) == 6 + 4  # trials and evaluations
    assert log.steps["lora · seed 0"] == 3
    assert log.scored_to == dict.fromkeys(log.scored_to, (4, 4))
    assert log.scored_to
    assert not read_json(out / "results.json")["complete"]
    assert not [*out.glob(".queue"), *out.glob(".locks/*")]
    shutil.rmtree(broken)
    compare(recipe, out, resume=True)  # one process goes on where several left off
    assert_equal(out, straight)


@pytest.fixture(scope="module")
def study(recipe):
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # which differs between processes
    return StudyRecipe.model_validate(
        {
            "name": "small",
            "architecture": {**GPT2, "n_layer": 1, **no_dropout},
            "tokenizer": {"path": recipe.model.name},
            "data": {"source": "tinyworld/base", "max_documents": 40, "block_size": 32, "held_out": 5},
            "training": {"steps": 1000, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": [0], "save_every": 20},
            "baseline": "one",
            "variants": {"one": {}, "two": {}},
        }
    )


@pytest.fixture(scope="module")
def straight_study(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    compare(study, out)
    return out


@pytest.mark.slow
def test_runs_shared_by_two_processes_which_may_cut_the_model(study, tmp_path):
    short = study.training.model_copy(update={"steps": 4, "lr": 1e-4})
    one = study.model_copy(update={"training": short, "variants": {"one": study.variants["one"]}})
    config = Path(__file__).parents[2] / "docs" / "accelerate" / "fsdp2-cpu.yaml"
    engines = {
        "straight": None,
        "whole": EngineSettings(jobs=1, processes_per_run=2),
        "cut": EngineSettings(jobs=1, processes_per_run=2, launch_config=str(config)),
    }
    losses, logs = {}, {}
    for name, engine in engines.items():
        compare(one, tmp_path / name, engine=engine, progress=logs.setdefault(name, Log()))
        records = MetricsFile(tmp_path / name / "runs/one/seed-0/metrics.jsonl").read()
        losses[name] = [record.loss for record in records if record.step]
        assert not [*(tmp_path / name).glob(".queue"), *(tmp_path / name).glob(".locks/*")]
    for name in ("whole", "cut"):
        assert len(losses[name]) == 4
        assert losses[name] != losses["straight"]  # other sums: it was shared
        assert losses[name] == pytest.approx(losses["straight"], rel=1e-4)
    workers = {name: {node for _, _, node in log.nodes} for name, log in logs.items()}
    assert (len(workers["whole"]), len(workers["cut"])) == (1, 2)  # an evaluation takes a whole model


class Command:
    """`hfpatch pretrain` of a study, in a process of its own."""

    def __init__(self, study, out, *options):
        self.out, recipe = out, out.parent / "study.yaml"
        recipe.write_text(study.to_yaml())
        self.log = (out.parent / "log.txt").open("w+")
        command = [sys.executable, "-m", "hfpatch", "pretrain", recipe, "--out", out, *options]
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True, preexec_fn=heard
        )

    @property
    def output(self):
        return (self.out.parent / "log.txt").read_text()

    def wait_for(self, run, step):
        """Wait until a run has done some steps; return its worker."""
        metrics, deadline = MetricsFile(self.out / "runs" / run / "seed-0" / "metrics.jsonl"), time.monotonic() + 300
        while (last := metrics.last()) is None or last.step < step:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output  # noqa: PT018
            time.sleep(0.02)
        return psutil.Process(int(re.findall(rf"{run} · seed 0: train on \S+:(\d+)", self.output)[-1]))

    def interrupt(self, number, worker):
        """Send the command a signal, which must end it and its processes within seconds; return its exit code."""
        processes = {worker, *psutil.Process(self.process.pid).children(recursive=True)}
        self.process.send_signal(number)
        code = self.process.wait(timeout=SECONDS)
        assert psutil.wait_procs(processes, timeout=SECONDS)[1] == []
        self.log.close()
        return code


def goes_on_whoever_ends(study, straight, out, number, *options):
    """Kill a worker, interrupt its driver, kill the next driver: each time the run goes on from its checkpoint."""
    run = out / "runs" / "one" / "seed-0"

    def saved():
        return max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))

    command = Command(study, out, "--resume", *options)
    first = command.wait_for("one", 20)
    first.kill()
    second = command.wait_for("one", MetricsFile(run / "metrics.jsonl").last().step + 40)
    assert second.pid != first.pid
    assert command.interrupt(number, second) == 128 + number
    assert re.search(r"one · seed 0: its worker ended \(.+\); another one goes on from the newest", command.output)
    assert 40 < saved() == MetricsFile(run / "metrics.jsonl").last().step < study.training.steps  # where it was stopped
    assert not [*out.glob(".queue"), *out.glob(".locks/*")]

    before, command = saved(), Command(study, out, "--resume", *options)
    assert command.interrupt(signal.SIGKILL, command.wait_for("one", before + 40)) == -signal.SIGKILL
    assert before < saved() < study.training.steps
    compare(study, out, resume=True)
    assert_equal(out, straight)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_goes_on_from_its_checkpoint_whoever_ends(number, study, straight_study, tmp_path):
    goes_on_whoever_ends(study, straight_study, tmp_path / "out", number, "--jobs", "1")


class Kill(Log):
    """Kills a process of each worker that begins one run: its first one, its second, or what forked it, or torchrun."""

    def __init__(self, run, times, victim="first"):
        super().__init__()
        self.run, self.times, self.victim, self.reasons, self.orphans = run, times, victim, [], []

    def placed(self, run, action, node):
        super().placed(run, action, node)
        if run != self.run or not self.times:
            return
        self.times -= 1
        first = killed = psutil.Process(int(node.rpartition(":")[2]))
        if self.victim != "first":
            self.orphans = first.parent().children()
            others = [orphan for orphan in self.orphans if orphan != first]
            while others and len(list(Path(first.cmdline()[-1]).glob(work.BORN))) <= len(others):
                time.sleep(0.01)  # until all have begun
            killed = others[0] if self.victim == "second" else first.parent()
        killed.kill()

    def lost(self, run, reason):
        self.reasons.append((run, reason))
        assert [birth(orphan.pid) for orphan in self.orphans] == [None] * len(self.orphans)  # before another one starts


@pytest.mark.slow
@pytest.mark.parametrize("forks", [True, False])
def test_a_unit_that_ends_its_workers_is_tried_three_times_and_costs_no_other(forks, study, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "runs_on_cpu", lambda: forks)  # where there is a device, workers start anew
    log = Kill("one · seed 0", times=9)
    with pytest.raises(HfpatchError) as caught:
        compare(study, tmp_path / "out", engine=EngineSettings(jobs=1), progress=log)
    failed = "one · seed 0: its worker ended 3 times before it did (exit code -9)"
    assert str(caught.value) == f"{failed} (1 unit that needs it left out)"
    assert log.reasons == [("one · seed 0", "exit code -9")] * 2
    assert [run for run, _, _ in log.nodes] == ["one · seed 0"] * 3 + ["two · seed 0"] * 2
    assert list(log.done) == ["two · seed 0"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
@pytest.mark.parametrize(("count", "victim"), [(1, "parent"), (2, "parent"), (2, "second")])
def test_a_run_goes_on_after_another_process_of_its_worker_was_killed(count, victim, study, straight_study, tmp_path):
    log, steps = Kill("one · seed 0", 1, victim), study.training.steps if count == 1 else 60
    study = study.model_copy(update={"training": study.training.model_copy(update={"steps": steps})})
    compare(study, tmp_path / "out", engine=EngineSettings(jobs=1, processes_per_run=count), progress=log)
    ((run, reason),) = log.reasons
    assert (run, reason.partition(":")[0]) == ("one · seed 0", f"exit code {-9 if victim == 'parent' else 1}")
    assert len(log.orphans) == count
    if count == 1:
        assert_equal(tmp_path / "out", straight_study)


@pytest.fixture(scope="module")
def one_ray():
    """Ray on this machine, started once for all tests."""
    ray = pytest.importorskip("ray")
    with sigterm_kept():
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False
        )
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
def test_two_workers_of_ray_give_the_numbers_of_one_process_though_one_is_killed(recipe, straight, tmp_path):
    log = Kill("baseline · seed 0", times=1)
    compare(recipe, tmp_path / "out", engine=EngineSettings(ray="local"), progress=log)
    assert_equal(tmp_path / "out", straight)
    assert log.opened_with == "2 runs at a time on this machine, each on 1 CPU core, by Ray"
    ((run, reason),) = log.reasons
    assert (run, reason.partition(":")[0]) == ("baseline · seed 0", "WorkerCrashedError")
    nodes = [node for name, action, node in log.nodes if (name, action) == ("baseline · seed 0", "evaluate")]
    assert len(set(nodes)) == 2
    assert not [*(tmp_path / "out").glob(".queue"), *(tmp_path / "out").glob(".locks/*")]
