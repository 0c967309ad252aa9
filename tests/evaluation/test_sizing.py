"""What rows cost by their length, against the products counted in the forward pass itself."""

import pytest
import torch
from families import make_model
from torch.utils.flop_counter import FlopCounterMode

from hfpatch.evaluation.sizing import row_operations


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama", "phi3"])
@pytest.mark.parametrize("length", [8, 40])
def test_operations_are_those_of_the_forward_pass(case, length):
    model = make_model(case)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    assert row_operations(model, [length])[0] == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_attention_reaches_no_further_than_its_window():
    model = make_model("gemma2")
    model.config.layer_types, model.config.sliding_window = ["sliding_attention", "full_attention"], 8
    both = row_operations(model, [8, 64])
    model.config.layer_types = ["full_attention"] * 2
    assert row_operations(model, 8) == both[0]
    assert row_operations(model, 64) - both[1] == 64 * 4 * model.config.hidden_size * (64 - 8)
