"""Pretraining recipes: one model, or a study of variants."""

import pytest
from recipes.conftest import refused

from hfpatch.recipes.pretraining import load_pretraining

PRETRAIN = """\
name: tiny
architecture: {model_type: gpt_neox, hidden_size: 16}
tokenizer: {train_vocab_size: 300}
data: {source: tinyworld/base}
"""


def test_a_pretraining_recipe_is_read_and_written_back(write, tmp_path):
    recipe = load_pretraining(write(PRETRAIN), ["training.steps=700", "architecture.hidden_size=32"])
    assert recipe.training.steps == 700
    assert recipe.architecture["hidden_size"] == 32
    assert (list(recipe.variants), recipe.baseline, recipe.asked()) == (["tiny"], "tiny", [])
    assert load_pretraining(write(recipe.to_yaml(), "again.yaml")) == recipe


STUDY = """\
name: tiny-study
architecture: {model_type: gpt2, n_embd: 16, n_head: 2, n_layer: 1, biases: false}
tokenizer: {train_vocab_size: 300}
data: {source: tinyworld/base, held_out: 10}
training: {steps: 20, warmup_steps: 2, lr: 1e-3, seeds: [0, 7]}
tuning:
  learning_rates: [1e-3, 2e-3]
  grid: {training.weight_decay: [0.1, 0.2]}
  steps: 5
  held_out: 4
baseline: linear
variants:
  linear: {}
  nonlinear: {architecture: {query: {path: nonlinear}}, training: {min_lr_ratio: 0.01}}
  wide: {architecture: {mlp_width: 4.75}, training: {weight_decay: 0.03125}, tuning: null}
"""


def test_a_study_is_read_and_written_back(write):
    assert load_pretraining(write(STUDY), ["training.seeds=3"]).training.seeds == (0, 1, 2)
    study = load_pretraining(write(STUDY), ["training.seeds={looks: [2, 4]}"])
    assert (study.training.all_seeds, study.training.first_seeds) == ((0, 1, 2, 3), (0, 1))
    assert load_pretraining(write(study.to_yaml(), "again.yaml")) == study


def test_an_override_changes_adds_or_takes_out_a_variant(write):
    changes = "variants.wide.training.lr=0.5", "variants.new={}", "variants.nonlinear=null"
    variants = load_pretraining(write(STUDY), changes).variants
    assert list(variants) == ["linear", "wide", "new"]
    assert variants["wide"].training["lr"] == 0.5
    for override, message in (
        ("variants.wide.trainin.lr=1", "unknown key 'variants.wide.trainin' (did you mean 'training'?)"),
        (
            "variants.wid.training.lr=1",
            "there is no 'wid' in variants (did you mean 'wide'?); to add it, write variants",
        ),
    ):
        assert message in refused(write(STUDY), override, load=load_pretraining)


def test_a_rate_that_tuning_replaces_is_refused(write):
    assert load_pretraining(write(STUDY), ["training.lr=0.5"]).training.lr == 0.5  # of wide
    tuned = write(STUDY.replace(", tuning: null", ""))
    assert "tunes the rate, so it has no effect" in refused(tuned, "training.lr=0.5", load=load_pretraining)


def test_a_recipe_of_another_command_is_refused_with_its_name(write):
    for text in (STUDY, PRETRAIN):
        assert "use hfpatch pretrain" in refused(write(text))
    assert "use hfpatch compare" in refused("quickstart", load=load_pretraining)


def test_the_runs_of_a_study(write):
    study = load_pretraining(write(STUDY))
    assert study.tuning_of("linear") == study.tuning
    assert study.tuning_of("wide") is None
    linear, nonlinear, wide = (study.single(name, {}, 7) for name in study.variants)
    assert linear.architecture == study.architecture
    assert nonlinear.architecture == {**study.architecture, "query": {"path": "nonlinear"}}
    assert (nonlinear.seed, nonlinear.name) == (7, "tiny-study-nonlinear")
    assert (wide.training.lr, wide.training.weight_decay) == (1e-3, 0.03125)
    tuned = study.single("nonlinear", {"lr": 2e-3, "weight_decay": 0.2}, 0).training
    assert (tuned.lr, tuned.weight_decay, tuned.min_lr_ratio, tuned.steps) == (2e-3, 0.2, 0.01, 20)
    trial = study.single("nonlinear", {"lr": 2e-3, "weight_decay": 0.2}, 0, trial=True).training
    assert trial == tuned.model_copy(update={"steps": 5})


def test_a_study_asks_by_default_for_a_gain_of_each_variant_over_the_baseline(write):
    (asked,) = load_pretraining(write(STUDY)).asked()
    assert (asked.pairs, asked.on) == ([("nonlinear", "linear"), ("wide", "linear")], ["held_out_text"])
    chosen = load_pretraining(write(STUDY), ["questions.gain.pairs=[[nonlinear, wide]]", "margin={}"])
    assert chosen.asked()[0].pairs == [("nonlinear", "wide")]
    assert chosen.margins["nats_per_token"] == 0.02
    assert load_pretraining(write(STUDY), ["questions.gain=null"]).asked() == []


def test_the_decay_of_a_variant_is_its_own(write):
    study = load_pretraining(write(STUDY.replace("min_lr_ratio: 0.01", "schedule: wsd, decay_steps: 5")))
    assert study.single("nonlinear", {}, 0).training.decay_steps == 5
    assert study.single("linear", {}, 0).training.decay_steps is None


@pytest.mark.parametrize(
    ("text", "old", "new", "parts"),
    [
        (PRETRAIN, "tokenizer: {train_vocab_size: 300}", "tokenizer: {}", ["tokenizer", "train_vocab_size or path"]),
        (PRETRAIN, "{train_vocab_size: 300}", "{train_vocab_size: 300, path: x}", ["tokenizer", "not both"]),
        (PRETRAIN, "train_vocab_size", "vocab_size", ["tokenizer.vocab_size", "did you mean 'train_vocab_size'"]),
        (PRETRAIN, "name: tiny", "name: tiny\ntraining: {steps: 10}", ["warmup_steps", "below training.steps"]),
        (PRETRAIN, "name: tiny", "name: tiny\nbaseline: other", ["baseline is 'other', which is not among variants"]),
        (PRETRAIN, "name: tiny", "name: tiny\nvariants: {}", ["give baseline"]),
        (STUDY, "baseline: linear\n", "", ["give baseline, the variant that all others are compared with"]),
        (PRETRAIN, "architecture: ", "architecure: ", ["did you mean 'architecture'"]),
        (PRETRAIN, "name: tiny", "name: tiny\ntraining: {diagnose_every: 5}", ["diagnose_every", "data.held_out"]),
        (PRETRAIN, "base}", "base, seed: 1}", ["data.seed is for held-out"]),
        (PRETRAIN, "base}", "base}\nevaluation_data: {mixture: [{source: a}, {source: b}]}", ["measures one text"]),
        (STUDY, "baseline: linear", "baseline: liner", ["baseline is 'liner'", "did you mean 'linear'"]),
        (STUDY, "[0, 7]", "[0, 0]", ["seeds lists 0 twice"]),
        (STUDY, "  wide:", "  wi/de:", ["'wi/de' becomes a folder"]),
        (STUDY, ", held_out: 10", "", ["loss on held-out text", "data.held_out"]),
        (STUDY, "training.weight_decay:", "training.weigt_decay:", ["tuning.grid", "did you mean 'weight_decay'"]),
        (STUDY, "training.weight_decay:", "training.steps:", ["tuning.grid", "must be the same for all"]),
        (STUDY, "[0.1, 0.2]", "[0.1, -1.0]", ["variants.linear at weight_decay=-1.0", "training.weight_decay is -1.0"]),
        (STUDY, "steps: 5", "steps: 2", ["tuning.steps is 2; must be above training.warmup_steps (2)"]),
        (STUDY, "tuning: null", "tuning: {learning_rates: [1e-3]}", ["variants.wide", "lists 1 rate"]),
        (STUDY, "tuning: null", "tuning: {steps: 3}", ["variants.wide.tuning.steps"]),
        (STUDY, "min_lr_ratio: 0.01", "min_lr_rati: 0.01", ["variants.nonlinear", "did you mean 'min_lr_ratio'"]),
        (STUDY, "min_lr_ratio: 0.01", "decay_steps: 4", ["variants.nonlinear", "training.decay_steps is for"]),
        (STUDY, "min_lr_ratio: 0.01", "lr: 0.01", ["variants.nonlinear.training.lr fixes the rate"]),
        (STUDY, "min_lr_ratio: 0.01", "batch_size: 4", ["variants.nonlinear", "batch_size must be the same"]),
        (STUDY, "baseline:", "questions: {keep: {}}\nbaseline:", ["questions.keep"]),
        (STUDY, "baseline:", "margin: {accuracy2: 1}\nbaseline:", ["margin.accuracy2", "no measure"]),
        (STUDY, "baseline:", "margin: {accuracy: 1}\nbaseline:", ["there are nats_per_token, held_out_text"]),
        (STUDY, "baseline:", "questions: {gain: {pairs: [[nonlinear, lin]]}}\nbaseline:", ["'lin'", "among variants"]),
        (
            STUDY.replace("seeds: [0, 7]", "seeds: {looks: [2, 3]}"),
            "baseline:",
            "questions: {gain: null}\nbaseline:",
            ["training.seeds.looks", "ask one in questions"],
        ),
        (PRETRAIN, "name: tiny", "name: tiny\ntraining: {decay_steps: 5}", ["decay_steps is for training.schedule="]),
        (STUDY, "{steps: 20,", "{steps: 20, decay_steps: 5,", ["decay_steps is for training.schedule=wsd"]),
    ],
)
def test_a_mistake_is_named(write, text, old, new, parts):
    assert old in text
    message = refused(write(text.replace(old, new)), load=load_pretraining)
    assert all(part in message for part in parts), message
