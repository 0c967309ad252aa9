import json
import math

import pytest

from hfpatch.training.state import LoopState


def test_the_lowest_finite_loss_is_the_best_and_waiting_ends_the_run():
    state = LoopState()
    found = [state.evaluated(step, loss, 2) for step, loss in enumerate([math.nan, 3.0, 2.0, 2.0], start=1)]
    assert found == [False, True, True, False]
    assert (state.best_loss, state.best_step, state.waited, state.stopped) == (2.0, 3, 1, False)
    assert not state.evaluated(5, math.inf, 2)
    assert state.stopped


def test_without_patience_it_never_stops():
    state = LoopState()
    for step in range(1, 50):
        state.evaluated(step, float(step), None)
    assert not state.stopped


@pytest.mark.parametrize("state", [LoopState(), LoopState({"lora_A": (1, 2)}, [3, 4], 1.5, 7, 2, True)])
def test_it_survives_json(state):
    assert LoopState.from_json(json.loads(json.dumps(state.to_json()))) == state
