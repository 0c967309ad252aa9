"""The command line: help in a blink, every mistake one line and exit code 2."""

import importlib
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import huggingface_hub.constants
import pytest
import torch
from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TextColumn
from transformers import LlamaConfig, MambaConfig, ZambaConfig

import hfpatch
from hfpatch import HfpatchError
from hfpatch.__main__ import main
from hfpatch.cli.progress import LiveProgress, PlainProgress, TableProgress, choose_progress
from hfpatch.promises import PROMISES
from hfpatch.results import load_results
from hfpatch.runs import Progress
from hfpatch.runs.locks import hold
from hfpatch.support import ranks
from hfpatch.training.interruption import Terminated
from hfpatch.training.records import StepRecord

COMMANDS = ["compare", "train", "eval", "report", "check", "inspect"]
COMMANDS += ["pretrain", "tokenize", "plan", "explore", "push", "export"]
RECIPE = """\
name: small
data: {block_size: 32, max_documents: 60}
training: {steps: 3, warmup_steps: 1, batch_size: 2}
evaluation: {tasks: [tinyworld_cloze], limit: 4}
methods:
  baseline: []
  pre_projection:
    - type: pre_projection
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def refused(capsys, *arguments: object) -> str:
    """Run hfpatch, expect exit code 2 and exactly one line on standard error, and return that line."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("hfpatch: error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert not any("Traceback" in line for line in lines)
    return errors[0]


@pytest.mark.parametrize("command", [["compare"], ["train", "--method", "pre_projection"], ["pretrain"], ["tokenize"]])
def test_a_data_dir_is_the_recipe_s(command, recipe, tmp_path, monkeypatch):
    """As data_dir=DIR would be, also where the folder's name needs quotes in YAML."""
    seen = []
    name = "load_recipe" if command[0] in ("compare", "train") else "load_pretrain_or_study"
    module = "hfpatch.recipes.comparison" if name == "load_recipe" else "hfpatch.recipes.pretraining"
    load = getattr(importlib.import_module(module), name)

    def loaded(*args, **options):
        seen.append(load(*args, **options).data_dir)
        raise HfpatchError("enough")

    monkeypatch.setattr(f"{module}.{name}", loaded)
    file = recipe if name == "load_recipe" else "queries-books"
    assert main([*command, str(file), "--data-dir", str(tmp_path / "a: #b")]) == 2
    assert seen == [tmp_path / "a: #b"]


def cpu_seconds(*arguments):
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_takes_little_more_time_than_importing_typer_and_rich():
    libraries = "import typer, rich.console, rich.table"
    seconds = [(cpu_seconds("-m", "hfpatch", "--help"), cpu_seconds("-c", libraries)) for _ in range(5)]
    ours, peer = map(min, zip(*seconds, strict=True))
    assert ours < 2.5 * peer  # 1.4 on an idle machine


@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("bash", "hfpatch ev", ["eval"]),
        ("bash", "hfpatch eval --ou", ["--output"]),
        ("bash", "hfpatch check tinyworld/gpt2 --method lora --j", ["--json"]),
        ("zsh", "hfpatch ev", ['_arguments \'*: :(("eval":"Evaluate a model, bare or with each of..."))\'']),
        (None, "hfpatch --help", None),
    ],
)
def test_completion_and_help_import_nothing_heavy(shell, words, expected):
    code = (
        "import sys; from hfpatch.__main__ import main; code = main();"
        "heavy = 'pydantic rich rich.markdown typer.rich_utils yaml torch transformers peft lm_eval datasets';"
        "print(*sorted(set(heavy.split()) & set(sys.modules))); sys.exit(code)"
    )
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_TYPER_COMPLETE_ARGS": words}
    variables = {"_HFPATCH_COMPLETE": f"complete_{shell}", **asked} if shell else {}
    arguments = [] if shell else words.split()[1:]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    *answers, loaded = done.stdout.splitlines()
    assert loaded == ("" if shell else "rich")
    assert expected is None or answers == expected


def test_the_version_the_help_and_that_of_each_command_with_an_example(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hfpatch {hfpatch.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert command in out
        assert main([command, "--help"]) == 0
        assert f"Example: hfpatch {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [["train"], ["nonsense"], ["compare"], ["eval", "--limit", "x"], ["report"]])
def test_wrong_usage_exits_with_2(capsys, arguments):
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_wrong_usage_under_a_launcher_is_said_by_one_process(capsys, monkeypatch, rank, lines):
    monkeypatch.setattr(ranks, "_SILENCE_S", 0.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert main(["report", "--markdwon"]) == 2
    said = capsys.readouterr().err
    assert said.count("No such option: --markdwon") == lines
    assert bool(said) == bool(lines)


def test_the_script_and_the_module_are_the_same():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="hfpatch")
    assert script.value == "hfpatch.__main__:main"
    done = subprocess.run([sys.executable, "-m", "hfpatch", "compare", "absent.yaml"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hfpatch: error: absent.yaml: no such file")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("training:", "trainig:", "did you mean 'training'"),
        ("type: pre_projection", "type: pre_projektion", "did you mean 'pre_projection'"),
        ("type: pre_projection", "type: pre_projection\n      expansoin: 2", "did you mean 'expansion'"),
        ("type: pre_projection", "type: pre_projection\n      activation: sillu", "sillu"),
        ("type: pre_projection", "type: pre_projection\n      layers_to_transform: [99]", "99"),
        ("type: pre_projection", "type: nonlinear_query\n      rank: 0", "rank"),
        ("type: pre_projection", "type: lora\n      r: 0\n      target_modules: attention", "r"),
        ("name: small", "name: small\nmodel: {name: no/such-model}", "no/such-model"),
        ("name: small", "name: small\nmodel: {name: ./absent}", "absent"),
        ("tasks: [tinyworld_cloze]", "tasks: [tinyworld_close]", "did you mean 'tinyworld_cloze'"),
        ("data: {", "data: {source: absent.jsonl, ", "absent.jsonl"),
        ("data: {", "data: {source: tinyworld/shfted, ", "did you mean 'tinyworld/shifted'"),
        ("batch_size: 2", "batch_size: 100000", "fewer than one batch"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(capsys, tmp_path, recipe, monkeypatch, old, new, expected):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert old in RECIPE
    recipe.write_text(RECIPE.replace(old, new))
    out = tmp_path / "out"
    assert expected in refused(capsys, "compare", recipe, "--out", out)
    assert not (out / "results.json").exists()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["--effect", "2"], "--effect 2: must lie between 0 and 1"),
        (["methods.x=[{type: ia3, match: pre_projection}]"], "ia3 has no size to solve for"),
        (["evaluation.tasks=[tinyworld_close]"], "did you mean 'tinyworld_cloze'"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(capsys, recipe, tmp_path, monkeypatch, wrong, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, "plan", recipe, *wrong)
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("method", "expected"), [("preprojection", "did you mean 'pre_projection'"), ("baseline", "nothing to train")]
)
def test_a_method_that_cannot_be_trained_is_one_line(capsys, recipe, tmp_path, method, expected):
    assert expected in refused(capsys, "train", recipe, "--method", method, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_too_little_memory_is_one_line_and_other_errors_are_not(capsys, recipe, tmp_path, monkeypatch, kind):
    huge = "methods.x=[{type: lora, r: 1000000000000000, target_modules: attention}]"
    assert "not enough memory" in refused(capsys, "compare", recipe, huge, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "results.json").exists()

    def fail(*_, **__):
        raise kind("sizes do not match")

    monkeypatch.setattr("hfpatch.recipes.comparison.load_recipe", fail)
    if kind is MemoryError:
        assert "not enough memory" in refused(capsys, "compare", recipe)
    else:
        with pytest.raises(RuntimeError, match="sizes do not match"):
            main(["compare", str(recipe)])


def test_compare_and_report_print_the_table_and_the_report(capsys, tmp_path, recipe):
    out = tmp_path / "out"
    for arguments in (["compare", str(recipe), "--out", str(out)], ["report", str(out)]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("baseline", "pre_projection", "tinyworld_cloze", "not tuned"))
        assert f"report: {out / 'report.html'}" in shown


MORE = f"""{RECIPE}\
  lora: [{{type: lora, match: pre_projection}}]
  skip: [{{type: pre_projection, expansion: 0, content_skip: true}}]
"""


def test_some_methods_of_a_recipe_are_run_and_resume_adds_others(capsys, tmp_path, recipe):
    recipe.write_text(MORE)
    out = tmp_path / "out"
    resumed = ["compare", str(recipe), "--out", str(out), "--resume"]
    assert main(["compare", str(recipe), "--methods", "pre_projection", "--out", str(out)]) == 0
    assert "note: pre_projection is not compared with lora, which --methods leaves out" in capsys.readouterr().err
    assert list(load_results(out).methods) == ["baseline", "pre_projection"]
    trained = (out / "runs" / "pre_projection" / "seed-0" / "training.json").read_bytes()
    assert main([*resumed, "--methods", "skip"]) == 0
    assert list(load_results(out).methods) == ["baseline", "pre_projection", "skip"]
    capsys.readouterr()
    assert main(resumed) == 0
    assert "note:" not in capsys.readouterr().err
    whole, alone = load_results(out), tmp_path / "alone"
    assert (out / "runs" / "pre_projection" / "seed-0" / "training.json").read_bytes() == trained
    assert main(["compare", str(recipe), "--out", str(alone)]) == 0
    assert list(whole.methods) == ["baseline", "pre_projection", "lora", "skip"]
    assert whole.comparisons == load_results(alone).comparisons
    capsys.readouterr()
    assert main(["report", str(out), "--methods", "skip", "--out", str(tmp_path / "shown")]) == 0
    shown = capsys.readouterr().out
    assert "Shown are 1 of 3 methods" in shown.replace("\n", " ")
    assert "lora" not in shown.partition("report: ")[0].partition("·")[0]
    refused(capsys, "compare", recipe, "--methods", "lora", "--out", out)
    assert main([*resumed, "labels.skip=Skip only"]) == 0
    assert "Skip only" in capsys.readouterr().out
    assert load_results(out).methods["skip"].label == "Skip only"
    assert (out / "runs" / "pre_projection" / "seed-0" / "training.json").read_bytes() == trained


@pytest.mark.parametrize(("command", "methods"), [("compare", "lora"), ("plan", "pre_projection,lroa"), ("plan", ",")])
def test_methods_that_cannot_be_alone_are_one_line(capsys, tmp_path, recipe, monkeypatch, command, methods):
    monkeypatch.chdir(tmp_path)
    recipe.write_text(MORE)
    assert "lora" in refused(capsys, command, recipe, "--methods", methods)
    assert list(tmp_path.iterdir()) == [recipe]


def test_one_report_of_two_runs_and_the_export_of_a_patch(capsys, tmp_path, recipe):
    for seed in (0, 1):
        assert main(["compare", str(recipe), f"training.seeds=[{seed}]", "--out", str(tmp_path / f"run{seed}")]) == 0
    capsys.readouterr()
    assert main(["report", *(str(tmp_path / name) for name in ("run0", "run1")), "--out", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'both' / 'report.html'}\n"
    assert "pre_projection (run1)" in (tmp_path / "both" / "report.md").read_text()
    patch = tmp_path / "run0" / "runs" / "pre_projection" / "seed-0" / "patch"
    assert "## Data" in (patch / "README.md").read_text()
    assert main(["export", str(patch)]) == 0
    assert "HfpatchGPTNeoXForCausalLM, 163,840 added parameters" in capsys.readouterr().out
    assert (patch.with_name("patch-standalone") / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted; "), (Terminated(7), 128 + 15, "SIGTERM after step 7, which is saved; ")],
)
def test_an_end_by_a_signal_says_how_to_go_on(capsys, tmp_path, recipe, monkeypatch, end, code, said):
    def train(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr("hfpatch.runs.comparison.train", train)
    assert main(["train", str(recipe), "--method", "lora", "--out", str(tmp_path / "out")]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{said}the same command with --resume continues in {tmp_path / 'out'}" in line


def test_sigterm_outside_of_a_training_is_one_line_too(capsys, tmp_path, recipe, monkeypatch):
    def evaluate(*_: object, **__: object) -> None:
        with hold(tmp_path / "out", ["lora@seed-0"]):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hfpatch.runs.comparison.compare", evaluate)
    assert main(["compare", str(recipe), "--out", str(tmp_path / "out")]) == 128 + 15
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpatch: ended by SIGTERM; ")
    assert f"--resume continues in {tmp_path / 'out'}" in line
    assert not (tmp_path / "out" / ".locks").exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_train_runs_under_a_launcher_on_one_process_and_on_two(capsys, tmp_path, recipe, processes):
    launched, alone = tmp_path / "launched", tmp_path / "alone"
    sharded = str(Path(__file__).parents[2] / "docs" / "accelerate" / "fsdp2-cpu.yaml")
    options = ["--cpu", "--num_processes=1"] if processes == 1 else ["--config_file", sharded, "--main_process_port=0"]
    command = ["accelerate.commands.launch", *options, "-m", "hfpatch"]
    arguments = ["train", str(recipe), "--method", "pre_projection", "--out"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = forked.python(["-m", *command, *arguments, str(launched)], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("patch: ") == 1
    assert main([*arguments, str(alone)]) == 0
    metrics = [out / "runs" / "pre_projection" / "seed-0" / "metrics.jsonl" for out in (launched, alone)]
    ours, theirs = ([json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in metrics)
    assert ours == pytest.approx(theirs, rel=1e-5)


def drive(progress: Progress) -> None:
    progress.started("lora · seed 0", 10)
    progress.stepped("lora · seed 0", StepRecord(step=3, loss=2.5, lr=1e-3, tokens=400, seconds=0.5))
    progress.evaluating("lora · seed 0", "cloze")
    progress.finished("lora · seed 0", "cloze acc 0.5")


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    with choose_progress() as progress:
        drive(progress)
    assert capsys.readouterr().err.splitlines() == [
        "lora · seed 0: training, 10 steps",
        "lora · seed 0: cloze",
        "lora · seed 0: done, cloze acc 0.5",
    ]
    monkeypatch.setattr("hfpatch.cli.progress.PLAIN_EVERY_S", -1.0)
    with choose_progress() as progress:
        drive(progress)
    assert re.search(r"step 3, loss 2.5000, 800 tokens/s, \d+\.\d GB, 0:00:04 left\n", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    with choose_progress() as progress:
        drive(progress)
    assert capsys.readouterr().err == ""


def test_scoring_shows_how_far_a_task_is(capsys, monkeypatch):
    monkeypatch.setattr("hfpatch.cli.progress.PLAIN_EVERY_S", -1.0)
    PlainProgress().scored("base", "cloze", 1200, 4000)
    assert capsys.readouterr().err == "base: cloze, 1,200 of 4,000 requests\n"
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with Bars(TextColumn("{task.completed} of {task.total}"), console=console, auto_refresh=False) as bars:
        LiveProgress(bars).scored("base", "cloze", 1200, 4000)
    assert "1200 of 4000" in console.file.getvalue()


def test_more_runs_than_the_terminal_has_lines_scroll_away():
    console = Console(file=io.StringIO(), width=100, height=4)
    with Bars(TextColumn("{task.description}"), console=console, auto_refresh=False) as bars:
        live = LiveProgress(bars)
        for run in "abcde":
            live.started(run, 3)
            live.finished(run, f"loss of {run}" if run != "b" else "")
        assert [task.description for task in bars.tasks] == ["c", "d", "e"]
    assert "a: done, loss of a\nb: done\n" in "\n".join(line.strip() for line in console.file.getvalue().splitlines())


def drive_two(progress):
    progress.opened("2 runs at a time", 6)
    for number, run in enumerate(("lora · seed 0", "pre · seed 0")):
        progress.placed(run, "train", f"node{number}:7")
        progress.started(run, 1000)
        progress.stepped(run, StepRecord(step=30 + number, loss=2.5, lr=1e-3, tokens=4000, seconds=2.0))


def test_runs_beside_each_other_are_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("hfpatch.cli.progress.PLAIN_EVERY_S", -1.0)
    with choose_progress(parallel=True) as progress:
        drive_two(progress)
        progress.placed("third · seed 0", "evaluate", "node2:7")
        progress.scored("third · seed 0", "cloze", 20, 5153)
        progress.lost("pre · seed 0", "BrokenProcessPool")
        progress.left("lora · seed 0", 5)
        progress.finished("lora · seed 0", "cloze acc 0.5")
        progress.left("pre · seed 0", 4, "pre · seed 0: no")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["6 units of work, 2 runs at a time", "lora · seed 0: train on node0:7"]
    runs = "lora · seed 0 train 30 / 1,000 loss 2.5000, pre · seed 0 train 31 / 1,000 loss 2.5000"
    assert lines[-6] == f"0 of 6 units done; at work: {runs}"
    assert lines[-4] == f"0 of 6 units done; at work: {runs}, third · seed 0 evaluate cloze 20 / 5,153"
    assert lines[-3].startswith("pre · seed 0: its worker ended (BrokenProcessPool); another one goes on")
    assert lines[-2:] == ["lora · seed 0: done, cloze acc 0.5", "failed: pre · seed 0: no"]


def test_runs_beside_each_other_are_one_table_in_a_terminal():
    console = Console(file=io.StringIO(), width=100, height=8, force_terminal=True)
    progress = TableProgress(console)
    with progress.live:
        drive_two(progress)
        progress.placed("third · seed 0", "evaluate", "node2:7")
        progress.placed("last · seed 0", "evaluate", "node2:8")
        progress.scored("last · seed 0", "cloze", 2000, 5153)
        progress.left("lora · seed 0", 5)
        plain = Console(file=io.StringIO(), width=100)
        plain.print(progress.table())
        assert [line.split() for line in plain.file.getvalue().splitlines()] == [
            ["run", "state", "node", "step", "loss", "tokens/s"],
            ["pre", "·", "seed", "0", "train", "node1:7", "31", "/", "1,000", "2.5000", "2,000"],
            ["third", "·", "seed", "0", "evaluate", "node2:7"],
            ["last", "·", "seed", "0", "evaluate", "cloze", "node2:8", "2,000", "/", "5,153"],
            ["1", "of", "6", "units", "done"],
        ]
        progress.placed("fourth · seed 0", "evaluate", "node3:7")
        plain.print(progress.table())
        assert "1 of the runs at work are not shown" in plain.file.getvalue()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_output_folder_without_permission_is_one_line(capsys, tmp_path, recipe):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "cannot be written" in refused(capsys, "compare", recipe, "--out", locked / "out")


def test_models_and_patches_that_cannot_be_had_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "no/such-model" in refused(capsys, "inspect", "no/such-model")
    assert "int8" in refused(capsys, "inspect", "tinyworld/gpt-neox", "--dtype", "int8")
    assert str(tmp_path) in refused(capsys, "inspect", "tinyworld/gpt-neox", "--patch", tmp_path)
    arguments = ["eval", "--model", "tinyworld/gpt-neox"]
    assert "did you mean 'tinyworld_cloze'" in refused(capsys, *arguments, "--tasks", "tinyworld_close")
    assert "tasks" in refused(capsys, *arguments, "--tasks", ",")
    arguments += ["--tasks", "tinyworld_questions", "--cluster"]
    assert "no column 'pasage' to be the cluster" in refused(capsys, *arguments, "tinyworld_questions=pasage")
    assert "cluster names 'boolq', which is not among tasks" in refused(capsys, *arguments, "boolq=passage")
    assert "--cluster kind: write it as TASK=COLUMN" in refused(capsys, *arguments, "kind")


def printed_json(capsys, *arguments):
    """Run hfpatch, and return the JSON that it prints."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_keeps_answers_for_the_next_call(capsys, monkeypatch, tmp_path):
    from hfpatch.evaluation.scorer import Scorer

    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path))
    scored = []
    score = Scorer._features
    monkeypatch.setattr(Scorer, "_features", lambda self, batch, *rest: scored.append(1) or score(self, batch, *rest))
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "8"]

    def scores(*options):
        scored.clear()
        results = printed_json(capsys, *arguments, *options)
        return len(scored), results["variants"]["base"]["scores"]["tinyworld_cloze"]

    cost, first = scores()
    assert cost > 0
    assert first["n"] == 8
    assert 0 <= first["metrics"]["acc"] <= 1
    assert "reused" not in first
    assert len(list((tmp_path / "answers").glob("*.jsonl"))) == 1
    assert scores() == (0, first)
    assert scores("--no-cache") == (cost, first)
    assert scores("--dtype", "bfloat16")[0] == cost
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tinyworld_cloze" in shown
    assert "8 answers were kept from an earlier call" in shown
    assert main([*arguments, "--no-cache"]) == 0
    assert "answers were kept" not in capsys.readouterr().out


def test_an_interrupted_eval_says_what_is_kept(capsys, monkeypatch, tmp_path):
    from hfpatch.runs import evaluation

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(evaluation, "run_tasks", interrupt)
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze"]
    for options, kept in (((), "answers"), (("--output", str(tmp_path / "out")), "out")):
        assert main([*arguments, *options]) == 130
        assert f"the same command continues from what is in {tmp_path / kept}" in capsys.readouterr().err
    assert main([*arguments, "--no-cache"]) == 130
    assert "nothing is kept with --no-cache" in capsys.readouterr().err


@pytest.fixture
def two_patches(tmp_path):
    """Two patches of the tiny world's GPT-NeoX: one that changes nothing and one that spoils it."""
    from hfpatch import PreProjectionConfig, patch, save_patch, unpatch
    from hfpatch.surgery.bases import load_base

    model = load_base("tinyworld/gpt-neox").model
    for name, std in (("same", 0.0), ("spoilt", 0.3)):
        patch(model, PreProjectionConfig(content_skip=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += std * torch.randn_like(parameter)
        save_patch(model, tmp_path / name / "patch")
        unpatch(model)
    return [tmp_path / name / "patch" for name in ("same", "spoilt")]


def test_eval_compares_several_patches_with_one_base(capsys, tmp_path, two_patches):
    out = tmp_path / "out"
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "60", "--baseline"]
    for patch in two_patches:
        arguments += ["--patch", str(patch)]
    as_json = printed_json(capsys, *arguments, "--output", out)
    assert as_json == json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert as_json == load_results(out, "evaluation").to_json()
    assert (as_json["schema"], as_json["kind"]) == (2, "evaluation")
    assert list(as_json["variants"]) == ["base", "same-patch", "spoilt-patch"]
    base, same, spoilt = (variant["scores"]["tinyworld_cloze"]["metrics"] for variant in as_json["variants"].values())
    assert same == pytest.approx(base)
    assert spoilt["acc"] < base["acc"] - 0.3
    same, spoilt = as_json["verdicts"]
    assert (same["method"], same["difference"], same["outcome"]) == ("same-patch", 0, "not decided")
    assert (spoilt["outcome"], spoilt["metric"], spoilt["family"]) == ("worse", "bits_per_byte", 2)
    assert [(pair["method"], pair["metric"]) for pair in as_json["comparisons"]] == [
        (patch, metric) for metric in ("acc", "bits_per_byte") for patch in ("same-patch", "spoilt-patch")
    ]
    for label in as_json["variants"]:
        assert len((out / label / "tinyworld_cloze.jsonl").read_text(encoding="utf-8").splitlines()) == 60
    assert len(list((out / "answers").glob("*.jsonl"))) == 3
    assert main([*arguments, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "worse" in printed
    assert "verdict" in printed
    assert "answers were kept" in printed
    assert main(["report", str(out)]) == 0
    again = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "kept" not in line] == again.splitlines()[:-1]
    assert again.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert "named twice" in refused(capsys, *arguments, "--patch", two_patches[0])
    assert "no patch here" in refused(capsys, *arguments, "--patch", tmp_path)
    assert "holds no evaluation" in refused(capsys, *arguments, "--output", two_patches[0])
    (tmp_path / "dead").symlink_to(tmp_path / "unmounted")
    assert "is a link to a folder that does not exist" in refused(capsys, *arguments, "--output", tmp_path / "dead")


def test_eval_scales_a_patch_from_the_base_to_the_patch(capsys, tmp_path, two_patches):
    spoilt = two_patches[1]
    arguments = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "20"]
    variants = printed_json(capsys, *arguments, "--patch", spoilt, "--scale", "0,0.5,1", "--baseline")["variants"]
    assert list(variants) == ["base", "patch at 0", "patch at 0.5", "patch"]
    assert [variant.get("scale") for variant in variants.values()] == [None, 0, 0.5, None]
    bits = [variant["scores"]["tinyworld_cloze"]["metrics"]["bits_per_byte"] for variant in variants.values()]
    assert bits[1] == pytest.approx(bits[0], rel=1e-6)
    assert bits[2] != pytest.approx(bits[1], rel=1e-3)
    assert bits[3] != pytest.approx(bits[2], rel=1e-3)
    (alone,) = printed_json(capsys, *arguments, "--patch", spoilt)["variants"].values()
    assert alone["scores"]["tinyworld_cloze"]["metrics"]["bits_per_byte"] == pytest.approx(bits[3], rel=1e-6)
    assert "give numbers with commas" in refused(capsys, *arguments, "--patch", spoilt, "--scale", "half")
    assert "different finite numbers" in refused(capsys, *arguments, "--patch", spoilt, "--scale", "1,inf")
    assert "no patch to scale" in refused(capsys, *arguments, "--scale", "0.5")
    assert main(["export", str(spoilt), "--out", str(tmp_path / "half"), "--scale", "0.5"]) == 0
    arguments[2] = str(tmp_path / "half")
    (exported,) = printed_json(capsys, *arguments, "--trust-remote-code")["variants"].values()
    assert exported["scores"]["tinyworld_cloze"]["metrics"]["bits_per_byte"] == pytest.approx(bits[2], rel=1e-5)


def test_eval_compares_whole_models(capsys, tmp_path):
    out = tmp_path / "out"
    models = ["--model", "tinyworld/gpt-neox", "--model", "tinyworld/gpt2"]
    tasks = ["--tasks", "tinyworld_cloze,tinyworld_questions", "--limit", "60"]
    arguments = ["eval", *models, *tasks, "--cluster", "tinyworld_questions=passage", "--output", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    as_json = printed_json(capsys, *arguments)
    assert as_json == load_results(out, "evaluation").to_json()
    assert {label: variant["model"]["name"] for label, variant in as_json["variants"].items()} == {
        "gpt-neox": "tinyworld/gpt-neox", "gpt2": "tinyworld/gpt2",
    }  # fmt: skip
    assert [(one["method"], one["reference"]) for one in as_json["comparisons"][:2]] == [("gpt2", "gpt-neox")] * 2
    assert as_json["verdicts"][0]["outcome"] == "worse"
    assert as_json["comparisons"][1]["clusters"]["column"] == "passage"
    assert main(["report", str(out)]) == 0
    again = capsys.readouterr().out
    assert printed == "\n".join(again.splitlines()[:-1]) + "\n"
    assert "Differences between the models" in printed
    assert (out / "results.csv").read_text(encoding="utf-8").splitlines()[1].startswith("gpt-neox,,0,tinyworld_cloze")
    refusals = {
        ("--baseline",): "--baseline: goes with one --model, not with 2",
        ("--patch", "p"): "--patch: goes with one --model, not with 2",
        ("--revision", "main"): "write the revision of each model as --model tinyworld/gpt-neox@main",
        ("--model", "tinyworld/gpt2"): "--model tinyworld/gpt2: named twice",
        ("--model", "x/y@"): "--model x/y@: no revision after the @",
        ("--model", "tinyworld/gpt3"): "tinyworld has no checkpoint 'gpt3'",
        ("--model", "tinyworld/gpt2@main"): "revision main: tinyworld/gpt2 is embedded in hfpatch",
    }
    for options, message in refusals.items():
        assert message in refused(capsys, "eval", *models, *options, *tasks)


def test_eval_stops_before_the_patches_of_a_base_outside_its_known_score(capsys, monkeypatch, two_patches):
    from hfpatch.evaluation import known_scores

    published = known_scores.KnownScore("tinyworld/gpt-neox", ("main",), "tinyworld_cloze", "acc", 0.1, 200, "x")
    monkeypatch.setattr(known_scores, "KNOWN_SCORES", (published,))
    bare = ["eval", "--model", "tinyworld/gpt-neox", "--tasks", "tinyworld_cloze", "--limit", "40"]
    assert main(bare) == 0
    assert "but 0.100" in " ".join(capsys.readouterr().out.split())
    compared = [*bare, "--baseline", "--patch", str(two_patches[0])]
    assert "--allow-unknown-base evaluates the patches" in refused(capsys, *compared)
    assert main([*compared, "--allow-unknown-base"]) == 0


@pytest.mark.parametrize("command", ["eval", "inspect", "export"])
def test_a_patch_of_another_base_needs_an_option(capsys, tmp_path, command):
    from hfpatch import PreProjectionConfig, patch, save_patch
    from hfpatch.surgery.bases import load_base

    model = load_base("tinyworld/gpt-neox").model
    model.gpt_neox.layers[1].mlp.dense_4h_to_h.weight.data.view(-1)[1234] += 1e-3
    folder = str(save_patch(patch(model, PreProjectionConfig()), tmp_path / "patch"))
    name = "tinyworld/gpt-neox"
    arguments = {
        "eval": ["eval", "--model", name, "--tasks", "tinyworld_cloze", "--limit", "2", "--patch", folder],
        "inspect": ["inspect", name, "--tokens", "32", "--patch", folder],
        "export": ["export", folder, "--model", name],
    }[command]
    message = refused(capsys, *arguments)
    assert "made for another base" in message
    assert "its weights differ" in message
    assert "--allow-other-base" in message
    assert main([*arguments, "--allow-other-base"]) == 0


def test_pretrain_writes_a_model_and_refuses_a_wrong_architecture(capsys, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "name: tiny\n"
        "architecture: {model_type: gpt_neox, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}\n"
        "tokenizer: {train_vocab_size: 300}\n"
        "data: {source: tinyworld/base, block_size: 32, max_documents: 30}\n"
        "training: {steps: 2, warmup_steps: 1, batch_size: 2}\n"
    )
    out = tmp_path / "out"
    assert main(["pretrain", str(path), "--out", str(out)]) == 0
    assert f"model: {out / 'model'}" in capsys.readouterr().out
    assert (out / "model" / "model.safetensors").is_file()
    wrong = ["architecture.hiden_size=8", "--out", tmp_path / "other"]
    assert "did you mean 'hidden_size'" in refused(capsys, "pretrain", path, *wrong)


@pytest.mark.slow
def test_check_reports_the_promises(capsys):
    assert main(["check", "tinyworld/gpt-neox", "--json"]) == 0
    out, shown = capsys.readouterr()
    as_json = json.loads(out)
    assert "no-op at init" not in shown
    assert as_json["passed"]
    assert not as_json["refused"]
    assert [report["method"] for report in as_json["reports"]] == ["PreProjectionConfig", "NonlinearQueryConfig"]
    wrong = ["--method", "pre_projection", "content_skp=true"]
    assert "did you mean 'content_skip'" in refused(capsys, "check", "tinyworld/gpt-neox", *wrong)
    assert "options belong to a method" in refused(capsys, "check", "tinyworld/gpt-neox", "content_skip=true")


def big(tmp_path, config):
    config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_check_needs_no_weights_of_a_big_model(capsys, tmp_path):
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    began = time.monotonic()
    assert main(["check", big(tmp_path, config), "--config-only"]) == 0
    assert time.monotonic() - began < 120
    out, shown = capsys.readouterr()
    assert f"a tiny random twin of {tmp_path}: PreProjectionConfig in 2 blocks" in out
    assert "FAIL" not in out
    lines = [f"{method}: {name}" for method in ("pre_projection", "nonlinear_query") for name, _ in PROMISES]
    assert [line for line in shown.splitlines() if line in lines] == lines  # each promise before it is tested


@pytest.mark.slow
def test_check_says_what_an_architecture_refuses(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("hfpatch.promises.run.PROMISES", PROMISES[:1])  # to compile its Mamba layers takes 20 s
    folder = big(tmp_path, ZambaConfig())
    assert main(["check", folder, "--config-only"]) == 0
    assert "pre_projection: refused: no layer of this model can be changed: the branch feeds" in capsys.readouterr().out
    asked = ["--config-only", "--method", "pre_projection", "content_skip=true"]
    assert "the branch feeds the input of a Mamba layer" in refused(capsys, "check", folder, *asked)


def test_check_of_a_model_without_attention_is_one_line(capsys, tmp_path):
    assert "without softmax attention" in refused(capsys, "check", big(tmp_path, MambaConfig()), "--config-only")
