"""Tuning: every method tried at the same rates on the same batches, the best taken, and interrupted without a trace."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file
from tiny_runs import Nothing, Stop, Trained, has_files, lines, numbers, refused, small_recipe

from hfpatch.data.blocks import TokenBlocks
from hfpatch.evaluation import compare_again
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.tuning import point_name
from hfpatch.results.folder import load_results
from hfpatch.results.tuning import Tuning as TuningResults
from hfpatch.runs import compare, records, train
from hfpatch.runs.folder import RunPaths
from hfpatch.runs.plan import Plan, plan_runs
from hfpatch.runs.setup import set_up
from hfpatch.runs.tuning import Tuning, best_of, collect_tuning
from hfpatch.support.files import read_json, write_json
from hfpatch.tinyworld import documents

TRAINING = {"steps": 3, "warmup_steps": 1, "batch_size": 4, "seeds": [0, 1], "save_every": 1, "keep_finished": True}
TUNING = {"learning_rates": [1e-4, 1e-3], "held_out": 4, "extend": 1}


def make_recipe(model_folder: Path, **sections) -> Recipe:
    return small_recipe(model_folder, **{"training": TRAINING, "tuning": TUNING, **sections})


@pytest.fixture
def recipe(model_folder):
    return make_recipe(model_folder)


@pytest.fixture(scope="module")
def straight(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    compare(make_recipe(model_folder), out)
    return out


class StopTrial(Stop):
    """Interrupts at the n-th step of all trials."""

    def hear(self, run, *_):
        if run.endswith("tuning"):
            super().hear(run)


# What is planned and decided, on outcomes made up.


def outcomes(
    out: Path, losses: dict[str, dict[float, float]], *, extend: int = 2, refine: int = 0, base: float = math.inf
) -> tuple[Tuning, list[str], TuningResults]:
    """Run the trials of a plan with these losses by method and rate; return the tuning and the order of its trials."""
    tuning = {**TUNING, "learning_rates": [0.1, 0.2], "extend": extend, "refine": refine}
    methods = {"baseline": [], **{name: [{"type": "lora", "r": 1}] for name in losses}}
    recipe = make_recipe(out, tuning=tuning, methods=methods)
    return decided(out, recipe, plan_runs(recipe, out), losses, base=base)


def decided(
    out: Path, recipe: Recipe | StudyRecipe, plan: Plan, losses: dict[str, dict[float, float]], *, base: float
) -> tuple[Tuning, list[str], TuningResults]:
    """Run the trials of a plan, as `outcomes`."""
    tuning, took_place = Tuning(plan.tuning, base=out / "base.json"), []
    if math.isfinite(base):
        write_json(out / "base.json", {"losses": [[base, 1], [2 * base, 2]]})
    for unit in plan.units:
        if unit.action == "tune" and tuning.needs(unit.run):
            took_place.append(f"{unit.run.variant} {unit.run.point['lr']:g}")
            loss = losses[unit.run.variant][unit.run.point["lr"]]
            diverged = 1 if math.isinf(loss) else None
            sizes = dict.fromkeys(("steps", "tokens", "peak_memory_bytes", "final_loss", "wall_s", "tokens_per_s"), 1)
            measured = {"final_eval_loss": None if diverged else loss, "diverged_step": diverged}
            records.Trained(**sizes, **measured, identity={"plan": "e" * 64}).write(unit.marker)
    shared = SimpleNamespace(steps=1)
    return tuning, took_place, collect_tuning(tuning, recipe, {}, shared)


def test_the_best_within_the_rates_needs_no_more_of_them(tmp_path):
    losses = {"a": {0.1: 2.0, 0.2: 1.0, 0.4: 3.0}, "b": {0.1: 1.0, 0.2: 0.9, 0.4: 1.5}}
    tuning, trials, results = outcomes(tmp_path, losses)
    assert trials == ["a 0.1", "a 0.2", "b 0.1", "b 0.2", "a 0.4", "b 0.4"]
    assert [tuning.chosen(name) for name in "ab"] == [{"lr": 0.2}, {"lr": 0.2}]
    assert [results.chosen[name].edge for name in "ab"] == [None, None]


def test_one_method_at_an_edge_adds_a_rate_for_all(tmp_path):
    """b is best at the lowest rate, until two more are tried, and the last of them is its best; a is not."""
    losses = {"a": {0.1: 2.0, 0.2: 2.1, 0.05: 1.5, 0.025: 1.6}, "b": {0.1: 1.0, 0.2: 1.4, 0.05: 0.9, 0.025: 0.8}}
    tuning, trials, results = outcomes(tmp_path, losses)
    assert trials == ["a 0.1", "a 0.2", "b 0.1", "b 0.2", "a 0.05", "b 0.05", "a 0.025", "b 0.025"]
    assert [tuning.chosen(name) for name in "ab"] == [{"lr": 0.05}, {"lr": 0.025}]
    assert [results.chosen[name].edge for name in "ab"] == [None, "lowest"]
    _, trials, results = outcomes(tmp_path / "none", losses, extend=0)
    assert len(trials) == 4
    assert [results.chosen[name].edge for name in "ab"] == ["lowest", "lowest"]


def test_rates_between_the_best_and_its_neighbours_are_tried_until_the_choice_is_worth_little(tmp_path):
    """The losses are parabolas over the logarithm of the rate; the margin is 0.02 nats a token."""

    class Parabola(dict):
        def __missing__(self, rate):
            return 1 + self["curve"] * math.log(rate / self["best"]) ** 2

    methods = {"a": Parabola(best=0.15, curve=0.5), "b": Parabola(best=0.19, curve=0.1)}
    tuning, trials, results = outcomes(tmp_path, methods, extend=1, refine=3)
    counts = [sum(trial.startswith(name) for trial in trials) for name in "ab"]
    assert counts[0] == counts[1]  # as many of every method
    assert {"a 0.141", "b 0.141", "b 0.283"} <= set(trials)  # halfway between 0.1, 0.2 and 0.4
    assert all(results.rate_error(name) < 0.01 for name in "ab")
    assert not {*results.refined} & {0.05, 0.1, 0.2, 0.4}
    assert tuning.chosen("a")["lr"] == pytest.approx(0.15, rel=0.2)
    _, fewer, coarse = outcomes(tmp_path / "none", methods, extend=1)
    assert len(fewer) < len(trials)
    assert coarse.refined is None
    assert max(coarse.rate_error(name) for name in "ab") > 0.01


def test_variants_of_a_study_are_refined_at_their_own_rates(tmp_path):
    tuning = {"learning_rates": [0.1, 0.2], "held_out": 4, "extend": 0, "refine": 1}
    given = {"name": "study", "architecture": {"model_type": "gpt2"}, "tokenizer": {"train_vocab_size": 300}}
    given |= {"data": {"source": "tinyworld/base", "held_out": 4}, "training": {"steps": 3, "warmup_steps": 1}}
    variants = {"a": {}, "b": {"tuning": {"learning_rates": [1.0, 4.0]}}, "fixed": {"tuning": None}}
    recipe = StudyRecipe.model_validate({**given, "tuning": tuning, "baseline": "a", "variants": variants})
    losses = {"a": {0.1: 1.0, 0.2: 2.0, 0.0707: 1.1, 0.141: 0.9}, "b": {1.0: 2.0, 4.0: 1.0, 2.0: 1.5, 8.0: 3.0}}
    tuning, trials, results = decided(tmp_path, recipe, plan_runs(recipe, tmp_path), losses, base=math.inf)
    assert trials == ["a 0.1", "a 0.2", "b 1", "b 4", "a 0.0707", "a 0.141", "b 2", "b 8"]
    assert {name: choice.values["lr"] for name, choice in results.chosen.items()} == {"a": 0.141, "b": 4.0}
    assert (results.refined, results.added) == ([0.0707, 0.141, 2.0, 8.0], [])


def test_a_loss_above_the_base_s_asks_for_no_more_rates(tmp_path):
    """The choice is worth a quarter of what the base is behind the best, which is below half the margin."""
    losses = {"a": {0.1: 9.0, 0.2: 1.0, 0.4: math.inf}, "b": {0.1: 5.0, 0.2: 1.01, 0.4: 7.0}}
    _, trials, results = outcomes(tmp_path / "known", losses, extend=1, refine=2, base=1.03)
    assert (len(trials), results.refined) == (6, None)
    assert [results.rate_error(name) for name in "ab"] == pytest.approx([0.0075, 0.005])
    with pytest.raises(KeyError):  # a rate between them is tried
        outcomes(tmp_path / "unknown", losses, extend=1, refine=2)


def test_a_trial_that_diverged_is_never_the_best_and_all_of_them_leave_the_lowest_rate(tmp_path):
    infinite = dict.fromkeys((0.1, 0.2, 0.05, 0.025), math.inf)
    losses = {"a": infinite, "b": {0.1: 3.0, 0.2: math.inf, 0.05: 4.0, 0.025: 5.0}}
    tuning, trials, results = outcomes(tmp_path, losses)
    assert [trial for trial in trials if trial.startswith("a")] == ["a 0.1", "a 0.2", "a 0.05", "a 0.025"]
    assert [tuning.chosen(name) for name in "ab"] == [{"lr": 0.025}, {"lr": 0.1}]
    assert best_of(tuning.outcomes(), "a").loss is None

    # The same in memory and in the file
    assert TuningResults.model_validate_json(json.dumps(results.to_json(), allow_nan=False)) == results
    assert (results.chosen["a"].loss, results.chosen["a"].edge, results.chosen["a"].is_tuned) == (None, None, False)
    assert results.chosen["b"].is_tuned
    assert not any(results.is_chosen(trial) for trial in results.of("a"))


def test_a_plan_has_as_many_trials_of_every_method_before_any_final_run(recipe):
    out = Path("out")
    plan = plan_runs(recipe, out)
    actions = [unit.action for unit in plan.units]
    assert actions[:2] == ["evaluate", "check_baseline"]
    tunes = [unit for unit in plan.units if unit.action == "tune"]
    assert actions[2 : 2 + len(tunes)] == ["tune"] * len(tunes)
    assert [stage.edge for stage in plan.tuning] == [None, "lowest", "highest"]
    for stage in plan.tuning:
        tried = {name: [run.point for run in stage.runs if run.variant == name] for name in recipe.trained}
        assert tried["lora"] == tried["pre"]
    for index, unit in enumerate(tunes):
        stage = next(stage for stage in plan.tuning if unit.run in stage.runs)
        before = [one for one in tunes[:index] if one.run not in stage.runs]
        assert list(unit.needs) == (before or [plan.units[1]])
        assert (unit.run.seed, unit.run.folder.parent) == (1000, out / "runs" / unit.run.variant / "tuning")
        assert unit.marker == RunPaths(unit.run.folder).training
    markers = {unit.marker for unit in tunes}
    finals = [unit for unit in plan.units if unit.action == "train"]
    assert all({need.marker for need in unit.needs} == markers for unit in finals)
    one = plan_runs(recipe, out, "lora")
    assert [unit.run.variant for unit in one.units] == ["lora"] * 6
    assert {lock.partition("@")[0] for lock in one.locks} == {"lora"}


# Whole comparisons of a tiny model.


def test_every_method_has_the_same_trials_on_the_same_batches(straight):
    results = read_json(straight / "results.json")
    tuning, runs = results["tuning"], straight / "runs"
    losses = {name: {} for name in ("pre", "lora")}
    for trial in tuning["trials"]:
        losses[trial["method"]][trial["values"]["lr"]] = trial["loss"]
        folder = runs / trial["method"] / "tuning" / f"lr={trial['values']['lr']}"
        assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "training.json"]
        assert max(step["lr"] for step in lines(folder / "metrics.jsonl")) == pytest.approx(trial["values"]["lr"])
    assert set(losses["pre"]) == set(losses["lora"]) == set(tuning["learning_rates"])
    assert all(best < tuning["base_loss"] for best in (min(losses["pre"].values()), min(losses["lora"].values())))
    plans = {trial["plan"] for trial in tuning["trials"]}
    final = {plan["sha256"] for plan in read_json(straight / "plan.json").values()} - plans
    assert (len(plans), len(final), tuning["seed"]) == (1, 2, 1000)
    assert plans == {read_json(straight / "plan.json")["1000"]["sha256"]}
    assert set(results["plan"]) == {"0", "1"}
    for name, tried in losses.items():
        best = min(tried, key=tried.get)
        assert tuning["chosen"][name]["values"] == {"lr": best}
        assert tuning["chosen"][name]["trials"] == len(tried)
        for seed in (0, 1):
            steps = lines(runs / name / f"seed-{seed}" / "metrics.jsonl")
            assert max(step["lr"] for step in steps) == pytest.approx(best)
    at_the_top = [name for name, tried in losses.items() if min(tried, key=tried.get) == max(tried)]
    warned = [warning for warning in results["warnings"] if "that were tried, so a higher one may be better" in warning]
    assert [name for warning in warned for name in warning.partition(":")[0].split(" and ")] == at_the_top
    assert not any("may favour some" in warning for warning in results["warnings"])
    assert "lr" not in results["training"]


def test_what_a_choice_is_worth_follows_from_the_kept_values(model_folder, tmp_path):
    """Of a copy without the runs, where the rate above the best diverged: h/4 up to the base's loss."""
    tuning = {**TUNING, "learning_rates": [1e-4, 1e-3, 1e25], "extend": 0}
    training = {**TRAINING, "seeds": [1000], "on_bad_loss": "stop"}  # which stops no trial
    compare(make_recipe(model_folder, tuning=tuning, training=training), tmp_path / "out")
    for name in ("results.json", "values.safetensors"):
        shutil.copy(tmp_path / "out" / name, tmp_path / name)
    results, kept = load_results(tmp_path), safetensors.numpy.load_file(tmp_path / "values.safetensors")
    tokens = kept["/weights/tuning_text/nats_per_token"]
    assert tokens.shape == (4,)
    losses = {name: -kept[f"{name}/tuning_text/nats_per_token"].sum(1) / tokens.sum() for name in results.methods}
    assert losses["baseline"] == pytest.approx([results.tuning.base_loss])
    for name in ("pre", "lora"):
        low, best, high = losses[name]
        assert [trial.loss for trial in results.tuning.of(name)] == [pytest.approx(low), pytest.approx(best), None]
        assert results.tuning.chosen[name].values == {"lr": 1e-3}
        assert results.tuning.of(name)[-1].diverged_step in (2, 3)
        assert np.isnan(high)
        assert results.rate_errors[name] == pytest.approx((losses["baseline"][0] - best) / 4)
    assert results.tuning.seed == 1001  # as a final run has 1000
    trials = [trial.model_copy(update={"loss": 1.0}) for trial in results.tuning.trials]
    wrong = results.tuning.model_copy(update={"base_loss": 9.0, "trials": trials})
    write_json(tmp_path / "results.json", results.model_copy(update={"tuning": wrong}).to_json())
    assert compare_again(tmp_path).tuning == results.tuning
    assert results.tuning.text["predicted_tokens"] == tokens.sum()
    assert "groups" not in results.tuning.text
    assert results.tuning.bits_per_nat == pytest.approx(tokens.sum() / results.tuning.text["bytes"] / math.log(2))


def test_the_text_of_tuning_is_in_no_training_and_no_task(recipe, straight):
    setup = set_up(recipe, Tuning(plan_runs(recipe, straight).tuning))
    parts = {"train": setup.blocks, "held_out": setup.held_out, "tuning": setup.tuning_text}

    def texts(blocks: TokenBlocks) -> set[tuple[int, ...]]:
        """The pieces of all rows, each at most a block long."""
        pieces = set()
        for row, begin, end in zip(blocks.rows, blocks.offsets, blocks.offsets[1:], strict=False):
            start = 0
            for size in blocks.sizes[begin:end]:
                pieces.add(tuple(row[start : start + size].tolist()))
                start += size
        return pieces

    assert {name: blocks.documents for name, blocks in parts.items()} == {"train": 21, "held_out": 5, "tuning": 4}
    assert not texts(setup.tuning_text) & (texts(setup.blocks) | texts(setup.held_out))
    assert read_json(straight / "identity.json")["tuning_text"] == setup.tuning_text.sha256


def test_interrupted_tuning_resumes_to_the_same_bits(recipe, straight, tmp_path):
    """In the first trial after a checkpoint, and in a later one."""
    out = tmp_path / "out"
    for stop in (2, 8):
        with pytest.raises(KeyboardInterrupt):
            compare(recipe, out, resume=out.exists(), progress=StopTrial(stop))
    checkpoints = list(out.rglob("checkpoints/step-*"))
    assert checkpoints  # of the trial that was interrupted
    assert all("tuning" in path.parts for path in checkpoints)
    results = compare(recipe, out, resume=True)
    assert numbers(results) == numbers(read_json(straight / "results.json"))
    assert not list(out.rglob("tuning/*/checkpoints"))
    for path in straight.rglob("*.safetensors"):
        ours, theirs = load_file(out / path.relative_to(straight)), load_file(path)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    compare(recipe, out, resume=True, progress=Nothing())


def test_train_tunes_its_method_and_compare_takes_that_up(recipe, straight, tmp_path):
    out, log = tmp_path / "out", Trained()
    patches = train(recipe, "lora", out, progress=log)
    assert patches == [out / "runs" / "lora" / f"seed-{seed}" / "patch" for seed in (0, 1)]
    assert all((patch / "patch.json").is_file() for patch in patches)
    assert "--resume" in refused(train, recipe, "lora", out)
    train(recipe, "lora", out, resume=True, progress=Nothing())
    assert all(name.startswith("lora") for name in log.trained)
    assert sum(name.endswith("tuning") for name in log.trained) >= 2
    train(recipe, "pre", out, progress=log)
    results = compare(recipe, out, resume=True, progress=(rest := Trained()))
    assert not set(log.trained) & set(rest.trained)
    assert numbers(results) == numbers(read_json(straight / "results.json"))


def test_a_run_trained_before_its_rate_changed_is_named(recipe, straight, tmp_path):
    """As where compare tried a rate beyond those that train had needed."""
    out = shutil.copytree(straight, tmp_path / "out")
    for path in (*out.glob("results.*"), *out.glob("runs/*/seed-*/result.json")):
        path.unlink()
    setup = set_up(recipe, Tuning(plan_runs(recipe, out).tuning))
    best = best_of(setup.tuning.outcomes(), "lora")
    other = next(trial for trial in setup.tuning.outcomes() if trial.method == "lora" and trial != best)
    training = RunPaths(out / "runs" / "lora" / "tuning" / point_name(other.values)).training

    class Changes(Trained):
        def evaluating(self, run, task):
            write_json(training, read_json(training) | {"final_eval_loss": 0.0})

    message = refused(compare, recipe, out, resume=True, progress=Changes())
    assert message.startswith("lora · seed 0: was trained before the rates were extended, and tuning now chooses lr=")
    assert f"delete {out / 'runs' / 'lora' / 'seed-0'} and resume" in message


def test_options_of_methods_are_tuned_at_equal_trials(model_folder, tmp_path):
    grid = {"methods.lora.0.lora_alpha": [2, 32], "methods.pre.0.init": ["identity", "paper"]}
    tuning = {"learning_rates": [1e-3, 1e-2], "held_out": 4, "extend": 0, "steps": 2, "grid": grid}
    small = make_recipe(model_folder, tuning=tuning, training={**TRAINING, "seeds": [0]})
    results = compare(small, tmp_path / "out")
    trials = results["tuning"]["trials"]
    assert [sum(trial["method"] == name for trial in trials) for name in ("pre", "lora")] == [4, 4]
    values = [json.dumps(trial["values"], sort_keys=True) for trial in trials if trial["method"] == "lora"]
    assert len(set(values)) == 4
    chosen = results["tuning"]["chosen"]["lora"]["values"]
    saved = read_json(tmp_path / "out" / "runs" / "lora" / "seed-0" / "patch" / "lora" / "adapter_config.json")
    assert saved["lora_alpha"] == chosen["0.lora_alpha"]


@pytest.mark.parametrize(
    ("lora", "pre", "reason"),
    [
        ({"lora_alhpa": [1, 2]}, {"init": ["paper", "identity"]}, "lora has no option 'lora_alhpa' (did you mean"),
        ({"lora_alpha": [1, 2]}, {"init": ["paper", "other"]}, "init='other'"),
        ({"lora_alpha": [1, 2]}, {"expansion": [1.0, 1.25]}, "gives pre 512 trained parameters in place of 640, so it"),
    ],
)
def test_options_that_cannot_be_tuned_are_refused_before_anything_is_written(model_folder, tmp_path, lora, pre, reason):
    grid = {
        f"methods.{name}.0.{key}": values
        for name, options in (("lora", lora), ("pre", pre))
        for key, values in options.items()
    }
    small, out = make_recipe(model_folder, tuning=TUNING | {"grid": grid}), tmp_path / "out"
    for start in (compare, lambda recipe, out: train(recipe, "lora", out)):
        message = refused(start, small, out)
        assert message.startswith("tuning.grid: ")
        assert reason in message
        assert not has_files(out)


def test_a_text_that_tuning_does_not_fit_is_refused_before_anything_is_written(model_folder, tmp_path):
    """Of the first there are too few documents; an epoch of the second is a few steps, which one warm-up exceeds."""
    text = tmp_path / "text.txt"
    text.write_text("One of many.\n\n" * 30 + "\n\n".join(documents("base", count=9)))
    small = make_recipe(model_folder, data={"source": str(text), "block_size": 32}, tuning={**TUNING, "held_out": 10})
    message = refused(compare, small, tmp_path / "out")
    assert "tuning.held_out is 10, and of 39 documents only 9 occur once in the text" in message
    assert not has_files(tmp_path / "out")
    training = {key: value for key, value in TRAINING.items() if key != "steps"} | {"epochs": 1.0}
    tuning = {**TUNING, "grid": {"training.warmup_steps": [1, 500]}}
    message = refused(compare, make_recipe(model_folder, training=training, tuning=tuning), tmp_path / "out")
    assert message.startswith("tuning.grid: training.warmup_steps is 500; must be below training.steps (")
    assert not has_files(tmp_path / "out")


def test_nothing_goes_on_with_a_trial_of_something_else(recipe, straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "out")
    (out / "results.json").unlink()
    path = out / "runs" / "lora" / "tuning" / "lr=0.001" / "training.json"
    write_json(path, read_json(path) | {"identity": read_json(path)["identity"] | {"plan": "0" * 64}})
    assert "does not match the current batch plan" in refused(compare, recipe, out, resume=True)
