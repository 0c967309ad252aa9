"""Every cell of the notebooks in examples/ runs, and what a cell shows can be shown."""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def run(source, where, names):
    """Run a cell as a notebook does; the value of its last line is shown as HTML where it can be, else as text."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), where, "exec"), names)
    if last is None:
        return None
    value = eval(compile(last, where, "eval"), names)
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    folder = tmp_path / "examples"
    folder.mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"}
    shown = [run(source, f"{path.name}, cell {i}", names) for i, source in enumerate(cells(path, "code"))]
    assert any(shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_says_what_it_is(path):
    assert cells(path, "markdown")[0].startswith("# ")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
