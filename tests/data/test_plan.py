import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.data.plan import BatchPlan, draw_plan
from hfpatch.errors import HfpatchError

sizes = st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 8)).filter(lambda size: size[0] >= size[2])


@given(sizes, st.integers(0, 2**32))
def test_every_block_is_seen_once_before_any_is_seen_again(size, seed):
    blocks, steps, batch_size = size
    plan = draw_plan(blocks=blocks, steps=steps, batch_size=batch_size, seed=seed)
    assert plan.indices.shape == (steps, batch_size)
    order = plan.indices.reshape(-1)
    for start in range(0, len(order), blocks):
        epoch = Counter(order[start : start + blocks].tolist())
        assert set(epoch.values()) == {1}
        assert set(epoch) <= set(range(blocks))


@given(sizes, st.integers(0, 100))
def test_json_round_trip(size, seed):
    blocks, steps, batch_size = size
    plan = draw_plan(blocks=blocks, steps=steps, batch_size=batch_size, seed=seed)
    back = BatchPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert np.array_equal(back.indices, plan.indices)
    assert (back.seed, back.blocks, back.sha256) == (seed, blocks, plan.sha256)


def test_a_seed_fixes_the_plan_and_more_steps_only_extend_it():
    plan = draw_plan(blocks=50, steps=4, batch_size=3, seed=7)
    generator = np.random.Generator(np.random.PCG64(7))
    assert np.array_equal(plan.indices.reshape(-1), generator.permutation(50)[:12])
    assert draw_plan(blocks=50, steps=4, batch_size=3, seed=8).sha256 != plan.sha256
    assert np.array_equal(draw_plan(blocks=50, steps=30, batch_size=3, seed=7).indices[:4], plan.indices)


def test_bad_plans_are_refused():
    with pytest.raises(HfpatchError, match="gives 3 blocks, fewer than one batch of 4"):
        draw_plan(blocks=3, steps=1, batch_size=4, seed=0)
    plan = draw_plan(blocks=10, steps=2, batch_size=3, seed=0)
    with pytest.raises(HfpatchError, match="drawn for 10 blocks and the data has 11"):
        plan.check(11)
    value = plan.to_json()
    with pytest.raises(HfpatchError, match="damaged"):
        BatchPlan.from_json({**value, "indices": value["indices"][::-1]})
    with pytest.raises(HfpatchError, match="not a batch plan"):
        BatchPlan.from_json({"seed": 0})
    negative = BatchPlan(indices=-plan.indices - 1, blocks=10, seed=0)
    with pytest.raises(HfpatchError, match="damaged"):
        BatchPlan.from_json(negative.to_json())
