import math
from functools import partial

import pytest
from lm_eval.api.metrics import bits_per_byte, f1_score, mean, median, perplexity, weighted_perplexity

from hfpatch.evaluation.metrics import metric_named, primary_metric

PAIRS = [(-120.5, 30), (-7.25, 4), (-300.0, 81)]


@pytest.mark.parametrize(
    ("name", "values", "lm_evals"),
    [
        ("acc", [1.0, 0.0, 1.0, 1.0], mean),
        ("exact_match", [0.25, 0.5], mean),
        ("perplexity", [-2.5, -0.125, -7.0], perplexity),
        ("word_perplexity", PAIRS, weighted_perplexity),
        ("byte_perplexity", PAIRS, weighted_perplexity),
        ("bits_per_byte", PAIRS, bits_per_byte),
        ("paragraph_perplexity", [2.0, 4.0], lambda losses: math.exp(mean(losses))),
    ],
)
def test_scores_are_lm_evals(name, values, lm_evals):
    assert metric_named(name).overall(values) == pytest.approx(lm_evals(values), rel=1e-12)


def test_a_shift_is_the_difference_of_two_scores():
    expected = {"acc": -0.03, "word_perplexity": math.exp(1.22) - math.exp(1.25), "bits_per_byte": -0.03}
    assert {name: metric_named(name).shift(1.25, -0.03) for name in expected} == pytest.approx(expected, rel=1e-9)


def test_directions_aggregations_and_primary_metrics():
    assert metric_named("acc").aggregate is metric_named("unheard_of").aggregate is None
    assert metric_named("acc", median).aggregate is median
    assert metric_named("f1").aggregate is f1_score
    assert metric_named("f1", mean).aggregate is None
    wrapped = partial(median)
    assert metric_named("acc", wrapped).aggregate is wrapped
    assert primary_metric("hellaswag", ["acc", "acc_norm"]) == "acc_norm"
    assert primary_metric("tinyworld_endings", ["acc_norm", "acc"]) == "acc"
    assert primary_metric("lambada_openai", ["perplexity", "acc"]) == "acc"
    assert primary_metric("wikitext", ["bits_per_byte", "word_perplexity"]) == "word_perplexity"
    assert primary_metric("other", ["f1", "bleu"]) == "f1"
