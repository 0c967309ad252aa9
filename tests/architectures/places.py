"""Where things are in every architecture, read in transformers' modelling source and never asked from hfpatch.

``place_of(case)`` gives the paths; ``sites_of(case, model)`` applies them to a model. The columns stand in columns.py.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from architectures.catalogue import TYPES, model_type
from architectures.columns import QUERY_COLUMNS, all_columns, rest_of, width_of
from torch import nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Place:
    """Paths in a block; ``{i}`` in ``residual`` makes a path from the model of it, with the block's index."""

    blocks: tuple[str, ...] = ("model.layers",)
    attention: tuple[str, ...] = ("self_attn",)
    kind: str = ""  # the class of an attention; in hybrids the others under the same name are something else
    one_input: str = (
        ""  # its class or its block's, whose query, key and value read one x; others take no pre-projection
    )
    inputs: tuple[str | int, ...] = ("hidden_states",)  # the arguments that are x: keywords or positions
    query: str = "q_proj"  # from the attention
    output: str = "o_proj"  # from the attention: the last projection; "" is the attention itself
    exit: str = "{attention}"  # what is added to the residual, from the block
    factor: Callable = lambda config, block, index: 1.0  # by what it is multiplied before
    residual: str = "post_attention_layernorm"  # whose input is the residual after the addition; "" the block's output
    argument: int = 0  # which of its positional arguments
    mixed: bool = True  # whether the output projection is called once, for all positions
    branch: bool = True  # whether what ends there is the branch alone
    stream: bool = True  # whether the block returns the one residual stream
    norm: str = ""  # of the queries, from the attention; the norms of one head alone see them as in ``norm_reads``
    norm_reads: str = "tokens"  # "tokens": (batch, seq, heads, size), "heads": (batch, heads, seq, size)
    refused: Mapping[str, str] = field(default_factory=dict)  # method -> why no layer takes it
    refused_in_some: Mapping[str, str] = field(default_factory=dict)  # method -> why some layers do not


LLAMA = Place()
SANDWICH = replace(LLAMA, exit="post_attention_layernorm", residual="pre_feedforward_layernorm")
PARALLEL = replace(LLAMA, residual="")
NORM_AFTER = replace(LLAMA, exit="post_attention_layernorm", residual="mlp")
OUT_PROJ = replace(LLAMA, output="out_proj")
GPT = Place(blocks=("transformer.h",), attention=("attn",), inputs=(0,), query="c_attn", output="c_proj",
            residual="ln_2")  # fmt: skip
SEQ2SEQ = replace(OUT_PROJ, blocks=("model.decoder.layers",), residual="final_layer_norm")
POST_NORM_SEQ2SEQ = replace(SEQ2SEQ, residual="self_attn_layer_norm")
BERT = Place(attention=("attention.self",), inputs=(0,), query="query", output="../output.dense",
             exit="attention.output.dense", residual="attention.output.LayerNorm")  # fmt: skip
NEOX = Place(blocks=("gpt_neox.layers",), attention=("attention",), inputs=(0,), query="query_key_value",
             output="dense")  # fmt: skip
FALCON = replace(NEOX, blocks=("transformer.h",), attention=("self_attention",), residual="")
LATENT = replace(LLAMA, query="q_b_proj")
MULTIPLIED = replace(LLAMA, factor=lambda config, block, index: config.residual_multiplier)
STREAMS = {"content skip": "each residual stream receives its own, data-dependent multiple of the branch"}
HYPER = {"refused": STREAMS, "stream": False}
INSIDE = ".linear" if "inkling2_loop_text" in TYPES else ""  # since that type projections of Inkling 2 are in modules
INKLING2 = replace(
    LLAMA, one_input="Inkling2SlidingAttention", query=f"q_proj{INSIDE}", output=f"o_proj{INSIDE}",
    exit="post_attention_convolution", residual="mlp_input", argument=1,
    refused_in_some={"pre-projection": "in full attention query, key and value read different inputs"},
)  # fmt: skip
MAMBA_INPUT = {"content skip": "the branch feeds the Mamba layer's input and never joins the residual"}


def depth_scale(config, block, index):
    return config.scale_depth / math.sqrt(config.num_hidden_layers)


def _bert(path):
    return replace(BERT, blocks=(path,))


PLACES = {
    **dict.fromkeys(["gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text"], SANDWICH),
    **dict.fromkeys(["gemma3", "gemma4", "gemma4_unified"], replace(SANDWICH, blocks=("model.language_model.layers",))),
    "afmoe": replace(SANDWICH, residual="pre_mlp_layernorm"),
    "beam": replace(SANDWICH, factor=lambda config, block, index: 1 / math.sqrt(2 * (index + 1))),
    "gemma3n_text": replace(SANDWICH, factor=lambda config, block, index: 1 / math.sqrt(2), stream=False),
    **dict.fromkeys(["glm4", "kolibri1"], replace(LLAMA, exit="post_self_attn_layernorm")),
    "hyperclovax": replace(MULTIPLIED, exit="post_norm1"),
    **dict.fromkeys(
        ["granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"], MULTIPLIED
    ),
    **dict.fromkeys(["exaone4", "flex_olmo", "olmo2", "olmo3", "olmo_hybrid"], NORM_AFTER),
    **dict.fromkeys(["cohere", "cohere2", "cohere2_moe", "cohere_compass_text"], PARALLEL),
    "stablelm/parallel": PARALLEL,
    "phi": replace(PARALLEL, output="dense"),
    **dict.fromkeys(["apertus", "apertus1p5_text"], replace(LLAMA, residual="feedforward_layernorm")),
    "dory": replace(
        LLAMA, inputs=(0,), residual="pre_feedforward_layernorm",
        refused={"content skip": "the block moves the residual towards the branch, each feature by a share of its own"},
    ),
    "vaultgemma": replace(LLAMA, residual="pre_feedforward_layernorm"),
    "modernbert-decoder": replace(LLAMA, attention=("attn",), output="Wo", residual="mlp_norm"),
    "moshi": replace(LLAMA, query="q_proj.linear", output="o_proj.linear"),
    **dict.fromkeys(["phi3", "phi4_multimodal"], replace(LLAMA, query="qkv_proj")),
    "persimmon": replace(LLAMA, query="query_key_value", output="dense"),
    "fuyu": replace(LLAMA, blocks=("model.language_model.layers",), query="query_key_value", output="dense"),
    **dict.fromkeys(["got_ocr2", "moss_transcribe_diarize"], replace(LLAMA, blocks=("model.language_model.layers",))),
    "mllama": replace(LLAMA, blocks=("model.layers",), kind="MllamaTextSelfAttention"),
    "blt": replace(
        LLAMA, blocks=("model.local_encoder.layers", "model.global_transformer.layers", "model.local_decoder.layers")
    ),
    "hrm_text": replace(LLAMA, blocks=("model.L_module.layers", "model.H_module.layers")),
    # hybrids
    **dict.fromkeys(["bamba", "jamba"], replace(LLAMA, residual="pre_ff_layernorm")),
    "falcon_h1": replace(
        LLAMA, residual="pre_ff_layernorm", factor=lambda config, block, index: config.attention_out_multiplier
    ),
    "lfm2": replace(OUT_PROJ, residual="ffn_norm"),
    "lfm2_moe": replace(OUT_PROJ, residual="ffn_norm"),
    "lfm3": replace(LLAMA, exit="post_operator_norm", residual="ffn_norm"),
    "recurrent_gemma": replace(
        LLAMA, attention=("temporal_block",), kind="RecurrentGemmaAttention", inputs=(0,), residual="channel_pre_norm"
    ),
    "nemotron_h": replace(LLAMA, attention=("mixer",), kind="NemotronHAttention", residual=""),
    "kimi_linear": replace(LLAMA, kind="KimiLinearAttention"),
    "kimi_linear/query_latent": replace(LATENT, kind="KimiLinearAttention"),
    "bailing_hybrid": replace(LLAMA, kind="BailingHybridAttention"),
    "minimax": replace(
        LLAMA, kind="MiniMaxAttention", factor=lambda config, block, index: config.full_attn_beta_factor
    ),
    "zamba": replace(LLAMA, attention=("shared_transf.self_attn",), residual="", refused=MAMBA_INPUT),
    "zamba2": replace(LLAMA, attention=("shared_transformer.self_attn",), residual="", refused=MAMBA_INPUT),
    **dict.fromkeys(["qwen4_exp", "qwen4_exp_text"], replace(LLAMA, inputs=(0,), residual="", **HYPER)),
    # latent attention
    **dict.fromkeys(
        ["axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "dots3_note_text", "glm4_moe_lite",
         "glm_moe_dsa", "youtu"],
        LATENT,
    ),
    **{f"{kind}/no_query_latent": LLAMA for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")},
    "axk2": replace(LATENT, query="q_gate_proj"),
    "minicpm3": replace(LATENT, factor=depth_scale),
    "minicpm3/no_query_latent": replace(LLAMA, factor=depth_scale),
    "longcat_flash": replace(
        LATENT, attention=("self_attn.0", "self_attn.1"), stream=False, residual="post_attention_layernorm.{attention}"
    ),
    "hy_v4": replace(LATENT, **HYPER),
    "deepseek_v4": replace(LATENT, inputs=(0,), output="o_b_proj", **HYPER),
    # GPT-2 and its kin
    **dict.fromkeys(["gpt2", "gpt-sw3", "gpt_bigcode"], GPT),
    "openai-gpt": replace(GPT, residual="ln_1"),
    "gpt_neo": replace(GPT, attention=("attn.attention",), query="q_proj", output="out_proj"),
    "gptj": replace(GPT, inputs=("hidden_states",), query="q_proj", output="out_proj", residual=""),
    "codegen": replace(GPT, inputs=("hidden_states",), query="qkv_proj", output="out_proj", residual=""),
    "mpt": replace(GPT, blocks=("transformer.blocks",), query="Wqkv", output="out_proj", residual="norm_2"),
    "dbrx": replace(
        OUT_PROJ, blocks=("transformer.blocks",), attention=("norm_attn_norm.attn",), query="Wqkv",
        residual="norm_attn_norm.norm_2",
    ),
    "ctrl": replace(
        GPT, attention=("multi_head_attention",), inputs=(0, 1, 2), query="Wq", output="dense", residual="layernorm2"
    ),
    "bloom": replace(NEOX, blocks=("transformer.h",), attention=("self_attention",), branch=False),
    "falcon": FALCON,
    "falcon/sequential": replace(FALCON, residual="post_attention_layernorm"),
    "gpt_neox": replace(NEOX, residual=""),
    "gpt_neox/sequential": NEOX,
    "gpt_neox_japanese": replace(NEOX, blocks=("gpt_neox_japanese.layers",)),
    # decoders of encoder-decoders
    **dict.fromkeys(["bigbird_pegasus", "blenderbot", "mbart", "musicgen_melody", "opt", "pegasus"], SEQ2SEQ),
    **dict.fromkeys(["musicgen", "whisper"], replace(SEQ2SEQ, inputs=(0,))),
    **dict.fromkeys(["mvp", "trocr"], POST_NORM_SEQ2SEQ),
    "opt/post_norm": POST_NORM_SEQ2SEQ,
    **dict.fromkeys(["bart", "blenderbot-small", "marian", "plbart"], replace(POST_NORM_SEQ2SEQ, inputs=(0,))),
    "biogpt": replace(SEQ2SEQ, blocks=("biogpt.layers",)),
    "xglm": replace(SEQ2SEQ, blocks=("model.layers",), inputs=(0,)),
    "prophetnet": replace(POST_NORM_SEQ2SEQ, mixed=False, blocks=("prophetnet.decoder.layers",), query="query_proj"),
    # encoders used as decoders
    **dict.fromkeys(["bert", "bert-generation", "big_bird"], _bert("bert.encoder.layer")),
    **dict.fromkeys(["camembert", "roberta", "xlm-roberta", "xmod"], _bert("roberta.encoder.layer")),
    **{kind: _bert(f"{kind}.encoder.layer") for kind in ("electra", "ernie", "git", "rembert", "roc_bert", "roformer")},
    "data2vec-text": _bert("data2vec_text.encoder.layer"),
    "megatron-bert": replace(_bert("bert.encoder.layer"), residual="ln"),
    "roberta-prelayernorm": replace(_bert("roberta_prelayernorm.encoder.layer"), residual="intermediate.LayerNorm"),
    "xlm-roberta-xl": replace(_bert("roberta.encoder.layer"), residual="LayerNorm"),
    # one of a kind
    "cpmant": Place(
        blocks=("cpmant.encoder.layers",), attention=("self_att.self_attention",), inputs=(0, 1), query="project_q",
        output="attention_out", residual="ffn.layernorm_before_ffn",
    ),
    "inkling_text": replace(LLAMA, exit="attn_sconv"),
    "inkling2_text": INKLING2,
    "inkling2_loop_text": replace(
        INKLING2, one_input="Inkling2LoopSlidingDecoderLayer",
        refused_in_some={"pre-projection": "in full attention and in loops query, key and value read different inputs"},
    ),
    "jetmoe": replace(
        LLAMA, attention=("self_attention",), query="", output="",
        refused={"nonlinear query": "a mixture of experts makes the query"},
    ),
    "reformer": Place(
        blocks=("reformer.encoder.layers",), attention=("attention.self_attention",), query="query",
        output="../output.dense", exit="attention.output.dense", residual="feed_forward", stream=False,
        refused_in_some={"nonlinear query": "LSH layers compute query and key by one projection"},
    ),
    "xlm": Place(
        blocks=("transformer.attentions",), attention=("",), inputs=(0,), query="q_lin", output="out_lin",
        residual="transformer.layer_norm1.{i}", stream=False,
    ),
    "xlnet": Place(
        blocks=("transformer.layer",), attention=("rel_attn",), inputs=(0,), query="", output="", residual="",
        refused={"all": "its projections are bare parameters, and residual and norm lie inside the attention"},
    ),
    "zaya": replace(
        LLAMA, branch=False, query="qkv_proj.q_proj",
        refused={"nonlinear query": "the query projection feeds the keys, too"},
        factor=lambda config, block, index: block.post_attention_residual_scale.hidden_states_scale.detach(),
    ),
}  # fmt: skip


# The norm of the queries
Q_NORM, Q_LAYERNORM = {"norm": "q_norm"}, {"norm": "q_layernorm"}
HEADS = {"norm_reads": "heads"}
SHARED_NORM = {"refused_in_some": {"query temperature": "one module norms queries and keys in layers with positions"}}
NORMS = {
    **dict.fromkeys(
        ["afmoe", "beam", "cohere/query_norm", "doge", "dory", "dots1", "flex_olmo", "flint", "gemma3n_text", "gemma4",
         "gemma4_text", "gemma4_unified", "gemma4_unified_text", "inkling_text", "laguna", "lara_mini", "lfm3",
         "mellum", "minimax_m2", "minimax_m3_vl_text", "moss_transcribe_diarize", "olmo2", "olmo3", "olmo_hybrid",
         "olmoe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
         "qwen4_exp", "qwen4_exp_text", "sarvam_moe"],
        Q_NORM,
    ),
    **dict.fromkeys(
        ["apertus", "apertus1p5_text", "exaone4", "exaone_moe", "gemma3", "gemma3_text", "hy_v3", "kolibri1",
         "nanochat"],
        Q_NORM | HEADS,
    ),
    **dict.fromkeys(["fuyu", "lfm2", "lfm2_moe", "persimmon"], Q_LAYERNORM),
    **dict.fromkeys(["phi/query_norm", "stablelm/query_norm"], Q_LAYERNORM | HEADS),
    **dict.fromkeys(["hunyuan_v1_dense", "hunyuan_v1_moe"], {"norm": "query_layernorm"} | HEADS),
    "deepseek_v4": {"norm": "q_b_norm"} | HEADS,
    "persimmon/no_query_norm": {"norm": ""},
    **dict.fromkeys(["llama4", "llama4_text"], SHARED_NORM),
}  # fmt: skip


def place_of(case):
    place = PLACES.get(case) or PLACES.get(model_type(case), LLAMA)
    return replace(place, **(NORMS.get(case) or NORMS.get(model_type(case), {})))


@dataclass(frozen=True)
class Site:
    """The attention of one block of a model, with every path from the model."""

    path: str
    place: Place
    block: str
    query: str
    output: str
    exit: str
    factor: float | torch.Tensor
    residual: str
    columns: list[int]
    norm: str
    key: tuple[str, list[int]] | None  # path of the projection and its columns
    value: tuple[str, list[int]] | None
    has_output: bool  # whether the output projection is a matrix
    has_one_input: bool
    shares_its_norm: bool


FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv")
BESIDE = {  # the projection of the query -> those of key and value, where they are there
    "q_proj": ("k_proj", "v_proj"),
    "query": ("key", "value"),
    "q_proj.linear": ("k_proj.linear", "v_proj.linear"),
    "query_proj": ("key_proj", "value_proj"),
    "project_q": ("project_k", "project_v"),
    "Wq": ("Wk", "Wv"),
    "q_lin": ("k_lin", "v_lin"),
}


def _key_and_value(model, case, path, name, columns):
    """Return for key and value the path of the projection and its columns; None where there is no projection."""
    if model_type(case) == "jetmoe":
        half = width_of(model.get_submodule(join(path, "kv_proj"))) // 2
        return tuple((join(path, "kv_proj"), [half * i + column for column in range(half)]) for i in (0, 1))
    if name in FUSED:
        projection = model.get_submodule(join(path, name))
        key, value = rest_of(columns, width_of(projection))
        both = (value, key) if model_type(case) == "codegen" else (key, value)
        return tuple((join(path, name), part) for part in both)
    both = [None, None]
    for index, beside in enumerate(BESIDE.get(name, ())):
        with suppress(AttributeError):
            module = model.get_submodule(join(path, beside))
            both[index] = None if module is None else (join(path, beside), all_columns(module, None))
    return both


def join(*parts):
    """Join dotted paths; ``../`` at the start of a part goes up."""
    path = ""
    for part in parts:
        while part.startswith("../"):
            path, part = path.rpartition(".")[0], part[3:]
        path = ".".join(piece for piece in (path, part) if piece)
    return path


def sites_of(case, model):
    """Return the attention sites of a model, block after block."""
    place = place_of(case)
    return [
        _site(case, model, place, f"{blocks}.{index}", index, attention)
        for blocks in place.blocks
        for index in range(len(model.get_submodule(blocks)))
        for attention in place.attention
        if _is_attention(model, place, join(f"{blocks}.{index}", attention))
    ]


def _is_attention(model, place, path):
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(module, nn.Module) and type(module).__name__ == (place.kind or type(module).__name__)


def _site(case, model, place, block_path, index, attention):
    block = model.get_submodule(block_path)
    path = join(block_path, attention)
    query = place.query if place.query != "query" or hasattr(model.get_submodule(path), "query") else ""
    residual = place.residual.format(i=index, attention=attention.rpartition(".")[2])
    config = model.config.get_text_config(decoder=True)
    output = join(path, place.output) if place.output else path
    formula = QUERY_COLUMNS.get(case) or QUERY_COLUMNS.get(model_type(case), all_columns)
    columns = formula(model.get_submodule(join(path, query)), config) if query else []
    key, value = _key_and_value(model, case, path, place.query, columns)
    return Site(
        path=path,
        place=place,
        block=block_path,
        query=join(path, query) if query else "",
        output=output,
        exit=join(block_path, place.exit.format(attention=attention)),
        factor=place.factor(config, block, index),
        residual=residual if "{i}" in place.residual else join(block_path, residual),
        columns=columns,
        key=key,
        value=value,
        has_output=isinstance(model.get_submodule(output), nn.Linear | Conv1D),
        norm=join(path, place.norm) if place.norm else "",
        shares_its_norm=hasattr(model.get_submodule(path), "qk_norm"),
        has_one_input=place.one_input in ("", type(model.get_submodule(path)).__name__, type(block).__name__),
    )
