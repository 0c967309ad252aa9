"""A study: every run once, whatever is interrupted, and statistics over seeds that are those of a text book."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import t as student
from scipy.stats import ttest_1samp
from tiny_runs import GPT2, Nothing, Stop, lines, refused
from tiny_runs import numbers as without_times

from hfpatch.models import load_scratch
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe, load_pretrain_or_study
from hfpatch.results.schema import Improvement, StudyRun
from hfpatch.runs import pretrain, pretrain_study
from hfpatch.runs.plan import planned_runs
from hfpatch.runs.study import _rows, improvement
from hfpatch.support.files import read_json

STUDY = {
    "name": "tiny",
    "architecture": GPT2,
    "tokenizer": {"train_vocab_size": 300},
    "data": {"source": "tinyworld/base", "block_size": 32, "max_documents": 80, "held_out": 10},
    "evaluation_blocks": 8,
    "training": {
        **{"steps": 6, "warmup_steps": 1, "batch_size": 4, "lr": 1e-3},
        **{"evaluate_every": 3, "diagnose_every": 3, "save_every": 2},
    },
    "seeds": [0, 1],
    "baseline": "linear",
    "variants": {"linear": {}, "nonlinear": {"architecture": {"query": {"path": "nonlinear"}}}},
}
CORNERS = {  # what cannot train: its loss soon passes the bound
    "training": {**STUDY["training"], "diverged_above": 7.0, "max_grad_norm": None},
    "variants": {**STUDY["variants"], "wild": {"training": {"lr": 30.0}}},
    "sweep": {"weight_decay": [0.0, 0.1]},
    "seeds": [0],
}


def study(**changes):
    return StudyRecipe.model_validate({**STUDY, **changes})


def numbers(results):
    """Return what must not depend on interruptions: all but times."""
    return without_times([results[key] for key in ("rows", "runs", "plans", "tokenizer")])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "straight"
    return out, pretrain_study(study(), out)


def test_every_run_leaves_its_files_and_the_rows_follow_from_them(straight):
    out, results = straight
    assert results["complete"]
    assert results == read_json(out / "results.json")
    assert {path.name for path in out.iterdir()} >= {"recipe.yaml", "plan.json", "report.html", "report.md"}
    losses = {}
    for run in planned_runs(study(), out):
        steps = lines(run.folder / "metrics.jsonl")
        losses[run.variant, run.seed] = steps[-1]["eval_loss"]
        assert steps[-1]["step"] == 6
        entry = next(each for each in results["runs"] if (each["variant"], each["seed"]) == (run.variant, run.seed))
        assert entry["seconds_per_step"] == pytest.approx(np.median([line["seconds"] for line in steps[1:]]))
        model = load_scratch(run.folder / "model")
        assert not (run.folder / "checkpoints").exists()
        assert model.num_parameters() == results["variants"][run.variant]["parameters"]["total"]
    baseline, other = results["rows"]
    assert (baseline["best"], other["best"]) == (True, True)
    assert (baseline["improvement"], baseline["missing"], baseline["diverged"]) == (None, [], {})
    for row in results["rows"]:
        ours = [losses[row["variant"], seed] for seed in (0, 1)]
        assert row["loss"]["values"] == {str(seed): loss for seed, loss in enumerate(ours)}
        assert row["loss"]["mean"] == pytest.approx(np.mean(ours))
        assert row["loss"]["sd"] == pytest.approx(np.std(ours, ddof=1))
        assert row["curve"][-1] == pytest.approx([6, np.mean(ours), min(ours), max(ours)])
    ratios = [1 - losses["nonlinear", seed] / losses["linear", seed] for seed in (0, 1)]
    assert other["improvement"]["mean"] == pytest.approx(np.mean(ratios))
    assert other["improvement_by_step"][-1] == pytest.approx(
        [6, *(other["improvement"][k] for k in ("mean", "low", "high"))]
    )
    (verdict,) = results["verdicts"]
    assert (verdict["p_corrected"], verdict["family"]) == (other["improvement"]["p"], 1)


def test_runs_of_one_seed_share_batches_and_what_weights_they_can(straight):
    out, results = straight
    plan = json.loads((out / "plan.json").read_text())
    assert {seed: each["sha256"] for seed, each in plan.items()} == results["plans"]
    assert plan["0"]["sha256"] != plan["1"]["sha256"]
    tokens = {}
    for run in planned_runs(study(), out):
        seen = [line["tokens"] for line in lines(run.folder / "metrics.jsonl")]
        assert tokens.setdefault(run.seed, seen) == seen


def test_diagnostics_are_there_where_there_is_an_f(straight):
    _, results = straight
    found = {run["variant"]: run["diagnostics"] for run in results["runs"]}
    assert found["linear"] == []
    assert {line["layer"] for line in found["nonlinear"]} == {0, 1}
    assert {3, 6} <= {line["step"] for line in found["nonlinear"]}
    assert all(line["size"] > 0 and -1 <= line["cosine"] <= 1 for line in found["nonlinear"])


def test_a_study_that_gets_a_seed_and_is_interrupted_goes_on_where_it_stopped(straight, tmp_path, no_report):
    out, stop = tmp_path / "out", Stop(9)  # in the second new run, after a checkpoint
    assert pretrain_study(study(seeds=[0]), out)["complete"]
    assert "--resume" in refused(pretrain_study, study(), out)
    with pytest.raises(KeyboardInterrupt):
        pretrain_study(study(), out, resume=True, progress=stop)
    assert [row["missing"] for row in read_json(out / "results.json")["rows"]] == [[], [1]]
    assert "seeds is [0, 1] there, [0] here" in refused(pretrain_study, study(seeds=[0]), out, resume=True)
    again = pretrain_study(study(), out, resume=True)
    assert numbers(again) == numbers(straight[1])
    assert numbers(pretrain_study(study(), out, resume=True, progress=Nothing())) == numbers(again)


def test_variants_trained_by_themselves_make_the_same_study(straight, tmp_path, no_report):
    out = tmp_path / "out"
    assert "did you mean 'linear'" in refused(pretrain_study, study(), out, variant="liner")
    assert not out.exists()
    pretrain_study(study(), out, variant="nonlinear")
    assert not (out / "report.html").exists()
    assert "--resume" in refused(pretrain_study, study(), out, variant="nonlinear")
    pretrain_study(study(), out, variant="linear")
    assert numbers(pretrain_study(study(), out, resume=True)) == numbers(straight[1])
    assert (out / "report.html").exists()


def test_a_run_by_itself_is_the_run_of_the_study(straight, tmp_path):
    out, _ = straight
    folder = out / "runs" / "nonlinear" / "seed-1"
    recipe = load_pretrain_or_study(folder / "recipe.yaml")
    assert isinstance(recipe, PretrainRecipe)
    pretrain(recipe, tmp_path / "alone")
    ours, theirs = (load_file(place / "model" / "model.safetensors") for place in (tmp_path / "alone", folder))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_divergence_is_an_outcome_and_the_best_point_is_chosen_among_the_others(tmp_path, no_report):
    results = pretrain_study(study(**CORNERS), tmp_path / "out")
    assert results["complete"]
    rows = {(row["variant"], row["point"]["weight_decay"]): row for row in results["rows"]}
    for decay in (0.0, 0.1):
        wild = rows["wild", decay]
        assert wild["loss"] is None
        assert 1 < wild["diverged"]["0"] <= 6
        assert not wild["best"]
        assert wild["improvement"] is None
    for variant in ("linear", "nonlinear"):
        losses = {decay: rows[variant, decay]["loss"]["mean"] for decay in (0.0, 0.1)}
        best = min(losses, key=losses.get)
        assert [rows[variant, decay]["best"] for decay in (0.0, 0.1)] == [best == 0.0, best == 0.1]
    best = next(row for row in results["rows"] if row["best"] and row["variant"] == "linear")
    for row in (rows["nonlinear", 0.0], rows["nonlinear", 0.1]):
        assert row["improvement"]["mean"] == pytest.approx(1 - row["loss"]["mean"] / best["loss"]["mean"])
        assert row["improvement"]["low"] is row["improvement"]["p"] is None  # one seed tells no spread


def test_a_variant_that_cannot_be_built_stops_before_any_training(tmp_path):
    out = tmp_path / "out"
    for wrong, told in (
        ({"architecture": {"query": {"path": "nonlinear", "rank": 0}}}, "rank"),
        ({"architecture": {"n_positions": 16}}, "blocks of 32 tokens"),
        ({"training": {"diverged_above": 2.0}}, "must be above ln V"),
        ({"sweep": {"diverged_above": [9.0, 2.0]}}, "must be above ln V"),
    ):
        message = refused(pretrain_study, study(variants={"linear": {}, "odd": wrong}), out)
        assert message.startswith("variants.odd: ")
        assert told in message
        assert not out.exists()


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=2, max_size=6))
def test_improvements_are_students_over_the_seeds(pairs):
    ratios = [(baseline - loss) / baseline for baseline, loss in pairs]
    found = improvement(*({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1)))
    assert found.mean == pytest.approx(np.mean(ratios))
    if np.std(ratios) > 1e-9:
        test = ttest_1samp(ratios, 0)
        interval = test.confidence_interval(0.95)
        assert found.p == pytest.approx(test.pvalue)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_improvements_use_common_seeds_and_need_seeds_that_differ():
    assert improvement({0: 4.0}, {1: 3.0}) is None
    assert improvement({0: 4.0, 1: 9.0}, {0: 3.0, 2: 1.0}).mean == 0.25
    same = improvement({0: 4.0, 1: 4.0}, {0: 3.0, 1: 3.0})
    assert same == Improvement(mean=0.25)
    assert improvement({0: 4.0, 1: 5.0}, {0: 4.0, 1: 5.0}).p == 1


@pytest.mark.parametrize(("seeds", "choices"), [*((seeds, 1) for seeds in range(2, 21)), (5, 2), (5, 3), (5, 8)])
def test_the_quantile_is_that_of_the_number_of_seeds_and_of_choices(seeds, choices):
    ratios = np.random.default_rng(seeds).normal(0.01, 0.02, seeds)
    pair = dict.fromkeys(range(seeds), 4.0), dict(enumerate(4 * (1 - ratios)))
    plain, found = improvement(*pair), improvement(*pair, choices)
    half = student.ppf(1 - 0.025 / choices, seeds - 1) * ratios.std(ddof=1) / seeds**0.5
    assert found.p == pytest.approx(min(1, choices * plain.p))
    assert (found.low, found.high) == pytest.approx((ratios.mean() - half, ratios.mean() + half))
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def rows_of(losses):
    """Return the rows of made-up runs: ``losses`` has an array (points, seeds) for each variant, the baseline first."""
    names = list(losses)
    seeds = range(losses[names[0]].shape[1])
    recipe = SimpleNamespace(
        seeds=seeds,
        baseline=names[0],
        variants=names,
        points=lambda name: [{"lr": float(place)} for place in range(len(losses[name]))],
    )
    train = {"steps": 1, "final_loss": 3.0, "tokens": 1, "wall_s": 1.0, "tokens_per_s": 1.0, "peak_memory_bytes": 1}
    runs = [
        StudyRun(
            variant=name,
            point=point,
            seed=seed,
            outcome="complete" if math.isfinite(loss) else "diverged",
            diverged_step=None if math.isfinite(loss) else 1,
            train={**train, "final_eval_loss": loss},
        )
        for name in names
        for point, of_seeds in zip(recipe.points(name), losses[name], strict=True)
        for seed, loss in enumerate(of_seeds)
    ]
    return _rows(recipe, runs)


@pytest.mark.parametrize(("variant", "baseline", "fold"), [(4, 1, 4), (1, 4, 4), (4, 3, 2), (4, 4, 1), (1, 1, 1)])
def test_on_noise_the_best_of_many_points_is_called_better_no_more_often_than_one(variant, baseline, fold):
    """All points are the same model; the losses of its seeds are noise. 2.5 % may be better, and 2.5 % worse."""
    seeds, runs, rng = 5, 1000, np.random.default_rng(0)
    found = {"better": 0, "worse": 0}
    for run in range(runs):
        losses = {"same": rng.normal(3.0, 0.01, (baseline, seeds)), "other": rng.normal(3.0, 0.01, (variant, seeds))}
        pair = [dict(enumerate(each[each.mean(axis=1).argmin()])) for each in losses.values()]
        one = improvement(*pair, fold)
        if run == 0:
            (row,) = (row for row in rows_of(losses) if row.best and row.variant == "other")
            assert row.improvement == one
        if one.p < 0.05:
            found["better" if one.mean > 0 else "worse"] += 1
    assert max(found.values()) / runs < 0.025 + 3 * (0.025 * 0.975 / runs) ** 0.5


def test_a_point_at_which_a_seed_diverged_is_none_to_choose_from():
    losses = {"same": np.full((1, 3), 3.0) + np.arange(3) / 100, "other": np.full((4, 3), 2.9) + np.arange(3) / 90}
    assert {row.improvement.choices for row in rows_of(losses) if row.variant == "other"} == {4}
    losses["other"][2, 1] = math.inf
    assert {row.improvement.choices for row in rows_of(losses) if row.variant == "other"} == {3}
