"""Methods of other packages: by entry points, and by the module and name of a class."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import make_model
from own_methods import REGISTRIES, forgotten, installed

import hfpatch
from hfpatch import HfpatchError
from hfpatch.__main__ import main
from hfpatch.surgery.methods import build_method, validate_methods
from hfpatch.tuners import registration

METHOD = '''
from dataclasses import dataclass

from torch import Tensor, nn

import hfpatch
from hfpatch.nn import normal_


@hfpatch.method("gain", size="rank")
@dataclass
class Gain(hfpatch.MethodConfig):
    """v + x A B."""

    rank: int = 2

    def build(self, site, seed):
        down = nn.Linear(site.hidden_size, self.rank, bias=False)
        up = nn.Linear(self.rank, site.width("value"), bias=False)
        normal_(down.weight, std=0.1, seed=seed, name=f"{site.name}.down")
        nn.init.zeros_(up.weight)
        return nn.ModuleDict({"down": down, "up": up})

    def value(self, parts, v: Tensor, x: Tensor, site) -> Tensor:
        return v + parts["up"](parts["down"](x))


class Unregistered(hfpatch.MethodConfig):
    pass


OTHER = "a word"
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a module with methods, and the entry points of its package, where Python finds them."""

    def install(text=METHOD, **entries):
        installed(tmp_path, registration.GROUP, "their_methods", text, **entries)
        registration.load_plugins.cache_clear()

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registration, "_BROKEN", {})
    with forgotten():
        yield install
    sys.modules.pop("their_methods", None)
    registration.load_plugins.cache_clear()


def test_the_method_of_an_installed_package_is_known_by_its_name(package, caplog):
    package(gain="Gain")
    registration.load_plugins()
    methods = {"a": [{"type": "gain", "match": "b"}], "b": [{"type": "gain", "rank": 3}]}
    model = make_model("gpt2")
    method = build_method(model, methods, "a")
    assert (method.match.size, method.match.value, method.configs[0].rank) == ("rank", 3, 3)
    assert hfpatch.patch_summary(hfpatch.patch(model, method.configs)).added == 2 * 3 * (32 + 32)
    assert caplog.records == []


BROKEN = {
    "no such name": ("MISSING", METHOD, "cannot be loaded: AttributeError: .*no attribute 'MISSING'"),
    "an error": ("Gain", "raise OSError('two\\nlines')", "cannot be loaded: OSError: two lines"),
    "a package that is not there": ("Gain", "import no_such_package", "ModuleNotFoundError: No module named 'no_such"),
    "no method": ("OTHER", METHOD, r"is not a method: put @hfpatch.method\(...\) on a dataclass below"),
    "not registered": ("Unregistered", METHOD, r"is not a method: put @hfpatch.method"),
    "another name": ("Gain", METHOD.replace('"gain"', '"growth"'), "must be called 'growth', as its method is"),
    "a name of PEFT": ("Gain", METHOD.replace('"gain"', '"lora"'), "method 'lora' is peft.tuners.lora"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_package_is_one_warning_and_an_error_where_it_is_asked_for(package, caplog, what):
    name, text, message = BROKEN[what]
    package(text, gain=name)
    registration.load_plugins()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.getMessage()
    assert record.getMessage().startswith(f"hfpatch: entry point 'gain' (their_methods:{name}) ")
    validate_methods({"a": [{"type": "pre_projection"}]})
    with pytest.raises(HfpatchError, match=rf"methods.a\[0\].type: entry point 'gain' .*{message}"):
        validate_methods({"a": [{"type": "gain"}]})


IMPORTS = """
import sys
sys.path.insert(0, {here!r})
{imports}
from peft import PEFT_TYPE_TO_CONFIG_MAPPING as known
assert "GAIN" in known and "OUTPUT_GATE" in known, sorted(known)
print(known["GAIN"].__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import their_methods", "import peft, hfpatch"])
def test_the_first_import_may_be_any_of_them(package, tmp_path, imports):
    """Importing hfpatch imports the package, whose import may have led to it; warnings as errors stop neither."""
    package(gain="Gain", other="absent")
    code = IMPORTS.format(here=str(tmp_path), imports=imports)
    run = [sys.executable, "-W", "error::UserWarning", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(hfpatch.__file__).parents[1])}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "their_methods\n"), done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("hfpatch: entry point 'other'")]
    assert len(warned) == (imports == "import peft, hfpatch"), done.stderr


NAMED = {
    "their_method:Gain": r"no module 'their_method' in .* or among .* \(did you mean 'their_methods'\?\)",
    "their.methods:Gain": "no module 'their.methods' in",
    "their_methods:Gian": r"their_methods.py defines no 'Gian' \(did you mean 'Gain'\?\)",
    "their_methods:OTHER": "their_methods:OTHER is not a method: put @hfpatch.method",
    "broken:Gain": r"broken:Gain: the module cannot be imported: SyntaxError: .*\(broken.py, line 1\)",
    "needs:Gain": r"needs:Gain: the module cannot be imported: ModuleNotFoundError: No module named 'absent'",
}


def test_a_class_is_named_by_its_module_in_recipes_and_commands(package, capsys, tmp_path):
    package()
    (tmp_path / "broken.py").write_text("class :")
    (tmp_path / "needs.py").write_text("import absent")
    for reference, message in NAMED.items():
        with pytest.raises(HfpatchError, match=rf"methods.a\[0\].type: .*{message}"):
            validate_methods({"a": [{"type": reference}]})
    methods = {"a": [{"type": "their_methods:Gain", "match": "b"}], "b": [{"type": "query_temperature"}]}
    method = build_method(make_model("gpt2"), methods, "a")
    assert (method.match.size, method.configs[0].rank) == ("rank", 1)
    with pytest.raises(HfpatchError, match=r"gain has no option 'rnak' \(did you mean 'rank'\?\)"):
        validate_methods({"a": [{"type": "their_methods:Gain", "rnak": 1}]})


def test_a_method_is_checked_before_anything_is_installed(package, capsys, monkeypatch):
    from hfpatch.promises import run

    package()
    monkeypatch.setattr(run, "PROMISES", run.PROMISES[:3])
    assert main(["check", "tinyworld/gpt2", "--method", "their_methods:Gain", "rank=3"]) == 0
    assert "no-op at init" in capsys.readouterr().out
    assert main(["check", "tinyworld/gpt2", "--method", "their_methods:Gain", "rnak=3"]) == 2
    assert "gain has no option 'rnak' (did you mean 'rank'?)" in capsys.readouterr().err
    assert main(["check", "tinyworld/gpt2", "--method", "output_gate", "per_head=true"]) == 0


def test_a_saved_method_that_is_not_there_says_what_to_import(package, tmp_path, caplog):
    package(gain="Gain")
    registration.load_plugins()
    model = make_model("gpt2")
    hfpatch.patch(model, build_method(model, {"a": [{"type": "gain"}]}, "a").configs)
    hfpatch.save_patch(model, tmp_path / "patch")
    assert "import their_methods\n" in (tmp_path / "patch" / "gain" / "README.md").read_text()
    with forgotten():
        for registry in REGISTRIES[:3]:
            registry.pop("GAIN")
        with pytest.raises(HfpatchError, match=r"of method 'gain', which .*, import their_methods first"):
            hfpatch.load_patch(make_model("gpt2"), tmp_path / "patch")
    hfpatch.load_patch(make_model("gpt2"), tmp_path / "patch")
