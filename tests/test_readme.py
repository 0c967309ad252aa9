"""The README's snippets run as they stand there, and its commands and links exist."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", blocks("python"))
def test_python_snippets_run(snippet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "added" in capsys.readouterr().out
    assert (tmp_path / "my-patch" / "patch.json").is_file()


def test_the_diff_leaves_a_script_that_trains():
    from transformers import AutoModelForCausalLM

    from hfpatch.tinyworld import checkpoint

    (diff,) = blocks("diff")
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "name": checkpoint("gpt-neox")}
    exec(compile(after, "README.md", "exec"), names)
    tokens = torch.arange(8)[None]
    names["model"](tokens, labels=tokens).loss.backward()
    trained = [n for n, p in names["model"].named_parameters() if p.grad is not None]
    assert trained
    assert all("preproj_" in name for name in trained)


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^ +make (\w+)", README, flags=re.MULTILINE))
    assert {"quickstart", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
