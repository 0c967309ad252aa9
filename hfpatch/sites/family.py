"""Declarations of architectures, and their registry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from torch import nn

from hfpatch.errors import HfpatchError, nearest
from hfpatch.sites.layouts import Layout
from hfpatch.support import plugins

Factor = Callable[[nn.Module], float]
Refusals = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where the attention branch lives in the models of some types. Paths are dotted attribute names.

    Args:
        name: name of the family.
        model_types: the ``config.model_type`` values that it covers.
        layers: path of the list of blocks, from the tower; several where blocks are in several lists.
        tower: path of the tower, from the model of these types; it reads that model's configuration. None: the text
            tower ``model.get_decoder()``. Another model inside it, such as a vision tower with a configuration of its
            own, is declared by its own type instead. Further families may declare further towers of a type.
        attention: path of the attention module, from a block; its hidden state is its argument ``hidden_states`` or
            the first one. Several where a block holds several.
        qkv: where query, key and value are computed; see :mod:`hfpatch.sites.layouts`.
        output: path of the output projection, from the attention module; None where the exit is that projection.
        exit: path, from a block, of the module whose output is added to the residual stream; None where that is the
            attention module itself.
        factor: the factor of that output before it is added, as a function of the block; None for 1.
        entries: paths, from the attention module, of the modules that read the hidden state, in architectures that
            exchange the attention module at run time; empty where the attention module itself is hooked.
        query_norm: path, from the attention module, of the norm of the queries; None for one of a common name, such as
            ``q_norm``, or for none.
        heads_first: whether that norm reads ``(batch, heads, seq, size)`` instead of ``(batch, seq, heads, size)``.
        norm: path, from a block, of the module whose output is the hidden state; needed where the attention caches its
            input, so that x~ has to be computed before. None: x is changed at the attention's input.
        host: path, from a block, of the module that added modules are put under; None for the attention module. Needed
            where the model ties the parameters below several attention modules.
        input_gradients: whether the blocks run in an autograd function that passes gradients on only if the
            input of the first block requires them.
        attention_classes: names of the classes that count, in hybrids that hold other mixers at the same path or none;
            the other blocks are skipped. Empty: every block has attention.
        refusals: unsupported changes (``pre_projection``, ``content_skip``, ``query``, ``key``,
            ``value``, ``temperature``; ``mixed``, to change the output projection's input; ``branch``, to read the
            branch at its end; ``stream``, to change the residual stream after the block; ``earlier``, to look back at
            earlier positions), with the reason; a function of the attention module where layers differ.
    """

    name: str
    model_types: tuple[str, ...]
    layers: str | tuple[str, ...]
    attention: str | tuple[str, ...]
    qkv: Layout
    output: str | None
    tower: str | None = None
    exit: str | None = None
    factor: Factor | None = None
    entries: tuple[str, ...] = ()
    query_norm: str | None = None
    heads_first: bool = False
    norm: str | None = None
    host: str | None = None
    input_gradients: bool = False
    attention_classes: tuple[str, ...] = ()
    refusals: Refusals | Callable[[nn.Module], Refusals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields whose mistakes would show elsewhere: text is a sequence of letters, a number no function.

        Raises:
            HfpatchError: naming the family and the field.
        """
        for name in ("model_types", "entries", "attention_classes"):
            if isinstance(value := getattr(self, name), str):
                raise HfpatchError(f"family {self.name!r}: {name}={value!r} must be a tuple of names: ({value!r},)")
        for name, takes in (("qkv", "the attention and the configuration"), ("factor", "the block")):
            if not callable(value := getattr(self, name)) and value is not None:
                raise HfpatchError(f"family {self.name!r}: {name}={value!r} must be a function of {takes}")


GROUP = "hfpatch.families"
"""The group of entry points by which other packages declare families."""

EXPORTED = "hfpatch_"
"""Prefix of an export's model type; the attention branches are in the same places as in the stock type."""

NO_WEIGHTS = "none without trust_remote_code=True"
"""The file of weights in an export's configuration; transformers refuses it in a line that shows it."""

DECLARED: dict[str, Family] = {}
"""The families of text towers by model type."""

TOWERS: dict[str, tuple[Family, ...]] = {}
"""The families of the other towers by model type."""

WITHOUT_ATTENTION: dict[str, str] = {}
"""The reason why models of some types have no attention branch that can be patched."""


def register_family(family: Family) -> None:
    """Add a family.

    Raises:
        HfpatchError: if one of its model types is covered already.
    """
    for kind in family.model_types:
        if family.tower is not None:
            if any(other.tower == family.tower for other in TOWERS.get(kind, ())):
                raise HfpatchError(f"tower {family.tower!r} of model type {kind!r} is declared already")
        elif kind in DECLARED:
            raise HfpatchError(f"model type {kind!r} is declared already, by family {DECLARED[kind].name!r}")
        if kind in WITHOUT_ATTENTION:
            raise HfpatchError(f"model type {kind!r} is declared already: {WITHOUT_ATTENTION[kind]}")
    if family.tower is None:
        DECLARED.update(dict.fromkeys(family.model_types, family))
    else:
        TOWERS.update({kind: (*TOWERS.get(kind, ()), family) for kind in family.model_types})


@functools.cache
def load_plugins() -> None:
    """Register the families of every installed package that declares some; once in a process.

    An entry point names a :class:`Family` or an iterable of them.

    Raises:
        HfpatchError: naming the entry point, if it cannot be loaded, is not a declaration, or repeats a model type.
    """
    for entry in sorted(entry_points(group=GROUP)):
        where, loaded = plugins.where(entry), plugins.load(entry)
        families = list(loaded) if isinstance(loaded, Iterable) else [loaded]
        if not all(isinstance(family, Family) for family in families):
            raise HfpatchError(f"{where} must be a hfpatch.Family or several of them")
        for family in families:
            try:
                register_family(family)
            except HfpatchError as error:
                raise HfpatchError(f"{where}: {error}") from error


def family_of(model_type: str) -> Family | None:
    """Return the declared family of a model type, or None where it is read from the structure of the blocks.

    Raises:
        HfpatchError: with the reason, if models of this type cannot be patched.
    """
    if model_type not in DECLARED:
        model_type = model_type.removeprefix(EXPORTED)
    if model_type in WITHOUT_ATTENTION:
        raise HfpatchError(f"models of type {model_type!r} cannot be patched: {WITHOUT_ATTENTION[model_type]}")
    return DECLARED.get(model_type)


def families_of(model_type: str) -> tuple[Family, ...]:
    """Return the declared families of all towers of a model type."""
    text = DECLARED.get(model_type)
    return (*TOWERS.get(model_type, ()), *([] if text is None else [text]))


def how_to_declare(model_type: str) -> str:
    """Return how to declare a model type; of a declared one, where its family has it."""
    if (family := DECLARED.get(model_type)) is not None:
        layers = family.layers if isinstance(family.layers, str) else " and ".join(family.layers)
        return f"family {family.name!r} declares it in the blocks of {layers}"
    return (
        f"model type {model_type!r} is of no declared family{nearest(model_type, DECLARED)}; declare it: "
        f"hfpatch.register_family(hfpatch.Family(name=..., model_types=({model_type!r},), layers='path of the blocks', "
        "attention='path in a block', qkv=hfpatch.sites.separate(query='q_proj', ...), output='o_proj', exit=None)), "
        "see hfpatch/sites/families for examples"
    )
