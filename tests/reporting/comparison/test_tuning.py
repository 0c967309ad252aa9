"""How rates were chosen, as the report says and draws it."""

import copy
import re

import pytest
from reporting.conftest import data_of, document_of, read_csv, tuned_example
from reporting.study_example import study

from hfpatch.reporting.cards import run_card
from hfpatch.reporting.comparison.answer import lead
from hfpatch.reporting.comparison.tuning import chosen_facts, tuning_figure
from hfpatch.reporting.differing import trained_differently
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.theme import report_style
from hfpatch.results.cautions import rates_sentence

SKIP, LORA = "pre_projection_skip", "lora"
WORTH = "the choice may be worth up to 0.1 nats per token"  # of the pre-projection; a diverged one has the base's


@pytest.fixture
def tuned(build):
    return build(tuned_example())


def test_the_first_thing_said_is_how_the_rates_were_chosen(tuned, results, raw, build):
    assert rates_sentence(tuned) == f"Each method at its best of 3 rates: {WORTH}; for lora it is not bounded."
    assert rates_sentence(results) == "All methods at one rate (0.001), which may favour some."
    alone = {name: raw["methods"][name] for name in ("baseline", SKIP)}
    text = rates_sentence(build(raw | {"tuning": None, "methods": alone, "comparisons": []}))
    assert text.startswith("One learning rate (0.001), not tuned")
    assert rates_sentence(build({"schema": 2, "kind": "comparison", "name": "empty"})) == ""


def test_the_first_sentence_says_what_holds_at_the_rates_tried(tuned):
    """The rate of the LoRA is not bounded, and another one might turn each sign."""
    (loss,) = [pair for pair in tuned.verdicts if pair.pair == (SKIP, LORA) and pair.task == "tinyworld_text"]
    primary = {"role": "primary", "question": "gain", "outcome": "better"}
    held = [loss.model_copy(update={**primary, "at_rates_tried": tried}) for tried in (None, True)]
    methods = {**tuned.methods, "third": tuned.methods[SKIP]}
    for verdicts, expected in (
        (held[:1], f"{SKIP} beats lora."),
        (held[1:], f"{SKIP} beats lora at the rates tried."),
        ([held[1].model_copy(update={"method": "third"}), held[0]],
         f"{SKIP} beats lora and third beats lora at the rates tried."),
    ):  # fmt: skip
        assert f", {expected}" in lead(tuned.model_copy(update={"joined": verdicts, "methods": methods}))
    worse = [
        one.model_copy(update={"outcome": "worse", "method": name})
        for one, name in zip(held, (SKIP, "third"), strict=True)
    ]
    assert "is worse than lora, third at the rates tried." in lead(
        tuned.model_copy(update={"joined": worse, "methods": methods})
    )


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({SKIP: ["preproj_up"]}, "One learning rate (1e-05), not tuned"),
        ({LORA: ["lora_A"]}, "One learning rate (0.003), not tuned"),
        ({LORA: ["lora_A", "preproj_up"]}, "No rate was tuned (1e-05, 0.003 for tensor group lora): others"),
        ({SKIP: ["preproj_up"], "third": ["temperature_query"]}, "All methods at one rate (1e-05), which may"),
        ({LORA: ["lora_A"], "third": ["lora_B"]}, "All methods at one rate (0.003), which may"),
        ({LORA: ["lora_A"], SKIP: ["preproj_up"]}, "No rate was tuned (1e-05, 0.003 for tensor group lora), which may"),
        ({LORA: [], SKIP: []}, "No rate was tuned (1e-05, 0.003 for tensor group lora), which may"),
    ],
)
def test_rates_that_are_not_tuned_are_those_of_the_tensors_that_the_methods_have(raw, build, tensors, expected):
    training = {"lr": 1e-5, "learning_rates": {"query": 1e-5, "lora": 3e-3}}
    methods = {"baseline": raw["methods"]["baseline"]}
    for name, groups in tensors.items():
        methods[name] = copy.deepcopy(raw["methods"][LORA])
        for run in methods[name]["runs"].values():
            run["train"]["update_survival"] = dict.fromkeys([*groups, "all"], 1.0)
    untuned = raw | {"tuning": None, "comparisons": [], "training": training, "methods": methods}
    assert rates_sentence(build(untuned)).startswith(expected)


def test_rates_of_variants_that_are_not_tuned_are_those_of_the_recipe(build):
    raw = study() | {"tuning": None, "training": {"lr": 1e-3}}
    raw["methods"]["nonlinear"]["variant"]["training"] = {"lr": 3e-3}
    assert (
        rates_sentence(build(raw)) == "No rate was tuned (0.001, 0.003 for variant nonlinear), which may favour some."
    )
    for method in raw["methods"].values():
        method["variant"]["training"] = {"lr": 3e-3}
    assert rates_sentence(build(raw)) == "All variants at one rate (0.003), which may favour some."


def test_a_method_whose_trials_all_diverged_is_never_called_tuned(build):
    raw = tuned_example()
    for trial in raw["tuning"]["trials"]:
        if trial["method"] == LORA:
            trial |= {"loss": None, "diverged_step": 3}
    raw["tuning"]["chosen"][LORA] = {"values": {"lr": 1e-3}, "loss": None, "trials": 3, "edge": "lowest"}
    some = build(raw)
    assert re.fullmatch(
        "Each method but lora, .* at its best of 3 rates: the choice may be worth up to 0.1 nats per token.",
        rates_sentence(some),
    )
    assert chosen_facts(some, LORA) == [("Not tuned", "all 3 trials diverged; trained at lr=0.001")]
    text = markdown(document_of(some))
    assert "| lora | 0.001 | all diverged | 3 |" in text
    assert "The loss on 200 documents (12,345 tokens)" in text
    raw["tuning"]["text"]["groups"] = 40
    assert "The loss on 200 documents in 40 groups (12,345 tokens)" in markdown(document_of(build(raw)))
    assert [row["method"] for row in data_of(some, "tuning") if row["chosen"] == "True"] == [SKIP]
    with report_style():
        (ax,) = tuning_figure(some).axes
    assert len([line for line in ax.lines if line.get_markerfacecolor() == "none"]) == 1
    raw["tuning"]["chosen"][SKIP] |= {"values": {"lr": 1e-3}, "edge": "lowest"}
    assert rates_sentence(build(raw)).endswith(f"for {SKIP} what the choice may be worth is not bounded.")
    raw["tuning"]["chosen"][SKIP]["loss"] = None
    assert rates_sentence(build(raw)) == "No method is tuned: all trials diverged."


def test_what_each_method_was_tried_at_is_counted(build, tuned):
    choices = {name: choice.model_copy(update={"trials": 6}) for name, choice in tuned.tuning.chosen.items()}
    more = tuned.model_copy(update={"tuning": tuned.tuning.model_copy(update={"chosen": choices})})
    assert (
        rates_sentence(more)
        == f"Each method at its best of 3 rates, 6 trials each: {WORTH}; for lora it is not bounded."
    )
    raw = tuned_example()
    raw["tuning"]["trials"] = raw["tuning"]["trials"][:-1]
    raw["tuning"]["chosen"][LORA]["trials"] = 2
    assert re.search(r"best of 2 to 3 rates,.* \(pre_projection_skip 3, lora 2\)", rates_sentence(build(raw)))


def test_the_report_shows_the_choices_and_what_is_at_the_edge(tuned):
    document = document_of(tuned)
    text = markdown(document)
    assert rates_sentence(tuned) in text[: text.index("## Protocol")]
    assert "200 documents (12,345 tokens)" in text
    assert "| pre_projection_skip | 0.01 | 1.2000 | 3 | – |" in text
    assert "| lora | 0.1 | 1.2500 | 3 | highest rate tried |" in text
    assert "figures/tuning.svg" in text
    rows = read_csv(document.parts[0].figures["tuning"].data)
    assert [(row["method"], row["lr"]) for row in rows if row["chosen"] == "True"] == [(SKIP, "0.01"), (LORA, "0.1")]
    assert [row["diverged_step"] for row in rows if not row["loss"]] == ["7"]
    assert {(row["seed"], row["plan"]) for row in rows} == {
        (str(trial.seed), trial.plan) for trial in tuned.tuning.trials
    }
    assert "tuning" in document.parts[0].figures
    assert rates_sentence(tuned) in html(document)
    assert [section.name for section in document.parts[0].sections].count("tuning") == 1


def test_the_figure_has_a_curve_a_method_and_rings_the_choices(tuned):
    with report_style():
        (ax,) = tuning_figure(tuned).axes
    assert ax.get_xscale() == "log"
    curves = [line for line in ax.lines if len(line.get_xdata()) == 3]
    losses = [[y for y in line.get_ydata() if y == y] for line in curves]
    assert losses == [[1.5, 1.2], [1.6, 1.3, 1.25]]
    rings = [line.get_xydata().tolist()[0] for line in ax.lines if line.get_markerfacecolor() == "none"]
    assert rings == [[1e-2, 1.2], [1e-1, 1.25]]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "x"] == [1e-1]


def test_a_loss_far_above_the_others_does_not_flatten_them(tuned):
    trials = [t.model_copy(update={"loss": 900.0}) if t.loss is None else t for t in tuned.tuning.trials]
    far = tuned.model_copy(update={"tuning": tuned.tuning.model_copy(update={"trials": trials})})
    with report_style():
        (ax,) = tuning_figure(far).axes
    assert ax.get_ylim()[1] < 3


def test_cards_and_joint_reports_say_it_too(tuned, results):
    assert "Each method at its best of 3 rates: the choice may" in run_card(tuned)
    expected = "Tuning, learning_rates: [0.001, 0.01, 0.1] (a); none (b)."
    assert expected in trained_differently({"a": tuned, "b": results})
