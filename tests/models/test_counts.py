"""Parameter counts on the meta device, against formulas written out and the published numbers.

d: hidden size, L: layers, V: vocabulary, T: context, r: rank, w: MLP width as a multiple of d, k: head size,
g: key/value heads, E: experts. GPT-2 small has neither biases nor an output head of its own.
"""

import pytest
import torch

from hfpatch.models import non_embedding_parameters
from hfpatch.recipes.models import GPT2_SMALL
from hfpatch.training.architecture import build_model

D, L, V, T = 768, 12, 50304, 1024
NORMS = L * 2 * D + D  # two in each block, one at the end
ATTENTION = L * 4 * D * D  # W_Q, W_K, W_V, W_O
MLP = L * 2 * D * 4 * D  # d -> 4d -> d
BASE = ATTENTION + MLP + NORMS
QUERY = L * D * D  # W_Q
BOTTLENECK = L * (D * (D // 2) + (D // 2) * D)  # W_1 and W_2 at r = d/2: d²
GAINS = L * 2 * D  # of f's input and output norm


def built(architecture):
    with torch.device("meta"):
        return build_model(architecture)


def nonlinear(**options):
    return {"query": {"path": "nonlinear", **options}}


@pytest.mark.parametrize(
    ("changes", "expected", "published"),
    [
        # query paths
        ({}, BASE, 84.95),
        ({"query": {"path": "identity"}}, BASE - QUERY, None),
        ({"query": {"path": "residual"}}, BASE - QUERY + L * D * D, None),
        (nonlinear(), BASE - QUERY + BOTTLENECK + GAINS, 84.97),
        (nonlinear(activation="identity"), BASE - QUERY + BOTTLENECK + GAINS, 84.97),
        (nonlinear(activation="relu2"), BASE - QUERY + BOTTLENECK + GAINS, 84.97),
        (nonlinear(fused=True), BASE - QUERY + BOTTLENECK + GAINS, 84.97),
        (nonlinear(anchor="weight"), BASE + BOTTLENECK + GAINS, None),
        (nonlinear(rank=96), BASE - QUERY + L * (D * 96 + 96 * D) + GAINS, None),
        (nonlinear(input_norm="none"), BASE - QUERY + BOTTLENECK + L * D, None),
        (nonlinear(output_norm="none"), BASE - QUERY + BOTTLENECK + L * D, None),
        (nonlinear(input_norm="none", output_norm="none"), BASE - QUERY + BOTTLENECK, None),
        (nonlinear(targets=["value"]), BASE - L * D * D + BOTTLENECK + GAINS, None),
        # the MLP's width, w·d rounded
        ({"mlp_width": 4.33}, BASE - MLP + L * 2 * D * 3325, None),  # 4.33 · 768 = 3325.44
        ({"mlp_width": 4.75}, BASE - MLP + L * 2 * D * 3648, 95.57),
        # both at once
        ({"mlp_width": 4.5, **nonlinear()}, BASE - MLP + L * 2 * D * 3456 - QUERY + BOTTLENECK + GAINS, None),
        # with biases: 3d of q, k, v; d of the output; 4d and d of the MLP; d of each norm
        ({"biases": True}, BASE + L * (3 + 1 + 4 + 1 + 2) * D + D, None),
        ({"biases": True, "query": {"path": "identity"}}, BASE - QUERY + L * (2 + 1 + 4 + 1 + 2) * D + D, None),
        ({"biases": True, **nonlinear(anchor="weight")}, BASE + BOTTLENECK + GAINS + L * 11 * D + D, None),
    ],
)
def test_non_embedding_counts_of_gpt2_small(changes, expected, published):
    counted = non_embedding_parameters(built({**GPT2_SMALL, **changes}))
    assert counted == expected
    assert published is None or round(counted / 1e6, 2) == published


def test_the_whole_model_has_its_embeddings_once():
    model = built(GPT2_SMALL)
    assert sum(p.numel() for p in model.parameters()) == BASE + V * D + T * D  # the head is the tokens' embedding
    untied = built({**GPT2_SMALL, "tie_word_embeddings": False})
    assert sum(p.numel() for p in untied.parameters()) == BASE + 2 * V * D + T * D
    assert non_embedding_parameters(untied) == BASE


LLAMA = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1536, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    ("query", "of_query"),
    [
        ({"path": "linear"}, 512 * 512),
        ({"path": "identity"}, 0),
        ({"path": "residual"}, 512 * 512),
        ({"path": "nonlinear"}, 512 * 256 + 256 * 512 + 2 * 512),
        ({"path": "nonlinear", "anchor": "weight"}, 512 * 512 + 512 * 256 + 256 * 512 + 2 * 512),
        # keys are g·k = 128 wide
        ({"anchor": "weight", "targets": ["key"], "rank": 64}, 512 * 512 + 512 * 64 + 64 * 128 + 512 + 128),
    ],
)
def test_non_embedding_counts_with_grouped_queries_and_experts(query, of_query, experts):
    moe = {"model_type": "mixtral", "num_local_experts": experts} if experts else {}
    counted = non_embedding_parameters(built({**LLAMA, **moe, "query": query}))
    feed_forward = max(experts, 1) * 3 * 512 * 1536 + 512 * experts  # gate, up, down; the router
    assert counted == 6 * (of_query + 2 * 512 * 128 + 512 * 512 + feed_forward + 2 * 512) + 512
