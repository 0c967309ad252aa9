"""The kind decides the type of loaded results, which `make types` checks; pytest does not run this file."""

from typing import assert_type

from hfpatch.results import EvaluationResults, load_results

assert_type(load_results("run").methods["lora"].trainable, int)
assert_type(load_results("run", "evaluation"), EvaluationResults)
load_results("run", None).methods["lora"]  # type: ignore[union-attr]  # an evaluation has no methods
