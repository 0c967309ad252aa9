"""Results of a comparison with budgets, with the difference of every pair given by hand."""

from reporting.conftest import with_pairs

from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.identity import OF_TASK

BUDGETS = {"1k": 1000, "10k": 10_000, "100k": 100_000}
GAINS = {"lora": (0.1, 0.2, 0.3), "ahead": (0.2, 0.3, 0.4), "behind": (0.0, 0.1, 0.2), "turning": (0.2, 0.2, 0.2)}
TASK = {
    **{"primary": "nats_per_token", "higher_is_better": False, "n": 100, "num_fewshot": 0, "version": "1"},
    **dict.fromkeys(OF_TASK, "d" * 64),
}
EXCHANGES = {
    "ahead": {"rate": 0.1, "low": 0.05, "high": 0.2, "lowest": 0.2, "highest": 0.3},
    "behind": {"rate": 10.0, "low": 5.0, "high": 20.0, "lowest": 0.1, "highest": 0.2},
    "turning": {"why": "they reach no common gain"},
    "alone": {"rate": 3.14159, "low": 2.2, "high": 123.4, "lowest": 0.15, "highest": 0.15},
}


def difference(method, other, gain, *, is_sure):
    value = -gain  # nats per token: lower is better
    return {
        **{"method": method, "reference": other, "task": "held_out_text", "metric": "nats_per_token", "n": 100},
        **{"seeds": 3, "difference": value, "low": value - 0.06, "high": value + 0.06, "test": "paired t"},
        **{"p": 1e-6 if is_sure else 0.5, "errors": [[0.03, 1000]]},
    }


def one(parts, trainable, match=None):
    score = {"metrics": {"nats_per_token": 2.0}, "stderr": {}}
    parameters = {"trainable": trainable, "added": trainable, "base": 1_000_000}
    return {
        "parts": parts,
        "parameters": parameters,
        "match": match,
        "runs": {"0": {"evaluation": {"held_out_text": score}}},
    }


def frontier_example(**changes):
    """Four methods at three budgets and one of a single size; a difference of 0.02 or more from LoRA was found."""
    methods = {"baseline": one([], 0), "alone": one([{"type": "query_temperature"}], 500)}
    comparisons = [difference("alone", "baseline", 0.15, is_sure=True)]
    for family, gains in GAINS.items():
        for (budget, asked), gain, lora in zip(BUDGETS.items(), gains, GAINS["lora"], strict=True):
            kind = "lora" if family == "lora" else "pre_projection"
            match = {"to": budget, "rank": 1, "parameters": asked, "target_parameters": asked, "difference": 0.0}
            methods[f"{family}@{budget}"] = one([{"type": kind, "match": asked}], asked, match)
            comparisons.append(difference(f"{family}@{budget}", "baseline", gain, is_sure=True))
            if family != "lora":
                apart = abs(gain - lora) >= 0.02
                comparisons.append(difference(f"{family}@{budget}", f"lora@{budget}", gain - lora, is_sure=apart))
    lines = [
        {"method": family, "points": [f"{family}@{budget}" for budget in BUDGETS], "exchange": EXCHANGES.get(family)}
        for family in GAINS
    ]
    values = {
        **{"schema": 2, "kind": "comparison", "name": "budgets", "complete": True, "methods": methods},
        **{"tasks": {"held_out_text": TASK}, "comparisons": comparisons, "left_out": {"ahead@300": "too small"}},
        "frontier": {
            **{"task": "held_out_text", "metric": "nats_per_token", "reference": "lora"},
            "lines": [*lines, {"method": "alone", "points": ["alone"], "exchange": EXCHANGES["alone"]}],
        },
    }
    return ComparisonResults.model_validate(with_pairs(values | changes))
