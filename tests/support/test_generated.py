"""Generated modelling files: complete, without hfpatch, and without anything that they do not use."""

import ast
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hfpatch import NonlinearQueryConfig, OutputGateConfig, PreProjectionConfig, QueryTemperatureConfig
from hfpatch.export.write import modelling_source as export_source
from hfpatch.models.classes import modelling_source as scratch_source
from hfpatch.support import generated
from hfpatch.support.generated import LICENCE, modelling_file
from hfpatch.twins import random_model, shrink

METHODS = [PreProjectionConfig, NonlinearQueryConfig, QueryTemperatureConfig, OutputGateConfig]


@pytest.mark.parametrize("kind", ["export", "scratch"])
def test_a_file_holds_its_licence_and_source_and_each_name_once_and_in_use(kind):
    source = scratch_source(LlamaForCausalLM, LlamaConfig)
    if kind == "export":
        source = export_source(random_model(shrink(LlamaConfig())), METHODS, keep_fp32=True)
    assert LICENCE in source
    assert "hfpatch/nn/calls.py" in source
    assert max(map(len, source.splitlines())) <= 120
    body = ast.parse(source).body
    imported = [alias.asname or alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    modules = [node for node in body if isinstance(node, ast.ImportFrom)]
    homes = [*imported, *(node.module for node in modules)]
    assert not [name for name in homes if name.startswith(("hfpatch", "peft"))]
    imported += [alias.name for node in modules if node.module != "__future__" for alias in node.names]
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(defined) == len(set(defined)) > 20
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert [name for name in [*imported, *defined] if name not in used and not name.startswith("Hfpatch")] == []


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Let ``hfpatch.low`` and ``hfpatch.high`` be modules of these texts."""

    def write(low, high):
        for name, text in (("low", low), ("high", high)):
            (tmp_path / f"{name}.py").write_text(text)

    files = {f"hfpatch.{name}": tmp_path / f"{name}.py" for name in ("low", "high")}
    monkeypatch.setattr(generated, "source_file", files.__getitem__)
    monkeypatch.setattr(generated, "_folder", lambda root: None)
    generated._read.cache_clear()
    yield write
    generated._read.cache_clear()


def test_definitions_come_after_what_they_use_with_their_decorators_and_docstrings(package):
    package(
        '"""Low."""\nimport functools\nimport os\n\nLIMIT = 3\n"""A limit."""\nOTHER = os.sep\n\n\n'
        "@functools.cache\ndef low() -> int:\n    return LIMIT\n\n\ndef idle() -> None:\n    pass\n",
        "from hfpatch.low import idle, low\n\n\ndef first():\n    return idle, 1\n\n\nVALUE = low()\n\n\n"
        "def high():\n    return VALUE\n",
    )
    source = modelling_file("a test", "hfpatch.high", "high", stock=(Path,), footer="found = high()")
    assert "import os" not in source
    assert "idle" not in source
    assert 'LIMIT = 3\n"""A limit."""\n' in source
    namespace = {}
    exec(source, namespace)
    assert namespace["found"] == 3
    assert namespace["Path"] is Path


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("A, B = 1, 2\nA = A + 5\nC = A\nA = 3\nfound = A, B, C", (3, 2, 6)),
        ("A = 1\nB = 0\nA = A + 5\nB = A\nA = A + 5\nfound = A, B", (11, 6)),  # a statement that comes twice
        ("import math\nif math.pi:\n    math.sqrt(2)\n    math.seen = 1\nfound = math.ceil(2.5)", 3),
        ("A = [1]\nif __name__ == '__main__':\n    A.append(2)\nfound = A", [1]),
    ],
)
def test_a_copy_computes_the_same(package, code, value):
    package("", f"{code}\n\n\ndef high():\n    return found\n")
    namespace = {}
    exec(modelling_file("a test", "hfpatch.high", "high", stock=(), footer="copied = high()"), namespace)
    assert namespace["copied"] == value


def test_one_name_from_two_modules_is_refused(package):
    package(
        "def _same():\n    return 1\n\n\ndef low():\n    return _same()\n",
        "from hfpatch.low import low\n\n\ndef _same():\n    return 2\n\n\ndef high():\n    return low() + _same()\n",
    )
    with pytest.raises(ValueError, match=r"_same means something else in another module .* rename it in"):
        modelling_file("a test", "hfpatch.high", "high", stock=(), footer="")


def test_the_notice_is_the_projects_licence():
    def words(text):
        return " ".join(text.replace("#", " ").split())

    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    assert words(licence.split("\n\n", 2)[2]) in words(LICENCE)
