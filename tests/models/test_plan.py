import pytest

from hfpatch.models.plan import describe_paths, describe_query
from hfpatch.recipes.models import QuerySettings, ScratchSettings

PLAIN = "f = LN(GELU(RMSNorm(x) W₁) W₂)"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"path": "linear"}, "Q = x W_Q"),
        ({"path": "identity"}, "Q = x"),
        ({"path": "residual"}, "Q = x + x W"),
        ({}, f"Q = (x + f(x))/2, {PLAIN}"),
        ({"anchor": "weight"}, f"Q = (x W_Q + f(x))/2, {PLAIN}"),
        ({"anchor": "weight", "targets": ("query", "key")}, f"Q, K = (x W + f(x))/2, {PLAIN}"),
        ({"activation": "identity"}, "Q = (x + f(x))/2, f = LN(RMSNorm(x) W₁ W₂)"),
        ({"activation": "relu2", "rank": 8}, "Q = (x + f(x))/2, f = LN(ReLU²(RMSNorm(x) W₁) W₂), rank 8"),
        ({"input_norm": "none", "output_norm": "none"}, "Q = (x + f(x))/2, f = GELU(x W₁) W₂"),
    ],
)
def test_a_query_path_as_maths(values, text):
    assert describe_query(QuerySettings(**values)) == text


def test_a_pre_projection_as_maths():
    settings = ScratchSettings.model_validate({"pre_projection": {"content_skip": True}})
    assert describe_paths(settings) == "x~ = x + W_down(SiLU(W_up x)), residual += x~ W_skip; x = x~ in Q = x W_Q"
    assert describe_paths(ScratchSettings()) == "Q = x W_Q"
