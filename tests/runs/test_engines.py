"""Engines: whoever works on which unit in whatever order, the numbers are those of one process."""

import os
import re
import shutil
import signal
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from tiny_runs import GPT2, lines, numbers, small_recipe, without_reports
from tqdm import tqdm

from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import Progress, compare, locks, pretrain_study
from hfpatch.runs.engines import parallel, processes, worker
from hfpatch.runs.engines.job import Job, Place
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.folder import COSTS
from hfpatch.support.files import read_json
from hfpatch.support.signals import sigterm_kept
from hfpatch.training.records import MetricsFile


@pytest.fixture(scope="module")
def recipe(model_folder):
    training = {"steps": 3, "warmup_steps": 1, "batch_size": 4, "seeds": [0, 1], "save_every": 1}
    return small_recipe(
        model_folder, training=training, tuning={"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 1}
    )


@pytest.fixture(scope="module", autouse=True)
def _no_report():
    with without_reports():
        yield


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    compare(recipe, out)
    return out


def content(out: Path) -> dict:
    """Return every file of a run folder but kept answers and times: numbers of JSON files, the bytes of others."""
    found = {}
    for path in sorted(each for each in out.rglob("*") if each.is_file() and each.parent.name != ".answers"):
        if path.name == COSTS:  # measured where there is time for it
            continue
        if path.suffix == ".json":
            found[str(path.relative_to(out))] = numbers(read_json(path))
        elif path.suffix == ".jsonl":
            found[str(path.relative_to(out))] = numbers(lines(path))
        else:
            found[str(path.relative_to(out))] = path.read_bytes()
    return found


def assert_equal(out: Path, other: Path) -> None:
    found, expected = content(out), content(other)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name


class Log(Progress):
    def __init__(self):
        self.opened_with, self.nodes, self.done, self.errors = None, [], {}, []

    def opened(self, engine, units):
        self.opened_with = engine

    def placed(self, run, action, node):
        self.nodes.append((run, action, node))

    def finished(self, run, summary):
        self.done[run] = summary

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


def test_how_far_an_evaluation_is_can_be_read_from_its_folder(tmp_path, monkeypatch):
    progress = worker.UnitProgress(tmp_path)
    assert worker.read_scored(tmp_path) is None
    for done in (1, 2):  # the second comes too soon
        progress.scored("lora · seed 0", "cloze", done, 9)
    assert worker.read_scored(tmp_path) == ("cloze", 1, 9)
    monkeypatch.setattr(worker, "SCORED_S", 0.0)
    progress.scored("lora · seed 0", "cloze", 3, 9)
    shown = []
    dispatch = object.__new__(parallel._Dispatch)
    dispatch.session = SimpleNamespace(progress=SimpleNamespace(scored=lambda *told: shown.append(told)))
    unit = SimpleNamespace(action="evaluate", run=SimpleNamespace(folder=tmp_path, name="lora · seed 0"))
    dispatch.seen, dispatch.looked, dispatch.seats = {}, 0, [SimpleNamespace(unit=unit)]
    for _ in range(2):
        dispatch._show_progress()
    assert shown == [("lora · seed 0", "cloze", 3, 9)]
    (tmp_path / "evaluations" / ".answers" / "scored.json").write_text('{"task": 1')
    assert worker.read_scored(tmp_path) is None


def test_a_worker_that_starts_ends_the_count_of_those_that_did_not():
    dispatch = object.__new__(parallel._Dispatch)
    dispatch.seats, dispatch.starts = [], 0

    def begin(result):
        future = Future()
        future.set_result(result) if isinstance(result, Place) else future.set_exception(result)
        dispatch.seats.append(parallel._Seat(0, SimpleNamespace(kill=lambda: None), future))
        dispatch._take_note(dispatch.seats[-1])

    lost, there = OSError("its machine is gone"), Place("node", 1)
    for result in (lost, lost, there, lost, lost):
        begin(result)
    with pytest.raises(HfpatchError, match=r"workers cannot be started .*its machine is gone"):
        begin(lost)


def test_processes_that_share_a_run_share_its_threads(monkeypatch):
    monkeypatch.setattr(processes, "count_cores", lambda: 8)
    torch.set_num_threads(8)
    settings = EngineSettings(jobs=1, processes_per_run=2)
    workers = processes.Processes(settings)
    with closing(parallel.Parallel(workers, settings)) as engine:
        engine.connect()
        assert (torch.get_num_threads(), workers.threads, engine.at_once) == (4, 4, 1)
        assert workers.describe() == "1 runs at a time, each on 8 threads of this machine"
    assert torch.get_num_threads() == 8
    torch.set_num_threads(1)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one_and_finish_all_but_what_fails(recipe, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "get_context", lambda _: forked.context())
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
    assert len({node for _, _, node in log.nodes}) == 2
    assert len(log.nodes) == len({each[:2] for each in log.nodes}) == 1 + 6 + 4 + 3
    assert len(log.done) == 6 + 4  # trials and evaluations
    assert not read_json(out / "results.json")["complete"]
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
            "training": {"steps": 300, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "save_every": 10},
            "baseline": "one",
            "variants": {"one": {}, "two": {}},
        }
    )


@pytest.fixture(scope="module")
def straight_study(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    pretrain_study(study, out)
    return out


@pytest.fixture
def look_often(monkeypatch):
    monkeypatch.setattr(parallel, "POLL_S", 0.02)


@pytest.mark.slow
def test_a_run_shared_by_two_processes_that_cut_the_model(study, tmp_path):
    short = study.training.model_copy(update={"steps": 4, "lr": 1e-4})
    one = study.model_copy(update={"training": short, "variants": {"one": study.variants["one"]}})
    config = Path(__file__).parents[2] / "docs" / "accelerate" / "fsdp2-cpu.yaml"
    pretrain_study(one, tmp_path / "straight")
    settings = EngineSettings(jobs=1, processes_per_run=2, launch_config=str(config))
    pretrain_study(one, tmp_path / "out", engine=settings)
    losses = [
        [record.loss for record in MetricsFile(tmp_path / out / "runs/one/seed-0/metrics.jsonl").read()[1:]]
        for out in ("straight", "out")
    ]
    assert len(losses[1]) == 4
    assert losses[0] != losses[1]  # other sums: it was shared
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not (tmp_path / "out" / ".locks").exists()


class Tell(Log):
    """Kills the worker of a run after one step, and writes down where the next one is after another."""

    def __init__(self, file, kill_after, tell_after):
        super().__init__()
        self.file, self.kill_after, self.tell_after = file, kill_after, tell_after

    def stepped(self, run, record):
        worker = int(self.nodes[-1][2].rpartition(":")[2])
        if self.kill_after and record.step > self.kill_after:
            self.kill_after = None
            os.kill(worker, signal.SIGKILL)
        elif self.kill_after is None and record.step > self.tell_after:
            self.file.write_text(str(worker))


def interrupted(study, out, number, kill_after, tell_after) -> None:
    """Run a study by one worker, and send the driver a signal after some steps, which must end both within seconds."""
    told = out.with_suffix(f".{number}")
    driver = os.fork()
    if driver == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
            log = Tell(told, kill_after, tell_after)
            pretrain_study(study, out, resume=True, engine=EngineSettings(jobs=1), progress=log)
        finally:
            os._exit(3)
    deadline = time.monotonic() + 300
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(driver, number)
    worker = int(told.read_text())
    begin = time.monotonic()
    os.waitpid(driver, 0)
    while locks._birth(worker) is not None and time.monotonic() < begin + 20:
        time.sleep(0.05)
    assert locks._birth(worker) is None


@pytest.mark.slow
@pytest.mark.usefixtures("look_often")
def test_a_run_goes_on_from_its_checkpoint_whoever_ends(study, straight_study, tmp_path):
    out = tmp_path / "out"
    run = out / "runs" / "one" / "seed-0"
    interrupted(study, out, signal.SIGINT, kill_after=20, tell_after=40)
    last = MetricsFile(run / "metrics.jsonl").last().step
    assert 40 < last < 300
    assert max(int(path.name[5:]) for path in (run / "checkpoints").iterdir()) == last  # saved where it was stopped
    assert not (out / ".locks").exists()
    interrupted(study, out, signal.SIGKILL, kill_after=None, tell_after=last)
    assert [path.name for path in (out / ".locks").iterdir()] == ["two@seed-0"]  # the driver's; the worker left none
    pretrain_study(study, out, resume=True)
    assert_equal(out, straight_study)


def test_a_worker_that_is_asked_to_end_outside_of_training_gives_its_locks_back(study, tmp_path):
    job = Job(recipe=study, out=tmp_path, part=None, holder=locks.new_holder(), folder=tmp_path)
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            worker.begin(job, {})
            with locks.hold(tmp_path, ["one@seed-0"]):
                with tqdm([]):
                    (tmp_path / "begun").write_text(type(tqdm.get_lock()).__module__)
                time.sleep(60)
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    assert not (tmp_path / ".locks").exists()
    assert (tmp_path / "begun").read_text() == "_thread"  # no semaphore, which would outlive it


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


class Lose(Log):
    """Kills the worker that is given a unit of one run, once."""

    def __init__(self, run):
        super().__init__()
        self.run, self.reasons = run, []

    def placed(self, run, action, node):
        super().placed(run, action, node)
        if run == self.run and not self.reasons:
            os.kill(int(node.rpartition(":")[2]), signal.SIGKILL)

    def lost(self, run, reason):
        self.reasons.append((run, reason))


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
def test_two_workers_of_ray_give_the_numbers_of_one_process_though_one_is_killed(recipe, straight, tmp_path):
    log = Lose("pre · seed 0")
    compare(recipe, tmp_path / "out", engine=EngineSettings(ray="local"), progress=log)
    assert_equal(tmp_path / "out", straight)
    assert log.opened_with == "2 runs at a time on this machine, each on 1 CPU core, by Ray"
    ((run, reason),) = log.reasons
    assert (run, reason.partition(":")[0]) == ("pre · seed 0", "ActorDiedError")
    places = [node for name, action, node in log.nodes if (name, action) == ("pre · seed 0", "train")]
    assert len(set(places)) == 2
    assert not (tmp_path / "out" / ".locks").exists()
