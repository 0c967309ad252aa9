"""Seeds that grow until the primary pairs are decided."""

import numpy as np
import pytest
from tiny_runs import Stop, Trained, lines, numbers, refused, small_recipe

from hfpatch.evaluation import compare_again
from hfpatch.recipes.comparison import Recipe
from hfpatch.results import load_results
from hfpatch.results.decision import ALPHA, reach
from hfpatch.runs import compare, train
from hfpatch.runs.engines.settings import EngineSettings
from hfpatch.support.files import read_json

LOOKS = [2, 3, 4]
LORA = [{"type": "lora", "r": 2}]
METHODS = {"baseline": [], "pre": [{"type": "pre_projection"}], "lora": LORA, "twin": LORA, "other": LORA}
PAIRS = [("pre", "lora"), ("twin", "lora")]
"""The first is decided by the last look; the second is equal, so equivalent at the first."""


def make_recipe(base, seeds: object, **sections) -> Recipe:
    training = {"steps": 2, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "seeds": seeds, "evaluate_every": 2}
    given = {
        "data": {"block_size": 32, "max_documents": 60, "held_out": 24},
        "training": training,
        "questions": {"gain": {"on": "held_out_text", "pairs": PAIRS}, "keep": None},
        "margin": {"nats_per_token": 1e-9},
        "methods": METHODS,
    }
    return small_recipe(base, **given | sections)


@pytest.fixture(scope="module")
def grown(model_folder, tmp_path_factory):
    """A run that was killed in the eleventh of its twelve trainings, and resumed."""
    recipe, out = make_recipe(model_folder, {"looks": LOOKS}), tmp_path_factory.mktemp("grown") / "out"
    log, messages = Trained(), list[str]()
    log.finished = lambda run, text: messages.append(f"{run}: {text}")
    with pytest.raises(KeyboardInterrupt):
        compare(recipe, out, progress=Stop(11, "started"))
    compare(recipe, out, resume=True, progress=log)
    return out, log, [message for message in messages if message.startswith("look")]


def test_only_undecided_pairs_and_their_references_get_more_seeds(grown):
    out, log, messages = grown
    assert messages == [
        *(
            f"look at {seeds} seeds: undecided: pre against lora on held_out_text; equivalent: twin against lora on "
            "held_out_text; more seeds for pre and lora"
            for seeds in (2, 3)
        ),
        "look at 4 seeds: worse: pre against lora on held_out_text; equivalent: twin against lora on held_out_text",
    ]
    results = load_results(out)
    assert {name: sorted(method.runs) for name, method in results.methods.items()} == {
        "baseline": [0],
        "pre": [0, 1, 2, 3],
        "lora": [0, 1, 2, 3],
        "twin": [0, 1],
        "other": [0, 1],
    }
    assert log.trained == ["pre · seed 3", "lora · seed 3"]
    assert results.runs_saved == 4
    assert results.looks is not None
    assert [(look.seeds, look.growing) for look in results.looks] == [
        (2, ["pre", "lora"]),
        (3, ["pre", "lora"]),
        (4, []),
    ]
    assert [look.part for look in results.looks] == [2 / 9, 3 / 9, 4 / 9]
    again = compare_again(out)  # from kept values
    assert (again.looks, again.primary) == (results.looks, results.primary)
    assert any("4 of 16 planned trainings" in warning for warning in results.warnings)
    assert any("seeds of pre 4, lora 4, twin 2, other 2" in warning for warning in results.warnings)


def test_curves_are_of_the_seeds_that_all_methods_have_and_begin_at_the_loss_of_the_base(grown):
    results = load_results(grown[0])
    for name in results.others:
        curve = results.methods[name].curve
        steps = [lines(grown[0] / "runs" / name / f"seed-{seed}" / "metrics.jsonl") for seed in (0, 1)]
        last = [next(line for line in of_seed if line["step"] == 2) for of_seed in steps]
        assert (curve.seeds, curve.steps, list(curve.held_out)) == (2, [1, 2], [0, 2])
        assert curve.loss[-1] == pytest.approx(np.mean([line["loss"] for line in last]))
        assert curve.held_out[2] == pytest.approx(np.mean([line["eval_loss"] for line in last]))
        assert curve.held_out[0] == pytest.approx(results.base_loss, rel=1e-5)


def test_a_pair_keeps_the_outcome_and_interval_of_the_look_that_decided_it(grown, model_folder, tmp_path):
    results = load_results(grown[0])
    first, second = results.primary
    assert (second.outcome, second.seeds, second.looks) == ("equivalent", 2, True)
    assert second.level == pytest.approx(2 * ALPHA * (2 / 9) / 2)  # that of the test of equivalence
    assert (first.outcome, first.seeds) == ("worse", 4)
    assert first.level == pytest.approx(ALPHA * (4 / 9) / 2)

    # The last look's numbers are those of four seeds, at its own part of the level
    some = {name: METHODS[name] for name in ("baseline", "pre", "lora")}
    asked = {"gain": {"pairs": PAIRS[:1]}, "keep": None}
    fixed = compare(make_recipe(model_folder, (0, 1, 2, 3), methods=some, questions=asked), tmp_path / "fixed")
    (one,) = [
        comparison
        for comparison in fixed["comparisons"]
        if (comparison["method"], comparison["reference"], comparison["task"], comparison["metric"])
        == ("pre", "lora", "held_out_text", "nats_per_token")
    ]
    assert first.difference == pytest.approx(one["difference"])
    assert (first.low, first.high) == pytest.approx((one["low"], one["high"]))
    half = reach(one["errors"], first.level)
    assert first.corrected_high - first.difference == pytest.approx(half)
    losses = {
        name: np.array([run.evaluation["held_out_text"].metrics["nats_per_token"] for run in method.runs.values()])
        for name, method in results.methods.items()
    }
    assert first.difference == pytest.approx((losses["pre"] - losses["lora"]).mean())


@pytest.mark.slow
def test_workers_take_the_same_looks(grown, model_folder, tmp_path):
    """They are not interrupted, as the other run was."""
    recipe = make_recipe(model_folder, {"looks": LOOKS})
    results = compare(recipe, tmp_path / "out", engine=EngineSettings(jobs=2))
    assert numbers(results) == numbers(read_json(grown[0] / "results.json"))


def test_a_pair_that_more_seeds_cannot_decide_gets_none(model_folder, tmp_path):
    """Two equal methods whose best rates are at the edge: what the choice of a rate is worth is not bounded."""
    log, messages = Trained(), list[str]()
    log.finished = lambda run, text: messages.append(f"{run}: {text}")
    tuning = {"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 0}
    asked = {"gain": {"on": "held_out_text", "pairs": PAIRS[1:]}, "keep": None}
    methods = {name: METHODS[name] for name in ("baseline", "lora", "twin")}
    recipe = make_recipe(model_folder, {"looks": [2, 3]}, tuning=tuning, questions=asked, methods=methods)
    compare(recipe, tmp_path / "out", progress=log)
    results = load_results(tmp_path / "out")
    (verdict,) = results.primary
    assert (verdict.outcome, verdict.seeds) == ("undecided", 2)
    assert verdict.why == "the choice of the rates: twin's is not bounded, lora's is not bounded"
    assert results.looks[0].growing == []
    assert results.runs_saved == 2
    (look,) = [message for message in messages if message.startswith("look")]
    assert look == f"look at 2 seeds: undecided ({verdict.why}): twin against lora on held_out_text"


def test_train_trains_the_seeds_before_the_first_look(model_folder, tmp_path):
    recipe = make_recipe(model_folder, {"looks": LOOKS})
    assert len(train(recipe, "pre", tmp_path / "out")) == 2
    message = refused(compare, make_recipe(model_folder, {"looks": [2, 3]}), tmp_path / "out", resume=True)
    assert "training.seeds.looks is [2, 3, 4] there, [2, 3] here" in message
