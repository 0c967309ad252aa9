"""Pretraining recipes: one model, or a study of variants."""

import pytest

from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe, load_pretrain_or_study, point_name

PRETRAIN = """\
name: tiny
architecture: {model_type: gpt_neox, hidden_size: 16}
tokenizer: {train_vocab_size: 300}
data: {source: tinyworld/base}
"""


def test_a_pretraining_recipe_is_read_and_written_back(write, tmp_path):
    recipe = load_pretrain_or_study(write(PRETRAIN), ["training.steps=700", "architecture.hidden_size=32"])
    assert recipe.training.steps == 700
    assert recipe.architecture["hidden_size"] == 32
    assert load_pretrain_or_study(write(recipe.to_yaml(), "again.yaml")) == recipe


STUDY = """\
name: tiny-study
architecture: {model_type: gpt2, n_embd: 16, n_head: 2, n_layer: 1, biases: false}
tokenizer: {train_vocab_size: 300}
data: {source: tinyworld/base, held_out: 10}
training: {steps: 20, warmup_steps: 2, lr: 1e-3}
seeds: [0, 7]
baseline: linear
variants:
  linear: {}
  nonlinear: {architecture: {query: {path: nonlinear}}, training: {weight_decay: 0.03125}}
  wide: {architecture: {mlp_width: 4.75}, sweep: {}}
sweep: {lr: [1e-3, 2e-3], weight_decay: [0.1, 0.2]}
"""


def test_a_study_is_told_from_one_model_by_its_variants_and_written_back(write):
    assert load_pretrain_or_study(write(STUDY), ["seeds=3"]).seeds == (0, 1, 2)
    study = load_pretrain_or_study(write(STUDY), ["seeds=[1]"])
    assert isinstance(study, StudyRecipe)
    assert study.seeds == (1,)
    assert load_pretrain_or_study(write(study.to_yaml(), "again.yaml")) == study
    assert isinstance(load_pretrain_or_study(write(PRETRAIN)), PretrainRecipe)


def test_the_runs_of_a_study(write):
    study = load_pretrain_or_study(write(STUDY))
    assert study.points("wide") == [{}]
    points = study.points("linear")
    assert points == [{"lr": lr, "weight_decay": decay} for lr in (1e-3, 2e-3) for decay in (0.1, 0.2)]
    assert point_name(points[1]) == "lr=0.001,weight_decay=0.2"
    assert point_name({}) == ""
    linear, nonlinear = (study.single(name, {}, 7) for name in ("linear", "nonlinear"))
    assert linear.architecture == study.architecture
    assert nonlinear.architecture == {**study.architecture, "query": {"path": "nonlinear"}}
    assert (linear.training.weight_decay, nonlinear.training.weight_decay) == (0.1, 0.03125)
    assert (nonlinear.seed, nonlinear.name) == (7, "tiny-study-nonlinear")
    swept = study.single("nonlinear", {"lr": 2e-3, "weight_decay": 0.2}, 0).training
    assert (swept.lr, swept.weight_decay) == (2e-3, 0.2)


@pytest.mark.parametrize("where", ["sweep", "variant"])
def test_the_decay_of_a_study_is_that_of_its_runs_with_wsd(write, where):
    text = STUDY.replace("{steps: 20,", "{steps: 20, decay_steps: 5,")
    if where == "sweep":
        text = text.replace("lr: [1e-3, 2e-3]", "schedule: [cosine, wsd]")
    else:
        text = text.replace("weight_decay: 0.03125", "schedule: wsd")
    study = load_pretrain_or_study(write(text))
    point = {"schedule": "wsd"} if where == "sweep" else {}
    assert study.single("nonlinear", point, 0).training.decay_steps == 5
    assert study.single("linear", {}, 0).training.decay_steps is None


@pytest.mark.parametrize(
    ("text", "old", "new", "parts"),
    [
        (PRETRAIN, "tokenizer: {train_vocab_size: 300}", "tokenizer: {}", ["tokenizer", "train_vocab_size or path"]),
        (PRETRAIN, "{train_vocab_size: 300}", "{train_vocab_size: 300, path: x}", ["tokenizer", "not both"]),
        (PRETRAIN, "train_vocab_size", "vocab_size", ["tokenizer.vocab_size", "did you mean 'train_vocab_size'"]),
        (PRETRAIN, "name: tiny", "name: tiny\ntraining: {steps: 10}", ["warmup_steps", "below training.steps"]),
        (PRETRAIN, "name: tiny", "name: tiny\nseed: -1", ["seed", "-1"]),
        (PRETRAIN, "architecture: ", "architecure: ", ["did you mean 'architecture'"]),
        (PRETRAIN, "name: tiny", "name: tiny\ntraining: {diagnose_every: 5}", ["diagnose_every", "data.held_out"]),
        (PRETRAIN, "base}", "base}\nevaluation_data: {source: tinyworld/base}", ["the text that is trained on"]),
        (STUDY, "baseline: linear", "baseline: liner", ["baseline is 'liner'", "did you mean 'linear'"]),
        (STUDY, "[0, 7]", "[0, 0]", ["seeds lists 0 twice"]),
        (STUDY, "  wide:", "  wi/de:", ["'wi/de' becomes a folder"]),
        (STUDY, ", held_out: 10", "", ["loss on held-out text", "data.held_out"]),
        (STUDY, "lr: [1e-3, 2e-3]", "rl: [1e-3]", ["sweep.rl", "'rl' is no key of training", "did you mean 'lr'"]),
        (STUDY, "lr: [1e-3, 2e-3]", "steps: [10]", ["sweep.steps", "must be the same for all"]),
        (STUDY, "lr: [1e-3, 2e-3]", "lr: []", ["sweep.lr is empty"]),
        (STUDY, "lr: [1e-3, 2e-3]", "lr: [1e-3, 1e-3]", ["sweep.lr lists 0.001 twice"]),
        (STUDY, "lr: [1e-3, 2e-3]", "betas: [[0.9, 0.95]]", ["sweep.betas", "single values"]),
        (STUDY, "1e-3, 2e-3", "1e-3, -1.0", ["variants.linear at lr=-1.0", "training.lr is -1.0", "greater than 0"]),
        (STUDY, "weight_decay: 0.03125", "weigt_decay: 0.03", ["variants.nonlinear", "did you mean 'weight_decay'"]),
        (
            STUDY,
            "weight_decay: 0.03125",
            "batch_size: 4",
            ["variants.nonlinear", "training.batch_size must be the same"],
        ),
        (STUDY, "sweep: {}}", "swep: {}}", ["variants.wide.swep"]),
        (PRETRAIN, "name: tiny", "name: tiny\ntraining: {decay_steps: 5}", ["decay_steps is of training.schedule=wsd"]),
        (STUDY, "{steps: 20,", "{steps: 20, decay_steps: 5,", ["decay_steps is of training.schedule=wsd"]),
    ],
)
def test_a_mistake_is_named(write, text, old, new, parts):
    assert old in text
    with pytest.raises(HfpatchError) as caught:
        load_pretrain_or_study(write(text.replace(old, new)))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)
