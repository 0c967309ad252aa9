"""`--dry-run`: the graph of units, and how long it takes on N devices."""

from types import SimpleNamespace

import pytest
from tiny_runs import small_recipe

from hfpatch.cli.engines import EngineCommand, print_preview
from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import previewing
from hfpatch.runs.engines import processes
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.runs.plan import plan_runs
from hfpatch.runs.previewing import preview

SECONDS = {"evaluate": 2.0, "tune": 3.0, "train": 10.0}


def test_the_time_on_many_devices_is_that_of_the_graph(tmp_path, monkeypatch, capsys):
    tuned = small_recipe("tinyworld/gpt-neox", tuning={"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 1})
    measured = SimpleNamespace(
        words="A few were measured.", work_of=lambda unit: SimpleNamespace(seconds=SECONDS[unit.action])
    )
    monkeypatch.setattr(previewing, "measure", lambda *_, **__: measured)
    monkeypatch.setattr(processes, "WorkerProcess", None)  # none is started
    shown = preview(tuned, tmp_path / "out", engine=EngineSettings(jobs=2))
    assert not (tmp_path / "out").exists()
    assert (len(shown.steps), sum(step.optional for step in shown.steps), shown.devices) == (2 + 4 + 4 + 8, 4, 2)
    assert shown.duration(1) == 2 + 4 * 3 + 4 * (10 + 2)
    assert shown.duration(2) == (2 + 4 * 3 + 4 * (10 + 2)) / 2
    assert shown.duration(4) == shown.duration(100) == 2 + 3 + 10 + 2  # the longest chain
    print_preview(tuned, tmp_path / "out", engine=EngineSettings(jobs=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["2", "check", "baseline", "baseline", "·", "seed", "0", "1"]
    assert lines[-6].startswith("18 units, 0 of them complete, 4 of them only if tuning needs other rates")
    assert lines[-4] == "on 2 at a time: 31 s <- as asked"
    assert lines[-1] == "times: A few were measured; loading and saving are left out"
    assert [line.split("  ")[0] for line in lines if "3-10" in line] == ["11", "13", "15", "17"]
    training = {"steps": 3, "warmup_steps": 1, "batch_size": 4, "seeds": {"looks": [2, 3]}}
    print_preview(small_recipe("tinyworld/gpt-neox", training=training), tmp_path / "out")
    assert ", 4 of them only if a look asks for more seeds (not" in capsys.readouterr().out


def test_what_is_complete_takes_no_time_and_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(previewing, "SECONDS", 0.1)
    study = StudyRecipe.model_validate(
        {
            "name": "small",
            "architecture": {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32},
            "tokenizer": {"path": "tinyworld/gpt2"},
            "data": {"source": "tinyworld/base", "block_size": 32, "held_out": 5, "max_documents": 60},
            "training": {"epochs": 2, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": [0, 1]},
            "baseline": "one",
            "variants": {"one": {}, "two": {}},
        }
    )
    out = tmp_path / "out"
    out.mkdir()
    (out / "recipe.yaml").write_text(study.to_yaml())
    units = plan_runs(study, out).units
    for unit in units[:4]:  # two runs
        unit.run.folder.mkdir(parents=True, exist_ok=True)
        unit.marker.write_text("{}")
    with pytest.raises(HfpatchError, match="unfinished run"):
        preview(study, out)
    shown = preview(study, out, resume=True)
    assert [step.seconds > 0 for step in shown.steps] == [False] * 4 + [True] * 4
    assert shown.source.startswith("Sampled: ")
    for unit in units[4:]:
        unit.run.folder.mkdir(parents=True, exist_ok=True)
        unit.marker.write_text("{}")
    monkeypatch.setattr(previewing, "measure", None)  # not called
    done = preview(study, out, resume=True)
    assert (done.duration(1), done.source) == (0.0, "")


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--ray"], ["--ray", "local"]),
        (["--ray", "r"], ["--ray", "local", "r"]),
        (["--ray", "training.steps=3"], ["--ray", "local", "training.steps=3"]),
        (["r", "--ray", "--resume"], ["r", "--ray", "local", "--resume"]),
        (["--ray", "auto", "a=b:1"], ["--ray", "auto", "a=b:1"]),
        (["--ray", "ray://head:10001"], ["--ray", "ray://head:10001"]),
        (["--ray", "10.0.0.1:6379"], ["--ray", "10.0.0.1:6379"]),
    ],
)
def test_ray_without_an_address_is_this_machine(words, arguments):
    command = EngineCommand("any", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    assert command.make_context("any", words).args == arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "--jobs 0: must be positive"),
        ({"jobs": 2, "gpus_per_run": 1.5}, "more than one GPU must be a whole number"),
        ({"jobs": 2, "gpus_per_run": float("inf")}, "more than one GPU must be a whole number"),
        ({"gpus_per_run": 1.0}, "go with --jobs N or --ray"),
        ({"jobs": 1, "gpus_per_run": 4.0, "processes_per_run": 2}, "one process for each of its GPUs"),
        ({"jobs": 1, "gpus_per_run": 0.5, "processes_per_run": 2}, "one process for each of its GPUs"),
        ({"jobs": 1, "launch_config": "no.yaml"}, "a training of one process has none"),
        ({"jobs": 1, "processes_per_run": 2, "launch_config": "no.yaml"}, "there is no such file"),
    ],
)
def test_options_that_contradict_are_one_line(options, message):
    with pytest.raises(HfpatchError, match=message) as caught:
        EngineSettings(**options)
    assert "\n" not in str(caught.value)
