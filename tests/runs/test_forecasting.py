"""What `hfpatch plan` says before a comparison is run."""

import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import small_recipe

import hfpatch.evaluation.sizing
import hfpatch.runs.measuring
from hfpatch.data.documents import Documents
from hfpatch.evaluation import evaluate, load_tasks
from hfpatch.evaluation.metrics import metric_named
from hfpatch.evaluation.model import HfpatchLM
from hfpatch.evaluation.run import Storage, scorer_options
from hfpatch.evaluation.selection import select
from hfpatch.evaluation.sizing import collect_requests, row_operations, time_requests
from hfpatch.reporting.forecast import forecast_document
from hfpatch.reporting.terminal import print_document
from hfpatch.results.decision import Design
from hfpatch.results.forecast import Forecast
from hfpatch.results.identity import OF_TASK
from hfpatch.runs import forecast
from hfpatch.runs.forecasting import _seconds_with
from hfpatch.runs.plan import plan_runs
from hfpatch.runs.progress import Progress
from hfpatch.runs.setup import set_up
from hfpatch.support.files import write_json
from hfpatch.surgery.bases import load_base
from hfpatch.training.validation import document_losses

MODEL, DOCUMENTS, PAIR = "tinyworld/gpt-neox", 24, ("pre_projection", "c3a")
METHODS = {
    "baseline": [],
    "pre_projection": [{"type": "pre_projection"}],
    "pre_projection_skip": [{"type": "pre_projection", "content_skip": True}],
    "c3a": [{"type": "c3a", "match": "pre_projection", "target_modules": "all-linear"}],
}


def make_recipe(**changes):
    data = {"block_size": 32, "max_documents": 30, "held_out": 4}
    training = {"steps": 7, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": [0, 1]}
    evaluation = {"tasks": ["tinyworld_cloze", "tinyworld_text"], "limit": DOCUMENTS}
    sections = {"data": data, "training": training, "evaluation": evaluation, "methods": METHODS}
    return small_recipe(MODEL, **sections | changes)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def scored(empty):
    """The base's documents of each task."""
    base, folder = load_base(MODEL), empty.with_name("scored")
    evaluate(base.model, base.tokenizer, select(make_recipe().evaluation), storage=Storage(records=folder))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}


def write_earlier(folder):
    """Write the results of a comparison with four seeds of 40 documents, by the measure of tinyworld_text."""
    one = {"method": "pre_projection", "reference": "c3a", "task": "tinyworld_text", "metric": "bits_per_byte", "n": 40}
    one |= {"seeds": 4, "difference": 0.1, "low": 0.0, "high": 0.2, "p": 0.04, "errors": [[0.02, 39], [0.03, 3]]}
    task = {"primary": "bits_per_byte", "higher_is_better": False, "n": 40, "version": "1"}
    task |= dict.fromkeys(OF_TASK, "")
    results = {"schema": 2, "kind": "comparison", "name": "earlier", "complete": True, "methods": {}}
    results |= {
        "tasks": {"tinyworld_text": task},
        "comparisons": [{**one, "test": "paired t over seeds and documents"}],
    }
    write_json(folder / "results.json", results)
    return folder


@pytest.fixture(scope="module")
def planned(empty):
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(empty)
        patched.setattr(hfpatch.evaluation.sizing, "_BATCHES", 1)
        like = write_earlier(empty / "earlier")
        gain = {"on": "tinyworld_text", "pairs": [PAIR, ("pre_projection_skip", "c3a")]}
        keep = {"on": ["tinyworld_cloze"], "methods": ["pre_projection"]}
        margin = {"bits_per_byte": 0.3, "tinyworld_cloze": 0.1}
        recipe = make_recipe(questions={"gain": gain, "keep": keep}, margin=margin)
        return forecast(recipe, like=like, seconds=1000, jobs=2)  # whatever else this machine does


def test_primary_questions_are_planned_with_the_variance_of_an_earlier_run(planned):
    """Two seeds and 24 documents where the earlier run had four and 40."""
    question, other, _ = planned.questions
    assert (question.like, other.like) == (PAIR, PAIR)
    assert (question.seeds, question.documents) == (2, DOCUMENTS)
    assert (question.metric, question.margin) == ("bits_per_byte", 0.3)
    times = math.sqrt(40 / DOCUMENTS)
    design = Design((0.02 * times, 23), (0.03 * times * math.sqrt(2), 1), estimate_freedom=3)
    assert question.difference == pytest.approx(design.smallest_difference(0.025))
    assert question.smallest_margin == pytest.approx(design.smallest_margin(0.025))
    needed = question.seeds_needed
    decided = [design.with_seeds(number).decides("gain", 0.0, 0.025, 0.3) >= 0.8 for number in (needed - 1, needed)]
    assert decided == [False, True]
    assert question.documents_needed is None  # two seeds vary too much for any number


def expected_design(sd, documents, seeds, assumed):
    """The errors over documents and over seeds of the assumptions: ``(correlation, shared, shift)``."""
    correlation, shared, shift = assumed
    variance = 2 * (1 - correlation) * sd**2
    of_documents = math.sqrt(variance * (shared + (1 - shared) / seeds) / documents)
    of_seeds = math.sqrt(variance * ((1 - shared) / documents + shift**2) / seeds)
    return Design((of_documents, documents - 1), (of_seeds, seeds - 1))


def jackknife_sd(terms, weights):
    """√n times the error of the ratio of sums over n documents, one of which is left out at a time."""
    without = [np.delete(terms, n).sum() / np.delete(weights, n).sum() for n in range(len(terms))]
    return math.sqrt((len(terms) - 1) * np.square(np.array(without) - terms.sum() / weights.sum()).sum())


def test_without_a_variance_to_go_by_the_base_s_documents_and_assumptions_give_one(planned, scored):
    """Bits per byte of right answers, of a method and the base."""
    asked = planned.questions[2]
    assert (asked.like, asked.is_assumed, asked.metric, asked.documents) == (None, True, "bits_per_byte", DOCUMENTS)
    logs, sizes = np.array([row["bits_per_byte"] for row in scored["tinyworld_cloze"]]).T
    bits = -logs / math.log(2)
    sd = jackknife_sd(bits, sizes)
    design = expected_design(sd, DOCUMENTS, 2, (0.8, 0.75, 0.05))
    assert asked.difference == pytest.approx(design.smallest_difference(0.05, "keep"), rel=1e-3)
    assert asked.smallest_margin == pytest.approx(design.smallest_margin(0.05, "keep"), rel=1e-3)
    needed = asked.documents_needed
    decided = [design.with_documents(n).decides("keep", 0.0, 0.05, asked.margin) >= 0.8 for n in (needed - 1, needed)]
    assert decided == [False, True]
    assert "of answers a method correlates 0.8 with the base, seeds share 75% of" in planned.assumptions[-1]


def test_texts_are_planned_by_the_losses_of_their_documents():
    """Nats per token of held-out text, of a method and the LoRA of its size; one seed decides nothing."""
    data, shown = {"block_size": 32, "max_documents": 60, "held_out": 30}, []
    evaluation, lora = {"tasks": ["tinyworld_cloze"], "limit": 4}, {"match": "pre_projection"}
    methods = {"baseline": [], "pre_projection": METHODS["pre_projection"], "lora": [{"type": "lora", **lora}]}
    for seeds in (1, 3):
        training = {"steps": 1, "warmup_steps": 0, "batch_size": 4, "seeds": seeds}
        recipe = make_recipe(data=data, evaluation=evaluation, methods=methods, training=training)
        shown.append(forecast(recipe, seconds=1000))
    (alone,), (asked,) = (plan.questions for plan in shown)
    assert (alone.difference, alone.smallest_margin, asked.seeds, asked.documents) == (None, None, 3, 30)
    assert min(alone.seeds_needed, asked.seeds_needed) > 1
    assert (alone.documents_needed, asked.documents_needed > 19) == (None, True)
    assert any("one seed" in warning for warning in shown[0].warnings)
    setup = set_up(recipe)
    losses, tokens = document_losses(setup.base.model, setup.held_out, batch_size=4).T
    sd = jackknife_sd(losses, tokens)
    design = expected_design(sd, 30, 3, (0.97, 0.5, 0.13))
    assert asked.difference == pytest.approx(design.smallest_difference(0.05), rel=1e-3)
    assert asked.margin == 0.02


def test_it_counts_the_units_of_the_plan_and_the_tokens_of_the_requests(planned):
    units = Counter(unit.action for unit in plan_runs(make_recipe(), Path("out")).units)
    assert {action: work.units for action, work in planned.work.items()} == {"train": units["train"], "evaluate": 7}
    assert planned.work["train"].steps == 3 * 2 * 7
    assert planned.work["train"].tokens == 3 * 2 * 7 * 4 * 32
    assert planned.work["evaluate"].requests == 7 * 2 * DOCUMENTS
    setup = set_up(make_recipe())
    documents = list(load_tasks(["tinyworld_text"])["tinyworld_text"].eval_docs)[:DOCUMENTS]
    texts = [setup.tokenizer(document.get("page", document.get("text"))).input_ids for document in documents]
    assert planned.tasks["tinyworld_text"].tokens == sum(len(tokens) + 1 for tokens in texts)  # after one start token
    of_tasks = sum(task.tokens for task in planned.tasks.values())
    assert planned.work["evaluate"].tokens == 7 * (of_tasks + 32 * len(setup.held_out))


def test_the_time_of_many_runs_at_a_time_is_that_of_the_graph():
    """A baseline, three rounds of tuning, of four trials and of two and two, then four trainings with evaluations."""
    seconds = {"evaluate": 2.0, "tune": 3.0, "train": 10.0}
    measured = SimpleNamespace(work_of=lambda unit: SimpleNamespace(seconds=seconds[unit.action]))
    recipe = small_recipe(MODEL, tuning={"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 1})
    units = plan_runs(recipe, Path("out")).units
    assert len(units) == 2 + 4 + 4 + 8
    assert _seconds_with(measured, units, 1) == 2 + 8 * 3 + 4 * (10 + 2)
    assert _seconds_with(measured, units, 2) == (2 + 8 * 3 + 4 * (10 + 2)) / 2
    assert _seconds_with(measured, units, 4) == _seconds_with(measured, units, 100) == 2 + 3 * 3 + 10 + 2


def test_one_method_of_each_kind_is_measured_and_small_steps_run_whole(planned):
    trained = {name: kind for name, kind in planned.kinds.items() if name != "base"}
    assert {name: kind.method for name, kind in planned.kinds.items()} == {
        "base": "baseline",
        "pre_projection": "pre_projection_skip",
        "c3a": "c3a",
    }
    assert planned.kinds["base"].step_s is None
    assert all(kind.step_s > 0 for kind in trained.values())
    assert all(min(kind.evaluation_s.values()) > 0 for kind in planned.kinds.values())
    assert planned.memory_bytes >= max(kind.evaluation_memory_bytes for kind in planned.kinds.values()) > 0
    assert {kind.step_share for kind in trained.values()} == {1.0}
    assert all(task.timed > 100 for task in planned.tasks.values())
    assert planned.assumptions[0].startswith("Sampled: ")
    assert "100% of a step" in planned.assumptions[0]


def test_without_time_it_works_from_a_part_of_everything(tmp_path, monkeypatch):
    """Nor is anything saved or evaluated: on a real model that takes longer than the step."""
    monkeypatch.chdir(tmp_path)
    shown, beside = [], []
    for name in ("save_checkpoint", "mean_loss"):
        monkeypatch.setattr(f"hfpatch.training.loop.{name}", lambda *_, **__: beside.append(1))
    monkeypatch.setattr("hfpatch.runs.forecasting.is_shared", lambda *_: True)
    progress = type("Shown", (Progress,), {"evaluating": lambda self, run, task: shown.append((run, task))})()
    tuning = {"learning_rates": [1e-3, 1e-2], "steps": 3, "held_out": 4, "extend": 0}
    questions = {"gain": {"on": "tinyworld_cloze", "pairs": [PAIR]}}
    planned = forecast(make_recipe(tuning=tuning, questions=questions), seconds=0, progress=progress)
    assert not beside
    assert (planned.work["tune"].units, planned.work["tune"].steps) == (6, 18)
    trained = [kind for name, kind in planned.kinds.items() if name != "base"]
    assert {kind.step_share for kind in trained} == {0.25}  # one of four blocks
    assert all(kind.step_s > 0 for kind in trained)
    assert all(0 < task.timed < task.tokens for task in planned.tasks.values())
    assert [task.sampled for task in planned.tasks.values()] == [8, 0]  # of the one that a question names
    assert "25% of a step" in planned.assumptions[0]
    assert planned.assumptions[1].startswith("Other programs used the machine")
    assert planned.seconds > 0
    assert ("base", "a part of tinyworld_text") in shown


def test_a_part_is_scaled_to_the_whole(monkeypatch):
    """Of a scorer that takes as long as its rows have operations, a small part tells the time of all."""
    base, recipe = load_base(MODEL), make_recipe()
    asked = collect_requests(base.model, base.tokenizer, select(recipe.evaluation))["tinyworld_text"]
    scorer = HfpatchLM(base.model, **scorer_options(base.tokenizer, recipe.evaluation))
    limits, clock = scorer._scorer().limits, [0.0]

    def cost(requests):
        rows = [len(context) + len(targets) for _, context, targets in requests]
        one = row_operations(base.model, 1)
        return row_operations(base.model, rows).sum() + -(-sum(rows) // limits.tokens) * limits.overhead * one

    def score(requests, **_):
        clock[0] += float(cost(requests)) / 1e9

    monkeypatch.setattr(scorer, "_loglikelihood_tokens", score)
    monkeypatch.setattr("hfpatch.evaluation.sizing.time.perf_counter", lambda: clock[0])
    for seconds in (0, 1e9):
        timed = time_requests(scorer, asked, seconds)
        assert timed.seconds == pytest.approx(float(cost(asked.encoded)) / 1e9)
    assert timed.tokens >= limits.tokens * 0.9


def test_methods_have_their_counts(planned):
    assert planned.methods["pre_projection"].trainable == planned.methods["c3a"].match.target_parameters
    assert planned.methods["c3a"].match.size == "block_size"
    assert planned.methods["c3a"].match.parameters == planned.methods["c3a"].trainable


def test_the_spread_is_that_of_the_base_s_documents(planned, scored):
    cloze, text = (planned.tasks[name] for name in ("tinyworld_cloze", "tinyworld_text"))
    assert (cloze.metric, cloze.sampled, text.metric, text.sampled) == ("acc", DOCUMENTS, "word_perplexity", DOCUMENTS)
    rights = [row["acc"] for row in scored["tinyworld_cloze"]]
    assert cloze.score == pytest.approx(np.mean(rights))
    spread = hfpatch.evaluation.sizing._spread_of("acc", rights, metric_named("acc"), cloze.score)
    right = (sum(rights) + 1) / (DOCUMENTS + 2)
    assert (spread.accuracy, spread.sd) == (True, pytest.approx(np.sqrt(right * (1 - right))))


def test_one_document_or_group_alone_has_no_spread(monkeypatch):
    values = [(-1.0, 0)] * 9 + [(-2.0, 3)]  # words
    spread = hfpatch.evaluation.sizing._spread_of("word_perplexity", values, metric_named("word_perplexity"), 2.0)
    assert (spread.sd, spread.documents) == (None, 10)
    setup = SimpleNamespace(base=SimpleNamespace(model=None, tokenizer=None))
    described = Documents(["0" * 16] * 10, np.full(10, 8), groups=np.zeros(10, np.int32))
    monkeypatch.setattr(hfpatch.runs.measuring, "by_document", lambda *arguments: np.ones((10, 2)))
    monkeypatch.setattr(hfpatch.runs.measuring, "describe_documents", lambda *arguments: described)
    for text in ("held_out_text", "retention_old"):
        assert hfpatch.runs.measuring._text_spread(setup, text, None) is None


def test_it_is_shown_and_read_back_and_nothing_is_written(planned, capsys, empty):
    print_document(forecast_document(planned))
    shown = capsys.readouterr().out
    for part in ("small on tinyworld/gpt-neox", "What will be run", "block size", "acc of 24"):
        assert part in shown
    assert Forecast.model_validate(planned.to_json()) == planned
    assert 0 < planned.jobs_s < planned.seconds
    assert "What the primary questions can decide" in shown
    assert [path.name for path in empty.iterdir()] == ["earlier"]


def test_a_machine_that_is_slow_for_an_instant_does_not_set_the_time_of_a_forward_pass():
    pauses = itertools.chain([0.05, 0.04], itertools.repeat(0.002))
    model = SimpleNamespace(device="cpu", eval=lambda: None, base_model=lambda row: time.sleep(next(pauses)))
    setup = SimpleNamespace(blocks=[{"input_ids": torch.zeros(4)}])
    assert 0.002 <= hfpatch.runs.measuring._forward_seconds(setup, model) < 0.03
