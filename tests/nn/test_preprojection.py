import pytest
import torch
from reference import ACTIVATIONS

from hfpatch.errors import HfpatchError
from hfpatch.nn import ContentSkip, PreProjection, inner_width

D = 16


def formula(module, x, sigma):
    """x + W_down σ(W_up x), or x + W_down (σ(W_gate x) ⊙ W_up x), with matrices as torch stores them (out, in)."""
    up, down = x @ module.up.weight.T, module.down.weight
    inner = sigma(up) if module.gate is None else sigma(x @ module.gate.weight.T) * up
    return x + inner @ down.T


def made(*, dtype=torch.float32, hidden_size=D, **options):
    module = PreProjection(hidden_size=hidden_size, **options).to(dtype)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=dtype) * 0.3
    return module


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_value(gated, name, dtype, tolerance):
    module = made(dtype=dtype, gated=gated, activation_name=name)
    x = torch.randn(2, 5, D, dtype=dtype)
    changed = module(x)
    torch.testing.assert_close(changed, formula(module, x, ACTIVATIONS[name]), rtol=tolerance, atol=tolerance)
    assert (changed - x).abs().max() > 0.1


@pytest.mark.parametrize(("expansion", "width"), [(1.25, 960), (1.0, 768), (0.3, 230), (2.667, 2048)])
def test_inner_width_is_the_whole_part(expansion, width):
    assert inner_width(768, expansion) == width


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_identity_init_is_a_no_op_bit_for_bit(gated, dtype):
    x = torch.randn(2, 5, D).to(dtype)
    module = PreProjection(hidden_size=D, gated=gated)
    assert torch.equal(module(x), x)
    assert module(x).dtype == dtype
    assert not module.down.weight.any()
    assert module.up.weight.any()
    branch, skip = torch.randn(2, 5, D).to(dtype), ContentSkip(hidden_size=D)
    assert torch.equal(skip(branch, x), branch)
    assert skip(branch, x).dtype == dtype


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("init", ["identity", "paper"])
def test_init_statistics(gated, init):
    module = PreProjection(hidden_size=300, gated=gated, init=init)
    for name, parameter in module.named_parameters():
        if init == "identity" and name == "down.weight":
            continue
        assert parameter.std().item() == pytest.approx(0.01, rel=0.02), name
        assert abs(parameter.mean()) < 1e-4, name
    weights = [p.flatten()[:100] for p in module.parameters()]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_the_gate_is_one_more_matrix_without_a_bias():
    plain, gated = (PreProjection(hidden_size=D, init="paper", gated=gated) for gated in (False, True))
    assert [name for name, _ in gated.named_parameters()] == ["up.weight", "gate.weight", "down.weight"]
    assert torch.equal(plain.up.weight, gated.up.weight)
    assert torch.equal(plain.down.weight, gated.down.weight)


def test_low_precision_input_is_computed_in_fp32_and_rounded_once():
    module, skip = made(), ContentSkip(hidden_size=D)
    skip.skip.weight.data = torch.randn(D, D)
    branch, x = torch.randn(2, 2, 5, D).to(torch.bfloat16)
    expected = formula(module, x.float(), ACTIVATIONS["silu"])
    assert torch.equal(module(x), expected.to(torch.bfloat16))
    expected = branch.float() + x.float() @ skip.skip.weight.T
    assert torch.equal(skip(branch, x), expected.to(torch.bfloat16))


def test_dropout_drops_inner_activations_in_training_only():
    module = made(dropout=0.5, hidden_size=256, activation_name="relu")
    module.down.weight.data = torch.eye(256, 320)  # the first 256 inner activations, visible one by one
    x = torch.randn(4, 256)
    module.eval()
    assert torch.equal(module(x), formula(module, x, ACTIVATIONS["relu"]))
    module.train()
    kept, inner = module(x) - x, formula(module, x, ACTIVATIONS["relu"]) - x
    active = inner.abs() > 1e-3
    dropped = (kept.abs() < 1e-5) & active
    assert 0.4 < dropped.sum() / active.sum() < 0.6
    torch.testing.assert_close(kept[active & ~dropped], 2 * inner[active & ~dropped], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expansion": 0.01}, "expansion=0.01 gives an inner width of 0 at hidden size 16"),
        ({"expansion": -1.0}, "expansion=-1.0 must be above 0"),
        ({"expansion": float("inf")}, "expansion=inf must be above 0 and at most 1024"),
        ({"expansion": float("nan")}, "expansion=nan must be above 0"),
        ({"activation_name": "sillu"}, "did you mean 'silu'"),
        ({"init": "zero"}, "init='zero' is not one of identity"),
    ],
)
def test_errors(options, message):
    with pytest.raises(HfpatchError, match=message):
        PreProjection(hidden_size=D, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_skip_value(dtype, tolerance):
    module = ContentSkip(hidden_size=D).to(dtype)
    module.skip.weight.data = torch.randn(D, D, dtype=dtype)
    branch, x = torch.randn(2, 2, 5, D, dtype=dtype)
    expected = branch + x @ module.skip.weight.T
    torch.testing.assert_close(module(branch, x), expected, rtol=tolerance, atol=10 * tolerance)


def test_skip_init_statistics_and_shape():
    weight = ContentSkip(hidden_size=300, init="paper").skip.weight
    assert weight.std().item() == pytest.approx(1e-4, rel=0.02)
    assert abs(weight.mean()) < 2e-6
    ((name, parameter),) = ContentSkip(hidden_size=D).named_parameters()
    assert (name, parameter.shape) == ("skip.weight", (D, D))
    with pytest.raises(HfpatchError, match="init='none' is not one of identity"):
        ContentSkip(hidden_size=D, init="none")
