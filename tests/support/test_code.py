"""The hash of code: equal in every process, another one wherever what runs is."""

import base64
import hashlib
import importlib
import os
import subprocess
import sys
import textwrap

import pytest
from peft import LoraConfig, LoraModel

from hfpatch.support.code import _filled_by, _module_code, hash_code
from hfpatch.support.distributions import describe_package

HELPERS = "def doubled(x):\n    return 2 * x\n\n\ndef unused(x):\n    return 3 * x\n"
MODULE = '''
"""A module."""
import collections
import fractions
import functools
import types

import helpers
import torch
from helpers import doubled as twice

SCALE = 0.5
TABLE = {"a": [1, 2], "b": {3, 4}}
FROZEN = types.MappingProxyType({"a": 5})
ORDERED = collections.OrderedDict(a=6)
PRECISIONS = {"dtype": torch.float32, "factor": 0.125}
ACTIVATIONS = [torch.nn.LeakyReLU(0.2)]
LAYERS = range(4)
THIRD = fractions.Fraction(1, 3)
CALLS = 0
CACHE = {}
SEEN = []
NESTED = {"a": {}}
SHIFTS = {"a": 21}
OFFSETS = {"b": 22}


def half(x):
    """Return a half."""
    return SCALE * x  # of it


def chosen(x, by=max, memo={}):
    memo[x] = 1
    return by(x, half(x)) if x in {"p", "q", "r"} else x


def keeping(function):
    memo = {}

    @functools.wraps(function)
    def kept(self, x):
        self.wrapped.append(x)
        return memo.setdefault(x, function(self, x))

    return kept


def listed(x, shifts=[41, 42]):
    shifts = [*shifts, x]
    shifts.append(x)
    return shifts


class Base:
    factor = 2
    inherited = {}

    def scaled(self, x):
        self.memo["base"] = self.inherited["base"] = x
        return self.factor * x


@functools.singledispatch
def dispatched(x):
    return x - 1


@dispatched.register
def _(x: int):
    return x - 2


class Stepper:
    def __init__(self, by):
        self.by = by

    def step(self, x):
        return x + self.by


class Method(Base):
    limits = (1, 2)
    weights = {"a": 31}
    layers = [1, 2]
    memo, seen, known, inherited = {}, [], {}, {}
    wrapped, lazy, stored, counted = [], [], [], []
    stepped = Stepper(12).step
    constants = FROZEN, ORDERED, PRECISIONS, ACTIVATIONS, LAYERS, THIRD
    run = staticmethod(chosen)
    both = functools.partial(half, 3)
    bound = functools.partialmethod(dispatched, 7)

    @property
    def table(self):
        return TABLE["a"]

    @table.setter
    def table(self, value):
        self.stored.append(value)

    @functools.cached_property
    def late(self):
        return self.lazy.append(1)

    @functools.lru_cache
    def count(self, x):
        self.counted.append(x)

    @keeping
    def keep(self, x):
        return x

    @classmethod
    def remembered(cls, x):
        return cls.known.setdefault(x, 2)

    def forward(self, x):
        global CALLS
        CALLS += 1
        CACHE[x] = 5
        CACHE[str(x)] = CACHE[min(x, SHIFTS["a"])] = CACHE.get(x, 1)
        CACHE[x] += 1
        SEEN.append(x)
        layers, TABLE = [], []
        layers.append(TABLE.append(x))
        self.table = self.late, self.count(x), self.keep(x), listed(x), self.layers
        self.remembered(x)
        self.memo[x] = Method.seen.append(self.weights["a"])
        SEEN[1:2] = [x]
        NESTED["a"]["b"] = NESTED["c"] = x
        parts = {"a": SHIFTS["a"]}
        parts["b"] = OFFSETS["b"]
        parts.update(c=FROZEN["a"])
        return [helpers.doubled(each) + twice(each) for each in (self.scaled(x), self.run(x))]
'''


CHANGES = {
    "formula": ("2 * x", "2.5 * x", "helpers"),
    "constant of the module": ("SCALE = 0.5", "SCALE = 0.25", "module"),
    "table of the module": ('"b": {3, 4}', '"b": {3, 5}', "module"),
    "member of the class": ("limits = (1, 2)", "limits = (1, 3)", "module"),
    "table of the class": ('{"a": 31}', '{"a": 33}', "module"),
    "table of the class beside a local one": ("layers = [1, 2]", "layers = [1, 3]", "module"),
    "default beside what replaces it": ("[41, 42]", "[41, 43]", "module"),
    "object of a bound method": ("Stepper(12)", "Stepper(13)", "module"),
    "inherited member": ("factor = 2", "factor = 3", "module"),
    "inherited function": ("self.factor * x", "self.factor + x", "module"),
    "static function": ('{"p", "q", "r"}', '{"p", "q"}', "module"),
    "default": ("by=max", "by=min", "module"),
    "argument of partial": ("partial(half, 3)", "partial(half, 4)", "module"),
    "argument of a partial method": ("partialmethod(dispatched, 7)", "partialmethod(dispatched, 8)", "module"),
    "function of a single dispatch": ("x - 1", "x - 3", "module"),
    "function for one type": ("x - 2", "x - 3", "module"),
    "table read in a key": ('{"a": 21}', '{"a": 23}', "module"),
    "table beside what is filled": ('{"b": 22}', '{"b": 23}', "module"),
    "read-only table": ('{"a": 5}', '{"a": 7}', "module"),
    "ordered table": ("a=6", "a=7", "module"),
    "number beside a dtype": ('"factor": 0.125', '"factor": 0.25', "module"),
    "option of a library's module": ("LeakyReLU(0.2)", "LeakyReLU(0.1)", "module"),
    "range": ("range(4)", "range(5)", "module"),
    "fraction": ("Fraction(1, 3)", "Fraction(2, 3)", "module"),
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
def test_code_changes_its_hash_and_what_is_said_about_it_does_not(written, change):
    before, after, where = (CHANGES | SAME)[change]
    text = {"module": MODULE, "helpers": HELPERS}
    assert before in text[where]
    changed = hashed_class(written, **{where: text[where].replace(before, after)})
    assert (changed == hashed_class(written)) == (change in SAME)


def test_running_changes_nothing(written):
    assert hashed_class(written, use=lambda mine: mine.Method().forward(3)) == hashed_class(written)


def test_what_functions_fill_is_looked_for_once():
    """A comparison asks for the hash of each method in each run, and many classes inherit the same functions."""
    first, second = (type(name, (CodedBase,), {}) for name in ("First", "Second"))
    hash_code([first])
    looked_for = _filled_by.cache_info()
    hash_code([second])
    assert _filled_by.cache_info().misses == looked_for.misses
    assert _filled_by.cache_info().hits > looked_for.hits


class CodedBase:
    def add(self, x):
        self.members.append(x)


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
    "import_module of a constant": ("import importlib\nNAME = 'helper'", "importlib.import_module(NAME).formula"),
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

    def write(files, folder="own"):
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        if str(tmp_path / folder) not in sys.path:
            monkeypatch.syspath_prepend(str(tmp_path / folder))
        for name, text in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
        _module_code.cache_clear()
        forget()
        return tmp_path / folder

    yield write
    forget()


def hashed_class(written, module=MODULE, helpers=HELPERS, use=lambda mine: None):
    """Return the hash of the class of a module, after it was used."""
    written({"helpers.py": helpers, "mine.py": module})
    mine = importlib.import_module("mine")
    use(mine)
    return hash_code([mine.Method])


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


READING = {
    "by name": ("", "(Path(__file__).parent / 'factor.txt').read_text()"),
    "in a folder": ("", "(Path(__file__).parent / 'pack' / 'factor.txt').read_text()"),
    "by a constant": ("PATH = Path(__file__).with_name('factor.txt')", "PATH.read_text()"),
    "from the working directory": ("", "open('factor.txt').read()"),
}


@pytest.mark.parametrize("way", READING)
def test_a_file_that_code_reads_counts_by_content(written, way, monkeypatch):
    given = {"pack/factor.txt": "2", "factor.txt": "2"}
    text = "from pathlib import Path\n{}\n\n\ndef f(x):\n    return int({}) * x\n".format(*READING[way])
    monkeypatch.chdir(written({**given, "mine.py": text}))
    first = hashed_f()
    written(dict.fromkeys(given, "3"))
    assert hashed_f() != first
    written(given)
    assert hashed_f() == first


def test_a_file_that_code_writes_is_no_input(written, monkeypatch):
    text = "def f(x):\n    with open('log.txt', 'a') as file:\n        file.write('called')\n    return 2 * x\n"
    monkeypatch.chdir(written({"mine.py": text, "log.txt": ""}))
    hashed_f()


def test_a_value_that_answers_to_any_name_is_no_array(written):
    """As libraries are that bind C functions when they are asked for."""
    answers = "class Library:\n    def __getattr__(self, name):\n        return lambda: name\n\n\nlib = Library()\n"
    use = MODULE.replace("import helpers\n", f"import helpers\n{answers}\n")
    use = use.replace("SCALE * x  #", "SCALE * x * len(lib.a())  #")
    assert use.count("lib") == 2
    assert hashed_class(written, module=use) != hashed_class(written)
