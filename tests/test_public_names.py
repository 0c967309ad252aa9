import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import hfpatch

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
DOCUMENTED = set(re.findall(r"^::: (hfpatch\.\S+)$", (ROOT / "docs/reference/api.md").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("name", sorted(set(hfpatch.__all__) - {"__version__"}))
def test_a_public_name_is_there_and_described(name):
    assert name in dir(hfpatch)
    assert inspect.getdoc(getattr(hfpatch, name))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'hfpatch' has no attribute 'patchh'"):
        _ = hfpatch.patchh


SIGNATURES = {
    "patch": ["model", "config", ...], "unpatch": ["model"], "patch_summary": ["model"],
    "save_patch": ["model", "directory"], "load_patch": ["model", "directory", ...], "find_sites": ["model"],
    "match_lora_rank": ["model", "budget", "target_modules"], "check": ["model_or_id", "config", ...],
    "load_results": ["folder", "kind"],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_the_design(name):
    names, expected = list(inspect.signature(getattr(hfpatch, name)).parameters), SIGNATURES[name]
    assert (names[:2] == expected[:2]) if expected[-1] is ... else (names == expected)


def code_shown():
    """Yield the file and the Python of every page, notebook and example."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            yield page.name, block
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield notebook.name, "".join(cell["source"])
    for example in (ROOT / "examples").rglob("*.py"):
        yield example.name, example.read_text(encoding="utf-8")


def names_used(code):
    """Yield the full name of everything of hfpatch that code imports or reads as an attribute."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hfpatch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hfpatch":
            yield f"hfpatch.{node.attr}"


def test_the_docs_use_public_names_alone():
    modules = {name.rpartition(".")[0] for name in DOCUMENTED}
    used = {(name, file) for file, code in code_shown() for name in names_used(code)}
    assert len(used) > 50
    assert sorted((name, file) for name, file in used if name not in DOCUMENTED | modules) == []


def test_documented_names_are_there_once_and_the_top_level_is_documented():
    for name in DOCUMENTED:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    assert {f"hfpatch.{name}" for name in hfpatch.__all__} - DOCUMENTED == {"hfpatch.__version__"}
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text(), flags=re.MULTILINE)
    assert sorted(set(listed)) == sorted(listed)
