import json

import numpy as np
import pytest
import safetensors.torch
import torch

from hfpatch.reporting.figure_data import layers_csv, read_layers_csv
from hfpatch.reporting.layer_figure import layer_figure
from hfpatch.reporting.layers import ANALYSIS, LayerSeries, read_layers
from hfpatch.reporting.theme import report_style


def patch_with(run_dir, seed, tensors):
    part = run_dir / "runs" / "pre_projection_skip" / f"seed-{seed}" / "patch" / "pre_projection"
    part.mkdir(parents=True)
    names = {
        f"base_model.model.gpt_neox.layers.{layer}.attention.hfpatch_pre_projection.{kind}.weight": t
        for (layer, kind), t in tensors.items()
    }
    safetensors.torch.save_file(names, part / "adapter_model.safetensors")


def only(series, quantity):
    (found,) = [each for each in series if each.quantity.startswith(quantity)]
    return found


def test_norms_of_the_patch_are_the_mean_over_seeds_beside_the_papers_init(run_dir, results):
    torch.manual_seed(0)
    skips = {(seed, layer): torch.randn(8, 8) for seed in (0, 1) for layer in (0, 1)}
    for seed in (0, 1):
        patch_with(run_dir, seed, {(layer, "preproj_skip"): skips[seed, layer] for layer in (0, 1)})
    series, broken = read_layers(run_dir, results)
    found = only(series, "‖W_skip‖")
    expected = {layer: np.mean([skips[seed, layer].double().norm().item() for seed in (0, 1)]) for layer in (0, 1)}
    assert found.points == pytest.approx(expected, rel=1e-6)
    assert found.reference == pytest.approx(1e-4 * 8)
    assert broken == []


def test_what_inspect_printed_is_read(run_dir, results):
    told = {
        "query_sizes": [
            {"layer": layer, "adapter": "a", "target": "query", "size": 0.1 * layer, "cosine": -0.5, "head_sizes": [1]}
            for layer in (0, 1)
        ],
        "ablations": {"score": 3.0, "without": [{"layer": None, "change": 9.0}, {"layer": 1, "change": 0.25}]},
        "relations": [{"layer": 0, "head": 0, "key_head": 0}],
        "notes": ["a sentence"],
        "gradients": [{"layer": 0, "tensor": "up", "gradient": None}],
    }
    (run_dir / "runs" / "lora" / "seed-0" / ANALYSIS).write_text(json.dumps(told))
    series, broken = read_layers(run_dir, results)
    assert {(each.quantity, each.method, each.group, tuple(each.points.items())) for each in series} == {
        ("‖f(x)‖ / ‖A(x)‖", "lora", "a, query", ((0, 0.0), (1, 0.1))),
        ("cosine of f(x) and A(x)", "lora", "a, query", ((0, -0.5), (1, -0.5))),
        ("loss added when the layer is left out", "lora", "", ((1, 0.25),)),
    }
    assert broken == []


@pytest.mark.parametrize("content", ["[]", "{", '"x"'])
def test_a_broken_analysis_is_named(run_dir, results, content):
    (run_dir / "runs" / "lora" / "seed-0" / ANALYSIS).write_text(content)
    assert read_layers(run_dir, results) == ([], ["runs/lora/seed-0/analysis.json cannot be read."])


def test_a_broken_patch_is_named(run_dir, results):
    patch_with(run_dir, 0, {(0, "preproj_skip"): torch.ones(2, 2)})
    (path,) = run_dir.glob("runs/*/seed-0/patch/*/adapter_model.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    series, (sentence,) = read_layers(run_dir, results)
    assert series == []
    assert sentence.startswith("runs/pre_projection_skip/seed-0/patch/pre_projection/adapter_model.safetensors cannot")


def test_a_panel_a_quantity_and_the_mean_of_many_groups(results):
    series = [LayerSeries("a", "lora", f"head {i}", {0: float(i), 1: 2.0 * i}) for i in range(5)]
    series += [LayerSeries("b", "pre_projection_skip", "", {0: 1.0}, reference=0.5)]
    with report_style():
        first, second = layer_figure(results, series).axes
    assert [line.get_ydata().tolist() for line in first.lines if len(line.get_xdata())] == [[2.0, 4.0]]
    assert {tuple(line.get_ydata()) for line in second.lines} == {(1.0,), (0.5, 0.5)}


def test_nothing_is_no_figure(results):
    assert layer_figure(results, []) is None


def test_what_a_report_kept_is_read_back(tmp_path):
    series = [LayerSeries("‖a‖, b", "lora", "q, 1", {0: 0.25, 3: 1e-9}, 0.5), LayerSeries("c", "x", "", {1: 2.0})]
    (tmp_path / "layers.csv").write_text(layers_csv(series), encoding="utf-8")
    assert read_layers_csv(tmp_path / "layers.csv", ["lora", "x"]) == series
    assert read_layers_csv(tmp_path / "layers.csv", ["lora"]) == series[:1]
    assert read_layers_csv(tmp_path / "absent.csv", ["lora"]) == []
