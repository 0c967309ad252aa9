"""A study: variants tuned and trained from scratch, whatever is interrupted, and decided like a comparison."""

import json
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from tiny_runs import GPT2, Nothing, Stop, has_files, lines, refused
from tiny_runs import numbers as without_times

from hfpatch.evaluation import compare_again
from hfpatch.models import load_scratch
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.reporting.forecast import forecast_document
from hfpatch.reporting.markdown import markdown
from hfpatch.results import load_results
from hfpatch.runs import compare, forecast
from hfpatch.runs.engines.driver import Engine
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.plan import plan_runs
from hfpatch.support.files import read_json, write_json
from hfpatch.tinyworld import documents

STUDY = {
    "name": "tiny",
    "architecture": GPT2,
    "tokenizer": {"train_vocab_size": 300},
    "data": {"block_size": 32, "group": "book", "held_out": 24, "scored_tokens": 32},
    "training": {
        **{"steps": 6, "warmup_steps": 1, "batch_size": 4, "lr": 1e-3, "seeds": [0, 1]},
        **{"evaluate_every": 3, "diagnose_every": 3, "save_every": 2},
    },
    "tuning": {"learning_rates": [3e-3, 3e-2], "held_out": 4, "steps": 3, "extend": 0},
    "baseline": "linear",
    "variants": {"linear": {}, "nonlinear": {"architecture": {"query": {"path": "nonlinear"}}}},
}


@pytest.fixture(scope="module", autouse=True)
def books(tmp_path_factory):
    """Write books of one to three documents, of which the study holds out 24 books."""
    path, texts = tmp_path_factory.mktemp("books") / "books.jsonl", iter(documents("base", count=90))
    books = [(number, next(texts)) for number in range(40) for _ in range(1 + number % 3)]
    path.write_text("".join(json.dumps({"text": text, "book": number}) + "\n" for number, text in books))
    STUDY["data"]["source"] = str(path)


def study(**changes):
    return StudyRecipe.model_validate({**STUDY, **changes})


def training(**changes):
    return {**STUDY["training"], **changes}


def published_copy(out, copy):
    """Return the results that follow from the files that are published of a folder."""
    copy.mkdir()
    for name in ("results.json", "values.safetensors"):
        shutil.copy(out / name, copy)
    return compare_again(copy)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "straight"
    return out, compare(study(), out)


def test_every_run_leaves_its_files_and_the_results_follow_from_them(straight):
    out, results = straight
    assert results["complete"]
    assert results == read_json(out / "results.json")
    assert {path.name for path in out.iterdir()} >= {"recipe.yaml", "plan.json", "report.html", "values.safetensors"}
    loaded = load_results(out, "comparison")
    assert (loaded.baseline, loaded.others, loaded.seeds) == ("linear", ["nonlinear"], [0, 1])
    plans, tokens = read_json(out / "plan.json"), {}
    assert plans["0"]["sha256"] != plans["1"]["sha256"]
    for name, method in loaded.methods.items():
        trials = {trial.values["lr"]: trial.loss for trial in loaded.tuning.of(name)}
        assert loaded.tuning.chosen[name].values == {"lr": min(trials, key=trials.get)}
        assert {trial.plan for trial in loaded.tuning.of(name)} == {plans["1000"]["sha256"]}
        for seed, run in method.runs.items():
            paths = RunPaths(out / "runs" / name / f"seed-{seed}")
            steps, records = lines(paths.metrics), lines(paths.evaluations / "held_out_text.jsonl")
            assert max(step["lr"] for step in steps) <= loaded.tuning.chosen[name].values["lr"]
            nats, predicted = np.array([line["nats_per_token"] for line in records]).sum(axis=0)
            assert len({line["cluster"] for line in records}) == 24
            assert run.evaluation["held_out_text"].metrics["nats_per_token"] == pytest.approx(-nats / predicted)
            assert steps[-1]["eval_loss"] == pytest.approx(-nats / predicted, rel=1e-6)
            assert tokens.setdefault(seed, [step["tokens"] for step in steps]) == [step["tokens"] for step in steps]
            assert load_scratch(paths.model).num_parameters() == method.parameters.trainable
            assert not paths.checkpoints.exists()
        assert method.curve.held_out.keys() == {0, 3, 6}
    assert loaded.improvements("nonlinear")[6] == pytest.approx(
        1 - loaded.mean("nonlinear", "held_out_text") / loaded.mean("linear", "held_out_text"), abs=1e-6
    )


def test_diagnostics_are_there_where_there_is_an_f(straight):
    out, results = straight
    assert results["methods"]["linear"]["variant"]["diagnostics"] == []
    variant = results["methods"]["nonlinear"]["variant"]
    assert variant["query"] == "Q = (x + f(x))/2, f = LN(GELU(RMSNorm(x) W₁) W₂)"
    assert [(line["step"], line["layer"]) for line in variant["diagnostics"]] == [
        (s, n) for s in (0, 3, 6) for n in (0, 1)
    ]
    files = [lines(out / f"runs/nonlinear/seed-{seed}/diagnostics.jsonl") for seed in (0, 1)]
    for mean, *by_seed in zip(variant["diagnostics"], *files, strict=True):
        for name in ("size", "cosine", "size_beside_x"):
            assert mean[name] == pytest.approx(np.mean([line[name] for line in by_seed]))


def test_a_published_study_is_decided_again_from_its_values(straight, tmp_path):
    out, _ = straight
    again, before = published_copy(out, tmp_path / "copy"), load_results(out, "comparison")
    assert again.comparisons == before.comparisons
    assert [trial.loss for trial in again.tuning.trials] == pytest.approx([t.loss for t in before.tuning.trials])
    assert (again.tuning.base_loss, again.kept, again.frontier) == (before.tuning.base_loss, None, None)


def test_a_study_is_planned_with_a_step_of_each_variant_and_an_earlier_study_s_variances(straight):
    out, _ = straight
    before = load_results(out)
    planned = forecast(study(training=training(seeds=3)), seconds=0.5, like=out)
    assert planned.methods.keys() == planned.kinds.keys() == {"linear", "nonlinear"}
    assert {name: method.trainable for name, method in planned.methods.items()} == {
        name: method.trainable for name, method in before.methods.items()
    }
    step_s = {name: kind.step_s for name, kind in planned.kinds.items()}
    assert (planned.work["tune"].units, planned.work["tune"].steps) == (4, 4 * 3)
    assert (planned.work["train"].units, planned.work["train"].steps) == (6, 6 * 6)
    held_out, tuning = (
        before.data["held_out"]["blocks"] / 4 / 3,
        before.tuning.text["blocks"] / 4 / 3,
    )  # of a step's time
    a_seed = {"train": 6 + 3 * held_out, "evaluate": held_out}  # held-out text is measured thrice while training
    for action, steps in {**a_seed, "tune": (3 + tuning) * 2 / 3}.items():
        assert planned.work[action].seconds == pytest.approx(sum(3 * steps * s for s in step_s.values()))
    (asked,) = planned.questions
    assert (asked.method, asked.other, asked.like, asked.seeds) == ("nonlinear", "linear", ("nonlinear", "linear"), 3)
    assert asked.difference > 0
    seldom = training(evaluate_every=None, diagnose_every=None)
    planned = forecast(study(data=STUDY["data"] | {"held_out": 19}, training=seldom), seconds=0.0)
    steps_s = 2 * 6 * sum(kind.step_s for kind in planned.kinds.values())
    assert planned.work["train"].seconds == pytest.approx(steps_s + 2 * planned.work["evaluate"].seconds)
    shown = markdown(forecast_document(planned))
    assert "| nonlinear |" in shown
    assert "method" not in shown.lower()
    (unknown,) = planned.questions
    assert unknown.difference is None
    assert any("held_out_text has 19 documents; with fewer than 20" in warning for warning in planned.warnings)


def test_a_study_that_gets_a_seed_and_is_interrupted_goes_on_where_it_stopped(straight, tmp_path):
    out, stop = tmp_path / "out", Stop(9)  # in the second new run, after a checkpoint
    first = study(training=training(seeds=[0]))
    assert compare(first, out)["complete"]
    assert "--resume" in refused(compare, study(), out)
    with pytest.raises(KeyboardInterrupt):
        compare(study(), out, resume=True, progress=stop)
    stopped = read_json(out / "results.json")
    assert (stopped["complete"], stopped["comparisons"]) == (False, [])
    assert "seeds is [0, 1] there, [0] here" in refused(compare, first, out, resume=True)
    again = compare(study(), out, resume=True)
    assert "Seeds changed when results existed already" in " ".join(again["warnings"])
    assert without_times(again["methods"]) == without_times(straight[1]["methods"])
    for model in straight[0].rglob("model.safetensors"):
        assert (out / model.relative_to(straight[0])).read_bytes() == model.read_bytes()
    assert compare(study(), out, resume=True, progress=Nothing()) == again


@pytest.mark.parametrize(
    "name",
    [
        *("results.json", "questions.json", "plan.json", "plan.safetensors"),
        *("training.json", "result.json", "evaluations/held_out_text.jsonl"),
    ],
)
def test_a_damaged_file_can_be_made_again(straight, tmp_path, name):
    out, asked = shutil.copytree(straight[0], tmp_path / "out"), study(margin={"nats_per_token": 0.5})
    run = out / "runs/linear/seed-0"
    damaged = run / name if (run / name).exists() else out / name
    damaged.write_bytes(damaged.read_bytes()[:100])
    message = refused(compare, asked, out, resume=True)
    named = {"plan.safetensors": out / "plan.json", "evaluations/held_out_text.jsonl": run / "result.json"}
    assert str(damaged.with_suffix("")) in message
    assert "--resume" in message
    if name == "training.json":  # as the message says
        shutil.rmtree(run)
    else:
        named.get(name, damaged).unlink()
    assert without_times(compare(asked, out, resume=True)["methods"]) == without_times(straight[1]["methods"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "model: is missing"),
        ("config.json", "model/config.json: "),
        ("model.safetensors", "model: cannot be loaded ("),
    ],
)
def test_a_lost_model_without_scores_can_be_trained_again(straight, tmp_path, name, said):
    out, run = shutil.copytree(straight[0], tmp_path / "out"), tmp_path / "out/runs/linear/seed-0"
    for file in (out / "results.json", run / "result.json"):
        file.unlink()
    lost = run / "model" / name
    if name == "model.safetensors":
        tensors = load_file(lost)
        tensors.pop(first := min(tensors))
        save_file(tensors, lost, metadata={"format": "pt"})
        assert f"cannot be loaded (missing keys: {first}); restore it" in refused(compare, study(), out, resume=True)
    shutil.rmtree(lost) if lost.is_dir() else lost.write_bytes(lost.read_bytes()[:100])
    message = refused(compare, study(), out, resume=True)
    assert f"{run}/{said}" in message
    assert "delete the folder that it is in, and --resume" in message
    shutil.rmtree(run)
    assert without_times(compare(study(), out, resume=True)["methods"]) == without_times(straight[1]["methods"])


def test_a_run_that_has_scores_is_not_trained_again(straight, tmp_path):
    out, asked = shutil.copytree(straight[0], tmp_path / "out"), study(margin={"nats_per_token": 0.5})
    (out / "runs/linear/seed-0/training.json").unlink()
    again = compare(asked, out, resume=True, progress=Nothing())
    assert without_times(again["methods"]) == without_times(straight[1]["methods"])


def test_an_engine_that_gives_up_the_devices_leaves_the_report_to_be_written(straight, tmp_path, monkeypatch):
    @contextmanager
    def of_devices(settings, progress):
        yield Engine()
        PartialState._reset_state()  # as engines of a machine with GPUs

    monkeypatch.setattr("hfpatch.runs.comparison.open_engine", of_devices)
    out = shutil.copytree(straight[0], tmp_path / "out")
    (out / "report.html").unlink()
    write_json(out / "results.json", {**straight[1], "complete": False})
    assert without_times(compare(study(), out, resume=True)) == without_times(straight[1])
    assert (out / "report.html").is_file()


def test_variants_trained_by_themselves_make_the_same_study(straight, tmp_path):
    out = tmp_path / "out"
    assert "did you mean 'linear'" in refused(compare, study(), out, variant="liner")
    assert not out.exists()
    compare(study(), out, variant="nonlinear")
    assert not (out / "report.html").exists()
    assert "--resume" in refused(compare, study(), out, variant="nonlinear")
    compare(study(), out, variant="linear")
    assert without_times(compare(study(), out, resume=True)) == without_times(straight[1])
    assert (out / "report.html").exists()


def test_divergence_is_an_outcome_of_trials_and_runs(tmp_path):
    wild = {"training": {"lr": 30.0}, "tuning": None}
    changes = {"training": training(seeds=[0], diverged_above=7.0, max_grad_norm=None)}
    tuning = {**STUDY["tuning"], "learning_rates": [3e-3, 30.0]}
    variants = {"wild": wild, **STUDY["variants"]}
    results = compare(study(variants=variants, tuning=tuning, **changes), tmp_path / "out")
    assert results["complete"]
    run = results["methods"]["wild"]["runs"]["0"]
    assert 1 < run["train"]["diverged_step"] <= 6
    assert run["evaluation"] == {}
    assert not (tmp_path / "out/runs/wild/seed-0/model").exists()
    trials = {trial["values"]["lr"]: trial for trial in results["tuning"]["trials"]}
    assert (trials[30.0]["loss"], trials[30.0]["diverged_step"] is None) == (None, False)
    assert results["tuning"]["chosen"]["linear"]["values"] == {"lr": 3e-3}
    assert "wild" not in results["tuning"]["chosen"]
    assert results["tuning"]["base_loss"] == pytest.approx(np.log(300))
    outcomes = {verdict["method"]: verdict["outcome"] for verdict in results["verdicts"]}
    assert outcomes == {"wild": "not tested", "nonlinear": "undecided"}
    assert any(warning.startswith("wild is not tuned") for warning in results["warnings"])
    assert published_copy(tmp_path / "out", tmp_path / "copy").to_json()["comparisons"] == results["comparisons"]


def test_seeds_grow_until_the_pair_is_decided(tmp_path):
    looks = training(seeds={"looks": [2, 3, 4]}, steps=2)
    wide = study(training=looks, tuning=None, margin={"nats_per_token": 50.0})
    results = compare(wide, tmp_path / "out")
    assert [look["seeds"] for look in results["looks"]] == [2]
    assert results["runs_saved"] == 2 * (4 - 2)
    assert results["verdicts"][0]["outcome"] == "equivalent"
    narrow = study(training=looks, tuning=None, margin={"nats_per_token": None})
    (tmp_path / "out/runs/linear/seed-1/evaluations/held_out_text.jsonl").write_text("")
    assert refused(compare, narrow, tmp_path / "out", resume=True).startswith("look at 2 seeds: ")
    assert [unit.seeds for unit in plan_runs(narrow, tmp_path).units if unit.action == "look"] == [2, 3, 4]


def test_a_variant_that_cannot_be_built_stops_before_any_training(tmp_path):
    out = tmp_path / "out"
    for wrong, reason in (
        ({"architecture": {"query": {"path": "nonlinear", "rank": 0}}}, "rank"),
        ({"architecture": {"n_positions": 16}}, "blocks of 32 tokens"),
        ({"training": {"diverged_above": 2.0}}, "must be above ln V"),
        ({"tuning": {"grid": {"training.diverged_above": [9.0, 2.0]}}}, "must be above ln V"),
    ):
        message = refused(compare, study(variants={"linear": {}, "odd": wrong}), out)
        assert message.startswith("variants.odd")
        assert reason in message
        assert not has_files(out)
