"""Every code block of docs/ and the README's snippets run, page by page and in order; links lead somewhere.

Python is executed, or written to the file that its first line names, as YAML is, and each command line runs; `pytest`
runs the tests of its file. A command whose comment says that it takes minutes or needs the hub is checked instead: the
command and its options exist, its recipe loads with its overrides.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from gguf_models import write_gguf
from own_methods import forgotten
from tiny_runs import without_reports
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hfpatch.__main__ import main
from hfpatch.cli.app import app
from hfpatch.recipes.comparison import load_recipe
from hfpatch.recipes.pretraining import load_pretraining
from hfpatch.recipes.training import TrainingSettings
from hfpatch.sites import family
from hfpatch.support.folders import recipes_dir
from hfpatch.tinyworld import checkpoint
from hfpatch.tuners import registration as methods

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_HERE = re.compile(r"#.*(needs the hub|minutes)")


def text_of(page):
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def run_commands(block):
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "pytest":
            tests = [function for name, function in runpy.run_path(*arguments).items() if name.startswith("test_")]
            assert tests
            for test in tests:
                test()
            continue
        assert program == "hfpatch"
        if NOT_HERE.search(line):
            check_command(arguments)
        else:
            of_page = arguments[0] == "check" and "--method" in arguments  # a method that no other test compiles
            with nullcontext() if of_page or arguments[0] == "report" else without_what_others_test():
                assert main(arguments) == 0, line


@contextmanager
def without_what_others_test():
    """Write no reports of runs (`hfpatch report` does) and compile no models (tests/promises does): both take long."""
    with without_reports(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "compile", lambda model, **_: model)
        yield


def check_command(arguments):
    command, *rest = arguments
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    for option in (argument for argument in rest if argument.startswith("--")):
        assert option in shown.output, f"hfpatch {command} has no {option}"
    if command in ("compare", "train"):
        load_recipe(rest[0], [argument for argument in rest[1:] if "=" in argument])
    if command == "pretrain":
        load_pretraining(rest[0], [argument for argument in rest[1:] if "=" in argument])


def write_file(block):
    """Write a block to the file that its first line names; return whether it names one."""
    name = re.match(r"# ([\w/-]+\.(yaml|py))\n", block)
    if name:
        Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(name[1]).write_text(block, encoding="utf-8")
    return name is not None


def check_entry_points(block):
    """Entry points are of the group that hfpatch reads, and each names an object in a module."""
    header, *entries = block.strip().splitlines()
    assert header in [f'[project.entry-points."{group}"]' for group in (family.GROUP, methods.GROUP)]
    assert entries
    assert all(re.fullmatch(r'\w+ = "[\w.]+:\w+"', entry) for entry in entries)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(family, "DECLARED", dict(family.DECLARED))  # what a page declares is forgotten after it
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules = set(sys.modules)
    if GGUF in text_of(page):  # which its reader has; a small one does as well
        write_gguf(tmp_path / GGUF, "llama", "Q4_1")
    names = {"__name__": "__docs__"}
    with forgotten():
        for language, block in FENCE.findall(text_of(page)):
            if language == "python":
                if not write_file(block):
                    exec(compile(block, f"docs/{page}.md", "exec"), names)
            elif language == "bash":
                run_commands(block)
            elif language == "yaml":
                assert write_file(block), "the first line of a YAML block names its file"
                section = yaml.safe_load(block)
                if section.keys() == {"training"}:  # a part of a recipe
                    TrainingSettings(**section["training"])
            elif language == "toml":
                check_entry_points(block)
            else:
                pytest.fail(f"docs/{page}.md: a block of {language or 'no language'} that nothing runs")
    for name in [name for name in set(sys.modules) - modules if (tmp_path / f"{name}.py").exists()]:
        del sys.modules[name]


README = [block for block in FENCE.findall(text_of("../README")) if block[0] in ("python", "diff")]


@pytest.mark.parametrize("snippet", [block for language, block in README if language == "python"])
def test_a_snippet_of_the_readme_runs(snippet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "added" in capsys.readouterr().out
    assert (tmp_path / "my-patch" / "patch.json").is_file()


def test_the_diff_of_the_readme_leaves_a_script_that_trains():
    (diff,) = (block for language, block in README if language == "diff")
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "name": checkpoint("gpt-neox")}
    exec(compile(after, "README.md", "exec"), names)
    tokens = torch.arange(8)[None]
    names["model"](tokens, labels=tokens).loss.backward()
    trained = [n for n, p in names["model"].named_parameters() if p.grad is not None]
    assert trained
    assert all("preproj_" in name for name in trained)


def test_pages_are_reached_and_the_tests_that_they_name_are_there():
    links = re.findall(r"\]\(([^)#]+)", text_of("index"))
    assert {f"{page}.md" for page in PAGES} - {"index.md"} <= set(links)
    assert len(links) == len(set(links))
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text_of("fair-comparison"))
    for file, name in named:
        assert f"def {name}(" in (DOCS.parent / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("page", ["../README", *(page for page in PAGES if page != "reference/commands")])
def test_commands_that_are_only_shown_have_what_they_name(page):
    """Commands in indented blocks do not run; their options, recipes and keys exist."""
    prose = FENCE.sub("", text_of(page)).replace("\\\n", " ")
    for line in re.findall(r"^    .*?\bhfpatch ((?!lm_eval)[a-z][\w-]* .*)", prose, flags=re.MULTILINE):
        words = shlex.split(line.rstrip("'"), comments=True)
        if not {"RECIPE", "...", "|"} & set(words):
            check_command(words)


def test_recipes_are_in_their_table():
    table = text_of("recipes").partition("## The recipes that come with hfpatch")[2]
    assert set(re.findall(r"`([\w-]+)`", table)) == {path.stem for path in recipes_dir().glob("*.yaml")}


def test_every_file_that_the_guide_names_is_there():
    named = re.findall(r"`((?:hfpatch|tests|docs|benchmarks|examples)/[^`<: ]+)`", text_of("../CONTRIBUTING"))
    assert [name for name in named if not (DOCS.parent / name).exists()] == []


@pytest.mark.parametrize("page", ["../README", *PAGES])
def test_links_and_anchors_lead_somewhere(page):
    prose = FENCE.sub("", text_of(page))
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (DOCS / page).parent / path if path else DOCS / f"{page}.md"
        if target.is_dir():
            continue
        assert target.is_file(), link
        text = target.read_text(encoding="utf-8") if anchor else ""
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.MULTILINE)
        names = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
        slugs = names + [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, link


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", DOCS / "cluster" / "slurm.sbatch"], check=True)


def test_the_diagrams_are_what_their_script_draws():
    draw = runpy.run_path(str(DOCS / "figures" / "draw.py"))
    drawn = {diagram.name: diagram.svg() for diagram in (figure() for figure in draw["FIGURES"])}
    assert drawn == {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "figures").glob("*.svg")}
