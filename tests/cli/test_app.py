"""The command line: help in a blink, every mistake one line and exit code 2."""

import importlib.metadata
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import forked
import pytest
import torch
from cli.conftest import RECIPE, refused
from tiny_runs import without_reports
from transformers import LlamaConfig, MambaConfig, ZambaConfig

import hfpatch
from hfpatch import HfpatchError
from hfpatch.__main__ import main
from hfpatch.cli.running import quiet_libraries
from hfpatch.promises import PROMISES
from hfpatch.results import load_results
from hfpatch.runs.locks import hold
from hfpatch.support import ranks
from hfpatch.training.interruption import Terminated

COMMANDS = ["compare", "train", "eval", "report", "check", "inspect"]
COMMANDS += ["pretrain", "tokenize", "plan", "explore", "push", "export"]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("command", "load"),
    [
        ("compare quickstart", "comparison.load_recipe"),
        ("train quickstart --method lora", "comparison.load_recipe"),
        ("pretrain queries-books", "pretraining.load_pretraining"),
        ("tokenize queries-books", "pretraining.load_pretraining"),
    ],
)
def test_a_data_dir_is_the_recipe_s(command, load, tmp_path, monkeypatch):
    """As data_dir=DIR would be, also where the folder's name needs quotes in YAML."""
    data_dirs, load = [], f"hfpatch.recipes.{load}"
    read = pkgutil.resolve_name(load)

    def loaded(*args, **options):
        data_dirs.append(read(*args, **options).data_dir)
        raise HfpatchError("enough")

    monkeypatch.setattr(load, loaded)
    assert main([*command.split(), "--data-dir", str(tmp_path / "a: #b")]) == 2
    assert data_dirs == [tmp_path / "a: #b"]


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
    printed = capsys.readouterr().err
    assert printed.count("No such option: --markdwon") == lines
    assert bool(printed) == bool(lines)


def test_the_script_and_the_module_are_the_same():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="hfpatch")
    assert script.value == "hfpatch.__main__:main"
    done = subprocess.run([sys.executable, "-m", "hfpatch", "compare", "absent.yaml"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hfpatch: error: absent.yaml: no such file")
    assert done.stderr.count("\n") == 1


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


MORE = f"""{RECIPE}\
  lora: [{{type: lora, match: pre_projection}}]
  skip: [{{type: pre_projection, expansion: 0, content_skip: true}}]
"""


def test_some_methods_of_a_recipe_are_run_and_resume_adds_others(capsys, tmp_path, recipe):
    recipe.write_text(MORE)
    out = tmp_path / "out"
    resumed = ["compare", str(recipe), "--out", str(out), "--resume"]
    with without_reports():
        assert main(["train", str(recipe), "--method", "pre_projection", "--out", str(out)]) == 0
        capsys.readouterr()
        assert main([*resumed, "--methods", "pre_projection"]) == 0
        printed, notes = capsys.readouterr()
        assert "note: pre_projection is not compared with lora, which --methods leaves out" in notes
        assert all(word in printed for word in ("baseline", "pre_projection", "tinyworld_cloze", "not tuned"))
        assert printed.endswith(f"report: {out / 'report.html'}\n")
        assert list(load_results(out).methods) == ["baseline", "pre_projection"]
        trained = (out / "runs" / "pre_projection" / "seed-0" / "training.json").read_bytes()
        assert main([*resumed, "--methods", "skip"]) == 0
        assert list(load_results(out).methods) == ["baseline", "pre_projection", "skip"]
        capsys.readouterr()
        assert main(resumed) == 0
        assert "note:" not in capsys.readouterr().err
        assert list(load_results(out).methods) == ["baseline", "pre_projection", "lora", "skip"]
    assert main(["report", str(out), "--methods", "skip", "--out", str(tmp_path / "shown")]) == 0
    shown = capsys.readouterr().out
    assert "Shown are 1 of 3 methods" in shown.replace("\n", " ")
    assert "lora" not in shown.partition("report: ")[0].partition("·")[0]
    refused(capsys, "compare", recipe, "--methods", "lora", "--out", out)
    with without_reports():
        assert main([*resumed, "labels.skip=Skip only"]) == 0
    assert "Skip only" in capsys.readouterr().out
    assert load_results(out).methods["skip"].label == "Skip only"
    assert (out / "runs" / "pre_projection" / "seed-0" / "training.json").read_bytes() == trained


@pytest.mark.parametrize(
    ("end", "code", "start"),
    [(KeyboardInterrupt(), 130, "interrupted; "), (Terminated(7), 128 + 15, "SIGTERM after step 7, which is saved; ")],
)
def test_an_end_by_a_signal_says_how_to_go_on(capsys, tmp_path, recipe, monkeypatch, end, code, start):
    def train(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr("hfpatch.runs.comparison.train", train)
    assert main(["train", str(recipe), "--method", "lora", "--out", str(tmp_path / "out")]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{start}the same command with --resume continues in {tmp_path / 'out'}" in line


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
    assert list((tmp_path / "out" / ".locks").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_train_runs_under_a_launcher(capsys, tmp_path, recipe):
    launched, alone = tmp_path / "launched", tmp_path / "alone"
    config = Path(__file__).parents[2] / "docs" / "accelerate" / "fsdp2-cpu.yaml"
    command = ["accelerate.commands.launch", "--config_file", config, "--main_process_port=0", "-m", "hfpatch"]
    arguments = ["train", str(recipe), "--method", "pre_projection", "--out"]
    done = forked.python(["-m", *command, *arguments, launched], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("patch: ") == 1
    assert main([*arguments, str(alone)]) == 0
    metrics = [out / "runs" / "pre_projection" / "seed-0" / "metrics.jsonl" for out in (launched, alone)]
    ours, theirs = ([json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in metrics)
    assert ours == pytest.approx(theirs, rel=1e-5)


LONG = "a" * 300
RUN = str(Path(__file__).parents[2] / "results" / "quickstart")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["explore", RUN, "--out", "."], ".: cannot be written"),
        (["explore", RUN, "--out", "/"], "/: cannot be written"),
        (["export", "."], ".: no patch here"),
        (["export", "/"], "/: no patch here"),
        (["export", __file__], "no patch here (it is a file)"),
        (["report", __file__], "no run here (it is a file)"),
        (["report", LONG], "File name too long"),
        (["compare", "quickstart", f"data.source={LONG}"], "File name too long; choose another path"),
        (["compare", "quickstart", f"model.name={LONG}"], "File name too long; choose another path"),
        (["compare", "quickstart", "--data-dir", "\udcff"], "data_dir is '\\udcff'; must be Unicode text"),
        (["compare", "quickstart", "--model", ""], "the model has no name"),
        (["compare", "quickstart", "model.name=no/such-model"], "no/such-model"),
        (["compare", "quickstart", "trainig.steps=1"], "did you mean 'training'"),
        (["compare", "quickstart", "evaluation.tasks=[tinyworld_close]"], "did you mean 'tinyworld_cloze'"),
        (["compare", "quickstart", "methods.pre_projection.0.expansoin=2"], "did you mean 'expansion'"),
        (["compare", "quickstart", "methods.pre_projection.0.layers_to_transform=[99]"], "layers [99] do not exist"),
        (["compare", "quickstart", "methods.a=[{type: lora, r: 0, target_modules: attention}]"], "methods.a"),
        (["compare", "quickstart", "--methods", "lora"], "--methods: lora has the size of"),
        (["plan", "quickstart", "--methods", "pre_projection,lroa"], "did you mean 'lora'"),
        (["plan", "quickstart", "--methods", ","], "--methods names no method"),
        (["check", "tinyworld/gpt2", "--config-only", "--dtype", "float16"], "the twin of --config-only is float32"),
        (["plan", "queries-books", "--model", "x"], "--model x: queries-books has variants, trained from scratch"),
        (["plan", "quickstart", "evaluation.tasks=[tinyworld_close]"], "did you mean 'tinyworld_cloze'"),
        (["pretrain", "tinyworld-gpt2", "data.max_documents=99", "architecture.n_embed=8"], "did you mean 'n_embd'"),
        (["inspect", "no/such-model"], "no/such-model"),
        (["inspect", "tinyworld/gpt2", "--dtype", "int8"], "int8"),
        (["inspect", "tinyworld/gpt2", "--out", "page.html"], "add --html"),
        (["inspect", "tinyworld/gpt2", "--patch", "."], ".: no patch here"),
        (["inspect", "tinyworld/gpt2", "--allow-other-base"], "--allow-other-base: there is no patch"),
        (["inspect", "tinyworld/gpt2", "--data-dir", "."], "--data-dir .: is for hub data sets; name one as --text"),
    ],
)
def test_a_path_or_an_option_that_cannot_be_used_is_one_line(capsys, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, *words)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("words", [["--out=~/x.html"], ["--out", "~/x.html"]])
def test_the_home_in_an_option_is_no_folder_of_that_name(capsys, tmp_path, monkeypatch, words):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["explore", RUN, *words]) == 0
    assert (tmp_path / "x.html").is_file()
    assert not (tmp_path / "~").exists()  # beside folders that libraries make in a home


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "? ? caf?"), ("cp1252", "? · café")])
def test_letters_that_the_output_lacks_are_replaced(encoding, shown):
    code = "from hfpatch.__main__ import main; main(['--version']); print('− · café')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout.decode(encoding).splitlines()[1] == shown


def test_a_warning_is_printed_once(capsys):
    with warnings.catch_warnings():
        quiet_libraries()
        for text in ("weights are\nin bfloat16", "weights are in bfloat16", "other"):
            warnings.simplefilter("always")
            warnings.warn(text, stacklevel=1)
    assert capsys.readouterr().err == "hfpatch: warning: weights are in bfloat16\nhfpatch: warning: other\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_output_folder_without_permission_is_one_line(capsys, tmp_path, recipe):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert "cannot be written" in refused(capsys, "compare", recipe, "--out", locked / "out")


def test_a_patch_of_another_base_needs_an_option(capsys, tmp_path):
    from hfpatch import PreProjectionConfig, patch, save_patch
    from hfpatch.surgery.bases import load_base

    model = load_base("tinyworld/gpt-neox").model
    model.gpt_neox.layers[1].mlp.dense_4h_to_h.weight.data.view(-1)[1234] += 1e-3
    folder = str(save_patch(patch(model, PreProjectionConfig()), tmp_path / "patch"))
    name = "tinyworld/gpt-neox"
    for arguments in (
        ["eval", "--model", name, "--tasks", "tinyworld_cloze", "--limit", "2", "--patch", folder],
        ["inspect", name, "--tokens", "32", "--patch", folder],
        ["export", folder, "--model", name],
    ):
        message = refused(capsys, *arguments)
        assert all(part in message for part in ("made for another base", "its weights differ", "--allow-other-base"))
        assert main([*arguments, "--allow-other-base"]) == 0


def test_check_reports_the_promises(capsys, monkeypatch):
    monkeypatch.setattr("hfpatch.promises.run.PROMISES", PROMISES[:2])  # test_run has all of them
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
    assert "write --method lora" in refused(capsys, "check", "tinyworld/gpt-neox", *wrong[:2], "type=lora")


def big(tmp_path, config):
    config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_check_needs_no_weights_of_a_big_model(capsys, tmp_path):
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    began = time.process_time()
    assert main(["check", big(tmp_path, config), "--config-only"]) == 0
    assert time.process_time() - began < 120
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
