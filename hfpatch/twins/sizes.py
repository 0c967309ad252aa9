"""Small values for the fields of configurations, and corrections where fields depend on each other."""

from __future__ import annotations

from typing import Any

VOCABULARY, LAYERS = 128, 2

LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
    "num_decoder_layers", "encoder_layers", "num_encoder_layers", "num_blocks",
)  # fmt: skip

SIZES = {
    # the vocabulary
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "unpadded_vocab_size": VOCABULARY,
    # the hidden state
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "emb_dim": 64, "embedding_dim": 64, "embedding_size": 64,
    "input_embedding_size": 64, "output_embedding_size": 64, "word_embed_proj_dim": 64, "dim_model_base": 64,
    "hidden_size_per_layer_input": 16, "ple_embed_dim": 16, "attention_hidden_size": 64, "lru_width": 64,
    # heads
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_kv_heads": 2,
    "num_query_groups": 4, "swa_head_dim": 16, "d_head": 16, "dim_head": 16, "attention_head_size": 16,
    "head_dim": 16, "kv_channels": 16, "rotary_dim": 8, "query_pre_attn_scalar": 16, "d_rel": 8, "rel_extent": 16,
    # latent attention and its indexers
    "q_lora_rank": 24, "kv_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 4,
    "index_topk": 4, "index_topk_blocks": 4, "index_block_size": 4, "index_kpool": 2, "gated_norm_rank": 8,
    "indexer_n_heads": 4, "indexer_head_dim": 32, "indexer_budget": 8, "indexer_compress_ratio": 2,
    # feed-forward layers and experts
    "intermediate_size": 96, "ffn_dim": 96, "dim_ff": 96, "dff": 96, "d_inner": 96, "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96, "n_inner": 96, "decoder_ffn_dim": 96, "feed_forward_size": 96, "moe_intermediate_size": 32,
    "dense_intermediate_size": 96, "intermediate_size_mlp": 96, "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "shared_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "router_hidden_size": 16, "laurel_rank": 8, "adapter_rank": 8,
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1,
    # recurrent and convolutional mixers
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "mamba_n_heads": 4, "mamba_num_heads": 4,
    "mamba_d_head": 32, "mamba_head_dim": 32, "mamba_d_ssm": 128, "mamba_dt_rank": 8, "mamba_expand": 2,
    "time_step_rank": 8, "chunk_size": 8, "mamba_chunk_size": 8, "n_groups": 1, "mamba_n_groups": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16,
    # towers that read other inputs than text, and their embeddings
    "decoder_vocab_size": VOCABULARY, "pronunciation_vocab_size": 32, "shape_vocab_size": 32,
    "pronunciation_embed_dim": 16, "shape_embed_dim": 16, "encoder_hash_byte_group_vocab": 64,
    "hidden_size_global": 64, "adapter_in_dim": 64, "adapter_out_dim": 64, "adapter_input_size": 64,
    "ngram_vocab_size_base": 64,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # encoders, vision and speech
    "dim": 64, "embed_dim": 64, "d_embed": 64, "encoder_hidden_size": 64, "out_hidden_size": 64, "output_dim": 64,
    "output_hidden_size": 64, "projection_dim": 64, "text_embed_dim": 64, "text_hidden_size": 64,
    "vision_embed_dim": 64, "vision_hidden_size": 64, "d_kv": 16, "d_ff": 96, "hidden_dim": 96, "mlp_dim": 96,
    "depth": LAYERS, "n_layers": LAYERS, "image_size": 32, "patch_size": 8, "temporal_patch_size": 1, "num_frames": 4,
    "num_mel_bins": 16, "max_source_positions": 64, "num_codevector_groups": 2, "codevector_dim": 16,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "context_length": 64, "prediction_length": 8,
    "num_queries": 6, "num_query_tokens": 6,
    # positions and windows
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "max_target_positions": 64,
    "sliding_window": 32, "sliding_window_size": 32, "window_size": 32, "attention_window_size": 32,
    "local_attention": 32, "original_max_position_embeddings": 64, "attention_chunk_size": 32,
}  # fmt: skip

SWITCHES = {  # zero turns these off and stays zero
    "shared_intermediate_size", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts",
    "first_k_dense_replace", "qk_rope_head_dim",
}  # fmt: skip

DROPOUTS = {
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "dropout_p",
    "embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob",
    "resid_pdrop", "resid_dropout", "residual_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
    "mlp_dropout", "lsh_attention_probs_dropout_prob", "local_attention_probs_dropout_prob", "input_jitter_noise",
    "router_jitter_noise",
}  # fmt: skip

SECTIONED = {  # times, rows and columns turn some frequencies each, also where the configuration lists no numbers
    "cohere_compass_text", "ernie4_5_vl_moe_text", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text",
    "paddleocr_vl_text", "qwen2_5_omni_talker", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text",
}  # fmt: skip

Values = dict[str, Any]
HIDDEN, HEADS, HEAD = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["head_dim"]


def correct(model_type: str, values: Values) -> None:
    """Correct small values, in place, where those of a type depend on each other."""
    _fit_frequencies(model_type, values)
    match model_type:
        case "bamba" | "mllama" | "mllama_text_model":  # layers of a kind are listed by index: the second one alone
            name = "attn_layer_indices" if model_type == "bamba" else "cross_attention_layers"
            values |= {name: [1]} if values.get(name) else {}
        case "blt":  # the global tower is as wide as the vectors that it reads from the local one
            tower = values["global_config"]
            tower.hidden_size = HIDDEN * values["cross_attn_k"]
            tower.head_dim = tower.hidden_size // tower.num_attention_heads
            for local in (values["encoder_config"], values["decoder_config"]):
                local.hidden_size_global = tower.hidden_size
        case "dbrx":  # sizes of the attention in a configuration of its own
            values["attn_config"].kv_n_heads = HEADS // 2
            values["attn_config"].rope_theta = 10_000.0
        case "dory":  # the layers in the middle run in a loop: those between the first and the last
            values |= {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "n_input_layers": 1,
                "n_recurrent_layers": 2,
                "n_output_layers": 1,
            }
        case "dots3_note" | "dots3_note_text" if "per_layer_config" in values:
            # some layers have fewer heads; the head size is that of the latent attention
            fewer = {"num_attention_heads": HEADS // 2, "num_key_value_heads": HEADS // 2}
            values["per_layer_config"] = {index: dict(fewer) for index in values["per_layer_config"]}
            values |= {"head_dim": SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"], "num_key_value_heads": HEADS}
        case "gemma3n_text" | "gemma4_text" | "gemma4_unified_text" if values["num_kv_shared_layers"]:
            # the last layers read keys and values of an earlier layer of their kind
            kinds = list(dict.fromkeys(values["layer_types"])) * 2
            values |= {"layer_types": kinds, "num_hidden_layers": len(kinds), "num_kv_shared_layers": len(kinds) // 2}
            if "per_layer_config" in values:  # the differences of full attention
                changes: Values = next(iter(values["per_layer_config"].values()), {})
                full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
                values["per_layer_config"] = {index: dict(changes) for index in full}
            for name in ("intermediate_size", "activation_sparsity_pattern"):
                if isinstance(values.get(name), list):
                    values[name] = (values[name] * len(kinds))[: len(kinds)]
        case "gpt_neo":  # the kinds of attention are listed with repetitions: one of each is enough
            kinds = list(dict.fromkeys(kind for group, _ in values["attention_types"] for kind in group))
            values |= {"attention_types": [[kinds, 1]], "num_layers": len(kinds)}
        case "hrm_text":  # the number of layers counts the slots of the cache: every pass through every layer
            values |= {"num_layers_per_stack": 1, "num_hidden_layers": values["H_cycles"] * (values["L_cycles"] + 1)}
        case "inkling2_loop_text":  # the layers in the middle run in a loop: one of each kind inside and outside
            values |= {
                "num_hidden_layers": 5,
                "layer_types": [*["hybrid_sliding", "hybrid"] * 2, "hybrid"],
                "n_layers_per_attn_res_block": 2,
                "loop_layer_index_start": 2,
                "loop_layer_index_end": 4,
            }
        case "longcat_flash":
            values["head_dim"] = SIZES["qk_rope_head_dim"]
        case "mamba2":
            values["head_dim"] = 2 * HIDDEN // HEADS
        case "mistral4":  # the turned part of a head is that of the latent attention
            values["rope_parameters"]["partial_rotary_factor"] = SIZES["qk_rope_head_dim"] / SIZES["qk_head_dim"]
        case "recurrent_gemma":  # one turn of its pattern
            values["num_hidden_layers"] = 3
        case "reformer":  # positions factor in two axes, on which the hidden state is split
            values |= {
                "axial_pos_embds_dim": [HIDDEN // 4, 3 * HIDDEN // 4],
                "axial_pos_shape": [8, 8],
                "local_attn_chunk_length": 8,
                "lsh_attn_chunk_length": 8,
                "num_buckets": 4,
            }
        case "zamba":  # the shared attention block needs two users, and a layer before it
            values |= {
                "layers_block_type": ["linear_attention", "hybrid"] * 2,
                "num_hidden_layers": 4,
                "attention_head_dim": 2 * HIDDEN // HEADS,
                "attention_hidden_size": 2 * HIDDEN,
            }
        case "zaya":
            values["num_experts_per_tok"] = 1


def _fit_frequencies(model_type: str, values: Values) -> None:
    """Correct what rotary embeddings list of their frequencies, which are half the turned part of a head."""
    head = values.get("qk_rope_head_dim") or values.get("head_dim") or HEAD
    rope = values.get("rope_parameters") or {}
    for part in [part for part in rope.values() if isinstance(part, dict)] or [rope]:  # of every kind of layers
        frequencies = int(head * (part.get("partial_rotary_factor") or 1)) // 2
        for name in {"short_factor", "long_factor"} & part.keys():
            part[name] = part[name][:frequencies]
        if part.get("mrope_section") or model_type in SECTIONED:
            axes = len(part.get("mrope_section") or "thw")
            part["mrope_section"] = [len(range(axis, frequencies, axes)) for axis in range(axes)]
