"""Engines: whoever works on which unit in whatever order, the numbers are those of one process."""

import json
from pathlib import Path

import pytest

import hfpatch.runs.comparison
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.recipes.comparison import Recipe
from hfpatch.runs import Progress, compare
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.support.files import read_json
from hfpatch.tinyworld import documents
from hfpatch.training.architecture import build_model

ARCHITECTURE = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
DIFFERENT = {"seconds", "wall_s", "tokens_per_s", "peak_memory_bytes", "mfu", "provenance", "commit", "started"}
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
        patched.setattr(hfpatch.runs.comparison, "write_report", lambda _: None)
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
        self.opened_with, self.nodes, self.done, self.errors = None, [], {}, {}

    def opened(self, engine, units):
        self.opened_with = engine

    def placed(self, run, action, node):
        self.nodes.append((run, action, node))

    def finished(self, run, summary):
        self.done[run] = summary

    def failed(self, run, error):
        self.errors[run] = error


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
