"""What is said of a method beside LoRA at several budgets."""

import json
import math

import pytest
from budgets_example import GAINS, frontier_example

from hfpatch.results.frontier import against_reference, sentence
from hfpatch.results.schema import ComparisonResults


def line_of(results, method):
    return next(line for line in results.frontier.lines if line.method == method)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("ahead", "reaches lora's gain with 0.1 times its parameters [0.05, 0.2]; is ahead of lora at every budget"),
        ("behind", "reaches lora's gain with 10 times its parameters [5, 20]; is behind lora at every budget"),
        ("alone", "reaches lora's gain with 3.1 times its parameters [2.2, 123]"),
        ("lora", "is what the others are compared with"),
    ],
)
def test_one_sentence_a_method(method, said):
    results = frontier_example()
    assert sentence(results, line_of(results, method)) == said


def test_where_the_better_method_changes_is_said_where_all_is_found():
    results = frontier_example()
    turning = line_of(results, "turning")
    assert sentence(results, turning) == (
        "is ahead of lora at 1k, behind lora at 100k and undecided at 10k; its exchange rate cannot be told "
        "(they reach no common gain)"
    )
    two = turning.model_copy(update={"points": ["turning@1k", "turning@100k"]})
    crossing = 1000 * math.sqrt(100)  # gains differ by 0.1 at 1k and by -0.1 at 100k
    assert sentence(results, two).startswith(f"is ahead of lora below {crossing:,.0f} parameters, behind above")


def test_each_budget_has_the_verdict_against_the_lora_of_its_own():
    results = frontier_example()
    found = against_reference(results, line_of(results, "ahead"))
    assert {point: verdict.other for point, verdict in found.items()} == {
        f"ahead@{budget}": f"lora@{budget}" for budget in ("1k", "10k", "100k")
    }
    assert {verdict.family for verdict in found.values()} == {3 * (len(GAINS) - 1)}  # all budgets of all methods
    alone = results.model_copy(update={"frontier": results.frontier.model_copy(update={"reference": None})})
    assert sentence(alone, line_of(alone, "ahead")) == "is compared with no LoRA of several budgets"


def test_what_is_written_is_read_again():
    results = frontier_example()
    written = json.loads(json.dumps(results.to_json()))
    assert ComparisonResults.model_validate(written) == results


def test_some_methods_and_labels():
    results = frontier_example()
    some = results.only(["ahead@1k", "lora@1k", "lora@10k"])
    assert {line.method: line.points for line in some.frontier.lines} == {
        "lora": ["lora@1k", "lora@10k"],
        "ahead": ["ahead@1k"],
    }
    methods = {
        name: method.model_copy(update={"label": name.replace("lora", "LoRA")})
        for name, method in results.methods.items()
    }
    labelled = results.model_copy(update={"methods": methods}).labelled()
    assert labelled.frontier.reference == "LoRA"
    assert sentence(labelled, line_of(labelled, "behind")).endswith("is behind LoRA at every budget")
