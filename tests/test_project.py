"""The files around the package agree with it: its version, its address on the package index, what is tested."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hfpatch import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_one_version(project):
    assert project["project"]["version"] == __version__ == read("CITATION.cff")["version"]


def test_the_readme_has_no_relative_link_on_the_package_index(project):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for each in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_workflow_runs_every_python_that_the_package_promises(project):
    minors = read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["minor"]
    promised = re.findall(r":: 3\.(\d+)$", "\n".join(project["project"]["classifiers"]), flags=re.MULTILINE)
    assert list(map(str, minors)) == promised
    assert project["project"]["requires-python"] == f">=3.{min(minors)}"
    assert project["tool"]["ruff"]["target-version"] == f"py3{min(minors)}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml"])
def test_make_has_the_targets_that_a_page_names(page):
    made = re.findall(r"^([\w.%-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = re.findall(
        r"^ +(?:- run: |run: )?make ([a-z][\w.-]*)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert named
    assert {re.sub(r"^test-3\..*", "test-3.%", target) for target in named} <= set(made)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_a_python_has_one_version_of_each_package(python):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    chosen = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    assert sorted(set(chosen)) == sorted(chosen)
    assert {"torch", "transformers", "peft", "numpy", "pandas"} <= set(chosen)
    assert all(str(pin.specifier).startswith("==") for pin in pins)


def test_the_page_on_stability_names_the_versions_that_are_tested(project):
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| (\d\S* \| \d\S*) \|$", page, flags=re.MULTILINE))
    pins = [
        dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE))
        for name in ("tests/oldest.txt", "constraints.txt")
    ]
    assert rows.keys() == {"Python", "torch", "transformers", "peft"}
    for name in rows.keys() - {"Python"}:
        assert rows[name] == f"{pins[0][name]} | {pins[1][name]}", name
    minors = read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["minor"]
    assert rows["Python"] == f"3.{min(minors)} | 3.{max(minors)}"
