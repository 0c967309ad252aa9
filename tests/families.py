"""Tiny random models of every supported family: seeded, in fp32, with weights large enough that changes are visible."""

import functools
import zlib
from contextlib import contextmanager

import torch
from copies import Template
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY, HIDDEN, LAYERS, HEADS = 96, 32, 2, 4
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "initializer_range": 0.2}
SHARED = {**SMALL, **TOKENS, "hidden_size": HIDDEN}
LLAMA = {**SHARED, "intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 2}
GEMMA = {**LLAMA, "head_dim": 12, "initializer_range": 0.3}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
    "initializer_range": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **TOKENS,
}  # fmt: skip
OPT = {
    **SHARED, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": HIDDEN, "init_std": 0.2,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
OPT.pop("initializer_range")
NEOX = {**SHARED, "intermediate_size": 48, "max_position_embeddings": 64}
BLOOM = {**SHARED, "hidden_dropout": 0.0, "attention_dropout": 0.0}
FALCON = {**BLOOM, "max_position_embeddings": 64, "ffn_hidden_size": 48}

# case name -> (model type, options of its config)
CASES = {
    "gpt_neox": ("gpt_neox", {**NEOX, "use_parallel_residual": True}),
    "gpt_neox_sequential": ("gpt_neox", {**NEOX, "use_parallel_residual": False}),
    "gpt2": ("gpt2", GPT2),
    "llama": ("llama", LLAMA),
    "mistral": ("mistral", {**LLAMA, "sliding_window": None}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 8}),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 12, "sliding_window": 64}),
    "phi3": ("phi3", LLAMA),
    "falcon_multi_query": ("falcon", {**FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon_per_head": (
        "falcon",
        {**FALCON, "multi_query": False, "new_decoder_architecture": False, "parallel_attn": False, "alibi": True},
    ),
    "falcon_new_decoder": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}),
    "opt": ("opt", {**OPT, "do_layer_norm_before": True}),
    "opt_post_norm": ("opt", {**OPT, "do_layer_norm_before": False}),
    "bloom": ("bloom", BLOOM),
    "bloom_post_norm_residual": ("bloom", {**BLOOM, "apply_residual_connection_post_layernorm": True}),
}

FAMILIES = list(CASES)
FEW = ["gpt_neox", "gpt2", "gemma2"]  # fused per head; Conv1D; sandwich norms with grouped queries


def model_type(case: str) -> str:
    return CASES[case][0]


def make_config(case: str, **changes):
    kind, options = CASES[case]
    return AutoConfig.for_model(kind, **{**options, **changes})


@functools.cache
def _made(case: str) -> Template:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(case.encode()))
        model = AutoModelForCausalLM.from_config(make_config(case), dtype=torch.float32)
        for parameter in model.parameters():  # norms off one and biases off zero, so that each one shows
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn(parameter.shape)
    return Template(model.eval())


def make_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a new model in evaluation mode, the same for every call."""
    return _made(case).copy().to(dtype)


def make_tokens(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


@contextmanager
def frozen(model: torch.nn.Module):
    """Let no parameter require gradients for a while: torch picks kernels by that, so that bits may depend on it."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad = True


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: torch.Tensor, **kwargs) -> torch.Tensor:
    """Return the logits, comparable bit for bit with those of a model whose parameters are frozen."""
    with frozen(model):
        return model(tokens, use_cache=False, **kwargs).logits


def hooks_act_as_registered(model: torch.nn.Module) -> bool:
    """Return whether the hooks of every module act in the order of their registration, which torch 2.11 compiles."""
    hooks = [dicts for module in model.modules() for dicts in (module._forward_pre_hooks, module._forward_hooks)]
    return all([*dicts] == [*dict.keys(dicts)] for dicts in hooks)


@torch.no_grad()
def perturb(model: torch.nn.Module, *, std: float = 0.1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Move every parameter that an adapter added off its initial value; return them by name.

    Adapter parameters are those whose name holds that of a layer of hfpatch or a prefix of PEFT.
    """
    moved = {}
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".hfpatch_", "lora_", "ia3_")):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            parameter += std * torch.randn(parameter.shape, generator=generator).to(parameter)
            moved[name] = parameter
    return moved


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of every trained parameter for the loss on its own tokens."""
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def train(model: torch.nn.Module, tokens: torch.Tensor, *, steps: int = 3, lr: float = 0.01) -> list[float]:
    """Train in training mode, leave evaluation mode, and return the losses."""
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr), []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def close(actual: torch.Tensor, expected: torch.Tensor, rounding: float = 1e-4) -> bool:
    """Return whether tensors are equal up to rounding, relative to the largest value."""
    return bool((actual - expected).abs().max() <= rounding * expected.abs().max())


def state_of(model):
    """Everything that unpatching must restore: names, bytes, order, flags, hooks, modes."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "modules": [(name, type(m)) for name, m in model.named_modules()],
        "training": [m.training for m in model.modules()],
        "hooks": hooks,
        "peft": hasattr(model, "peft_config"),
        "flag": getattr(model, "_hf_peft_config_loaded", False),
    }


def assert_as_it_was(model, before):
    after = state_of(model)
    for key in before.keys() - {"state"}:
        assert after[key] == before[key], key
    assert list(after["state"]) == list(before["state"])
    for name, tensor in before["state"].items():
        assert torch.equal(tensor, after["state"][name]), name


@contextmanager
def unchanged(model):
    """Check that a model ends as it is now."""
    before = state_of(model)
    yield
    assert_as_it_was(model, before)
