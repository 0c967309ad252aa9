import pytest
import torch

from hfpatch.training.survival import UpdateSurvival, survival_steps


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        (500, 50, [50, 106, 162, 218, 274, 330, 386, 442]),
        (5, 2, [2, 3, 4]),
        (3, 10, [2]),
        (1, 0, [0]),
    ],
)
def test_steps_are_spread_from_the_end_of_warm_up(steps, warmup, expected):
    assert sorted(survival_steps(steps=steps, warmup_steps=warmup)) == expected


def test_counts_weights_that_changed_among_those_with_a_gradient():
    first = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    second = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    idle = torch.nn.Parameter(torch.tensor([1.0]))
    parameters = {"x.A.default.weight": first, "y.B.default.weight": second, "z.C.default.weight": idle}
    first.grad, second.grad = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0])
    survival = UpdateSurvival({"B": (0, 1)})
    survival.before(parameters)
    first.data += torch.tensor([0.5, 0.0, 0.5, 0.5])  # the third moves without a gradient
    second.data += torch.tensor([0.5, 0.5])
    survival.after(parameters)
    assert survival.counts == {"A": (2, 3), "B": (2, 3)}
    assert survival.shares() == {"A": 2 / 3, "B": 2 / 3, "all": 4 / 6}


def test_bf16_loses_an_update_below_its_precision():
    for dtype, expected in ((torch.float32, 1.0), (torch.bfloat16, 0.0)):
        weight = torch.nn.Parameter(torch.ones(10, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        survival = UpdateSurvival()
        survival.before({"a.b.default.weight": weight})
        weight.data -= 1e-3
        survival.after({"a.b.default.weight": weight})
        assert survival.shares()["all"] == expected
