"""Names of adapters and of their parameters."""

from hfpatch.tuners.adapters import tensor_group


def test_groups_are_what_precedes_the_adapter_name():
    assert tensor_group("layers.0.attention.query_key_value.lora_A.default.weight") == "lora_A"
    assert tensor_group("layers.0.attention.hfpatch.preproj_up.second.weight") == "preproj_up"
    assert tensor_group("layers.0.attention.query_norm.default.bias") == "query_norm"
    assert tensor_group("wte.lora_embedding_A.default") == "lora_embedding_A"
