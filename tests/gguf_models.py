"""Small GGUF files of random models, as llama.cpp's converter writes them, and the weights that they hold."""

import struct
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

HIDDEN, LAYERS, HEADS, PAIRS = 64, 2, 4, 2
_SPECIAL = ["<|end|>", "<|start|>", "<|endoftext|>"]
WORDS = [*_SPECIAL, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
_MERGES = ["Ġ t", "h e", "Ġt he"]
_COMMON = {"vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": 0, "initializer_range": 0.2}
_LLAMA = {
    **_COMMON, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": PAIRS, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "head_dim": HIDDEN // HEADS,
}  # fmt: skip
_GPT2 = {**_COMMON, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 1024}
CONFIGS = {"llama": _LLAMA, "qwen2": {**_LLAMA, "tie_word_embeddings": False}, "gpt2": _GPT2}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def make(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.eval()


def write_gguf(path: Path, family: str, kind: str = "Q8_0", *, seed: int = 0, extra: dict | None = None) -> dict:
    """Write a file whose matrices are quantised, and return the state dict that it holds, dequantised by ``gguf``."""
    model, ggml = make(family, seed), GGMLQuantizationType[kind]
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    if family == "gpt2":
        writer.add_feed_forward_length(4 * HIDDEN)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(PAIRS)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(HIDDEN // HEADS)
        writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(WORDS) - len(_SPECIAL)))
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == family), LAYERS)
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        values, transposed = tensor, family == "gpt2" and tensor.dim() == 2 and ".h." in name
        heads = {"q_proj": HEADS, "k_proj": PAIRS}.get(stem.rpartition(".")[2]) if family == "llama" else None
        if transposed:
            values = tensor.T
        if heads:  # in the order of llama.cpp, whose rotary pairs are neighbours
            halves = tensor.view(heads, 2, len(tensor) // heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(tensor.shape)
        values = values.contiguous().numpy()
        if tensor.dim() == 1 or kind == "F32":
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values)
            held[name] = tensor
            continue
        stored = quants.quantize(values, ggml)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", stored, raw_dtype=ggml)
        back = torch.from_numpy(quants.dequantize(stored, ggml).copy())
        if transposed:
            back = back.T
        if heads:
            back = back.view(heads, len(back) // heads // 2, 2, -1).swapaxes(1, 2).reshape(back.shape)
        held[name] = back.contiguous()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def holding(family: str, held: dict) -> PreTrainedModel:
    """Return a plain model with these weights."""
    model = make(family)
    missing, unexpected = model.load_state_dict(held, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


def damaged(data: bytes, *, key_count: int) -> bytes:
    """Return a file whose header promises another number of metadata keys."""
    return data[:16] + struct.pack("<Q", key_count) + data[24:]
