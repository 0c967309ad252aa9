import numpy as np
import pytest

from hfpatch.reporting.curves import Curve, read_curves, smooth
from hfpatch.reporting.figure_data import read_training_csv, training_csv


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


def test_held_out_loss_is_the_mean_where_every_seed_measured_it(tmp_path):
    line = '{"step": %d, "loss": 3.0, "eval_loss": %s}\n'
    lines(tmp_path, 0, line % (1, 2.0) + line % (2, 1.0))
    lines(tmp_path, 1, line % (1, 4.0) + line % (2, "null"))
    assert read_curves(tmp_path, ["lora"])["lora"].held_out == {1: 3.0}


def test_the_data_of_the_figure_gives_the_curves_back(tmp_path):
    curve = Curve(np.arange(1, 1201), np.linspace(3, 2, 1200), 2, {7: 2.5, 1200: 2.25})
    assert len(training_csv({str(i): curve for i in range(400)}).splitlines()) < 45_000
    (tmp_path / "training.csv").write_text(training_csv({"a": curve, "b": curve}))
    (found,) = read_training_csv(tmp_path / "training.csv", ["b", "c"]).values()
    assert (found.seeds, dict(found.held_out)) == (2, curve.held_out)
    assert found.steps[:3].tolist() == [1, 4, 7]
    assert found.steps[-1] == 1200
    np.testing.assert_array_equal(found.loss, curve.loss[found.steps - 1])


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
