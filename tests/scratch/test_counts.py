"""Parameter counts of GPT-2 small, on the meta device, against arithmetic and the published numbers."""

import pytest
import torch

from hfpatch.scratch import GPT2_SMALL, build_scratch, non_embedding_parameters, split_architecture
from hfpatch.training.architecture import build_config

D, LAYERS = 768, 12
BASE = LAYERS * (12 * D * D + 2 * D) + D
QUERY = LAYERS * D * D


def count(**changes):
    architecture = {**GPT2_SMALL, **changes}
    settings, _ = split_architecture(architecture)
    with torch.device("meta"):
        return non_embedding_parameters(build_scratch(build_config(architecture), settings))


@pytest.mark.parametrize(
    ("changes", "expected", "published"),
    [
        ({}, BASE, 84.95),
        ({"query": {"path": "nonlinear"}}, BASE + LAYERS * 2 * D, 84.97),
        ({"query": {"path": "nonlinear", "activation": "identity"}}, BASE + LAYERS * 2 * D, 84.97),
        ({"mlp_width": 4.75}, BASE + LAYERS * 2 * D * 576, 95.57),
        ({"mlp_width": 4.33}, BASE + LAYERS * 2 * D * (3325 - 3072), None),
        ({"mlp_width": 4.5}, BASE + LAYERS * 2 * D * 384, None),
        ({"mlp_width": 4.625}, BASE + LAYERS * 2 * D * 480, None),
        ({"mlp_width": 5}, BASE + LAYERS * 2 * D * 768, None),
        ({"head_size": 68}, BASE + LAYERS * 4 * D * 48, None),
        ({"query": {"path": "identity"}}, BASE - QUERY, None),
        ({"query": {"path": "residual"}}, BASE, None),
        ({"query": {"path": "nonlinear", "anchor": "weight"}}, BASE + QUERY + LAYERS * 2 * D, None),
        ({"query": {"path": "nonlinear", "fused": True}}, BASE + LAYERS * 2 * D, None),
        ({"query": {"path": "nonlinear", "input_norm": "none", "output_norm": "none"}}, BASE, None),
        ({"query": {"path": "nonlinear", "source": "mlp"}}, BASE + 2 * D, None),  # the first layer keeps its norms
        ({"query": {"path": "nonlinear", "rank": 96}}, BASE - QUERY + LAYERS * (2 * D * 96 + 2 * D), None),
    ],
)
def test_counts(changes, expected, published):
    counted = count(**changes)
    assert counted == expected
    assert published is None or round(counted / 1e6, 2) == published
