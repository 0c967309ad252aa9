import numpy as np
import pytest

from hfpatch.reporting.curves import read_curves, smooth


def lines(folder, seed, text):
    path = folder / "runs" / "lora" / f"seed-{seed}" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_the_mean_over_seeds_at_common_steps(tmp_path):
    lines(tmp_path, 0, '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n')
    lines(tmp_path, 1, '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "lo')
    curve = read_curves(tmp_path, ["lora", "absent"])["lora"]
    assert curve.steps.tolist() == [1, 2]
    assert curve.loss.tolist() == [4.0, 3.0]
    assert curve.seeds == 2


def test_a_step_told_twice_counts_as_last_told(tmp_path):
    lines(tmp_path, 0, '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 9.0}\n{"step": 2, "loss": 2.0}\n\n[]\n')
    assert read_curves(tmp_path, ["lora"])["lora"].loss.tolist() == [3.0, 2.0]


@pytest.mark.parametrize("name", ["../lora", "..", "", "lora/seed-0"])
def test_a_name_never_leads_out_of_the_run(tmp_path, name):
    lines(tmp_path, 0, '{"step": 1, "loss": 3.0}\n')
    assert read_curves(tmp_path, [name]) == {}


def test_no_curves(tmp_path):
    lines(tmp_path, 0, "")
    assert read_curves(tmp_path, ["lora"]) == {}
    assert read_curves(tmp_path / "nowhere", ["lora"]) == {}


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_smooth_is_the_centred_mean(window):
    values = np.random.default_rng(0).normal(size=9)
    expected = [values[max(i - window // 2, 0) : i + (window - 1) // 2 + 1].mean() for i in range(values.size)]
    np.testing.assert_allclose(smooth(values, window), expected, rtol=1e-12)
