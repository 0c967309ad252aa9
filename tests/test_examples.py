"""Every cell of the notebooks in examples/ runs, and what a cell shows can be shown; the scripts there run."""

import ast
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(source, where, names):
    """Run a cell as a notebook does; the value of its last line is shown."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), where, "exec"), names)
    if last is None:
        return None
    return repr(eval(compile(last, where, "eval"), names))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    folder = tmp_path / "examples"
    folder.mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"}
    code = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code), "it is committed with outputs"
    shown = [run("".join(cell["source"]), f"{path.name}, cell {i}", names) for i, cell in enumerate(code)]
    assert any(shown)


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sentence_encoder_learns_and_is_saved_with_its_head():
    scores = script("sentence_encoder").main(epochs=6)
    assert scores["before"] < 0.6
    assert scores["after"] > 0.9


def test_speech_and_image_models_are_patched_saved_loaded_and_generate():
    cases = script("speech_and_images").main()
    assert len(cases) == 4
    assert all(case["changed"] for case in cases.values())
    assert {case["trainable"] for case in cases.values()} == {2 * (2 * 32 * 40 + 32 * 32)}  # two blocks: up, down, skip
    assert all(any("target_modules can name" in why for why in case["left out"].values()) for case in cases.values())


def test_new_digits_are_compared_by_paired_intervals():
    """A short form: three seeds, few steps; its intervals are scipy's."""
    results = script("new_digits").main(seeds=3, steps=5, pretraining=60)
    sizes = results["sizes"]
    assert sizes["pre-projection"] == sizes["linear control"] == 2 * (2 * 32 * 8)
    assert abs(sizes["matched LoRA"] - sizes["pre-projection"]) <= 2 * 4 * (32 + 32) / 2  # the nearest rank
    assert all(len(values) == 3 and 0 <= min(values) <= max(values) <= 1 for values in results["scores"].values())
    for other, (mean, low, high) in results["differences"].items():
        pairs = np.subtract(results["scores"]["pre-projection"], results["scores"][other])
        assert mean == pytest.approx(pairs.mean(), abs=1e-6)
        expected = stats.ttest_1samp(pairs, 0).confidence_interval() if pairs.std() else (pairs.mean(), pairs.mean())
        assert (low, high) == pytest.approx((expected[0], expected[1]), abs=1e-6)
