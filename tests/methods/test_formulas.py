"""The formula of every further method, on architectures that differ in what the methods touch.

``make architectures`` tries all architectures; docs/architectures.md must say what comes out here.
"""

import pytest
from architectures import table
from architectures.further import FURTHER, check

# fused per head; Conv1D; grouped queries; sandwich norms; a multiplied branch; query norms; latent queries; output
# projection outside the attention and norms on the stream; one key and value head; attention that adds the stream;
# several streams, keys and values of other layers; attention as a block
CASES = ["gpt_neox", "gpt2", "llama", "gemma2", "granite", "qwen3", "deepseek_v2", "bert", "falcon", "bloom"]
CASES += ["gemma3n_text", "xlm"]
PAGE = table.read()


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("case", CASES)
def test_formula(case, name):
    """``python -m architectures.table NAME`` adds a method that the page lacks."""
    assert check(case, name) == PAGE[name][case]
