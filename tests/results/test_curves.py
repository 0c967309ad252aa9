import pytest

from hfpatch.results.curves import MOST_STEPS, mean_curve


@pytest.fixture
def lines(tmp_path):
    def written(seed, text):
        path = tmp_path / f"seed-{seed}.jsonl"
        path.write_text(text)
        return path

    return written


def test_the_mean_over_seeds_at_common_steps(lines, tmp_path):
    first = lines(0, '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n')
    second = lines(1, '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "lo')
    curve = mean_curve([first, second, tmp_path / "absent"])
    assert (curve.steps, curve.loss, curve.seeds) == ([1, 2], [4.0, 3.0], 2)


def test_of_a_step_that_is_there_twice_the_later_line_counts(lines):
    path = lines(0, '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 9.0}\n{"step": 2, "loss": 2.0}\n\n[]\n')
    assert mean_curve([path]).loss == [3.0, 2.0]


def test_held_out_loss_is_the_mean_where_every_seed_measured_it(lines):
    line = '{"step": %d, "loss": 3.0, "eval_loss": %s}\n'
    first = lines(0, line % (1, 2.0) + line % (2, 1.0))
    second = lines(1, line % (1, 4.0) + line % (2, "null"))
    assert mean_curve([first, second]).held_out == {1: 3.0}


def test_a_very_long_curve_is_thinned_out_but_for_held_out_losses(lines):
    records = [f'{{"step": {i}, "loss": {i}.5}}\n' for i in range(1, 3 * MOST_STEPS)]
    records[4] = '{"step": 5, "loss": 5.5, "eval_loss": 2.0}\n'
    curve = mean_curve([lines(0, "".join(records))])
    assert curve.steps[:4] == [1, 4, 5, 7]
    assert len(curve.steps) == MOST_STEPS + 1
    assert curve.loss == [step + 0.5 for step in curve.steps]


def test_no_curve(lines, tmp_path):
    assert mean_curve([]) is None
    assert mean_curve([lines(0, ""), tmp_path / "absent"]) is None
