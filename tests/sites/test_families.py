"""What is declared about each family, against what a probe of the model itself shows."""

import pytest
import torch
from families import FAMILIES, HIDDEN, LAYERS, PLACES, make_model, make_tokens, model_type
from torch import nn

from hfpatch.sites import find_sites

LENGTH, AT = 5, 2
LAST_OF_MLP = {"llama": "mlp.down_proj", "gpt2": "mlp.c_proj", "gptj": "mlp.fc_out", "opt": "fc2"}
LAST_OF_MLP |= dict.fromkeys(["mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"], "mlp.down_proj")
LAST_OF_MLP |= dict.fromkeys(["gpt_neox", "falcon", "bloom"], "mlp.dense_4h_to_h")
NORMS_OF_THE_RESIDUAL = {  # post-norm blocks norm the residual stream itself, after the branch has joined it
    "opt_post_norm": ["self_attn_layer_norm", "final_layer_norm"],
    "bloom_post_norm_residual": ["post_attention_layernorm"],
}


def places(case):
    return PLACES[model_type(case)]


@torch.no_grad()
def attention_moves(model, path: str, name: str, position: int) -> torch.Tensor:
    """Return by how much the attention output moves, (columns, positions), when one output column of a projection is
    changed at one position: one column a row, and a row without change to compare with."""
    attention = model.get_submodule(path)
    seen = []

    def shift(module, args, output):
        moved = output.clone()
        columns = range(output.shape[-1])
        moved[list(columns), position, list(columns)] += 0.5 * output.std()
        return moved

    width = projected_width(model, path, name)
    handles = [
        attention.get_submodule(name).register_forward_hook(shift),
        attention.register_forward_hook(lambda module, args, output: seen.append(output[0])),
    ]
    model(make_tokens(1, LENGTH).expand(width + 1, -1), use_cache=False)
    for handle in handles:
        handle.remove()
    return (seen[0][:-1] - seen[0][-1]).abs().amax(-1)


@torch.no_grad()
def projected_width(model, path, name):
    widths = []
    handle = model.get_submodule(f"{path}.{name}").register_forward_hook(lambda m, a, out: widths.append(out.shape[-1]))
    model(make_tokens(1, LENGTH), use_cache=False)
    handle.remove()
    return widths[0]


def roles(model, path: str, name: str) -> list[str]:
    """Tell query, key and value columns apart: over one key alone the softmax is 1 whatever query and key are, a key
    acts on later positions only, a query on its own position only."""
    first, later = (attention_moves(model, path, name, position) > 1e-6 for position in (0, AT))
    found = []
    for at_first, at_later in zip(first, later, strict=True):
        assert not at_later[:AT].any(), "a later token acts on earlier ones"
        if at_first[0]:
            found.append("value")
        elif at_first[1:].any():
            found.append("key")
        else:
            assert at_later[AT]
            assert not at_later[AT + 1 :].any()
            found.append("query")
    return found


@pytest.mark.parametrize("case", FAMILIES)
def test_columns_are_those_that_a_probe_finds(case):
    model = make_model(case)
    path, names, _ = places(case)
    site = find_sites(model)[0]
    for name in names:
        found = roles(model, path, name)
        for target in ("query", "key", "value"):
            projection = site.projections[target]
            if projection.path == name:
                read = projection.columns.read(torch.arange(len(found)))
                assert read.tolist() == [i for i, role in enumerate(found) if role == target], (name, target)
            else:
                assert target not in found
    assert {projection.path for projection in site.projections.values()} == set(names)


@pytest.mark.parametrize("case", FAMILIES)
def test_paths_and_sizes(case):
    model = make_model(case)
    path, names, output = places(case)
    sites = find_sites(model)
    assert [site.layer for site in sites] == list(range(LAYERS))
    for layer, site in enumerate(sites):
        expected = path.replace(".0.", f".{layer}.")
        assert site.path == expected
        assert site.attention is model.get_submodule(expected)
        assert model.get_submodule(site.exit_path) is site.exit
        assert site.hidden_size == HIDDEN == model.config.hidden_size
        assert site.linear_paths == [f"{expected}.{name}" for name in [*names, output]]
        for target in ("query", "key", "value"):
            assert site.projection_module(target) is site.attention.get_submodule(site.projections[target].path)


@torch.no_grad()
def block_output(model, layer: int, at: nn.Module, vector: torch.Tensor) -> torch.Tensor:
    """Return what block ``layer`` returns when ``vector`` is added to the output of the module ``at``."""

    def add(module, args, output):
        return output + vector if isinstance(output, torch.Tensor) else (output[0] + vector, *output[1:])

    seen = []

    def keep(module, args, output):
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    block = model.get_submodule(find_sites(model)[layer].path.rpartition(".")[0])
    handles = [at.register_forward_hook(add), block.register_forward_hook(keep)]
    model(make_tokens(2, LENGTH), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen[0].reshape(2, LENGTH, -1)


def linear_after_the_attention(case):
    """Return a model in whose blocks nothing but additions follows the exit: MLPs and norms of the residual are out."""
    model = make_model(case)
    for site in find_sites(model):
        block = model.get_submodule(site.path.rpartition(".")[0])
        for parameter in block.get_submodule(LAST_OF_MLP[model_type(case)]).parameters():
            parameter.data.zero_()
        for name in NORMS_OF_THE_RESIDUAL.get(case, []):
            setattr(block, name, nn.Identity())
    return model


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("case", FAMILIES)
def test_what_is_added_at_the_exit_joins_the_residual_with_coefficient_one(case, layer):
    model = linear_after_the_attention(case)
    vector = torch.randn(HIDDEN)
    exit_module = find_sites(model)[layer].exit
    plain = block_output(model, layer, exit_module, torch.zeros(HIDDEN))
    moved = block_output(model, layer, exit_module, vector)
    torch.testing.assert_close(moved - plain, vector.expand_as(plain), rtol=1e-5, atol=2e-5)


def test_the_probe_tells_a_wrong_exit_of_gemma2():
    model = linear_after_the_attention("gemma2")
    vector = torch.randn(HIDDEN)
    site = find_sites(model)[0]
    assert site.exit is not site.attention
    plain, moved = (block_output(model, 0, site.attention, v) for v in (torch.zeros(HIDDEN), vector))
    assert (moved - plain - vector).abs().max() > 0.1


def test_every_declared_type_is_built_here():
    assert {model_type(case) for case in FAMILIES} >= {
        "gpt_neox", "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "falcon", "gptj", "opt",
        "bloom",
    }  # fmt: skip
