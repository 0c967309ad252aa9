"""The outcomes, and what a learning rate may be worth, by hand; for probabilities see test_planning.py."""

import math

import pytest

from hfpatch.results.decision import decide_gain, decide_keep, rate_error
from hfpatch.results.tuning import Choice, Trial, Tuning

DELTA = 0.02


@pytest.mark.parametrize(
    ("difference", "wide", "narrow", "outcome"),
    [
        (0.05, 0.03, 0.025, "better"),
        (-0.05, 0.03, 0.025, "worse"),
        (0.001, 0.015, 0.012, "equivalent"),
        (0.01, 0.008, 0.007, "better by less than the margin"),
        (-0.01, 0.008, 0.007, "worse by less than the margin"),
        (0.01, 0.03, 0.025, "undecided"),
        (0.02, 0.03, 0.0, "undecided"),  # at the margin
    ],
)
def test_a_gain_has_one_of_four_outcomes(difference, wide, narrow, outcome):
    ends = [(difference - half, difference + half) for half in (wide, narrow)]
    assert decide_gain(*ends, DELTA) == outcome
    if "margin" not in outcome:
        without = "undecided" if outcome == "equivalent" else outcome
        assert decide_gain(*ends, 0.0) == without  # signs alone


@pytest.mark.parametrize(
    ("difference", "narrow", "outcome"),
    [
        (0.05, 0.03, "kept"),
        (-0.005, 0.01, "kept"),
        (-0.05, 0.03, "lost"),
        (-0.01, 0.008, "lost by less than the margin"),
        (-0.01, 0.015, "undecided"),
    ],
)
def test_what_is_kept_is_not_worse_by_the_margin(difference, narrow, outcome):
    assert decide_keep((difference - narrow, difference + narrow), DELTA) == outcome


@pytest.mark.parametrize(
    ("losses", "best", "cap", "error"),
    [
        ({1e-3: 3.4, 3e-3: 3.0, 1e-2: 3.1}, 3e-3, 4.0, 0.1),
        ({1e-3: 9.0, 3e-3: 3.0, 1e-2: 3.1}, 3e-3, 4.0, 0.25),  # the base's loss is 4
        ({1e-3: 3.1, 3e-3: 3.0, 1e-2: math.inf, 3e-2: math.inf}, 3e-3, 4.0, 0.25),
        ({1e-3: 3.1, 3e-3: 3.0, 1e-2: math.inf}, 3e-3, math.inf, math.inf),
        ({1e-3: 3.0, 3e-3: 3.1}, 1e-3, 4.0, math.inf),
        ({1e-3: 5.0, 3e-3: 4.8, 1e-2: 4.9}, 3e-3, 4.0, 0.05),  # a method that the base is better than
    ],
)
def test_what_the_choice_of_a_rate_may_be_worth(losses, best, cap, error):
    assert rate_error(losses, best, cap) == pytest.approx(error)


def test_only_trials_that_differ_in_the_rate_alone_say_what_it_may_be_worth():
    losses = {(1e-3, 0.0): 3.4, (3e-3, 0.0): 3.0, (1e-2, 0.0): 3.1, (1e-3, 0.1): 9.0}
    given = {"method": "a", "seed": 1}
    trials = [Trial(**given, values={"lr": lr, "decay": decay}, loss=loss) for (lr, decay), loss in losses.items()]
    chosen = {"a": Choice(values={"lr": 3e-3, "decay": 0.0}, loss=3.0, trials=4)}
    tuning = Tuning(seed=1, steps=10, trials=trials, chosen=chosen | {"b": Choice(values={"lr": 1e-3}, trials=4)})
    assert tuning.rate_error("a") == pytest.approx(0.1)
    assert tuning.rate_error("b") == math.inf  # all its trials diverged: nothing bounds it
    assert tuning.rate_error("c") is None
