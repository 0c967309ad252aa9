"""Every command on every kind of folder: it works where it should, else one line, exit code 2 and nothing changed."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
from cli.conftest import RECIPE, refused
from tiny_runs import without_reports

from hfpatch.__main__ import main

STUDY = """\
name: study
architecture: {model_type: gpt2, n_embd: 16, n_head: 2, n_layer: 1, n_positions: 32, biases: false}
tokenizer: {train_vocab_size: 300}
data: {source: tinyworld/base, block_size: 32, max_documents: 60, held_out: 10}
training: {steps: 2, warmup_steps: 1, batch_size: 2, evaluate_every: 1}
baseline: linear
variants: {linear: {}, nonlinear: {architecture: {query: {path: nonlinear}}}}
"""
MODEL = "tinyworld/gpt-neox"
EVAL = ["eval", "--tasks", "tinyworld_cloze", "--limit", "3"]
TO = ["--to", "someone/something", "--dry-run"]
COMMANDS = {
    "report": lambda folder, recipes: ["report", folder],
    "compare": lambda folder, recipes: ["compare", recipes / "small.yaml", "--out", folder, "--resume"],
    "train": lambda folder, recipes: [
        *("train", recipes / "small.yaml", "--method", "pre_projection", "--out", folder, "--resume")
    ],
    "pretrain": lambda folder, recipes: ["pretrain", recipes / "study.yaml", "--out", folder, "--resume"],
    "eval --model": lambda folder, recipes: [*EVAL, "--model", folder],
    "eval --patch": lambda folder, recipes: [*EVAL, "--model", MODEL, "--patch", folder],
    "eval --output": lambda folder, recipes: [*EVAL, "--model", MODEL, "--output", folder],
    "export": lambda folder, recipes: ["export", folder, "--out", recipes / "export"],
    "push": lambda folder, recipes: ["push", folder, *TO],
    "inspect": lambda folder, recipes: ["inspect", folder],
    "inspect --patch": lambda folder, recipes: ["inspect", MODEL, "--patch", folder],
}
WORKS = {
    *(("run", command) for command in ("report", "compare", "train", "push")),
    ("patch", "push"),
    *(("study", command) for command in ("report", "pretrain")),
    ("half run", "train"),  # each run has files of its own
    *(("evaluation", command) for command in ("report", "eval --output")),
    ("half evaluation", "report"),  # its results.json is whole
}
ORDINARY = {  # work that other tests do
    *((kind, command) for kind in ("empty", "absent") for command in ("compare", "train", "pretrain", "eval --output")),
    *(("patch", command) for command in ("eval --patch", "inspect --patch", "export")),
}
KINDS = [
    *("evaluation", "half evaluation", "run", "half run", "study", "half study", "patch", "half patch"),
    *("empty", "absent", "file", "foreign object", "foreign list", "foreign file"),
]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "small.yaml").write_text(RECIPE)
    (folder / "study.yaml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory, recipes):
    """Folders of each kind: made by hfpatch, cut off in the middle, and others'."""
    made = {kind: tmp_path_factory.mktemp("kinds") / kind.replace(" ", "-") for kind in KINDS}
    with without_reports():
        for kind, command in (("evaluation", "eval --output"), ("run", "compare"), ("study", "pretrain")):
            assert main(list(map(str, COMMANDS[command](made[kind], recipes)))) == 0
    shutil.copytree(made["run"] / "runs" / "pre_projection" / "seed-0" / "patch", made["patch"])
    for kind, cut in (
        *(("evaluation", "evaluation.json"), ("run", "results.json"), ("study", "results.json")),
        ("patch", "pre_projection/adapter_model.safetensors"),
    ):
        half = made[f"half {kind}"]
        shutil.copytree(made[kind], half)
        file = half / cut
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for kind, content in (("foreign object", {"a": 1, "name": "x"}), ("foreign list", [1])):
        made[kind].mkdir()
        for name in ("results.json", "patch.json", "evaluation.json", "config.json", "adapter_config.json"):
            (made[kind] / name).write_text(json.dumps(content))
    made["empty"].mkdir()
    made["file"].write_text("a note")
    made["foreign file"].mkdir()
    (made["foreign file"] / "notes.txt").write_text("a note")
    return made


def content(path):
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [(file, file.read_bytes() if file.is_file() else None) for file in files]


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_on_each_folder(kind, folders, recipes, capsys):
    wrong = {}
    for command, arguments in COMMANDS.items():
        if (kind, command) in ORDINARY:
            continue
        before = content(folders[kind])
        with nullcontext() if command == "report" else without_reports():
            code = main(list(map(str, arguments(folders[kind], recipes))))
        lines = capsys.readouterr().err.splitlines()
        if (kind, command) in WORKS:
            right = code == 0
        else:
            errors = [line for line in lines if line.startswith("hfpatch: error: ")]
            right = code == 2 and errors == lines[-1:] and content(folders[kind]) == before
        if not right:
            wrong[command] = (code, lines[-1:])
    assert wrong == {}


@pytest.mark.parametrize(("kind", "command"), [("run", "compare"), ("run", "train"), ("study", "pretrain")])
def test_a_cut_off_recipe_in_a_run_folder_says_how_to_go_on(kind, command, folders, recipes, tmp_path, capsys):
    folder = shutil.copytree(folders[kind], tmp_path / "run")
    (folder / "recipe.yaml").write_text("name: small\n")
    assert main(list(map(str, COMMANDS[command](folder, recipes)))) == 2
    error = capsys.readouterr().err
    assert "recipe.yaml: " in error
    assert "choose another --out, or put this file back as hfpatch wrote it" in error


@pytest.mark.parametrize(("kind", "command"), [("study", "compare"), ("study", "train"), ("run", "pretrain")])
def test_a_run_of_another_kind_is_no_damage(kind, command, folders, recipes, capsys):
    message = refused(capsys, *COMMANDS[command](folders[kind], recipes))
    assert "contains a run of another recipe (" in message
    assert message.endswith("; choose another --out")


def test_a_deleted_model_is_named_and_trained_again(folders, recipes, tmp_path, capsys):
    out, command = shutil.copytree(folders["study"], tmp_path / "out"), COMMANDS["pretrain"](tmp_path / "out", recipes)
    run = out / "runs" / "linear" / "seed-0"
    shutil.rmtree(run / "model")
    message = f"{run / 'model'}: is missing; to train it again delete {run} and {out / 'results.json'}, then --resume"
    for part in ([], ["--variant", "linear"]):
        with without_reports():
            assert main([*map(str, command), *part]) == 0
        assert message in capsys.readouterr().err
    shutil.rmtree(run)
    (out / "results.json").unlink()
    with without_reports():
        assert main(list(map(str, command))) == 0
    assert message not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "tinyworld/gpt2"], "(models.base.name is 'tinyworld/gpt-neox' there, 'tinyworld/gpt2' here)"),
        (
            ["--model", MODEL, "--model", "tinyworld/gpt2"],
            "(models.gpt-neox.name is not set there, 'tinyworld/gpt-neox' here)",
        ),
        (["--dtype", "bfloat16"], "(models.base.dtype is 'float32' there, 'bfloat16' here)"),
        (["--tasks", "tinyworld_endings"], "(settings.tasks is ['tinyworld_cloze'] there, ['tinyworld_endings'] here)"),
        (["--limit", "2"], "holds 3 documents of tinyworld_cloze, and --limit asks for the first 2"),
        (["--max-length", "64"], "(settings.max_length is not set there, 64 here)"),
        (["--patch", "PATCH"], "(models."),
        (["--token-budget", "100", "--allow-unknown-base"], None),
    ],
)
def test_one_folder_takes_one_evaluation(options, expected, folders, capsys):
    before = content(folders["evaluation"])
    given = [str(folders["patch"]) if option == "PATCH" else option for option in options]
    model = [] if "--model" in options else ["--model", MODEL]
    code = main([*EVAL, *model, "--output", str(folders["evaluation"]), *given])
    error = capsys.readouterr().err
    if expected is None:
        assert code == 0
        return
    assert code == 2
    assert expected in error
    assert "choose another --output" in error
    assert content(folders["evaluation"]) == before


def test_a_patch_or_a_base_that_was_changed_is_another_evaluation(folders, tmp_path, capsys, monkeypatch):
    from hfpatch.runs import variants

    shutil.copytree(folders["patch"], tmp_path / "patch")
    arguments = [*EVAL, "--model", MODEL, "--patch", str(tmp_path / "patch"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    (tmp_path / "patch" / "README.md").write_text("another card")
    assert main(arguments) == 0
    file = tmp_path / "patch" / "pre_projection" / "adapter_config.json"
    file.write_text(file.read_text() + "\n")
    assert main(arguments) == 2
    assert "holds another evaluation (models.patch.patch is" in capsys.readouterr().err
    file.write_text(file.read_text()[:-1])
    load = variants.load_base
    monkeypatch.setattr(variants, "load_base", lambda *given, **more: replace(load(*given, **more), sha256="other"))
    assert main(arguments) == 2
    assert "models.patch.sha256 is" in capsys.readouterr().err
