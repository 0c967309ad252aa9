"""The files around the package agree with it: its version, its address on the package index, what is tested."""

import re
from pathlib import Path

import pytest
import yaml

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
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []


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
