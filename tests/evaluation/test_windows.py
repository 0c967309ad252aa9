"""What rows cost by their length, against the products counted in the forward pass itself."""

import pytest
import torch
from families import make_model
from lm_eval.api.instance import Instance
from torch.utils.flop_counter import FlopCounterMode

from hfpatch.evaluation import HfpatchLM
from hfpatch.evaluation.windows import long_windows, row_operations, warn_once
from hfpatch.surgery.bases import load_base


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


def test_long_windows_are_named_with_their_cost():
    model = make_model("llama")
    model.config.max_position_embeddings = 8192
    costs = row_operations(model, [8192, 1024]) / [8192, 1024]
    caution = long_windows(model, [8192, 100, 8192], 8192)
    assert caution.startswith("2 windows of 8,192 tokens, the model's longest")
    assert f"{costs[0] / costs[1]:.1f} times as much a token" in caution
    assert "--max-length 1024" in caution
    assert long_windows(model, [100, 8191], 8192) == ""
    assert long_windows(model, [1024], 1024) == ""


def test_an_evaluation_says_so_once_and_not_where_a_length_was_given(caplog, monkeypatch):
    base = load_base("tinyworld/gpt2")
    monkeypatch.setattr("hfpatch.evaluation.windows._SHORT", 8)
    warn_once.cache_clear()
    long = Instance("loglikelihood_rolling", {}, ("the cat " * 600,), 0, metadata=("text", 0, 1))
    for length in (64, None, None):
        HfpatchLM(base.model, tokenizer=base.tokenizer, max_length=length).loglikelihood_rolling([long])
    messages = [record.message for record in caplog.records if "windows of" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith("text: ")
