import pytest
import safetensors.torch
import torch

from hfpatch.results.layout import LayerSeries
from hfpatch.results.series import MOST_STEPS, mean_curve, mean_series, patch_norms


def patch_with(folder, tensors):
    part = folder / "pre_projection"
    part.mkdir(parents=True)
    names = {
        f"base_model.model.gpt_neox.layers.{layer}.attention.hfpatch_pre_projection.{kind}.weight": t
        for (layer, kind), t in tensors.items()
    }
    safetensors.torch.save_file(names, part / "adapter_model.safetensors")
    return folder


def test_norms_of_a_patch_stand_beside_the_paper_s_init(tmp_path):
    torch.manual_seed(0)
    skips = {layer: torch.randn(8, 8) for layer in (0, 1)}
    (norms,) = patch_norms(patch_with(tmp_path, {(layer, "preproj_skip"): skip for layer, skip in skips.items()}))
    assert (norms.quantity, norms.group) == ("‖W_skip‖ of the content skip", "pre_projection")
    assert norms.points == pytest.approx({layer: skip.double().norm().item() for layer, skip in skips.items()})
    assert norms.reference == pytest.approx(1e-4 * 8)


def test_several_tensors_of_a_layer_are_one_norm(tmp_path):
    (tmp_path / "lora").mkdir()
    names = {f"m.layers.3.{part}.lora_B.weight": torch.full((2, 2), value) for part, value in (("q", 1.5), ("k", 2.0))}
    safetensors.torch.save_file(names, tmp_path / "lora" / "adapter_model.safetensors")
    (norms,) = patch_norms(tmp_path)
    assert norms.points == pytest.approx({3: 5.0})  # sqrt(3² + 4²)
    path = tmp_path / "lora" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    assert patch_norms(tmp_path) == []  # of a file that cannot be read


def test_the_mean_is_over_the_runs_that_have_a_layer():
    series = [LayerSeries(quantity="a", points={0: 1.0, 1: 2.0}), LayerSeries(quantity="a", points={0: 3.0})]
    series.append(LayerSeries(quantity="a", group="g", points={0: 7.0}))
    assert [(one.group, one.points) for one in mean_series(series)] == [("", {0: 2.0, 1: 2.0}), ("g", {0: 7.0})]


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
    twice = lines(0, '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 9.0}\n{"step": 2, "loss": 2.0}\n\n[]\n')
    assert mean_curve([twice]).loss == [3.0, 2.0]  # of a step that is there twice the later line counts
    assert mean_curve([]) is None
    assert mean_curve([lines(0, ""), tmp_path / "absent"]) is None


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
