from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hfpatch.results.parts import TrainResult
from hfpatch.runs import comparison, train_eval
from hfpatch.runs.comparison import run_session
from hfpatch.runs.plan import Plan, PlannedRun, Unit
from hfpatch.runs.records import Identity, Trained
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.runs.train_eval import EVERY_S, SHARE, TrainEvalSession
from hfpatch.support.files import read_json, write_json


def test_results_are_written_at_once_then_rarely(monkeypatch, tmp_path):
    now, written, cost = [0.0], [], [1.0]

    def write_results():
        now[0] += cost[0]
        written.append(now[0])

    monkeypatch.setattr(train_eval.time, "monotonic", lambda: now[0])
    session, run = TrainEvalSession(SimpleNamespace()), PlannedRun("pre", "pre", {}, 0, tmp_path, "pre")
    session.write_results = write_results
    trained, evaluated = (Unit(action, run, None) for action in ("train", "evaluate"))
    session.record(trained)  # which is in no results yet
    assert written == []
    session.record(evaluated)
    assert written == [1.0]
    now[0] = EVERY_S
    session.record(evaluated)
    assert len(written) == 1
    now[0], cost[0] = 1.0 + EVERY_S, 100.0
    for _ in range(2):
        session.record(evaluated)
    assert len(written) == 2
    now[0] = written[1] + 100.0 / SHARE - 1  # it may take a twentieth of the time
    session.record(evaluated)
    assert len(written) == 2


def test_runs_stay_locked_until_their_report_is_written(monkeypatch, tmp_path):
    events = []

    @contextmanager
    def open_runs(plan, load, **options):
        events.append("locked")
        yield
        events.append("released")
        write_json(tmp_path / "results.json", {"of": "another command that waited for the locks"})

    class Empty(TrainEvalSession):
        def write_results(self, *, complete=False):
            write_json(tmp_path / "results.json", {"complete": complete})

    monkeypatch.setattr(comparison, "check_start", lambda plan, *, resume: None)
    monkeypatch.setattr(comparison, "open_runs", open_runs)
    monkeypatch.setattr("hfpatch.reporting.write_report", lambda out: events.append(read_json(out / "results.json")))
    monkeypatch.setattr(Empty, "measure_costs", lambda self: None)
    results = run_session(Empty(Plan(None, tmp_path, (), ())), resume=False, engine=None)
    assert events == ["locked", results, "released"]
    assert results == {"complete": True}


def test_what_was_trained_names_the_method_that_the_training_began_with(monkeypatch, tmp_path):
    code = ["before"]

    def train_probe(model, run):
        code[0] = "after"  # as where a file that the method names is changed meanwhile
        return TrainResult(steps=1, final_loss=1.0, tokens=1, wall_s=1.0, tokens_per_s=1.0, peak_memory_bytes=1)

    monkeypatch.setattr(train_eval, "train_probe", train_probe)
    monkeypatch.setattr(train_eval, "save_patch", lambda model, folder: None)
    session, run = TrainEvalSession(SimpleNamespace()), PlannedRun("pre", "pre", {}, 0, tmp_path / "seed-0", "pre")
    session.setup = Mock(spec=ComparisonSetup, blocks=None, held_out=None, plans={0: None})
    session.setup.identify = lambda run: Identity(method=code[0])
    session.setup.patched = lambda run: nullcontext()
    session.train(run)
    assert Trained.read(run.folder / "training.json").identity == Identity(method="before")


@pytest.mark.parametrize("units", [1, 2])  # the second one comes too soon, and waits
def test_results_that_wait_are_written_before_an_error_leaves(monkeypatch, tmp_path, units):
    written, run = [], PlannedRun("pre", "pre", {}, 0, tmp_path, "pre")

    def execute(session):
        for _ in range(units):
            session.record(Unit("evaluate", run, None))
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "check_start", lambda plan, *, resume: None)
    monkeypatch.setattr(comparison, "open_runs", lambda plan, load, **options: nullcontext())
    monkeypatch.setattr(comparison, "open_engine", lambda *_: nullcontext(SimpleNamespace(execute=execute)))
    session = TrainEvalSession(Plan(None, tmp_path, (), ()))
    session.write_results = lambda: written.append(run)
    with pytest.raises(KeyboardInterrupt):
        run_session(session, resume=False, engine=None)
    assert len(written) == units
