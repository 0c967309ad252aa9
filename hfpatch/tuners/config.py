"""The configuration of a method: its options, its parts, and its function at each place."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from peft import PeftConfig
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite
from hfpatch.tuners.hooks import PLACES, MethodSite
from hfpatch.tuners.options import fitting

_FRONT = "---\nlibrary_name: peft\ntags: [hfpatch]\n---\n\n# PEFT adapter of hfpatch\n"
_TO_LOAD = """
## How to load this adapter

`pip install hfpatch`, and before `PeftModel.from_pretrained(base_model, "this folder")`:

    import {module}
"""


@dataclass(frozen=True)
class MethodSpec:
    """The registration of a class by :func:`hfpatch.method`.

    Args:
        name: the method's name in recipes and reports.
        label: its name in a sentence.
        kind: its ``peft_type``, the name in capitals.
        prefix: of the names of its tensors.
        child: name of its layer, a child of the attention.
        size: the option that ``match`` solves for; None if the method has none.
        shares: whether its layers share tensors within a forward pass, see :attr:`hfpatch.MethodSite.shared`.
    """

    name: str
    label: str
    kind: Any
    prefix: str
    child: str
    size: str | None
    shares: bool = False


@dataclass
class MethodConfig(PeftConfig):
    """A method: its options, the parts that it adds to a layer, and their computation.

    A method is a dataclass under :func:`hfpatch.method`. Its fields are its options; it is a PEFT configuration, which
    works in every PEFT call. It defines :meth:`build` and, of the places below, those where it acts::

        entered(self, parts, x, site)          x ``(batch, seq, hidden)`` that enters the attention
        query(self, parts, q, x, site)         q ``(batch, seq, out)`` as projected, before the split into heads;
        key, value                             the same; x is the hidden state that the projection reads
        heads(self, parts, q, site)            q ``(batch, seq, heads, size)``, behind the query's norm if it has one
        mixed(self, parts, a, x, site)         a ``(batch, seq, heads·size)`` that the output projection reads
        output(self, parts, o, a, site)        o ``(batch, seq, hidden)`` that the output projection returns for a
        left(self, parts, branch, x, site)     branch ``(batch, seq, hidden)`` as it joins the residual stream
        stream(self, parts, h, site)           h ``(batch, seq, hidden)``, the residual stream behind the block

    Each returns a tensor of the same shape in its place. ``parts`` has the modules that :meth:`build` returned, by
    name, ``site`` is a :class:`hfpatch.MethodSite`. Several adapters act in the order of the stack. Where LoRA adapts
    the same projection, its term is added to the result of query, key or value, and it reads the input of ``mixed``.
    A method that mixes tokens says how far it looks back by :meth:`steps_back` and asks ``site.earlier(x, steps)``.

    Values are checked against the types of the fields, without conversion: ``"false"`` is text and no truth value.
    numpy's numbers become Python's. The options that PEFT's configurations share have PEFT's meaning. A method changes
    whole attention branches, so ``target_modules`` and ``exclude_modules`` name these; injection fills in
    ``target_modules``.

    Args:
        init_weights: start with the method's initial values, which change nothing by default; False moves every one by
            U(-1/√n, 1/√n), n its last dimension, for tests and ablations.
        seed: seed of the initialisation; a parameter's initial value depends on it, the layer, the parameter's name and
            the adapter's (see :func:`drawn_as`) alone.

    Raises:
        HfpatchError: if a value is of another type or not finite.
    """

    spec: ClassVar[MethodSpec]  # set by hfpatch.method

    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "Index or indices of the layers to change; None changes all."}
    )
    layers_pattern: list[str] | str | None = field(
        default=None, metadata={"help": "Name or names of the lists of layers that layers_to_transform counts in."}
    )
    target_modules: set[str] | str | None = field(
        default=None,
        metadata={"help": "The attention modules to change, by the last parts of their names or a regular expression."},
    )
    exclude_modules: set[str] | str | None = field(
        default=None, metadata={"help": "The attention modules to leave out, named like target_modules."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules to train and save beside the method, such as a head."}
    )
    trainable_token_indices: list[int] | dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Tokens whose embeddings are trained, for each embedding's name or for all."}
    )
    init_weights: bool = field(
        default=True, metadata={"help": "Start with the method's initial values; false moves every one at random."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the initialisation."})

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT has no type for it
        self.peft_type = self.spec.kind
        with_python_values(self)
        for name, hint in option_types(type(self)).items():
            setattr(self, name, fitting(name, getattr(self, name), hint))
        if self.layers_pattern and self.layers_to_transform is None:
            raise HfpatchError(
                f"layers_pattern={self.layers_pattern!r} says where layers_to_transform counts; give both or neither"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON keeps it: tuples and sets as lists, sets sorted."""
        values: dict[str, Any] = super().to_dict()
        for name, value in values.items():
            if isinstance(value, set | tuple):
                values[name] = sorted(value) if isinstance(value, set) else list(value)
        return values

    def build(self, site: MethodSite, seed: int) -> nn.ModuleDict:
        """Return the parts of one layer, initialised so that they change nothing, or as the options say.

        Args:
            site: the layer.
            seed: seed of the initialisation; draw by :func:`hfpatch.nn.normal_` with ``name=f"{site.name}.<part>"``.

        Raises:
            HfpatchError: if the options do not fit the layer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define build(site, seed)")

    def acts_at(self) -> tuple[str, ...]:
        """Return the places where the method acts with these options: all that the class defines."""
        return tuple(place for place in PLACES if hasattr(self, place))

    def takes_autocast(self) -> bool:
        """Return whether the method takes tensors in autocast's dtype and still rounds its result only once.

        If not, it receives copies in at least the dtype of its parts.
        """
        return False

    def steps_back(self) -> int:
        """Return how many earlier positions the method reads by ``site.earlier``: above 0 it mixes tokens.

        Such a method acts at ``entered``, ``query``, ``key``, ``value`` and ``mixed`` alone.
        """
        return 0

    def unmergeable(self) -> str | None:
        """Return why the method cannot be merged into the base's weights with these options; None if it can.

        It can if each place is an affine function. PEFT's merging and :func:`hfpatch.fold` read its matrices by calling
        the method.
        """
        return f"{type(self).__name__} does not say that it is linear, by unmergeable()"

    def refusal(self, site: AttentionSite) -> str | None:
        """Return why the method cannot act at a site that has all its places, or None if it can."""
        return None

    def refusal_after(self, first: AttentionSite, site: AttentionSite) -> str | None:
        """Return why the method cannot act at a site where ``first`` is the first that it changes, or None."""
        return None

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write ``adapter_config.json``, and a card that names the module to import before loading."""
        super().save_pretrained(save_directory, **kwargs)
        card, module = Path(save_directory) / "README.md", home_of(self) or "hfpatch"
        text = card.read_text(encoding="utf-8") if card.is_file() else _FRONT
        if f"import {module}" not in text:
            card.write_text(f"{text.rstrip()}\n{_TO_LOAD.format(module=module)}", encoding="utf-8")


def option_types(cls: type[PeftConfig]) -> dict[str, Any]:
    """Return the type of each option of a method's configuration, of hfpatch or PEFT, by name.

    Raises:
        NameError: if an annotation names something that the class's module does not have.
    """
    hints = typing.get_type_hints(cls)
    ours = {field.name for field in dataclasses.fields(cls)} - {field.name for field in dataclasses.fields(PeftConfig)}
    return {name: hints[name] for name in sorted(ours)}


def with_python_values(config: PeftConfig) -> PeftConfig:
    """Turn a configuration's numpy numbers, arrays and ranges into Python's numbers and lists, in place.

    Only those can be saved as JSON.
    """
    for item in dataclasses.fields(config):
        setattr(config, item.name, python_value(getattr(config, item.name)))
    return config


def python_value(value: Any) -> Any:
    """Return a value with Python's numbers and lists in place of numpy's numbers, arrays and ranges."""
    if isinstance(value, dict):
        return {key: python_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(python_value, value))
    if isinstance(value, range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def method_name(config: PeftConfig) -> str:
    """Return the name of a configuration's method in lower case: ``pre_projection``, ``lora``, ..."""
    kind: Any = config.peft_type
    return str(kind.value).lower()


def home_of(config: PeftConfig) -> str | None:
    """Return the module that must be imported, beside hfpatch, before an adapter can be loaded; None if none."""
    module = type(config).__module__
    return module if isinstance(config, MethodConfig) and module.partition(".")[0] != "hfpatch" else None


def drawn_as(adapter_name: str, config: PeftConfig) -> str:
    """Return the suffix that an adapter's name adds to the name that its initial values are drawn by.

    It is empty for ``default`` and for the method's name in lower case, which the first part of a kind has in a stack.
    So two parts of a kind start from different values, and a value does not depend on other adapters.
    """
    return "" if adapter_name in ("default", method_name(config)) else f".{adapter_name}"
