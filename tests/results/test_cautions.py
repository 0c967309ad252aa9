"""What the reader is warned of."""

import copy
import math
import re

from own_tasks import task_result

from hfpatch.recipes.comparison import Recipe
from hfpatch.results.cautions import comparison_cautions
from hfpatch.results.comparison import ComparisonResults
from hfpatch.runs.results import form_of

SCORE = task_result("cloze", n=2000, metrics={"acc": 0.5}, stderr={"acc": 0.01}).to_json()
PAIR = {"method": "a", "reference": "b", "metric": "acc", "n": 9, "seeds": 1, "difference": 0.0, "test": "any"}


def make_recipe(methods: dict, **training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "any",
            "model": {"name": "gpt2"},
            "training": {"seeds": [0, 1], **training},
            "methods": {"baseline": [], **methods},
        }
    )


def make_results(sizes: dict[str, int], *, survival: float = 1.0, n: int = 2000) -> dict:
    def method(name: str, size: int) -> dict:
        sizes = dict.fromkeys(("steps", "tokens", "wall_s", "tokens_per_s", "peak_memory_bytes", "final_loss"), 1)
        train = {**sizes, "update_survival": {"all": survival}} if size else None
        lambada = {**SCORE, "task": "lambada_openai", "n": 5153, "metrics": {"acc": 0.326}}
        run = {"commit": "abc", "train": train, "evaluation": {"cloze": SCORE, "lambada_openai": lambada}}
        parts = [{"type": "any"}] if size else []
        parameters = {"trainable": size, "added": size, "base": 9}
        return {"parts": parts, "parameters": parameters, "form": None, "runs": {"0": copy.deepcopy(run)}}

    return {
        "tasks": {"cloze": SCORE | {"n": n}},
        "pairs": {"base": [("a", "b")]},
        "methods": {name: method(name, size) for name, size in sizes.items()},
        "comparisons": [
            {**PAIR, "task": "cloze", "method": method, "low": -0.1, "high": 0.1, "p": 1.0}
            for method in ("a", "b", "c")
        ],
    }


PRE = [{"type": "pre_projection"}]
LORA = [{"type": "lora", "r": 8}]
QUERY = [{"type": "nonlinear_query"}]
LINEAR = [{"type": "nonlinear_query", "activation": "identity"}]


def cautions_of(recipe: Recipe, results: dict) -> list[str]:
    return list(comparison_cautions(recipe, ComparisonResults.model_validate({"name": "any", **results})))


def test_a_fair_comparison_needs_no_caution():
    recipe = make_recipe({"pre": PRE, "lora": LORA})
    assert cautions_of(recipe, make_results({"baseline": 0, "pre": 1000, "lora": 1010})) == []


def test_sizes_that_differ_by_more_than_a_hundredth_are_named_with_their_ratio():
    recipe = make_recipe({"pre": PRE, "lora": LORA})
    (caution,) = cautions_of(recipe, make_results({"baseline": 0, "pre": 17694720, "lora": 26542080}))
    assert all(part in caution for part in ("lora", "26,542,080", "pre", "17,694,720", "ratio of 1.50", "not match"))


def test_a_control_that_is_smaller_by_design_is_no_mismatch_but_a_linear_one_is():
    methods = {"query": QUERY, "linear": LINEAR, "temperature": [{"type": "query_temperature"}]}
    methods |= {"skip": [{**PRE[0], "content_skip": True}], "alone": [{**PRE[0], "expansion": 0, "content_skip": True}]}
    sizes = {"baseline": 0, "query": 1000, "linear": 500, "temperature": 8, "skip": 3500, "alone": 1000}
    (caution,) = cautions_of(make_recipe(methods), make_results(sizes))
    assert all(part in caution for part in ("linear has 500 ", "query"))


def test_lost_updates_are_named_below_nine_tenths():
    recipe = make_recipe({"pre": PRE})
    (caution,) = cautions_of(recipe, make_results({"baseline": 0, "pre": 9}, survival=0.41))
    assert "pre: as little as 41%" in caution
    assert cautions_of(recipe, make_results({"baseline": 0, "pre": 9}, survival=0.9)) == []


def test_half_precision_is_named():
    recipe = make_recipe({"pre": PRE}, seeds=[3], trainable_dtype="bfloat16")
    (dtype,) = cautions_of(recipe, make_results({"baseline": 0, "pre": 9}, n=999))
    assert "bfloat16" in dtype
    recipe = make_recipe({"pre": PRE}, trainable_dtype="bfloat16", trainable_dtypes={"lora": "float32"})
    (dtype,) = cautions_of(recipe, make_results({"baseline": 0, "pre": 1000}))
    assert "bfloat16 (lora in float32)" in dtype


def test_tasks_without_enough_documents_for_a_test_are_named():
    recipe, results = make_recipe({"pre": PRE}), make_results({"baseline": 0, "pre": 1000})
    for comparison in results["comparisons"]:
        comparison.update(low=None, high=None, p=None, test="none (too few documents)")
    assert [caution.partition(": ")[2] for caution in cautions_of(recipe, results)] == ["cloze."]
    for comparison in results["comparisons"]:
        comparison.update(clusters={"column": "kind", "groups": 4}, test="none (too few groups)")
    assert [caution.partition(": ")[2] for caution in cautions_of(recipe, results)] == ["cloze (4 groups of kind)."]


def test_another_class_is_named_in_full_but_not_between_the_variants_of_a_study():
    recipe, results = make_recipe({"a": LORA}), make_results({"baseline": 0, "a": 9})
    for name in ("baseline", "a"):
        results["methods"][name]["runs"]["0"]["computed_with"] = {
            "class": f"{name}ForCausalLM",
            "code_sha256": "c" * 64,
        }
    (caution,) = cautions_of(recipe, results)
    assert "another class of the model: baselineForCausalLM (baseline, seed 0); aForCausalLM (a, seed 0)." in caution
    assert cautions_of(recipe, {**results, "study": {"baseline": "baseline"}}) == []


def test_the_literal_form_several_commits_and_products_in_fp32_are_named():
    recipe = make_recipe({"query": [{"type": "nonlinear_query", "form": "literal"}]})
    results = make_results({"baseline": 0, "query": 9})
    assert cautions_of(recipe, {**results, "provenance": {"matmul": "bf16"}}) == []
    results["methods"]["query"] |= {"form": form_of(recipe.methods["query"])}
    results["methods"]["query"]["runs"]["0"]["commit"] = None
    literal, products, commits = cautions_of(recipe, {**results, "provenance": {"matmul": "fp32"}})
    assert "literal" in literal
    assert products.startswith("Matrix products: of bfloat16 weights in float32")
    assert "abc, unknown" in commits


def test_the_form_of_a_method():
    literal, identity = (
        {"type": "nonlinear_query", "form": "literal"},
        {"type": "nonlinear_query", "anchor": "identity"},
    )
    assert [form_of(parts) for parts in ([], PRE, [identity])] == [None] * 3
    assert (form_of(QUERY), form_of([*PRE, literal])) == ("preserving", "literal")


def test_updates_left_out_and_early_stops_are_named_with_their_seed():
    recipe, results = make_recipe({"pre": PRE}), make_results({"baseline": 0, "pre": 1000})
    train = results["methods"]["pre"]["runs"]["0"]["train"]
    train.update(skipped_steps=3, stopped_early=True, steps=40)
    left_out, early = cautions_of(recipe, results)
    assert left_out.startswith("pre, seed 0: 3 updates")
    assert re.match("pre, seed 0: .* 40 steps", early)
    train.update(skipped_steps=1)
    assert cautions_of(recipe, results)[0].startswith("pre, seed 0: 1 update was left out")


def test_weights_that_the_held_out_text_chose_are_named():
    recipe, results = make_recipe({"pre": PRE}), make_results({"baseline": 0, "pre": 1000})
    assert cautions_of(recipe, results) == []
    results["training"] = {"keep_best": True}
    (caution,) = cautions_of(recipe, results)
    assert caution.startswith("training.keep_best ")
    assert "held-out text" in caution


def test_rates_that_were_not_tuned_are_named_and_best_ones_at_an_edge():
    recipe = make_recipe({"pre": PRE, "lora": LORA})
    untuned = {**make_results({"baseline": 0, "pre": 1000, "lora": 1000}), "training": {"lr": 1e-3}}
    assert cautions_of(recipe, untuned) == ["All methods at one rate (0.001), which may favour some."]
    choices = {
        "pre": {"values": {"lr": 0.1}, "loss": 1.5, "trials": 2, "edge": "highest"},
        "lora": {"values": {"lr": 0.01}, "loss": None, "trials": 2, "edge": "lowest"},
    }
    tuning = {"seed": 1000, "steps": 9, "learning_rates": [0.01, 0.1], "chosen": choices}
    edge, lost = cautions_of(recipe, {**untuned, "tuning": tuning})
    assert re.match("pre: .* 0.1, is the highest of the 2 ", edge)
    assert lost.startswith("lora: all 2 trials")
    in_memory = {**choices, "lora": {**choices["lora"], "loss": math.inf}}
    diverged = {**untuned, "tuning": {**tuning, "chosen": in_memory}}
    assert cautions_of(recipe, diverged)[1].startswith("lora: all 2 trials")
    choices["lora"] |= {"loss": 1.0, "edge": None}
    trial = {"method": "lora", "seed": 1000, "values": {"lr": 0.01}, "commit": "other"}
    (_, caution) = cautions_of(recipe, {**untuned, "tuning": {**tuning, "trials": [trial]}})
    assert "abc, other" in caution


def test_a_base_that_is_lost_where_rows_begin_inside_documents_is_named():
    recipe, results = make_recipe({"pre": PRE}), make_results({"baseline": 0, "pre": 1000})
    scores = results["methods"]["baseline"]["runs"]["0"]["evaluation"]
    scores["cloze"]["starts"] = {"documents": 4.0, "inside": 5.9}
    assert cautions_of(recipe, results) == []
    scores["cloze"]["starts"] = {"documents": 4.0, "inside": 6.1}
    (caution,) = cautions_of(recipe, results)
    assert all(part in caution for part in ("cloze", "4.00", "6.10", "start token"))
