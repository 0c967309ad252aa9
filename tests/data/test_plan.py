import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hfpatch.data.plan import BatchPlan, draw_plan, read_plans, write_plans
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
def test_what_is_written_is_read_back(size, seed):
    blocks, steps, batch_size = size
    plans = {key: draw_plan(blocks=blocks, steps=steps, batch_size=batch_size, seed=key) for key in (seed, seed + 1)}
    with TemporaryDirectory() as folder:
        write_plans(Path(folder), plans)
        described, back = json.loads((Path(folder) / "plan.json").read_text()), read_plans(Path(folder))
    assert [(key, value["sha256"]) for key, value in described.items()] == [
        (str(k), p.sha256) for k, p in plans.items()
    ]
    assert not any("indices" in value for value in described.values())
    for key, plan in plans.items():
        assert np.array_equal(back[key].indices, plan.indices)
        assert (back[key].seed, back[key].blocks, back[key].sha256) == (key, blocks, plan.sha256)


def test_a_seed_fixes_the_plan_of_four_bytes_a_block_and_more_steps_only_extend_it(tmp_path):
    write_plans(tmp_path, {0: draw_plan(blocks=50, steps=1000, batch_size=16, seed=0)})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 16_000 + 500
    plan = draw_plan(blocks=50, steps=4, batch_size=3, seed=7)
    generator = np.random.Generator(np.random.PCG64(7))
    assert np.array_equal(plan.indices.reshape(-1), generator.permutation(50)[:12])
    assert draw_plan(blocks=50, steps=4, batch_size=3, seed=8).sha256 != plan.sha256
    assert np.array_equal(draw_plan(blocks=50, steps=30, batch_size=3, seed=7).indices[:4], plan.indices)


def test_bad_plans_are_refused(tmp_path):
    with pytest.raises(HfpatchError, match="gives 3 blocks, fewer than one batch of 4"):
        draw_plan(blocks=3, steps=1, batch_size=4, seed=0)
    with pytest.raises(HfpatchError, match=r"training.steps is 10{15}; .* at most 16777216 are possible"):
        draw_plan(blocks=40, steps=10**15, batch_size=16, seed=0)
    plan = draw_plan(blocks=10, steps=2, batch_size=3, seed=0)
    spoilt = [plan.indices[::-1], -plan.indices - 1, plan.indices.reshape(3, 2), plan.indices + 5, plan.indices[:0]]
    for indices in spoilt:
        write_plans(tmp_path, {0: plan})
        save_file({"0": np.ascontiguousarray(indices)}, tmp_path / "plan.safetensors")
        with pytest.raises(HfpatchError, match=r"plan\.json: the batch plan is damaged"):
            read_plans(tmp_path)
    assert BatchPlan(plan.indices, blocks=11, seed=0).sha256 != plan.sha256
    for name, text in {"plan.safetensors": "x", "plan.json": '{"0": 3}'}.items():
        write_plans(tmp_path, {0: plan})
        (tmp_path / name).write_text(text)
        with pytest.raises(HfpatchError, match="not a batch plan"):
            read_plans(tmp_path)
