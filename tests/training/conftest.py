from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from training_blocks import make_blocks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hfpatch.data.blocks import TokenBlocks

VOCABULARY = 64


def make_base(kind: str = "gpt_neox", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {"gpt_neox": {"intermediate_size": 64}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    config = AutoConfig.for_model(kind, **small, **extra.get(kind, {}), bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_patched(kind: str = "gpt_neox", dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> PreTrainedModel:
    """Return a frozen base with a LoRA adapter in float32, its second matrix away from zero."""
    model = make_base(kind, dtype).requires_grad_(False)
    target = {"gpt_neox": "query_key_value", "gpt2": "c_attn"}[kind]
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=[target], fan_in_fan_out=kind == "gpt2")
    torch.manual_seed(1)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.fixture
def blocks() -> TokenBlocks:
    return make_blocks()


@pytest.fixture
def padded_blocks() -> TokenBlocks:
    return make_blocks(layout="padded")


@pytest.fixture
def completion_blocks() -> TokenBlocks:
    with pytest.warns(UserWarning, match="have none to learn and are left out"):
        return make_blocks(completions=True)


@pytest.fixture
def patched() -> Callable[..., PreTrainedModel]:
    return make_patched


@pytest.fixture
def base() -> Callable[..., PreTrainedModel]:
    return make_base
