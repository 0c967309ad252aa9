"""What the methods of a comparison cost, measured in its end."""

import time

import pytest
import torch
from tiny_runs import small_recipe

from hfpatch.runs import costs
from hfpatch.runs.costs import StepTime
from hfpatch.runs.setup import set_up


def test_costs_are_measured_in_three_rounds_of_all_methods_on_the_same_blocks(monkeypatch):
    setup = set_up(small_recipe("tinyworld/gpt-neox"))
    names, turns, real = [*dict(setup.base.model.named_parameters())], [], costs.time_step

    def timed(*given, least):
        turns.append((given[-2], least))  # how many blocks
        return real(*given, least=least)

    monkeypatch.setattr(costs, "time_step", timed)
    measured = costs.measure_costs(setup, 60.0)
    trained = [name for name, method in setup.methods.items() if method.configs]
    assert list(measured) == trained
    assert {len(cost.steps_s) for cost in measured.values()} == {costs.ROUNDS}
    assert len(turns) == (1 + costs.ROUNDS) * len(trained)
    assert turns[: len(trained)] == [(1, 1)] * len(trained)
    assert set(turns[len(trained) :]) == {(turns[-1][0], 2)}
    assert all(0 < seconds < 60 for cost in measured.values() for seconds in cost.steps_s)
    assert {cost.share for cost in measured.values()} == {1.0}
    assert all(value is None or value > 0 for value in (cost.memory_bytes for cost in measured.values()))
    assert [*dict(setup.base.model.named_parameters())] == names  # the base again


def test_costs_are_not_measured_where_there_is_no_time(monkeypatch):
    setup = set_up(small_recipe("tinyworld/gpt-neox"))
    assert costs.measure_costs(setup, 0.01) == {}
    slow, calls = StepTime(1e9, 1.0, 1), []
    monkeypatch.setattr(costs, "time_step", lambda *_, **__: calls.append(time.sleep(0.3)) or slow)
    assert costs.measure_costs(setup, 0.21 * len(setup.methods)) == {}
    assert len(calls) == 1  # the first one shows that it takes longer


@pytest.mark.parametrize(("busy", "process", "shared"), [(10.0, 9.95, False), (12.0, 10.0, True), (None, None, None)])
def test_a_shared_machine_is_noticed(monkeypatch, busy, process, shared):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(costs, "cpu_seconds", lambda: None if busy is None else (busy, process))
    assert costs.is_shared((0.0, 0.0), 10.0) is shared
