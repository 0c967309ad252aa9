"""Sage: a small decoder whose attention and feed-forward network read the same norm, side by side."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class SageConfig(LlamaConfig):
    """Configuration of a Sage: that of a Llama of full heads, and the factor of its attention branches."""

    model_type = "sage"
    branch_scale: float = 0.5


class SageAttention(nn.Module):
    """Attention by one projection with the columns [v all, k all, q all]."""

    def __init__(self, config: SageConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.heads, self.head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.scaling, self.is_causal, self.num_key_value_groups = self.head_dim**-0.5, True, 1
        self.joint = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the branch ``(batch, seq, hidden)``."""
        by_head = self.joint(hidden_states).unflatten(-1, (3, self.heads, -1))
        value, key, query = by_head.transpose(1, 3).unbind(2)  # (batch, heads, seq, size) each
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.out(mixed.flatten(-2))


class SageBlock(GradientCheckpointingLayer):
    """h + branch_scale · attention(norm(h)) + mlp(norm(h))."""

    def __init__(self, config: SageConfig, layer: int) -> None:
        super().__init__()
        self.branch_scale = config.branch_scale
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention, self.mlp = SageAttention(config, layer), LlamaMLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the residual stream ``(batch, seq, hidden)``."""
        x = self.norm(hidden_states)
        return hidden_states + self.branch_scale * self.attention(x, **kwargs) + self.mlp(x)


class SageModel(LlamaModel):
    """The blocks between the embeddings and the last norm."""

    config_class = SageConfig

    def __init__(self, config: SageConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(SageBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.post_init()


class SageForCausalLM(LlamaForCausalLM):
    """The model with its head."""

    config_class = SageConfig

    def __init__(self, config: SageConfig) -> None:
        super().__init__(config)
        self.model = SageModel(config)
        self.post_init()
