"""Where a model's weights go: what is refused before anything is loaded, and a map with parts elsewhere."""

import pytest
from families import make_config

from hfpatch.errors import HfpatchError
from hfpatch.surgery import placement
from hfpatch.surgery.placement import Placement, tensor_parallel_plan


@pytest.mark.parametrize(
    ("asked", "processes", "why"),
    [
        (Placement("auto", tp=True), 2, "--tp: cannot go with --device-map"),
        (Placement(tp=True), 1, "--tp: needs a process for each device"),
        (Placement("auto"), 2, "--device-map auto: spreads one model .* there are 2 processes"),
        ("gpt2", 2, "no plan of tensor parallelism for gpt2 models"),
        ("llama", 3, r"3 processes cannot share 4 heads \(num_attention_heads\)"),
        ("llama", 4, r"4 processes cannot share 2 heads \(num_key_value_heads\)"),
    ],
)
def test_what_cannot_be_placed_is_refused(asked, processes, why):
    with pytest.raises(HfpatchError, match=why):
        asked.check(processes) if isinstance(asked, Placement) else tensor_parallel_plan(make_config(asked), processes)


def test_old_versions_of_transformers_are_refused(monkeypatch):
    monkeypatch.setattr(placement, "version", lambda _: "5.16.2")
    with pytest.raises(HfpatchError, match=r"--tp: needs transformers 5\.17, this is 5\.16\.2"):
        tensor_parallel_plan(make_config("llama"), 2)


def test_a_model_is_cut_by_its_plan():
    Placement().check(4)
    plan = tensor_parallel_plan(make_config("llama"), 2)
    assert (plan.tp_plan, plan.tp_size) == ("auto", 2)
