"""Corrections for types of configurations whose fields depend on each other, so that small sizes are not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfpatch.twins.sizes import SIZES

Values = dict[str, Any]
HIDDEN, HEADS, HEAD = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["head_dim"]


def _set(**changes: Any) -> Callable[[Values], None]:
    """Set the given fields."""
    return lambda values: values.update(changes)


def _second_alone(name: str) -> Callable[[Values], None]:
    """List the second layer alone where layers of a kind are listed by their index."""
    return lambda values: values.update({name: [1]} if values.get(name) else {})


def _gpt_neo(values: Values) -> None:
    """The kinds of attention are listed with repetitions: one of each is enough."""
    kinds = list(dict.fromkeys(kind for group, _ in values["attention_types"] for kind in group))
    values |= {"attention_types": [[kinds, 1]], "num_layers": len(kinds)}


def _shared_keys_and_values(values: Values) -> None:
    """The last layers read keys and values of an earlier layer of their kind."""
    if values["num_kv_shared_layers"]:
        values["layer_types"] = list(dict.fromkeys(values["layer_types"])) * 2
        values["num_hidden_layers"] = len(values["layer_types"])
        values["num_kv_shared_layers"] = len(values["layer_types"]) // 2
        if "per_layer_config" in values:  # the differences of full attention
            changes: Values = next(iter(values["per_layer_config"].values()), {})
            full = [i for i, kind in enumerate(values["layer_types"]) if kind == "full_attention"]
            values["per_layer_config"] = {index: dict(changes) for index in full}
        for name in ("intermediate_size", "activation_sparsity_pattern"):
            if isinstance(values.get(name), list):
                values[name] = (values[name] * len(values["layer_types"]))[: len(values["layer_types"])]


def _nested_attention(values: Values) -> None:
    """Sizes of the attention in a configuration of its own."""
    values["attn_config"].kv_n_heads = HEADS // 2
    values["attn_config"].rope_theta = 10_000.0


def _hrm(values: Values) -> None:
    """The number of layers counts the slots of the cache: every pass through every layer."""
    values["num_layers_per_stack"] = 1
    values["num_hidden_layers"] = values["H_cycles"] * (values["L_cycles"] + 1)


def _blt(values: Values) -> None:
    """The global tower is as wide as the vectors that it reads from the local one."""
    tower = values["global_config"]
    tower.hidden_size = HIDDEN * values["cross_attn_k"]
    tower.head_dim = tower.hidden_size // tower.num_attention_heads
    for local in (values["encoder_config"], values["decoder_config"]):
        local.hidden_size_global = tower.hidden_size


def _dots3(values: Values) -> None:
    """Some layers have fewer heads; the head size is that of the latent attention."""
    fewer = {"num_attention_heads": HEADS // 2, "num_key_value_heads": HEADS // 2}
    if "per_layer_config" not in values:
        return
    values["per_layer_config"] = {index: dict(fewer) for index in values["per_layer_config"]}
    values |= {"head_dim": SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"], "num_key_value_heads": HEADS}


def _sections_of_positions(values: Values) -> None:
    """Times, rows and columns each turn a part of the rotary frequencies: without a list the parts of 64."""
    for own in values["rope_parameters"].values():
        if isinstance(own, dict):
            own["mrope_section"] = [3, 3, 2]  # head size / 2


CORRECTIONS: dict[str, Callable[[Values], None]] = {
    "bamba": _second_alone("attn_layer_indices"),
    "blt": _blt,
    "cohere_compass_text": _sections_of_positions,
    "dbrx": _nested_attention,
    "dots3_note": _dots3,
    "dots3_note_text": _dots3,
    "gemma3n_text": _shared_keys_and_values,
    "gemma4_text": _shared_keys_and_values,
    "gemma4_unified_text": _shared_keys_and_values,
    "gpt_neo": _gpt_neo,
    "hrm_text": _hrm,
    "longcat_flash": _set(head_dim=SIZES["qk_rope_head_dim"]),
    "mamba2": _set(head_dim=2 * HIDDEN // HEADS),
    "mllama": _second_alone("cross_attention_layers"),
    "mllama_text_model": _second_alone("cross_attention_layers"),
    "recurrent_gemma": _set(num_hidden_layers=3),  # one turn of its pattern
    "reformer": _set(  # positions factor in two axes, on which the hidden state is split
        axial_pos_embds_dim=[HIDDEN // 4, 3 * HIDDEN // 4], axial_pos_shape=[8, 8], local_attn_chunk_length=8,
        lsh_attn_chunk_length=8, num_buckets=4,
    ),
    "zamba": _set(  # the shared attention block needs two users, and a layer before it
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"], num_hidden_layers=4,
        attention_head_dim=2 * HIDDEN // HEADS, attention_hidden_size=2 * HIDDEN,
    ),
    "zaya": _set(num_experts_per_tok=1),
}  # fmt: skip
