"""The hash of code: equal in every process, another one wherever what runs is."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from peft import LoraConfig, LoraModel

from hfpatch.support.code import hash_code

HELPERS = "def doubled(x):\n    return 2 * x\n\n\ndef unused(x):\n    return 3 * x\n"
MODULE = '''
"""A module."""
import functools
import helpers
from helpers import doubled as twice

SCALE = 0.5
TABLE = {"a": [1, 2], "b": {3, 4}}
CALLS = 0
CACHE = {}


def half(x):
    """Return a half."""
    return SCALE * x  # of it


def chosen(x, by=max):
    return by(x, half(x)) if x in {"p", "q", "r"} else x


class Base:
    factor = 2

    def scaled(self, x):
        return self.factor * x


class Method(Base):
    limits = (1, 2)
    run = staticmethod(chosen)
    both = functools.partial(half, 3)

    @property
    def table(self):
        return TABLE["a"]

    def forward(self, x):
        global CALLS
        CALLS += 1
        CACHE[x] = 5
        return [helpers.doubled(each) + twice(each) for each in (self.scaled(x), self.run(x))]
'''


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Return a function from the text of the module and of its helpers to the hash of its class."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def hashed(module=MODULE, helpers=HELPERS, use=lambda found: None):
        for name, text in (("helpers", helpers), ("mine", module)):
            sys.modules.pop(name, None)
            (tmp_path / f"{name}.py").write_text(text)
        for cached in tmp_path.rglob("*.pyc"):
            cached.unlink()
        importlib.invalidate_caches()
        found = importlib.import_module("mine")
        use(found)
        return hash_code([found.Method])

    yield hashed
    for name in ("helpers", "mine"):
        sys.modules.pop(name, None)


CHANGES = {
    "formula": ("2 * x", "2.5 * x", "helpers"),
    "constant of the module": ("SCALE = 0.5", "SCALE = 0.25", "module"),
    "table of the module": ('"b": {3, 4}', '"b": {3, 5}', "module"),
    "member of the class": ("limits = (1, 2)", "limits = (1, 3)", "module"),
    "inherited member": ("factor = 2", "factor = 3", "module"),
    "inherited function": ("self.factor * x", "self.factor + x", "module"),
    "static function": ('{"p", "q", "r"}', '{"p", "q"}', "module"),
    "default": ("by=max", "by=min", "module"),
    "argument of partial": ("partial(half, 3)", "partial(half, 4)", "module"),
    "property": ('TABLE["a"]', 'TABLE["b"]', "module"),
    "import": ("import doubled as twice", "import unused as twice", "module"),
    "attribute of a module": ("helpers.doubled(each)", "helpers.unused(each)", "module"),
}
SAME = {
    "comment": ("# of it", "# of the thing", "module"),
    "docstring": ("Return a half.", "Return half of it.", "module"),
    "what is not used": ("3 * x", "4 * x", "helpers"),
    "lines": ("SCALE = 0.5", "\n\n\nSCALE = 0.5", "module"),
}


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
def test_code_changes_its_hash_and_what_is_said_about_it_does_not(code, change):
    before, after, where = (CHANGES | SAME)[change]
    text = {"module": MODULE, "helpers": HELPERS}
    assert before in text[where]
    changed = code(**{**text, where: text[where].replace(before, after)})
    assert (changed == code()) == (change in SAME)


def test_running_changes_nothing(code):
    assert code(use=lambda found: found.Method().forward(3)) == code()


def test_a_cell_of_a_notebook_has_a_hash_though_it_has_no_file():
    def cell(text):
        space = {"__name__": "__main__"}
        exec(compile(textwrap.dedent(text), "<cell 1>", "exec"), space)
        return hash_code([space["f"]])

    assert cell("def f(x):\n return x + 1") == cell("def f(x):\n\n return x + 1  # more")
    assert cell("def f(x):\n return x + 1") != cell("def f(x):\n return x + 2")
    assert cell("a = 1\ndef f(x):\n return x + a") != cell("a = 2\ndef f(x):\n return x + a")


def test_every_process_has_the_same_hash():
    text = "from hfpatch.support.code import hash_code; import argparse; print(hash_code([argparse.ArgumentParser]))"
    given = {"capture_output": True, "text": True, "check": True}
    runs = [
        subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONHASHSEED": s}, **given) for s in "12"
    ]
    assert len({run.stdout for run in runs}) == 1


def test_the_state_of_a_library_is_no_code_of_a_method(monkeypatch):
    """Tests and plugins replace functions of libraries as they run; the versions say what a library computes."""
    before = hash_code([LoraConfig, LoraModel])
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self: self)
    monkeypatch.setattr(sys.modules[LoraModel.__module__], "warnings", None)
    assert hash_code([LoraConfig, LoraModel]) == before != hash_code([LoraConfig])


def test_a_folder_of_installed_packages_may_lie_anywhere(tmp_path):
    """As after `pip install --target`, with the folder on PYTHONPATH: a package's name counts, and not its state."""
    Path(tmp_path, "own.py").write_text("import package\n\ndef f(x):\n    return package.g(x)\n")

    def run(body):
        Path(tmp_path, "site", "package.py").write_text(f"def g(x):\n    return {body}\n")
        path = os.pathsep.join([str(tmp_path), str(tmp_path / "site")])
        text = "import own; from hfpatch.support.code import hash_code; print(hash_code([own.f]))"
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        given = {"capture_output": True, "text": True, "check": True}
        return subprocess.run([sys.executable, "-c", text], env=environment, **given).stdout

    Path(tmp_path, "site").mkdir()
    assert run("x") != run("x + 1")  # a module of the user's
    Path(tmp_path, "site", "package-1.0.dist-info").mkdir()
    assert run("x") == run("x + 1")


def test_a_value_that_answers_to_any_name_is_no_array(code):
    """As libraries are that bind C functions when they are asked for."""
    answers = "class Library:\n    def __getattr__(self, name):\n        return lambda: name\n\n\nlib = Library()\n"
    use = MODULE.replace("import helpers\n", f"import helpers\n{answers}\n").replace(
        "SCALE * x  #", "SCALE * x * len(lib.a())  #"
    )
    assert use.count("lib") == 2
    assert code(module=use, helpers=HELPERS) != code()
