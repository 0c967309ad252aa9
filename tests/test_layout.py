import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_layout_in_the_guide_is_that_of_the_contract():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    shown = re.findall(r"^    ([a-z]+(?: \| [a-z]+)*)  +\S", GUIDE, flags=re.MULTILINE)
    assert [layer for layer in shown if layer.split(" | ")[0] != "make"] == [x for x in layers if x != "__main__"]
    packages = {path.name for path in (ROOT / "hfpatch").iterdir() if (path / "__init__.py").is_file()}
    assert packages == {name for layer in layers for name in layer.split(" | ")} - {"__main__", "errors"}


def test_every_place_in_the_guide_is_there():
    places = re.findall(r"`(hfpatch/[^`<]+|tests/[^`<: ]+)`", GUIDE)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_few_modules_are_at_the_top_level():
    assert {path.name for path in (ROOT / "hfpatch").glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_files_and_functions_are_short_enough_to_read():
    long = []
    for path in sorted((ROOT / "hfpatch").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        long += [path.name] if len(text.splitlines()) > 400 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 80:
                long.append(f"{path.name}: {node.name}")
    assert long == []


def test_no_mean_depends_on_the_version_of_python():
    """``sum`` rounds floats otherwise since Python 3.12; `statistics.fmean` and `math.fsum` are exact everywhere."""
    mean = re.compile(r"\bsum\(([a-z_]+)\) / len\(\1\)")
    found = {path.name for path in (ROOT / "hfpatch").rglob("*.py") if mean.search(path.read_text(encoding="utf-8"))}
    assert found == set()
