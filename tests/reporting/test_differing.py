"""What a report of several runs says of their differences: all that differs, and nothing else."""

import copy
import re

import pytest
from reporting.conftest import example
from reporting.study_example import study

from hfpatch.reporting.differing import measured_differently, trained_differently
from hfpatch.results.comparison import ComparisonResults


def both(change, first=lambda raw: None, example=example):
    """Return the sentences on how two runs were measured and trained, of which the second is changed."""
    runs = {}
    for label, changed in (("one", first), ("two", change)):
        changed(raw := copy.deepcopy(example()))
        runs[label] = ComparisonResults.model_validate(raw)
    return [*measured_differently(runs)], [*trained_differently(runs)]


def computed(raw, name, value, methods=slice(None)):
    for method in [*raw["methods"].values()][methods]:
        for run in method["runs"].values():
            run["computed_with"][name] = value


BASE = "tinyworld/gpt-neox, {}, {}…"
MEASURED = {
    "weights": (
        lambda raw: raw["model"].update(sha256="f" * 64),
        f"Frozen model: {BASE.format('float32', 'a' * 16)} (one); {BASE.format('float32', 'f' * 16)} (two).",
    ),
    "dtype": (
        lambda raw: raw["model"].update(dtype="bfloat16"),
        f"Frozen model: {BASE.format('float32', 'a' * 16)} (one); {BASE.format('bfloat16', 'a' * 16)} (two).",
    ),
    "loading": (
        lambda raw: raw["model"].update(loading={"load_in_4bit": True}),
        "Way of loading, of the same weights: none (one); load_in_4bit on (two).",
    ),
    "documents": (
        lambda raw: raw["tasks"]["tinyworld_cloze"].update(data_sha256="e" * 64),
        f"tinyworld_cloze, documents: {'d' * 16}… (one); {'e' * 16}… (two).",
    ),
    "groups": (
        lambda raw: raw["tasks"]["tinyworld_cloze"].update(clusters={"column": "passage", "groups": 9}),
        "tinyworld_cloze, measure: acc on 400 documents (one); acc on 400 documents by passage (two).",
    ),
    "tasks": (
        lambda raw: raw["tasks"].pop("tinyworld_text"),
        "Tasks: tinyworld_cloze, tinyworld_endings, tinyworld_text (one); tinyworld_cloze, tinyworld_endings (two).",
    ),
    "setting": (
        lambda raw: raw["evaluation"].update(max_length=16),
        "Evaluation, max_length: none (one); 16 (two).",
    ),
    "version": (
        lambda raw: computed(raw, "versions", {"torch": "2.14.0"}),
        "Scores were computed with another versions of libraries, torch: 2.13.0 (one); 2.14.0 (two).",
    ),
    "version of the last method": (
        lambda raw: computed(raw, "versions", {"torch": "2.14.0"}, slice(-1, None)),
        "Scores were computed with another versions of libraries, torch: 2.13.0 (one); 2.13.0 and 2.14.0 (two).",
    ),
    "held-out text": (
        lambda raw: raw["data"].update(held_out={"sha256": "f" * 64}),
        f"Held-out text: none (one); {'f' * 16}… (two).",
    ),
    "text to keep": (
        lambda raw: raw.update(retention={"texts": {"old": {"sha256": "f" * 64}}}),
        f"Text to keep, old: none (one); {'f' * 16}… (two).",
    ),
    "margin": (
        lambda raw: raw.update(margin={"tinyworld_cloze": 0.25}),
        "Margin, tinyworld_cloze: none (one); 0.25 (two).",
    ),
    "question": (
        lambda raw: raw.update(
            questions=[{"question": "gain", "pairs": [["lora", "baseline"]], "on": ["tinyworld_cloze"]}]
        ),
        "Question gain on tinyworld_cloze: none (one); [[lora, baseline]] (two).",
    ),
}  # fmt: skip
TRAINED = {
    "rate": (lambda raw: raw["training"].update(lr=1.0), "Training, lr: 0.001 (one); 1.0 (two)."),
    "text": (
        lambda raw: raw["data"].update(sha256="f" * 64),
        f"Training text: {'b' * 16}… (one); {'f' * 16}… (two).",
    ),
    "batches": (
        lambda raw: raw["plan"]["0"].update(sha256="f" * 64),
        f"Batch plan of seed 0: {'0' * 16}… (one); {'f' * 16}… (two).",
    ),
    "commit": (
        lambda raw: raw["provenance"].update(commit="f" * 40),
        f"Environment, commit: {example()['provenance']['commit']} (one); {'f' * 40} (two).",
    ),
    "not recorded": (lambda raw: raw["provenance"].pop("device"), "Environment, device: cpu (one); none (two)."),
    "uncommitted": (
        lambda raw: raw["provenance"].update(dirty=True),
        "Environment, dirty: off (one); on (two).",
    ),
    "threads": (lambda raw: raw["provenance"].update(threads=8), "Environment, threads: 2 (one); 8 (two)."),
    "parts": (
        lambda raw: raw["methods"]["lora"].update(parts=[{"type": "lora", "r": 3}]),
        "lora, parts: [{type lora, match pre_projection_skip, target_modules attention}] (one); [{type lora, r 3}] "
        "(two).",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), MEASURED.values(), ids=MEASURED)
def test_what_was_measured_differently_is_named_alone(change, sentence):
    assert both(change) == ([sentence], [])


@pytest.mark.parametrize(("change", "sentence"), TRAINED.values(), ids=TRAINED)
def test_what_was_trained_differently_is_named_alone(change, sentence):
    assert both(change) == ([], [sentence])


STUDIES = {
    "architecture": (
        lambda raw: raw["study"]["architecture"].update(n_embd=48),
        "Architecture common to all, n_embd: none (one); 48 (two).",
    ),
    "tokenizer": (
        lambda raw: raw["study"]["tokenizer"].update(sha256="f" * 64),
        f"Tokenizer, sha256: none (one); {'f' * 16}… (two).",
    ),
    "variant": (
        lambda raw: raw["methods"]["linear"]["variant"]["architecture"].update(mlp_width=4.75),
        "linear, architecture, mlp_width: none (one); 4.75 (two).",
    ),
    "variant's training": (
        lambda raw: raw["methods"]["linear"]["variant"].update(training={"lr": 0.003}),
        "linear, training, lr: none (one); 0.003 (two).",
    ),
    "tuning text": (
        lambda raw: raw["tuning"].update(text={"sha256": "f" * 64}),
        f"Tuning text: documents 20, tokens 999 (one); {'f' * 16}… (two).",
    ),
    "base's loss": (
        lambda raw: raw["tuning"].update(base_loss=5.5),
        "Tuning, base_loss: none (one); 5.5 (two).",
    ),
    "values chosen": (
        lambda raw: raw["tuning"]["chosen"]["linear"].update(values={"lr": 0.5}),
        "linear, values chosen, lr: 0.001 (one); 0.5 (two).",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), STUDIES.values(), ids=STUDIES)
def test_what_differs_between_studies_is_named(change, sentence):
    measured, trained = both(change, example=study)
    assert measured == []
    assert sentence in trained


def test_what_all_variants_share_is_named_once_and_a_long_value_by_its_hash():
    def change(raw, width):
        for holder in (raw["study"], *(method["variant"] for method in raw["methods"].values())):
            holder["architecture"].update(n_embd=width, layers=list(range(99)))

    assert both(lambda raw: change(raw, 48), lambda raw: change(raw, 32), example=study) == (
        [],
        ["Architecture common to all, n_embd: 32 (one); 48 (two)."],
    )
    _, (sentence,) = both(lambda raw: raw["training"].update(kinds=list(range(99))))
    assert re.fullmatch(r"Training, kinds: none \(one\); SHA-256 [0-9a-f]{16}… \(two\)\.", sentence)


def test_of_equal_runs_nothing_is_named_nor_settings_that_change_no_score():
    assert both(lambda raw: raw["evaluation"].update(batch_size=2)) == ([], [])


def test_other_weights_are_not_asked_about_code_and_configuration():
    def changed(raw):
        raw["model"]["sha256"] = "f" * 64
        raw["model"]["identity"] = dict.fromkeys(raw["model"]["identity"], "f" * 64)

    ((sentence,), _) = both(changed)
    assert sentence.startswith("Frozen model: ")
