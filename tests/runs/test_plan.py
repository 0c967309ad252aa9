"""Plans are data: what each unit of work does, needs, writes and locks."""

from itertools import chain
from pathlib import Path

import pytest

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.runs.plan import plan_runs

OUT = Path("out")
COMPARISON = Recipe.model_validate(
    {
        "name": "small",
        "training": {"steps": 3, "warmup_steps": 1, "seeds": [3, 5]},
        "methods": {"skip": [{"type": "pre_projection"}], "baseline": [], "lora": [{"type": "lora", "r": 2}]},
    }
)
STUDY = StudyRecipe.model_validate(
    {
        "name": "small",
        "architecture": {"model_type": "gpt2"},
        "tokenizer": {"train_vocab_size": 300},
        "data": {"source": "tinyworld/base", "held_out": 10},
        "training": {"steps": 3, "warmup_steps": 1, "seeds": [0, 1]},
        "tuning": {"learning_rates": [0.1, 0.2], "extend": 1, "held_out": 3},
        "baseline": "plain",
        "variants": {
            "plain": {},
            "wide": {"tuning": {"learning_rates": [0.2, 0.3], "grid": {"training.weight_decay": [0.0, 0.1]}}},
            "fixed": {"tuning": None},
        },
    }
)


def listed(plan):
    return [(unit.action, str(unit.run.folder.relative_to(OUT / "runs"))) for unit in plan.units]


def test_a_comparison_trains_after_its_baseline_has_passed_the_check():
    plan = plan_runs(COMPARISON, OUT)
    runs = [(method, f"{method}/seed-{seed}") for seed in (3, 5) for method in ("skip", "lora")]
    baseline = [("evaluate", "baseline/seed-0"), ("check_baseline", "baseline/seed-0")]
    assert listed(plan) == [*baseline, *((action, folder) for _, folder in runs for action in ("train", "evaluate"))]
    evaluated, checked, *others = plan.units
    assert checked.needs == (evaluated,)
    for trained, scored in zip(others[::2], others[1::2], strict=True):
        assert (trained.needs, scored.needs) == ((checked,), (trained,))
        assert trained.run == scored.run
        assert (trained.marker, scored.marker) == tuple(
            trained.run.folder / name for name in ("training.json", "result.json")
        )
    assert plan.locks == ["baseline@seed-0", *(f"{method}@{folder[-6:]}" for method, folder in runs)]
    assert [run.name for run in plan.runs][:2] == ["baseline · seed 0", "skip · seed 3"]


def test_training_one_method_plans_nothing_else():
    plan = plan_runs(COMPARISON, OUT, "lora")
    assert listed(plan) == [("train", "lora/seed-3"), ("train", "lora/seed-5")]
    assert {unit.needs for unit in plan.units} == {()}
    assert len(plan.runs) == 5
    with pytest.raises(HfpatchError, match="did you mean 'lora'"):
        plan_runs(COMPARISON, OUT, "lorra")
    with pytest.raises(HfpatchError, match="nothing to train"):
        plan_runs(COMPARISON, OUT, "baseline")


@pytest.mark.parametrize("variant", [None, "wide", "fixed"])
def test_a_study_tunes_each_variant_at_its_own_values_and_trains_all_seed_by_seed(variant):
    plan = plan_runs(STUDY, OUT, variant)
    wide = {rate: [f"wide/tuning/lr={rate},weight_decay={decay}" for decay in (0.0, 0.1)] for rate in (0.2, 0.3)}
    wide |= {rate: [f"wide/tuning/lr={rate},weight_decay={decay}" for decay in (0.0, 0.1)] for rate in (0.133, 0.45)}
    rounds = [
        ["plain/tuning/lr=0.1", "plain/tuning/lr=0.2", *wide[0.2], *wide[0.3]],
        ["plain/tuning/lr=0.05", *wide[0.133]],
        ["plain/tuning/lr=0.4", *wide[0.45]],
    ]
    assert [[str(run.folder.relative_to(OUT / "runs")) for run in stage.runs] for stage in plan.tuning] == rounds
    runs = [f"{name}/seed-{seed}" for seed in (0, 1) for name in STUDY.variants]
    trials = [("tune", folder) for folder in chain(*rounds)]
    expected = [*trials, *((action, folder) for folder in runs for action in ("train", "evaluate"))]
    assert listed(plan) == [pair for pair in expected if variant is None or pair[1].startswith(variant)]
    tuned = tuple(unit for unit in plan.units if unit.action == "tune")
    assert all(unit.needs == tuned for unit in plan.units if unit.action == "train")
