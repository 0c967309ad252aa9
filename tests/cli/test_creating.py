"""``hfpatch new-method``: what it writes passes as it is."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
from cli.conftest import refused
from own_methods import forgotten

import hfpatch
from hfpatch.__main__ import main
from hfpatch.cli.creating import PLACES
from hfpatch.promises import run
from hfpatch.sites.heads import QueryHeads
from hfpatch.sites.layouts import Columns
from hfpatch.tuners.hooks import PLACES as KNOWN
from hfpatch.tuners.hooks import MethodSite

CONFIG = Path(__file__).parents[2] / "pyproject.toml"
MADE = {
    "one_place": [],
    "two_places": ["--place", "entered", "--place", "left"],
    "all_places": [argument for place_name in KNOWN for argument in ("--place", place_name)],
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with forgotten():
        yield
    for name in (*MADE, *(f"test_{name}" for name in MADE)):
        sys.modules.pop(name, None)


def test_a_method_can_begin_at_every_place():
    assert set(PLACES) >= set(KNOWN)


@pytest.mark.parametrize("name", MADE)
def test_the_files_pass_as_they_are(name, tmp_path, monkeypatch, capsys):
    assert main(["new-method", name, *MADE[name]]) == 0
    printed = capsys.readouterr().out
    cls = "".join(map(str.capitalize, name.split("_")))
    assert f"hfpatch check tinyworld/gpt2 --method {name}:{cls}" in printed
    monkeypatch.setattr(run, "PROMISES", run.PROMISES[:3])  # the others take seconds
    tests = {key: function for key, function in runpy.run_path(f"test_{name}.py").items() if key.startswith("test_")}
    assert len(tests) == 2
    for test in tests.values():
        test()
    text = Path(f"{name}.py").read_text(encoding="utf-8")
    Path(f"{name}.py").write_text(re.sub(r"return (\w+) \+", r"return \1 + 2 *", text), encoding="utf-8")
    sys.modules.pop(name)
    with pytest.raises(AssertionError):  # another formula than the test's
        runpy.run_path(f"test_{name}.py")["test_formula"]()


def test_commands_import_the_methods_of_a_patch_when_they_are_trusted(capsys):
    """A process that has not imported the user's file refuses the patch, and runs the file only when told."""
    assert main(["new-method", "one_place"]) == 0
    model = hfpatch.load_base("tinyworld/gpt2").model
    with forgotten():
        hfpatch.patch(model, importlib.import_module("one_place").OnePlace())
        hfpatch.save_patch(model, "patch")
    del sys.modules["one_place"]
    of_a_patch = ["--model", "tinyworld/gpt2", "--patch", "patch", "--tasks", "tinyworld_cloze", "--limit", "2"]
    for command in (["export", "patch"], ["eval", *of_a_patch], ["inspect", "tinyworld/gpt2", "--patch", "patch"]):
        with forgotten():
            line = refused(capsys, *command)
            assert line.endswith("install its package, import one_place first or, of commands, add --trust-code")
            assert "one_place" not in sys.modules
            assert main([*command, "--trust-code"]) == 0
            del sys.modules["one_place"]
    Path("one_place.py").unlink()
    assert "patch.json: no module 'one_place' in" in refused(capsys, "export", "patch", "--out", "x", "--trust-code")


def test_the_stream_may_have_another_width_than_what_enters_the_attention():
    """As in Zamba 2, whose attention reads two streams side by side."""
    assert main(["new-method", "all_places", *MADE["all_places"]]) == 0
    columns = dict.fromkeys(("query", "key", "value"), Columns(groups=1, width=6, start=0, length=6))
    sizes = {"hidden_size": 10, "mixed_size": 6, "output_size": 4, "exit_factor": 1.0}
    site = MethodSite(layer=0, name="0", columns=columns, heads=QueryHeads(2), **sizes)
    parts = importlib.import_module("all_places").AllPlaces(rank=1).build(site, 0)
    widths = {"output": (6, 4), "left": (10, 4), "stream": (4, 4), "entered": (10, 10), "mixed": (10, 6)}
    for name, expected in widths.items():
        assert (parts[f"{name}_a"].in_features, parts[f"{name}_b"].out_features) == expected, name


def test_files_that_it_wrote_are_no_installed_module(capsys):
    assert main(["new-method", "one_place"]) == 0
    assert "one_place.py: exists already; choose another name, or --out" in refused(capsys, "new-method", "one_place")


def test_a_package_gets_its_entry_point():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    assert main(["new-method", "one_place", "--package", "--out", "new/folder"]) == 0
    project = tomllib.loads(Path("new/folder/pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["hfpatch.methods"] == {"one_place": "one_place:OnePlace"}
    assert project["tool"]["setuptools"]["py-modules"] == ["one_place"]


REFUSED = {
    ("MyGate",): "MyGate: use lowercase letters",
    ("class",): "class: is a word of Python's syntax; choose another name",
    ("none",): "none: its class None would have a name that its files use; choose another name",
    ("method_site",): "method_site: its class MethodSite would have a name that its files use",
    ("output_gate",): "output_gate: is a method already; choose another name",
    ("lora",): "lora: is a method already",
    ("json",): "json: a module of this name is installed already",
    ("mine", "--place", "qeury"): "--place qeury: no place of a branch (did you mean 'query'?); use entered, query",
    ("mine", "--place", "nowhere"): "--place nowhere: no place of a branch; use entered, query",
    ("there",): "there.py: exists already; choose another name, or --out",
}


@pytest.mark.parametrize("arguments", REFUSED, ids="-".join)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, tmp_path, capsys):
    (tmp_path / "test_there.py").write_text("mine")
    assert REFUSED[arguments] in refused(capsys, "new-method", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["test_there.py"]
