"""What one declares about an architecture, and the register of what was declared."""

from __future__ import annotations

from dataclasses import dataclass

from hfpatch.errors import HfpatchError, nearest
from hfpatch.sites.layouts import Layout


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where the attention branch lives in the models of some types. Paths are dotted attribute names.

    Args:
        name: what to call the family.
        model_types: the ``config.model_type`` values that it covers.
        layers: path of the list of blocks, from the model.
        attention: path of the attention module, from a block; its hidden state is its argument ``hidden_states`` or
            the first one.
        qkv: where query, key and value are computed; see :mod:`hfpatch.sites.layouts`.
        output: path of the output projection, from the attention module.
        exit: path, from a block, of the module whose output is added to the residual stream; None where that is the
            attention module itself.
    """

    name: str
    model_types: tuple[str, ...]
    layers: str
    attention: str
    qkv: Layout
    output: str
    exit: str | None = None


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a family.

    Raises:
        HfpatchError: if one of its model types is covered already.
    """
    for model_type in family.model_types:
        if model_type in _FAMILIES:
            raise HfpatchError(
                f"model type {model_type!r} is declared already, by family {_FAMILIES[model_type].name!r}"
            )
    _FAMILIES.update(dict.fromkeys(family.model_types, family))


def family_of(model_type: str) -> Family:
    """Return the family that covers a model type.

    Raises:
        HfpatchError: saying what to declare, if there is none.
    """
    if model_type not in _FAMILIES:
        raise HfpatchError(
            f"model type {model_type!r} is of no declared family{nearest(model_type, _FAMILIES)}; declare it: "
            f"hfpatch.register_family(hfpatch.Family(name=..., model_types=({model_type!r},), layers='path of the "
            "blocks', attention='path in a block', qkv=hfpatch.sites.separate(query='q_proj', ...), "
            "output='o_proj', exit=None)), see hfpatch/sites/families for examples"
        )
    return _FAMILIES[model_type]


def supported_model_types() -> list[str]:
    """Return the model types that are covered, sorted."""
    return sorted(_FAMILIES)
