"""The section ``tuning``: what is tried, and what contradicts itself, in one line each."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes.conftest import refused
from training_blocks import rates_of

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import Recipe, load_recipe
from hfpatch.recipes.training import with_steps
from hfpatch.recipes.tuning import TuningSettings, tuning_seed

RATES = "tuning.learning_rates=[1e-3, 1e-2]"


def grid(text):
    return [RATES, f"tuning.grid={{{text}}}"]


BAD = [
    (["tuning.learning_rates=[1e-3]"], "lists 1 rate, and tuning chooses between several"),
    (["tuning.learning_rates=[]"], "lists 0 rates"),
    (["tuning.learning_rates=[fast, 1]"], r'tuning.learning_rates.0 is "fast"; must be a number'),
    (["tuning.learning_rates=[true, 1]"], "tuning.learning_rates.0 is true; must be a number"),
    (["tuning.learning_rates=[1e-3, 0]"], "tuning.learning_rates.1 is 0; must be greater than 0"),
    (["tuning.learning_rates=[-1e-3, 1]"], "must be greater than 0"),
    (["tuning.learning_rates=[1e-3, 1e-2, 1e-3]"], "lists 0.001 twice; name each once"),
    (["tuning.learning_rates=[1e-3, 1.002e-3]"], "lists 0.001 and 0.001002, which are nearly the same"),
    (["tuning.learning_rates=1e-3"], "must be a list"),
    (["tuning.steps=20"], "tuning.learning_rates is missing"),
    ([RATES, "tuning.steps=5"], r"tuning.steps is 5; must be above training.warmup_steps \(5\)"),
    ([RATES, "tuning.extend=-1"], "tuning.extend is -1"),
    ([RATES, "tuning.held_out=0"], "tuning.held_out is 0"),
    (
        [RATES, "tuning.held_out=2000", "data.held_out=null", "training.evaluate_every=null"],
        "is 2000; must be below data.max_documents",
    ),
    ([RATES, "tuning.held_out=1000", "data.held_out=1000"], r"must with data.held_out \(1000\) be below"),
    ([RATES, "retention.tasks=[gone]"], r"=\[gone\]: retention.tasks names 'gone'"),
    ([RATES, "tuning.rates=[1]"], "unknown key 'tuning.rates'"),
    ([RATES, "training.lr=0.1"], "override 'training.lr=0.1': this recipe tunes the rate, so it has no effect"),
    ([RATES, "training.learning_rates.lora=0.1"], "training.learning_rates.lora fixes a rate that tuning would choose"),
    ([RATES, "data.source=text.bin", "data.layout=stream", "data.max_documents=null"], "text.bin contains tokens"),
    (grid("weight_decay: [0, 0.1]"), "is neither a key of training nor an option of a method"),
    (grid("training.weight_decy: [0, 0.1]"), r"training has no key 'weight_decy' \(did you mean 'weight_decay'\?\)"),
    (grid("training.weight_decay.lora: [0, 0.1]"), "training has no key 'weight_decay.lora'"),
    (grid("training.weight_decay: [0.1]"), "has 1 value; list two or more, or set training.weight_decay itself"),
    (grid("training.weight_decay: [0.1, 0.1]"), "lists 0.1 twice"),
    (grid("training.max_grad_norm: [null, null]"), "lists null twice"),
    (grid("training.weight_decay: [0, -1]"), "tuning.grid: training.weight_decay is -1; must be greater"),
    (grid("training.betas: [[0.9, 0.99], [0.9, 0.999]]"), r"contains \[0.9, 0.99\]; use numbers"),
    (grid("training.decay_steps: [1, 2]"), "tuning.grid: training.decay_steps is for training.schedule=wsd"),
    (
        grid("training.schedule: [wsd, cosine], training.decay_steps: [1, 2]"),
        r"is cosine; leave it out \(at schedule=cosine,decay_steps=1; try them in two recipes\)",
    ),
    (["training.schedule=linear", *grid("training.min_lr_ratio: [0, 0.1]")], "is for training.schedule=cosine or wsd"),
    (grid("training.lr: [1, 2]"), "is what tuning.learning_rates lists"),
    (grid("training.steps: [10, 20]"), "must be the same for all trials"),
    (["training.steps=null", "training.epochs=1", *grid("training.epochs: [1, 2]")], "must be the same for all trials"),
    ([*grid("training.warmup_steps: [1, 8]"), "tuning.steps=8"], r"in a trial: training.warmup_steps is 8; .* \(8\)"),
    (grid("training.warmup_steps: [1, 900]"), "tuning.grid: training.warmup_steps is 900; must be below"),
    (grid("training.micro_batch_size: [1, 2]"), "must be the same for all trials"),
    (grid("methods.lorra.0.lora_alpha: [1, 2]"), r"names no method that is trained \(did you mean 'lora'\?\)"),
    (grid("methods.baseline.0.r: [1, 2]"), "names no method that is trained"),
    (grid("methods.lora.1.lora_alpha: [1, 2]"), r"must name a part of lora by its number \(0\)"),
    (grid("methods.lora.lora_alpha: [1, 2]"), "must name a part of lora by its number"),
    (grid("methods.lora.0.type: [lora, ia3]"), "changes the method lora"),
    (grid("methods.lora.0.lora_alpha: [1, 2]"), "gives lora 2 settings and pre_projection 1; every method must have"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_a_mistake_is_one_line(overrides, message):
    assert re.search(message, refused("quickstart", *overrides))


def test_a_recipe_without_tuning_can_be_tuned_and_the_reverse():
    assert load_recipe("quickstart", [RATES]).tuning == TuningSettings(learning_rates=(1e-3, 1e-2))
    untuned = load_recipe("pythia-160m", ["tuning=null", "training.lr=1e-4"])
    assert (untuned.tuning, untuned.training.lr) == (None, 1e-4)


def test_rates_are_continued_by_the_ratio_at_the_edge():
    tuning = TuningSettings(learning_rates=(3e-5, 1e-2, 1e-5), extend=2)
    assert tuning.extension("lowest") == [pytest.approx(1e-5 / 3, rel=1e-2), pytest.approx(1e-5 / 9, rel=1e-2)]
    assert tuning.extension("highest") == [pytest.approx(1e-2 * (1e-2 / 3e-5) ** n, rel=1e-2) for n in (1, 2)]
    assert TuningSettings(learning_rates=(1, 2), extend=0).extension("lowest") == []


def test_no_final_run_has_the_seed_of_tuning():
    assert tuning_seed([0, 1, 2]) == 1000
    assert tuning_seed([1001, 1000]) == 1002


@given(
    warmup=st.lists(st.integers(0, 30), min_size=2, max_size=2, unique=True),
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    decay=st.lists(st.integers(1, 60), min_size=2, max_size=2, unique=True),
    steps=st.sampled_from([None, 10, 20]),
)
@settings(max_examples=60, deadline=None)
def test_every_trial_that_is_accepted_reaches_its_rate(warmup, schedule, decay, steps):
    axes = {"training.warmup_steps": warmup}
    axes |= {"training.decay_steps": decay} if schedule == "wsd" else {"training.schedule": [schedule, "wsd"]}
    tuning = {"learning_rates": [0.1, 0.2], "steps": steps, "grid": axes}
    try:
        recipe = small(steps=25, warmup_steps=1, schedule=schedule, tuning=tuning)
    except ValueError:
        assert max(warmup) >= (steps or 25)
        return
    for values in recipe.tuning.combinations("lora", recipe.methods):
        trial = recipe.tuned("lora", {"lr": 0.2, **values}, trial=True).training
        assert trial.steps == (steps or 25)
        assert max(rates_of(trial, trial.steps)) == pytest.approx(0.2)


def test_a_trial_of_epochs_is_judged_by_the_steps_that_they_are():
    axes = {"training.warmup_steps": [1, 30]}
    recipe = small(epochs=2.0, warmup_steps=1, tuning={"learning_rates": [0.1, 0.2], "grid": axes})
    assert recipe.tuned("lora", {"lr": 0.2, "warmup_steps": 30}, trial=True).training.epochs == 2.0
    in_steps = [recipe.model_copy(update={"training": with_steps(recipe.training, blocks=n * 8)}) for n in (31, 30)]
    in_steps[0].check_trials()
    with pytest.raises(HfpatchError, match=r"training.warmup_steps is 30; must be below training.steps \(30\)"):
        in_steps[1].check_trials()


def small(tuning, **training):
    methods = {"baseline": [], "lora": [{"type": "lora", "r": 2}]}
    return Recipe.model_validate({"name": "small", "training": training, "tuning": tuning, "methods": methods})


def test_a_trial_is_the_recipe_at_its_values():
    grid = {"training.weight_decay": [0.0, 0.5], "training.learning_rates.skip": [0.3, 0.4]}
    grid |= {"methods.lora.0.lora_alpha": [4, 8], "methods.pre.1.init": ["paper", "identity"]}
    lora = {"type": "lora", "r": 2}
    recipe = Recipe.model_validate(
        {
            "name": "small",
            "data": {"held_out": 9},
            "training": {
                **{"steps": 50, "warmup_steps": 2, "patience": 3, "keep_best": True, "evaluate_every": 5},
                **{"on_bad_loss": "stop", "report_to": ["tensorboard"], "keep_checkpoints": 3},
            },
            "tuning": {"learning_rates": [0.1, 0.2], "steps": 20, "grid": grid},
            "methods": {"baseline": [], "lora": [lora], "pre": [lora, {"type": "pre_projection"}]},
        }
    )
    trained = {name: recipe.methods[name] for name in recipe.trained}
    combined = recipe.tuning.combinations("pre", trained)
    assert len(combined) == len(recipe.tuning.combinations("lora", trained)) == 8
    assert combined[1] == {"weight_decay": 0.0, "learning_rates.skip": 0.3, "1.init": "identity"}
    trial = recipe.tuned("pre", {"lr": 0.2, **combined[-1]}, trial=True)
    changed = {"steps": 20, "lr": 0.2, "weight_decay": 0.5, "learning_rates": {"skip": 0.4}}
    once = {"evaluate_every": None, "patience": None, "keep_best": False, "keep_checkpoints": 1}
    once |= {"on_bad_loss": "record", "report_to": ()}
    assert trial.training == recipe.training.model_copy(update=changed | once)
    assert trial.methods == recipe.methods | {"pre": [lora, {"type": "pre_projection", "init": "identity"}]}
    final = recipe.tuned("lora", {"lr": 0.1, "0.lora_alpha": 8})
    assert final.training == recipe.training.model_copy(update={"lr": 0.1})
    assert final.methods["lora"] == [{**lora, "lora_alpha": 8}]
    assert final.tuning is None


@pytest.mark.parametrize("name", ["pythia-160m", "pythia-410m", "gpt2", "quickstart-tuned"])
def test_our_comparisons_tune_and_the_published_protocols_do_not(name):
    assert load_recipe(name).tuning is not None
    if name.startswith("pythia"):
        assert load_recipe(f"{name}-as-published").tuning is None
        assert load_recipe(name).tuning.learning_rates == (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
