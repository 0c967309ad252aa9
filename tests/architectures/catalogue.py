"""Every causal language model type of transformers, and several configurations of those whose structure they change.

A case is a model type, or ``type/what`` for one more configuration of it; its model is the tiny random twin of the
type's default configuration with the options given here.
"""

import functools

import torch
from copies import Template
from families import frozen
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfpatch.twins import random_model, twin

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

WRITTEN_FOR = "5.23.0"  # the version of transformers whose types are counted
DRAFTER = "a drafter: it reads another model's hidden states, keys and values instead of token ids"
NOT_TRIED = {
    "gemma3n": "its vision tower needs timm; gemma3n_text is the same text model",
    "gemma4_assistant": DRAFTER,
    "gemma4_unified_assistant": DRAFTER,
}
WITHOUT_ATTENTION = {
    "falcon_mamba": "a state-space model without softmax attention",
    "mamba": "a state-space model without softmax attention",
    "mamba2": "a state-space model without softmax attention",
    "rwkv": "a recurrent model without softmax attention",
    "xlstm": "a recurrent model without softmax attention",
}

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8} | {
    "indexer_compress_ratio": 2
}
PER_HEAD = {"multi_query": False, "new_decoder_architecture": False}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}

# Encoders become causal by this switch
DECODERS = [
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
]  # fmt: skip
# Factors between the attention and the residual, most of them 1 by default, where a forgotten one would not show
MULTIPLIED = [
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hyperclovax",
]  # fmt: skip
FACTORS = {
    **{kind: {"residual_multiplier": 0.22} for kind in MULTIPLIED},
    "falcon_h1": {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.4, "ssm_out_multiplier": 0.7},
    "minicpm3": {"scale_depth": 0.9},
    "minimax": {"full_attn_alpha_factor": 0.8, "full_attn_beta_factor": 0.35},
}

# What the default configuration of a type needs to be built, or to have attention layers and to be causal
OPTIONS = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"initializer_range": 0.2},  # it divides scales, to which the twin adds noise, by this
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"hash_seed": 0},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}

# Switches that change the layout of the projections or the form of the block
VARIATIONS = {
    "big_bird/full": {"attention_type": "original_full"},
    "bloom/residual_after_norm": {"apply_residual_connection_post_layernorm": True},
    "cohere/query_norm": {"use_qk_norm": True},
    "deepseek_v2/no_query_latent": {"num_experts_per_tok": 2, "q_lora_rank": None},
    "deepseek_v3/no_query_latent": {"q_lora_rank": None},
    "falcon/per_head": PER_HEAD,
    "falcon/sequential": {**PER_HEAD, "parallel_attn": False, "alibi": True},
    "falcon/new_decoder": GROUPED,
    "falcon/new_decoder_one_norm": {**GROUPED, "num_ln_in_parallel_attn": 1},
    "gemma4_text/kv_shared": {"num_kv_shared_layers": 15},
    "gemma4_text/value_is_key": {"attention_k_eq_v": True},
    "glm4_moe_lite/no_query_latent": {"q_lora_rank": None},
    "gpt_bigcode/multi_head": {"multi_query": False},
    "gpt_neox/sequential": {"use_parallel_residual": False},
    "kimi_linear/query_latent": {"q_lora_rank": 32},
    "llama/other_head_size": {"head_dim": 96},
    "minicpm3/no_query_latent": {"q_lora_rank": None},
    "mpt/clipped": {"attn_config": {"clip_qkv": 1.0}},
    "olmo/clipped": {"clip_qkv": 1.0},
    "opt/post_norm": {"do_layer_norm_before": False},
    "persimmon/no_query_norm": {"qk_layernorm": False},
    "phi/query_norm": {"qk_layernorm": True},
    "reformer/local": {"attn_layers": ["local"] * 2},
    "stablelm/parallel": {"use_parallel_residual": True},
    "stablelm/query_norm": {"qk_layernorm": True},
    "youtu/no_query_latent": {"q_lora_rank": None},
    "zamba2/adapters": {"use_shared_attention_adapter": True},
}

# Small configurations as they are: a twin has four heads, one in each of CodeGen's four groups
EXPLICIT = {
    "codegen/eight_heads": {
        "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4,
    },
}  # fmt: skip

TRIED = [kind for kind in TYPES if kind not in NOT_TRIED]
MORE = [case for case in {**VARIATIONS, **EXPLICIT} if case.split("/")[0] in TYPES]
CASES = sorted([kind for kind in TRIED if kind not in WITHOUT_ATTENTION] + MORE)


def model_type(case):
    return case.split("/")[0]


def options_of(case):
    kind = model_type(case)
    causal = {"is_decoder": True} if kind in DECODERS else {}
    return {**causal, **OPTIONS.get(kind, {}), **FACTORS.get(kind, {}), **VARIATIONS.get(case, EXPLICIT.get(case, {}))}


@functools.lru_cache(maxsize=1)
def _made(case):
    config = CONFIG_MAPPING[model_type(case)](**options_of(case))
    return Template(random_model(config) if case in EXPLICIT else twin(config))


def make(case):
    """Return a new tiny model, the same for every call; the tests of one case in a row build it once."""
    return _made(case).copy()


def settled(model):
    """Exchange the modules that transformers itself exchanges at BigBird's first short batch."""
    if model.config.model_type == "big_bird":
        model.bert.set_attention_type("original_full")
    return model


def tokens_for(model, *, batch=2, length=8, seed=0):
    """Return token ids ``(batch, length)``; of MusicGen's decoders ``(batch·codebooks, length)``."""
    rows = batch * (model.config.num_codebooks if model.config.model_type.startswith("musicgen") else 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, length), generator=generator)


@torch.no_grad()
def logits_of(model, tokens, **states):
    with frozen(model):
        return model(tokens, use_cache=False, **states).logits
