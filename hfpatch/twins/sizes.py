"""Small values for the fields of configurations that are sizes."""

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
    "index_topk": 4, "index_topk_blocks": 4, "index_block_size": 4, "gated_norm_rank": 8,
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
    # positions and windows
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "max_target_positions": 64,
    "sliding_window": 32, "sliding_window_size": 32, "window_size": 32, "attention_window_size": 32,
    "local_attention": 32, "original_max_position_embeddings": 64, "attention_chunk_size": 32,
}  # fmt: skip

SWITCHES = {  # zero turns these off and stays zero
    "shared_intermediate_size", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts",
    "first_k_dense_replace",
}  # fmt: skip

DROPOUTS = {
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "dropout_p",
    "embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob",
    "resid_pdrop", "resid_dropout", "residual_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
    "mlp_dropout", "lsh_attention_probs_dropout_prob", "local_attention_probs_dropout_prob", "input_jitter_noise",
    "router_jitter_noise",
}  # fmt: skip
