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
GONE = ("lm_eval", "datasets", "scipy", "matplotlib", "sklearn")  # the last needs scipy, and transformers imports it
WITHOUT = f"import sys\nfor name in {GONE}: sys.modules[name] = None\n"


PROGRAM = """
from pathlib import Path
from hfpatch.__main__ import main
code = main(["compare", "quickstart"])
for statement in (
    "import hfpatch.evaluation",
    "import hfpatch.sharing",
    "from hfpatch.reporting import write_report",
    "from hfpatch.recipes.comparison import load_recipe; from hfpatch.runs import compare; "
    "compare(load_recipe('quickstart'), Path('out'))",
):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
sys.exit(code)
"""


def test_a_command_a_call_and_an_import_say_what_to_install(tmp_path):
    """In a process where the packages of the lab cannot be imported, as where they are not installed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT + PROGRAM], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    missing = "this needs {}, which is not installed; pip install 'hfpatch[lab]'"
    # Before it stands what takes long on a busy machine
    assert done.stderr.splitlines()[-1] == f"hfpatch: error: {missing.format('lm_eval')}"
    names = ["lm_eval", "matplotlib", "matplotlib", "lm_eval"]
    assert done.stdout.splitlines() == [missing.format(name) for name in names]
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_another_missing_package_is_no_mistake_of_the_user():
    with pytest.raises(ModuleNotFoundError, match="of_nobody") as raised, lazy.needing_lab():
        import of_nobody  # noqa: F401
    assert not isinstance(raised.value, HfpatchError)


def test_the_packages_are_those_of_the_extra():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = {Requirement(line).name.replace("-", "_") for line in settings["project"]["optional-dependencies"]["lab"]}
    assert extra == lazy.LAB_PACKAGES


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_during_an_import_and_is_afterwards(tmp_path, monkeypatch, fails):
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "home.py").write_text(f"import gc\nenabled = gc.isenabled()\nassert not {fails}\n")
    monkeypatch.syspath_prepend(tmp_path)
    get = lazy.lazy_names("lazily", {"home": ["enabled"]})
    assert gc.isenabled()
    if fails:
        with pytest.raises(AssertionError):
            get("enabled")
    else:
        assert get("enabled") is False
    assert gc.isenabled()
    for name in ("lazily", "lazily.home"):
        sys.modules.pop(name, None)


CYCLE = """
import os, sys
class Held:
    def __del__(self, write=os.write):
        write(1, b"freed")
held = Held()
held.itself = held
from hfpatch.support.lazy import freeze
freeze()
sys.modules[sys.argv[1]] = sys
"""


@pytest.mark.parametrize("module", ["another", "triton"])
def test_what_is_frozen_is_freed_at_the_end_where_triton_would_report_it(module):
    done = subprocess.run([sys.executable, "-c", CYCLE, module], capture_output=True, text=True, check=True)
    assert done.stdout == ("freed" if module == "triton" else "")
