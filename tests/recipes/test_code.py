"""Code outside the installed packages: what of a recipe is such, and that none of it runs unless the user said so."""

import json
import subprocess
import sys

import pytest
from own_methods import forgotten
from own_tasks import write_task

from hfpatch import HfpatchError
from hfpatch.__main__ import main
from hfpatch.evaluation.tasks import hub_dataset
from hfpatch.promises import run
from hfpatch.recipes.comparison import load_recipe
from hfpatch.recipes.pretraining import load_pretraining
from hfpatch.recipes.strict import write_yaml
from hfpatch.runs.engines.processes import WorkerProcess
from hfpatch.surgery.methods import validate_methods

RAN = "from pathlib import Path\nPath('ran').touch()\n"
METHOD = f"""{RAN}
from dataclasses import dataclass
import hfpatch
from hfpatch.nn import normal_
from torch import nn

@hfpatch.method("of_a_stranger", size="rank")
@dataclass
class Method(hfpatch.MethodConfig):
    rank: int = 2

    def build(self, site, seed):
        up = nn.Linear(site.hidden_size, site.width("value"), bias=False)
        nn.init.zeros_(up.weight)
        return nn.ModuleDict({{"up": up}})

    def value(self, parts, v, x, site):
        return v + parts["up"](x)
"""
TASK = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
TEMPLATE = "{{ cycler.__init__.__globals__.os.makedirs('ran', 511, True) or question }}"
BASE = {
    "name": "theirs",
    "model": {"name": "tinyworld/gpt2"},
    "data": {"source": "tinyworld/shifted", "max_documents": 20, "block_size": 32},
    "training": {"steps": 1, "warmup_steps": 0, "batch_size": 2},
    "evaluation": {"tasks": ["tinyworld_cloze"], "limit": 2},
    "methods": {"baseline": [], "skip": [{"type": "pre_projection"}]},
}
PRETRAINING = {
    "name": "theirs",
    "architecture": {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32},
    "tokenizer": {"train_vocab_size": 300},
    "data": BASE["data"],
}


def with_part(**part):
    return {"methods": {"baseline": [], "skip": [part]}}


FOREIGN = {
    "a method": ("methods.skip.0.type", "strange_module:Method", with_part(type="strange_module:Method")),
    "an option": (
        *("methods.skip.0.tokenizer_kwargs.trust_remote_code", "true"),
        with_part(type="prompt_tuning", tokenizer_kwargs={"trust_remote_code": True}),
    ),
    "task files": (
        *("evaluation.include_path", "tasks"),
        {"evaluation": {"tasks": ["of_a_stranger"], "include_path": "tasks", "limit": 2}},
    ),
    "a model's code": ("model.trust_remote_code", "true", {"model": {"name": "model", "trust_remote_code": True}}),
    "code that a model writes": (
        *("evaluation.confirm_run_unsafe_code", "true"),
        {"evaluation": {"tasks": ["tinyworld_cloze"], "confirm_run_unsafe_code": True}},
    ),
}
"""By what it is: the key, its value as it is shown, and how it is put into a recipe."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change into a stranger's folder: a recipe of each kind, and a module, a task and a model that leave ``ran``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "strange_module.py").write_text(METHOD)
    (tmp_path / "tasks").mkdir()
    write_task(tmp_path / "tasks", "of_a_stranger", **TASK, doc_to_text="!function strange.text")
    (tmp_path / "tasks" / "strange.py").write_text(f"{RAN}\ndef text(doc):\n    return doc['question']\n")
    rows = [{"question": f"q{n}", "choices": ["a", "b"], "gold": 0} for n in range(4)]
    (tmp_path / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").mkdir()
    config = "from transformers import PreTrainedConfig\nclass Config(PreTrainedConfig):\n    model_type = 'strange'\n"
    (tmp_path / "model" / "strange.py").write_text(RAN + config)
    auto = {"AutoConfig": "strange.Config"}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": auto}))
    for name, (_, _, changes) in FOREIGN.items():
        (tmp_path / f"{name}.yaml").write_text(write_yaml({**BASE, **changes}))
    with forgotten():
        yield tmp_path
    sys.modules.pop("strange_module", None)


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("command", ["compare", "train --method skip", "plan"])
def test_nothing_of_a_recipe_runs_unasked(here, capsys, what, command):
    key, value, _ = FOREIGN[what]
    name, *options = command.split()
    assert main([name, f"{what}.yaml", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{what}.yaml: names code outside the installed packages ({key}={value})" in line
    assert "--trust-code" in line
    assert not (here / "ran").exists()
    assert not (here / "runs").exists()


@pytest.mark.parametrize("what", ["a method", "task files", "a model's code"])
def test_it_runs_where_the_user_said_so(here, capsys, what):
    assert main(["plan", f"{what}.yaml", "--trust-code", "--seconds", "0"]) == (2 if what == "a model's code" else 0)
    assert (here / "ran").exists()
    assert "names code" not in capsys.readouterr().err  # the model has no code but that of its configuration


@pytest.mark.parametrize("what", FOREIGN)
def test_an_override_is_said_by_the_user_and_covers_what_it_names_alone(here, what):
    """So no code that the file names runs because something beside it was said."""
    key, value, changes = FOREIGN[what]
    section = key.partition(".")[0]
    beside = ["methods.skip.0.rank=3", "methods.other=[{type: lora}]", "evaluation.limit=1", "model.dtype=bfloat16"]
    with pytest.raises(HfpatchError, match=rf"\({key}={value}\)"):
        load_recipe(f"{what}.yaml", beside)
    load_recipe(f"{what}.yaml", [f"{section}={json.dumps(changes[section])}"])
    load_recipe(f"{what}.yaml", [f"{section}={json.dumps(BASE[section])}"])  # without any


def test_in_python_a_file_needs_consent_and_what_the_caller_built_does_not(here):
    validate_methods(load_recipe("a method.yaml", trust_code=True).methods)
    assert (here / "ran").exists()


def test_pretraining_recipes_name_kernels_alone(here):
    (here / "theirs.yaml").write_text(write_yaml(PRETRAINING))
    assert load_pretraining("theirs.yaml").name == "theirs"
    kernel = {"architecture": {**PRETRAINING["architecture"], "attn_implementation": "someone/kernel"}}
    (here / "theirs.yaml").write_text(write_yaml({**PRETRAINING, **kernel}))
    for command in ("pretrain", "tokenize"):
        assert main([command, "theirs.yaml"]) == 2
    assert load_pretraining("theirs.yaml", trust_code=True).name == "theirs"


def test_a_task_of_include_path_runs_code_without_naming_any(here):
    """So the folder as a whole is code: its templates are not confined."""
    write_task(here / "tasks", "of_a_stranger", **TASK, doc_to_text=TEMPLATE)
    assert main(["compare", "task files.yaml"]) == 2
    assert not (here / "ran").exists()
    options = ["--tasks", "of_a_stranger", "--include-path", "tasks", "--no-cache"]
    assert main(["eval", "--model", "tinyworld/gpt2", *options]) == 0
    assert (here / "ran").exists()


def test_looking_up_the_data_of_a_task_runs_nothing_of_it(here):
    assert hub_dataset("of_a_stranger", include_path=here / "tasks") is None
    assert not (here / "ran").exists()


def test_a_method_named_on_the_command_line_is_said(here, monkeypatch):
    monkeypatch.setattr(run, "PROMISES", run.PROMISES[:1])
    assert main(["check", "tinyworld/gpt2", "--method", "strange_module:Method"]) == 0
    assert (here / "ran").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads PYTHONSAFEPATH since 3.11")
@pytest.mark.parametrize("given", ["", "."])
def test_processes_of_a_run_find_modules_of_the_working_directory_only_if_their_parent_does(here, monkeypatch, given):
    monkeypatch.setattr(sys, "path", [*([str(here)] if given else []), *sys.path])
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "__init__", lambda self, command, env, **_: setattr(self, "env", env))
        env = WorkerProcess(here / "worker", None).env
    (here / "beside.py").touch()
    done = subprocess.run([sys.executable, "-m", "beside"], env=env, capture_output=True, text=True, check=False)
    assert ("No module named beside" not in done.stderr) == bool(given)
