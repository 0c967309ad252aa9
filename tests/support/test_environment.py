"""Variables of launchers."""

import pytest
from accelerate.utils import parse_flag_from_env

from hfpatch.support.environment import CPU_ONLY, is_set
from hfpatch.training.sharding import DEEPSPEED, FSDP


@pytest.mark.parametrize("value", [None, "0", "False", "no", "1", "True", "yes", "on", "y", "t"])
def test_a_variable_is_set_where_accelerate_takes_it_to_be(monkeypatch, value):
    monkeypatch.delenv(CPU_ONLY, raising=False)
    if value is not None:
        monkeypatch.setenv(CPU_ONLY, value)
    assert is_set(CPU_ONLY) == parse_flag_from_env(CPU_ONLY)
    for sharding in (FSDP, DEEPSPEED):  # accelerate takes one word for true here
        monkeypatch.setenv(sharding, value or "")
        assert is_set(sharding) == (value == "True")
