"""The hash of code: equal in every process, another one wherever what runs is."""

import base64
import dataclasses
import functools
import hashlib
import importlib
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from peft import LoraConfig, LoraModel

from hfpatch.support.code import hash_code
from hfpatch.support.distributions import _owners, describe_package

METHOD = '''
"""A module."""
import functools

import torch

SCALE = 0.5


@torch.no_grad()
def half(x):
    """Return a half."""
    return SCALE * x  # of it


class Method:
    """A method."""

    run = functools.partial(half, 3)
'''
CHANGES = {
    "constant": ("SCALE = 0.5", "SCALE = 0.25"),
    "formula": ("SCALE * x", "SCALE + x"),
    "argument": ("(half, 3)", "(half, 4)"),
    "decorator": ("@torch.no_grad()\n", ""),
}
SAME = {
    "comment": ("# of it", "# of the thing"),
    "docstring": ("Return a half.", "Return half of it."),
    "docstring of the class": ('    """A method."""\n', ""),
    "docstring of a constant": ("SCALE = 0.5", 'SCALE = 0.5\n"""A scale."""'),
    "lines": ("SCALE = 0.5", "\n\n\nSCALE = 0.5"),
    "order of imports": ("import functools\n\nimport torch", "import torch, functools"),
    "unused import": ("import torch", "import math\nimport torch"),
    "definition above": ("\n\nclass Method", "\n\n@functools.cache\ndef other():\n    return 1\n\n\nclass Method"),
}


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
@pytest.mark.parametrize("root", [lambda mine: mine.Method, lambda mine: {"a": (mine.half, mine.Method)}])
def test_code_changes_its_hash_and_what_is_said_about_it_does_not(written, change, root):
    def hashed(text):
        written({"mine.py": text})
        return hash_code([root(importlib.import_module("mine"))])

    assert METHOD.count((CHANGES | SAME)[change][0]) == 1
    changed = hashed(METHOD.replace(*(CHANGES | SAME)[change]))
    assert (changed == hashed(METHOD)) == (change in SAME)


def test_values_count_beside_code():
    @dataclasses.dataclass(slots=True)
    class Setting:
        value: float

    values = [1, "1", None, [1, 2], {"a": 1}, {3}, functools.partial(max, 1), functools.partial(max, 2)]
    values += [Setting(1.0), Setting(2.0), re.compile("a"), re.compile("b"), max, min, torch.float32, torch.float64]
    assert len({hash_code([value]) for value in values}) == len(values)
    assert hash_code([1, [2, max]]) == hash_code([[2, max], 1])
    assert hash_code([object()]) == hash_code([object()])


def test_another_definition_and_a_counter_do_not_count_and_a_computed_constant_does(written, monkeypatch):
    """A file may get one more method, and a script may do other things beside."""
    text = METHOD.replace("SCALE = 0.5", "import os\n\nSCALE = os.environ['A_SCALE']\nCALLS = 0\nSTART = os.getpid()")
    text += "    def run(self):\n        global CALLS\n        CALLS += 1\n        return half\n"

    def hashed(more="", calls=0):
        written({"mine.py": text + more})
        mine = importlib.import_module("mine")
        mine.CALLS, mine.START = calls, mine.START + calls
        return hash_code([mine.Method])

    monkeypatch.setenv("A_SCALE", "1")
    before = hashed()
    assert hashed("def other():\n    return Method\n", 3) == before
    monkeypatch.setenv("A_SCALE", "2")
    assert hashed() != before


OF_ANOTHER_FILE = {
    "closure": ("def made(k):\n    def f(x):\n        return k * x\n    return f\n", "f = made({})\n"),
    "partial": ("import functools\n\n\ndef made(k):\n    return functools.partial(max, k)\n", "f = made({})\n"),
    "wrapper": (
        "from functools import wraps as w\ndef made(g):\n @w(g)\n def f(x):\n  return g(x) + {}\n return f",
        "@made\ndef f(x):\n    return x\n",
    ),
    "recursion": ("def made(k):\n    def f(x):\n        return f(x - 1) * {}\n    return f\n", "f = made(1)\n"),
    "bound method": ("class C:\n    def f(self, x):\n        return {} * x\n\n\nmade = C\n", "f = made().f\n"),
    "constants": ("import enum\n\n\nclass Mode(enum.IntEnum):\n    A = {}\n\n\nmade = Mode.A\n",
                  "BOTH = (made, max)\n\n\nclass f:\n    def g(self):\n        return made, BOTH\n"),
    "member": ("def made(self, x):\n    return {} * x\n", "f = type('C', (), {'g': made})\n"),
    "class of a function": (
        "def made(k):\n class C:\n  def g(self):\n   return k\n return C\n", "f = made({})\n"),
    "constant of a closure": ("def made(k):\n    def f(x):\n        return k\n    return f\n",
                              "import enum\n\n\nclass Mode(enum.Enum):\n    A = {}\n\n\nf = made(Mode.A)\n"),
    "function that a decorator registers": (
        "KINDS = dict()\n\n\ndef made(g):\n    KINDS[g.__name__] = g\n    return g\n",
        "import lib\n\n\n@made\ndef g(x):\n    return {}\n\n\ndef f(x):\n    return lib.KINDS\n"),
    "function of a type": ("import functools\n\n\n@functools.singledispatch\ndef made(x):\n    return x\n",
                           "@made.register\ndef g(x: int):\n    return {}\n\n\nf = made\n"),
    "function in the place of another": (
        "def made(x):\n    return g(x)\n\n\ndef g(x):\n    return x\n",
        "import lib\nlib.g = lambda x: {}\nf = made\n"),
    "name in a text": ("made = 1\n", "def g(x):\n    return {}\n\n\ndef f(x):\n    return globals()['g'](x)\n"),
    "file in a folder": ("made = 1\n", "from pathlib import Path\n\n\ndef f(x):\n"
                         "    return Path(__file__).parent / 'pack' / 'gain'\n"),
    "file beside one that is written": (
        "made = 1\n", "class f:\n    def read(self):\n        return open('factor.txt')\n"
        "    def log(self):\n        open('log.txt', 'w').write('')\n"),
    "file at the top": ("made = 1\n", "from pathlib import Path\nPATH = Path(__file__).with_name('factor.txt')\n"
                        "def f(x):\n    return PATH\n"),
    "file below": ("made = 1\n", "def f(x):\n    return open('pack/factor.txt')\n"),
}  # fmt: skip


@pytest.mark.parametrize("way", OF_ANOTHER_FILE)
def test_what_another_file_makes_counts(written, way):
    def hashed(value):
        lib, mine = (text.replace("{}", value) for text in OF_ANOTHER_FILE[way])
        files = {"lib.py": lib, "mine.py": f"from lib import made\n\n\n{mine}"}
        written({**files, "factor.txt": value, "pack/factor.txt": value, "pack/gain": value})
        return hash_code([importlib.import_module("mine").f])

    assert hashed("1") == hashed("1") != hashed("2")


BY = "def by(g):\n {} = {}\n def f(x):\n  {}\n  return g(x)\n return f\n@by\ndef f(x):\n return x\n"
FILLED = {
    "cache": BY.format("cache", "{}", "cache[x] = g(x)"),
    "counter": BY.format("n", "0", "nonlocal n; n += 1"),
    "default": "def f(x, seen=[]):\n seen.append(x)\n",
    "single dispatch": "import functools\n@functools.singledispatch\ndef f(x):\n return x\n",
    "state of the process": "def f(x):\n return open('/proc/self/io').read()\n",
    "count of instances": "class f:\n n = 0\n def __init__(self, x):\n  f.n += 1\n",
}


@pytest.mark.parametrize("way", FILLED)
def test_what_code_fills_as_it_runs_does_not_count(written, way):
    written({"mine.py": FILLED[way]})
    f = importlib.import_module("mine").f
    before = hash_code([f])
    f(1)
    assert hash_code([f]) == before


def test_the_folder_of_a_source_does_not_count(written):
    files = {"mine.py": "import os\nHERE = os.path.dirname(os.path.abspath(__file__))\ndef f(x):\n    return HERE\n"}
    hashes = set()
    for folder in ("one", "two"):
        written(files, folder)
        hashes.add(hash_code([importlib.import_module("mine").f]))
    assert len(hashes) == 1


def test_a_file_that_code_writes_is_no_input(written):
    text = "def f(x):\n    with open('log.txt', 'a') as file:\n        file.write('called')\n"
    written({"mine.py": text, "log.txt": ""})
    before = hash_code([importlib.import_module("mine").f])
    written({"log.txt": "called"})
    assert hash_code([importlib.import_module("mine").f]) == before


def test_a_file_that_is_edited_while_its_code_is_in_use_counts_from_its_next_import(written):
    folder = written({"mine.py": METHOD})
    mine = importlib.import_module("mine")
    before = hash_code([mine.half])
    (folder / "mine.py").write_text(METHOD.replace("0.5", "0.25"))
    assert hash_code([mine.half]) == before
    assert hash_code([importlib.reload(mine).half]) != before


def test_a_cell_of_a_notebook_has_a_hash_though_it_has_no_file():
    def cell(text):
        space = {"__name__": "a_notebook"}
        exec(compile(textwrap.dedent(text), "<cell 1>", "exec"), space)
        return hash_code([space["f"]])

    assert cell("def f(x):\n return x + 1") == cell("def f(x):\n\n return x + 1  # more")
    assert cell("def f(x):\n return x + 1") != cell("def f(x):\n return x + 2")
    assert cell("f = (lambda: 1), (lambda: 2)") != cell("f = (lambda: 2), (lambda: 1)")
    for part in ("a = {}\n", "def g(x):\n return {}\na = g\n", "class C:\n def g(self):\n  return {}\na = C\n"):
        used = [cell(part.format(value) + "def f(x):\n def inner():\n  return a\n return inner") for value in "112"]
        assert used[0] == used[1] != used[2]


def test_every_process_has_the_same_hash():
    text = "from hfpatch.support.code import hash_code; import argparse; print(hash_code([argparse.ArgumentParser]))"
    given = {"capture_output": True, "text": True, "check": True}
    program = [sys.executable, "-c", text]
    runs = [subprocess.run(program, env={**os.environ, "PYTHONHASHSEED": seed}, **given) for seed in "12"]
    assert runs[0].stdout == runs[1].stdout


def test_the_state_of_a_library_is_no_code_of_a_method(monkeypatch):
    """Tests and plugins replace functions of libraries as they run; the versions say what a library computes."""
    before = hash_code([LoraConfig, LoraModel])
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self: self)
    monkeypatch.setattr(sys.modules[LoraModel.__module__], "warnings", None)
    assert hash_code([LoraConfig, LoraModel]) == before != hash_code([LoraConfig])


FORMULA = "def formula(x):\n    return 2 * x\n"
LAZY = """def __getattr__(name):
    import importlib
    if name == "formula":
        return getattr(importlib.import_module(f"{__name__}.hidden"), name)
    raise AttributeError(name)
"""
FILES = {
    "helper.py": FORMULA,
    "pack/__init__.py": "",
    "pack/sub.py": FORMULA,
    "again/__init__.py": "from .inner import formula\n",
    "again/inner.py": FORMULA,
    "space/part.py": FORMULA,
    "lazy/__init__.py": LAZY,
    "lazy/hidden.py": FORMULA,
}
AT_THE_TOP = {
    "module": ("import helper", "helper.formula"),
    "renamed module": ("import helper as other", "other.formula"),
    "name": ("from helper import formula", "formula"),
    "renamed name": ("from helper import formula as other", "other"),
    "all names": ("from helper import *", "formula"),
    "submodule": ("import pack.sub", "pack.sub.formula"),
    "renamed submodule": ("import pack.sub as other", "other.formula"),
    "module out of a package": ("from pack import sub", "sub.formula"),
    "name out of a submodule": ("from pack.sub import formula", "formula"),
    "name that a package passes on": ("from again import formula", "formula"),
    "member that a package passes on": ("import again", "again.formula"),
    "folder without __init__": ("import space.part", "space.part.formula"),
    "__getattr__ of a module": ("import lazy", "lazy.formula"),
    "name by __getattr__": ("from lazy import formula", "formula"),
    "import_module": ("import importlib\nhelper = importlib.import_module('helper')", "helper.formula"),
    "import that may fail": ("try:\n    import helper\nexcept ImportError:\n    helper = None", "helper.formula"),
    "getattr": ("import helper", "getattr(helper, 'formula')"),
}
INSIDE = {
    "import_module of a text": ("import importlib", "importlib.import_module('helper').formula"),
    "import_module by name": ("from importlib import import_module", "import_module('pack.sub').formula"),
    "__import__": ("", "__import__('helper').formula"),
    "getattr of import_module": ("import importlib", "getattr(importlib.import_module('helper'), 'formula')"),
}
WAYS = {
    **{
        f"{way} at the top": (f"{text}\n\n\ndef f(x):\n    return {use}(x)\n")
        for way, (text, use) in AT_THE_TOP.items()
    },
    **{
        f"{way} in a function": "def f(x):\n" + textwrap.indent(f"{text}\nreturn {use}(x)\n", "    ")
        for way, (text, use) in AT_THE_TOP.items()
        if "*" not in text
    },
    **{f"{way} in a function": f"{text}\n\n\ndef f(x):\n    return {use}(x)\n" for way, (text, use) in INSIDE.items()},
    "in a class": "class C:\n    from helper import formula\n\n\ndef f(x):\n    return C.formula(x)\n",
    "in a method": "class C:\n    def g(self, x):\n        import helper\n        return helper.formula(x)\n\n\n"
    "def f(x):\n    return C().g(x)\n",
    "in a nested function": "def f(x):\n    def g():\n        from helper import formula\n        return formula\n"
    "    return g()(x)\n",
    "as a default": "import helper\n\n\ndef f(x, by=helper.formula):\n    return by(x)\n",
    "by a decorator": "import functools\nimport helper\n\n\n@functools.lru_cache\n"
    "def f(x):\n    return helper.formula(x)\n",
}
USING = "from helper import formula\n\n\ndef f(x):\n    return formula(x)\n"
RELATIVE = {
    "module": ("from . import near", "near.formula"),
    "name": ("from .near import formula", "formula"),
    "two up": ("from ..far import formula", "formula"),
    "import_module": ("import importlib\nnear = importlib.import_module('.near', __package__)", "near.formula"),
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes files below a folder of the path, and forgets the modules that they were."""
    before = set(sys.modules)

    def forget():
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())))
            if str(file).startswith(str(tmp_path)):
                del sys.modules[name]
        importlib.invalidate_caches()
        describe_package.cache_clear()
        _owners.cache_clear()

    def write(files, folder="own"):
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        if str(tmp_path / folder) not in sys.path:
            monkeypatch.syspath_prepend(str(tmp_path / folder))
        for name, text in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
        forget()
        return tmp_path / folder

    yield write
    forget()


def install(write, files, version="1.0", **more):
    """Install files as a wheel does, as the distribution ``gate-lib``."""

    def line(name, text):
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(text)}\n"

    required = "".join(f"Requires-Dist: {name}\n" for name in more.pop("requires", ()))
    about = {"METADATA": f"Metadata-Version: 2.1\nName: gate-lib\nVersion: {version}\n{required}", **more}
    about["RECORD"] = "".join(line(name, text) for name, text in files.items())
    return write(files | {f"gate_lib-1.0.dist-info/{name}": text for name, text in about.items()}, "site")


def hashed_f(name="mine"):
    """Return the hash of a function of a fresh module, which is the same before and after the function runs."""
    f = importlib.import_module(name).f
    before = hash_code([f])
    assert f(3) in (6, 9)
    assert hash_code([f]) == before
    return before


@pytest.mark.parametrize("way", WAYS)
def test_a_helper_counts_however_it_is_imported(written, way):
    written({**FILES, "mine.py": WAYS[way]})
    first = hashed_f()
    written({})
    assert hashed_f() == first
    written({name: text.replace("2 * x", "3 * x") for name, text in FILES.items()})
    assert hashed_f() != first


@pytest.mark.parametrize("way", [way for way in WAYS if way.endswith("at the top")])
def test_an_installed_helper_counts_by_its_version(written, way, monkeypatch):
    written({"mine.py": WAYS[way]})
    site = install(written, FILES)
    first = hashed_f()
    install(written, FILES, version="2.0")
    assert hashed_f() != first
    install(written, FILES)
    assert hashed_f() == first
    monkeypatch.setattr("helper.unused", 1, raising=False)  # its state
    assert hash_code([sys.modules["mine"].f]) == first
    for name in FILES:  # edited where it is installed
        (site / name).write_text((site / name).read_text().replace("2 * x", "3 * x"))
    written({})
    assert hashed_f() != first


@pytest.mark.parametrize("way", RELATIVE)
@pytest.mark.parametrize("inside", [False, True])
def test_relative_imports_count(written, way, inside):
    text, use = RELATIVE[way]
    space = f"def f(x):\n{textwrap.indent(text, '    ')}\n" if inside else f"{text}\n\n\ndef f(x):\n"
    files = {"top/__init__.py": "", "top/far.py": FORMULA, "top/low/__init__.py": "", "top/low/near.py": FORMULA}
    written({**files, "top/low/mine.py": f"{space}    return {use}(x)\n"})
    first = hashed_f("top.low.mine")
    written({name: text.replace("2 * x", "3 * x") for name, text in files.items()})
    assert hashed_f("top.low.mine") != first


def test_an_install_from_a_folder_counts_by_its_files_and_one_from_an_index_by_its_version(written):
    written({"mine.py": USING})
    changed = {name: text.replace("2 * x", "3 * x") for name, text in FILES.items()}
    hashes = {}
    for kind, more in {"index": {}, "folder": {"direct_url.json": '{"url": "file:///x", "dir_info": {}}'}}.items():
        for files in (FILES, changed):
            install(written, files, **more)
            hashes.setdefault(kind, []).append(hashed_f())
    assert hashes["index"][0] == hashes["index"][1]  # an index has one file of a version
    assert hashes["folder"][0] != hashes["folder"][1]


def test_what_a_distribution_requires_counts_and_the_libraries_of_the_results_do_not(written):
    written({"mine.py": USING})
    hashes = []
    for version in ("1.0", "2.0"):
        about = f"Metadata-Version: 2.1\nName: core\nVersion: {version}\n"
        written({"core-1.0.dist-info/METADATA": about}, "site")
        install(written, FILES, requires=["Core>=1", "torch", "absent", "pytest; extra == 'dev'"])
        hashes.append(hashed_f())
        lines = describe_package("helper", tuple(sys.path))
        assert lines == ("gate-lib 1.0", f"core {version}")
    assert hashes[0] != hashes[1]


def test_a_package_of_no_distribution_counts_by_its_files(written):
    """As a folder that was copied to where packages are installed."""
    written({"mine.py": USING})
    written({**FILES, "other-1.0.dist-info/METADATA": "Name: other\nVersion: 1.0\n"}, "site")
    first = hashed_f()
    written({"helper.py": FORMULA.replace("2", "3")}, "site")
    assert hashed_f() != first
