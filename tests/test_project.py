"""The files around the package agree with it and with each other: metadata, workflows, images, templates, hooks."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hfpatch import __version__

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_one_version(project):
    assert project["project"]["version"] == __version__ == read("CITATION.cff")["version"]


def test_the_readme_has_no_relative_link_on_the_package_index(project):
    text = README
    for each in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "](https://raw.githubusercontent.com/hfpatch/hfpatch/main/results/smollm2-135m-gpu/figures/" in text


def test_one_address_of_the_repository(project):
    home = project["project"]["urls"]["Homepage"]
    files = [*ROOT.glob("*.*"), *(ROOT / ".github").rglob("*.*"), *(ROOT / "docs").glob("*.*")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    named = {
        (name, url)
        for name, text in texts.items()
        for url in re.findall(r"https://github\.com/[\w-]+/[\w-]+(?![\w-]|/(?:issues|pull)/\d)", text)
    }
    assert {name for name, _ in named} >= {"pyproject.toml", "mkdocs.yml", "CITATION.cff", "SECURITY.md", "config.yml"}
    assert {url for _, url in named} == {home}
    assert read("CITATION.cff")["repository-code"] == home


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^ +make (\w+)", README, flags=re.MULTILINE))
    assert {"quickstart", "test"} <= targets
    assert all(re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path):
    steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
    found = [re.match(r"make ([\w.-]+)", step["run"]) for step in steps if "run" in step]
    assert found
    assert all(found)
    targets = [re.sub(r"^test-3\..*", "test-3.%", match[1]) for match in found]
    assert [target for target in targets if not re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)] == []


def test_the_workflow_runs_every_python_that_the_package_promises(project):
    minors = read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["minor"]
    promised = re.findall(r":: 3\.(\d+)$", "\n".join(project["project"]["classifiers"]), flags=re.MULTILINE)
    assert list(map(str, minors)) == promised
    assert project["project"]["requires-python"] == f">=3.{min(minors)}"
    assert project["tool"]["ruff"]["target-version"] == f"py3{min(minors)}"


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


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_copies_what_is_there_and_runs_hfpatch_as_a_user(path):
    lines = re.sub(r"\\\n", "", path.read_text(encoding="utf-8")).splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#")]
    assert {name for name, _ in steps} <= {"FROM", "ENV", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    copied = [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]
    assert {"constraints.txt", "pyproject.toml", "hfpatch", "recipes", "eval"} <= set(copied)
    assert all((ROOT / source).exists() for source in copied)
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{source}" for source in copied} <= set(allowed)
    assert dict(steps)["ENTRYPOINT"] == '["hfpatch"]'
    assert dict(steps)["USER"] == "1000"


def test_hooks_use_the_environment_of_the_makefile():
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].split()[0] for hook in repository["hooks"]]
    assert [Path(entry).name for entry in entries] == ["ruff", "ruff", "lint-imports", "mypy"]
    folder = re.search(r"^VENV \?= (\S+)", MAKEFILE, re.MULTILINE)[1]
    assert all(entry.startswith(f"{folder}/bin/") for entry in entries)
