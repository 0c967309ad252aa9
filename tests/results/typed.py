"""The kind decides the type of loaded results, which `make types` checks; pytest does not run this file."""

from typing import assert_type

from hfpatch.results import EvaluationResults, StudyResults, load_results

assert_type(load_results("run").methods["lora"].trainable, int)
assert_type(load_results("run", "evaluation"), EvaluationResults)
assert_type(load_results("run", "pretraining"), StudyResults)
load_results("run", None).methods["lora"]  # type: ignore[union-attr]  # a study and an evaluation have no methods
