import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.nn import normal_, seeded_generator


def draw(seed=0, name="a", shape=(8,), std=1.0, dtype=torch.float32):
    return normal_(torch.empty(shape, dtype=dtype), std=std, seed=seed, name=name)


@given(st.integers(0, 2**40), st.text(max_size=20))
def test_a_generator_takes_any_seed_and_name_and_repeats_itself(seed, name):
    values = [torch.rand(3, generator=seeded_generator(seed, name)) for _ in range(2)]
    assert torch.equal(*values)


@pytest.mark.parametrize("other", [{"seed": 1}, {"name": "b"}, {"seed": 10, "name": "a"}])
def test_another_seed_or_name_gives_other_values(other):
    assert not torch.equal(draw(), draw(**other))


def test_seed_and_name_are_kept_apart_and_the_global_state_left_alone():
    assert not torch.equal(draw(seed=1, name="2/a"), draw(seed=12, name="/a"))
    state, first = torch.get_rng_state(), draw()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(7)
    assert torch.equal(first, draw())


@pytest.mark.parametrize("std", [0.01, 1e-4, 3.0])
def test_mean_and_deviation(std):
    values = draw(shape=(400, 500), std=std).double()
    assert abs(values.mean()) < 5 * std / values.numel() ** 0.5
    assert values.std() == pytest.approx(std, rel=5 / (2 * values.numel()) ** 0.5)
    assert values.abs().max() > 3.5 * std  # normal, not uniform or clipped


def test_low_precision_gets_the_rounded_fp32_values_and_meta_tensors_pass():
    assert torch.equal(draw(dtype=torch.bfloat16), draw().to(torch.bfloat16))
    assert normal_(torch.empty(3, device="meta"), std=1.0, seed=0, name="a").is_meta
