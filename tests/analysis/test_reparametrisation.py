"""What arXiv 2510.23912 claims: an attention reads X only through matrices, so XΘ and Θ⁻¹W give the same output.

With Θ = W_Q the query's matrix becomes the identity.
"""

import pytest
import torch
from families import HIDDEN, logits_of, make_model, make_tokens

from hfpatch import find_sites
from hfpatch.analysis.heads import weight_matrix
from hfpatch.support.modes import hooked
from hfpatch.tuners.hidden_state import argument_names, hidden_argument, replace_hidden


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2", "llama", "qwen3", "phi3", "opt", "bloom"])
def test_an_attention_in_the_basis_of_its_query_matrix_gives_the_same_output(case):
    model = make_model(case).double()
    expected, handles = logits_of(model, make_tokens()), []
    for site in find_sites(model):
        theta = site.projections["query"].columns.read(weight_matrix(site.projection_module("query"))).clone()
        for module in {site.projection_module(target) for target in site.projections}:
            matrix = torch.linalg.solve(theta, weight_matrix(module))  # (hidden, out)
            module.weight.data = matrix if hasattr(module, "nx") else matrix.T.contiguous()
        query = site.projections["query"].columns.read(weight_matrix(site.projection_module("query")))
        torch.testing.assert_close(query, torch.eye(HIDDEN).double(), rtol=0, atol=1e-10)

        def move(module, args, kwargs, theta=theta):
            return replace_hidden(argument_names(module), args, kwargs, hidden_argument(args, kwargs) @ theta)

        handles.append(site.attention.register_forward_pre_hook(move, with_kwargs=True))
    with hooked(handles):
        torch.testing.assert_close(logits_of(model, make_tokens()), expected, rtol=1e-8, atol=1e-8)


def test_the_matrix_of_a_module_without_a_float_weight_is_computed():
    class Packed(torch.nn.Module):
        """Holds its weight as int8, as quantised modules do."""

        def __init__(self, linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.weight = (linear.weight.detach() * 64).round().to(torch.int8)
            self.bias = torch.nn.Parameter(linear.bias.detach())

        def forward(self, x):
            return x @ (self.weight.to(x.dtype) / 64).T + self.bias

    packed = Packed(torch.nn.Linear(6, 4))
    assert float((weight_matrix(packed) - packed.weight.double().T / 64).abs().max()) < 1e-6
    assert weight_matrix(find_sites(make_model("gpt2"))[0].projection_module("query")).shape == (HIDDEN, 3 * HIDDEN)
