"""The columns that are declared for each family, against what a probe of the model itself shows."""

import pytest
import torch
from families import FAMILIES, PLACES, make_model, make_tokens, model_type

from hfpatch.sites import find_sites

LENGTH, AT = 5, 2


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

    projection = attention.get_submodule(name)
    width = projection.nf if hasattr(projection, "nf") else projection.out_features
    handles = [
        projection.register_forward_hook(shift),
        attention.register_forward_hook(lambda module, args, output: seen.append(output[0])),
    ]
    model(make_tokens(1, LENGTH).expand(width + 1, -1), use_cache=False)
    for handle in handles:
        handle.remove()
    return (seen[0][:-1] - seen[0][-1]).abs().amax(-1)


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
    path, names, _ = PLACES[model_type(case)]
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
