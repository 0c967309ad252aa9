"""The formula of every further method, on architectures that differ in what the methods touch."""

import pytest
from architectures.further import FURTHER, check

# fused per head; Conv1D; grouped queries; sandwich norms; a multiplied branch; query norms; latent queries; output
# projection outside the attention; one key and value head
CASES = ["gpt_neox", "gpt2", "llama", "gemma2", "granite", "qwen3", "deepseek_v2", "bert", "falcon"]


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("case", CASES)
def test_formula(case, name):
    check(case, name)
