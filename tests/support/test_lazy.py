"""Names that are imported when they are used; a package of ``hfpatch[lab]`` that is missing says what to install."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hfpatch.errors import HfpatchError
from hfpatch.support import lazy

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys\nfor name in ('lm_eval', 'datasets', 'scipy', 'matplotlib'): sys.modules[name] = None\n"


def without_lab(code, cwd):
    """Run Python in a process where these packages cannot be imported, as where they are not installed."""
    command = [sys.executable, "-c", WITHOUT + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_a_command_says_what_to_install(tmp_path):
    code = "from hfpatch.__main__ import main; sys.exit(main(['compare', 'quickstart']))"
    done = without_lab(code, tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == ("hfpatch: error: this needs lm_eval, which is not installed; pip install 'hfpatch[lab]'\n")


COMPARE = (
    "from pathlib import Path; from hfpatch.recipes.comparison import load_recipe; from hfpatch.runs import compare; "
    "compare(load_recipe('quickstart'), Path('out'))"
)


@pytest.mark.parametrize(
    "statement", [COMPARE, "import hfpatch.evaluation", "from hfpatch.reporting import write_report"]
)
def test_an_import_or_a_call_says_what_to_install(statement, tmp_path):
    code = f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)"
    done = without_lab(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(", which is not installed; pip install 'hfpatch[lab]'\n")


def test_another_missing_package_is_no_mistake_of_the_user():
    with pytest.raises(ModuleNotFoundError, match="of_nobody") as raised, lazy.needing_lab():
        import of_nobody  # noqa: F401
    assert not isinstance(raised.value, HfpatchError)


def test_the_packages_are_those_of_the_extra_and_of_the_contract():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = {Requirement(each).name.replace("-", "_") for each in settings["project"]["optional-dependencies"]["lab"]}
    assert extra == lazy.LAB_PACKAGES
    (contract,) = [
        each for each in settings["tool"]["importlinter"]["contracts"] if "no package of the lab" in each["name"]
    ]
    assert set(contract["forbidden_modules"]) == lazy.LAB_PACKAGES


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_during_an_import_and_is_afterwards(tmp_path, monkeypatch, fails):
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "home.py").write_text(f"import gc\nenabled = gc.isenabled()\nassert not {fails}\n")
    monkeypatch.syspath_prepend(tmp_path)
    get = lazy.lazy_names("lazily", {"enabled": "home"})
    assert gc.isenabled()
    if fails:
        with pytest.raises(AssertionError):
            get("enabled")
    else:
        assert get("enabled") is False
    assert gc.isenabled()
    for name in ("lazily", "lazily.home"):
        sys.modules.pop(name, None)
