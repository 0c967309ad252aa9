from types import SimpleNamespace

from hfpatch.runs import train_eval
from hfpatch.runs.plan import PlannedRun, Unit
from hfpatch.runs.train_eval import EVERY_S, SHARE, ComparisonSession


def test_results_are_written_at_once_then_rarely(monkeypatch, tmp_path):
    now, written, cost = [0.0], [], [1.0]
    monkeypatch.setattr(train_eval.time, "monotonic", lambda: now[0])

    class Writes(ComparisonSession):
        def write_results(self, *, complete=False):
            now[0] += cost[0]
            written.append(now[0])

    session, run = Writes(SimpleNamespace()), PlannedRun("pre", "pre", {}, 0, tmp_path, "pre")
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
