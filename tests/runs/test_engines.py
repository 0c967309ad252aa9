"""Engines: whoever works on which unit in whatever order, the numbers are those of one process."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

import hfpatch.runs.comparison
import hfpatch.runs.study
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs import Progress, compare, locks, pretrain_study
from hfpatch.runs.engines import parallel
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.support.files import read_json, write_json
from hfpatch.tinyworld import documents
from hfpatch.training.architecture import build_model
from hfpatch.training.records import MetricsFile

ARCHITECTURE = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
DIFFERENT = {
    "seconds",
    "wall_s",
    "tokens_per_s",
    "peak_memory_bytes",
    "mfu",
    "seconds_per_step",
    "provenance",
    "commit",
    "started",
}
"""What depends on when and where a run took place."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(documents("base", count=50), 300)
    build_model(ARCHITECTURE, tokenizer=tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Recipe.model_validate(
        {
            "name": "small",
            "model": {"name": str(folder)},
            "data": {"block_size": 32, "max_documents": 30, "held_out": 5},
            "training": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "seeds": [0, 1], "save_every": 1},
            "tuning": {"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 1},
            "evaluation": {"tasks": ["tinyworld_cloze"], "limit": 4},
            "methods": {"baseline": [], "pre": [{"type": "pre_projection"}], "lora": [{"type": "lora", "r": 2}]},
        }
    )


@pytest.fixture(scope="module", autouse=True)
def _no_report():
    with pytest.MonkeyPatch.context() as patched:
        for module in (hfpatch.runs.comparison, hfpatch.runs.study):
            patched.setattr(module, "write_report", lambda _: None)
        yield


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    compare(recipe, out)
    return out


def numbers(value):
    """Return JSON values without those that depend on when and where a run took place."""
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items() if key not in DIFFERENT}
    return [numbers(each) for each in value] if isinstance(value, list) else value


def content(out: Path) -> dict:
    """Return every file of a run folder: numbers of JSON files, the bytes of others."""
    found = {}
    for path in sorted(each for each in out.rglob("*") if each.is_file()):
        if path.suffix == ".json":
            found[str(path.relative_to(out))] = numbers(read_json(path))
        elif path.suffix == ".jsonl":
            found[str(path.relative_to(out))] = [numbers(json.loads(line)) for line in path.open()]
        else:
            found[str(path.relative_to(out))] = path.read_bytes()
    return found


def assert_equal(out: Path, other: Path) -> None:
    found, expected = content(out), content(other)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name


class Log(Progress):
    def __init__(self):
        self.opened_with, self.nodes, self.done, self.errors = None, [], {}, []

    def opened(self, engine, units):
        self.opened_with = engine

    def placed(self, run, action, node):
        self.nodes.append((run, action, node))

    def finished(self, run, summary):
        self.done[run] = summary

    def failed(self, error):
        self.errors.append(error)


@pytest.fixture(scope="module")
def one_ray():
    """Ray on this machine, started once for all tests."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [EngineSettings(jobs=2), EngineSettings(ray="local")], ids=["jobs", "ray"])
def test_two_workers_give_the_numbers_of_one_process(recipe, straight, tmp_path, settings, request):
    if settings.ray:
        request.getfixturevalue("one_ray")
    out, log = tmp_path / "out", Log()
    compare(recipe, out, engine=settings, progress=log)
    assert_equal(out, straight)
    assert log.opened_with.startswith("2 runs at a time")
    assert len({node for _, _, node in log.nodes}) == 2
    trained = [(run, action) for run, action, _ in log.nodes]
    assert len(trained) == len(set(trained)) == 1 + 6 + 4 + 4
    assert len(log.done) == 6 + 5
    assert not (out / ".locks").exists()


@pytest.fixture
def begun(straight, tmp_path):
    """A copy of the complete comparison of which one run of LoRA is to be repeated."""
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    write_json(out / "results.json", {**read_json(out / "results.json"), "complete": False})
    shutil.rmtree(out / "runs" / "lora" / "seed-1")
    return out


@pytest.mark.slow
def test_a_failure_of_its_own_is_one_line_in_the_end_and_the_others_are_finished_first(recipe, straight, begun):
    broken = begun / "runs" / "lora" / "seed-1"
    (broken / "metrics.jsonl").mkdir(parents=True)  # no method is so bad
    shutil.rmtree(begun / "runs" / "pre" / "seed-1")
    log = Log()
    with pytest.raises(HfpatchError) as caught:
        compare(recipe, begun, resume=True, engine=EngineSettings(jobs=1), progress=log)
    assert re.fullmatch(
        rf"lora · seed 1: IsADirectoryError: .*; its traceback is in {broken}/error.txt \(1 unit that need "
        r"this left out\)",
        str(caught.value),
    )
    assert "Traceback" in (broken / "error.txt").read_text()
    assert [each[:2] for each in log.nodes] == [
        ("pre · seed 1", "train"),
        ("pre · seed 1", "evaluate"),
        ("lora · seed 1", "train"),
    ]
    assert read_json(begun / "runs" / "pre" / "seed-1" / "result.json")["evaluation"]
    assert not read_json(begun / "results.json")["complete"]
    shutil.rmtree(broken / "metrics.jsonl")
    compare(recipe, begun, resume=True)  # one process goes on where several left off
    (broken / "error.txt").unlink()
    assert_equal(begun, straight)


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 32, "biases": False}


@pytest.fixture(scope="module")
def study(recipe):
    return StudyRecipe.model_validate(
        {
            "name": "small",
            "architecture": GPT2,
            "tokenizer": {"path": recipe.model.name},
            "data": {"source": "tinyworld/base", "max_documents": 40, "block_size": 32, "held_out": 5},
            "training": {"steps": 150, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "save_every": 10},
            "baseline": "one",
            "variants": {"one": {}, "two": {}},
        }
    )


@pytest.fixture(scope="module")
def straight_study(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    pretrain_study(study, out)
    return out


class Kill(Log):
    """Sends a signal to the worker of a run once it has done some steps, so many times."""

    def __init__(self, run, number, times):
        super().__init__()
        self.run, self.number, self.times, self.reasons = run, number, times, []

    def stepped(self, run, record):
        if run == self.run and record.step > 20 and self.times:
            self.times -= 1
            node = [node for name, _, node in self.nodes if name == run][-1]
            os.kill(int(node.rpartition(":")[2]), self.number)

    def lost(self, run, reason):
        self.reasons.append(reason)


@pytest.fixture
def look_often(monkeypatch):
    monkeypatch.setattr(parallel, "POLL_S", 0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("look_often")
def test_a_run_whose_worker_is_killed_goes_on_elsewhere(study, straight_study, tmp_path):
    log = Kill("one · seed 0", signal.SIGKILL, 1)
    pretrain_study(study, tmp_path / "out", engine=EngineSettings(jobs=1), progress=log)
    assert [reason.partition(":")[0] for reason in log.reasons] == ["BrokenProcessPool"]
    assert [run for run, _, _ in log.nodes] == ["one · seed 0", "one · seed 0", "two · seed 0"]
    assert_equal(tmp_path / "out", straight_study)


@pytest.mark.slow
def test_a_run_shared_by_two_processes_that_cut_the_model(study, tmp_path):
    short = study.training.model_copy(update={"steps": 4, "lr": 1e-4})
    one = study.model_copy(update={"training": short, "variants": {"one": study.variants["one"]}})
    config = Path(__file__).parents[2] / "docs" / "accelerate" / "fsdp2-cpu.yaml"
    pretrain_study(one, tmp_path / "straight")
    settings = EngineSettings(jobs=1, processes_per_run=2, launch_config=str(config))
    pretrain_study(one, tmp_path / "out", engine=settings)
    losses = [
        [record.loss for record in MetricsFile(tmp_path / out / "runs/one/seed-0/metrics.jsonl").read()[1:]]
        for out in ("straight", "out")
    ]
    assert len(losses[1]) == 4
    assert losses[0] != losses[1]  # other sums: it was shared
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not (tmp_path / "out" / ".locks").exists()


class Tell(Log):
    """Writes down where a run is, and how far."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def stepped(self, run, record):
        self.file.write_text(f"{self.nodes[-1][2].rpartition(':')[2]} {record.step}")


def interrupted(study, out, number) -> int:
    """Run a study by one worker, send the driver a signal after some steps, and return the worker's process."""
    told = out.with_suffix(".told")
    told.unlink(missing_ok=True)
    driver = os.fork()
    if driver == 0:
        try:
            pretrain_study(study, out, resume=True, engine=EngineSettings(jobs=1), progress=Tell(told))
        finally:
            os._exit(3)
    deadline = time.monotonic() + 120
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    worker = int(told.read_text().split()[0])
    os.kill(driver, number)
    begin = time.monotonic()
    os.waitpid(driver, 0)
    while locks._birth(worker) is not None and time.monotonic() < begin + 20:
        time.sleep(0.05)
    assert locks._birth(worker) is None  # within seconds
    return worker


@pytest.mark.slow
@pytest.mark.usefixtures("look_often")
def test_no_worker_outlives_its_driver_and_nothing_is_lost(study, straight_study, tmp_path):
    out = tmp_path / "out"
    run = out / "runs" / "one" / "seed-0"
    interrupted(study, out, signal.SIGINT)
    last = MetricsFile(run / "metrics.jsonl").last().step
    assert 0 < last < 150
    assert max(int(path.name[5:]) for path in (run / "checkpoints").iterdir()) == last  # saved where it was stopped
    assert not (out / ".locks").exists()
    interrupted(study, out, signal.SIGKILL)
    assert (out / ".locks" / "one@seed-0").exists()
    pretrain_study(study, out, resume=True)
    assert_equal(out, straight_study)
