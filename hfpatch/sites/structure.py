"""Reading the attention branch from the structure of a block, for types without a declaration.

It supports the common forms of self-attention: separate projections of queries, keys and values, one projection for
all three, or multi-head latent attention. Where the branch joins the residual stream is read in the source of the
block, see :mod:`hfpatch.sites.joining`. Anything else has to be declared.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family
from hfpatch.sites.joining import Unclear, follow_branch, follow_inputs
from hfpatch.sites.layouts import TARGETS, Layout, equal_parts, latent, separate
from hfpatch.sites.modules import features, has_module, is_linear, linear_path, submodule, unwrapped
from hfpatch.sites.site import joined

STRUCTURAL = "read from the structure"
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("linear_q", "linear_k", "linear_v"),
)
FUSED = ("qkv", "Wqkv", "qkv_proj", "att_proj")
QUERIES = {*FUSED, "q_a_proj"}.union(names[0] for names in SEPARATE)
OUTPUTS = (
    "o_proj", "out_proj", "dense", "Wo", "proj", "projection", "projection_layer", "output_projection", "o", "out_lin",
    "linear_out", "post",
)  # fmt: skip
OTHER_MIXERS = re.compile(r"Linear|Delta|Lightning|Mamba|Conv(?!Bert)|Recurrent|Cross")
CROSS = re.compile(r"cross|encoder_att|encdec|enc_dec", re.IGNORECASE)
IN_THIRDS = re.compile(
    r"\b3, *(?:self\.)?(?:num_|n_)?(?:attention_)?heads?\b|\b3, -1, self\.head_dim\b"
    r"|\bchunk\(3\b|\bsplit\(self\.\w+, dim=2\)"
)
"""In the source of an attention: the columns of one projection are all queries, then all keys, then all values."""


_READ: WeakKeyDictionary[nn.Module, tuple[Any, Family | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Form:
    """How an attention module computes queries, keys and values; paths are from that module.

    Args:
        qkv: the layout.
        projections: the projections, by target.
        output: the output projection; None where another module holds it.
        unknown: why the columns of query, key and value are not known; empty if they are.
    """

    qkv: Layout
    projections: dict[str, str]
    output: str | None
    unknown: dict[str, str] = field(default_factory=dict)


def block_lists(root: nn.Module, at: str = "") -> Iterator[str]:
    """Yield the paths of the lists of blocks with self-attention, from the model.

    A list of lists of equal blocks, the stages of a hierarchy, is none itself.
    """
    for name, child in root.named_children():
        path = joined(at, name)
        items = list(child.children())  # a list may hold None, too
        if isinstance(child, nn.ModuleList | nn.Sequential) and any(map(has_attention, items)) and not _stages(items):
            if not any(map(_form, items)):
                yield path
        else:
            yield from block_lists(child, path)


def has_attention(block: nn.Module) -> bool:
    """Return whether a block contains self-attention of a known form."""
    return next(attention_paths(block), None) is not None


def attention_paths(block: nn.Module) -> Iterator[str]:
    """Yield the paths of the self-attention modules of known forms in a block, from it."""
    for path, module in block.named_modules():
        if path and not CROSS.search(path) and not OTHER_MIXERS.search(type(module).__name__) and _form(module):
            yield path


def read_family(block: nn.Module) -> Family | None:
    """Return the declaration that is read from the structure of a block; None if it has no attention.

    It is read once, and again where modules or switches of the block have changed.

    Raises:
        HfpatchError: if the structure is ambiguous; the message says where.
    """
    state = [
        (
            path,
            type(module),
            [item for item in vars(module).items() if isinstance(item[1], (int, float, str)) and item[0] != "training"],
        )
        for path, module in block.named_modules()
    ]
    seen = _READ.get(block)
    if seen is None or seen[0] != state:
        seen = _READ[block] = state, _read_family(block)
    return seen[1]


def _read_family(block: nn.Module) -> Family | None:
    paths = list(attention_paths(block))
    if not paths:
        return None
    if len(paths) > 1:
        raise HfpatchError(f"{type(block).__name__} contains several attention modules ({', '.join(paths)})")
    attention = submodule(block, paths[0], of=type(block).__name__)
    form = _form(attention)
    assert form is not None
    refusals = {**form.unknown, **_misread(attention, form)}
    family = Family(
        name=STRUCTURAL,
        model_types=(),
        layers="",
        attention=paths[0],
        qkv=form.qkv,
        output=form.output,
        refusals=refusals,
    )
    try:
        branch = follow_branch(block, paths[0], None if form.output is None else f"{paths[0]}.{form.output}")
    except Unclear as error:
        return replace(family, refusals={**refusals, "content_skip": str(error), "branch": str(error)})
    why = f"before the branch joins the residual stream, {branch.changed}" if branch.changed else ""
    output = submodule(block, joined(paths[0], form.output) if form.output else branch.end, of=paths[0])
    read = features(unwrapped(submodule(attention, next(iter(form.projections.values())), of=paths[0])))[0]
    if is_linear(unwrapped(output)) and (width := features(unwrapped(output))[1]) != read:
        why = f"the branch is {width} wide, and the attention's input {read}"
    if why:
        return replace(family, refusals={**refusals, "content_skip": why, "branch": why})
    inside = branch.end.startswith(f"{paths[0]}.")  # the attention adds the residual itself, to its own input
    return replace(
        family,
        exit=None if branch.end == paths[0] else branch.end,
        entries=tuple(dict.fromkeys(form.projections.values())) if inside else (),
        factor=None if branch.factor == 1 else lambda block: branch.factor,
    )


@functools.cache  # inspect parses the whole file of a class
def _is_in_thirds(kind: Any) -> bool:
    return IN_THIRDS.search(inspect.getsource(kind)) is not None


def _misread(attention: nn.Module, form: Form) -> dict[str, str]:
    """Return what cannot be changed where queries, keys and values do not read the attention's input itself."""
    kind, everything = type(attention).__name__, ("pre_projection", "content_skip", *TARGETS, "temperature")
    every = dict.fromkeys(form.projections.values())  # one may compute all three
    try:
        for target, read in zip(form.projections, follow_inputs(attention, *every), strict=False):
            why = ""
            if read is None:
                why = f"{kind} has several inputs, and the {target} does not read the first"
            elif read.added:
                why = f"{kind} adds {read.added} to what the {target} reads"
            elif read.end:
                why = f"{kind} reads the {target} through {read.end}, not from its input itself"
            if why:
                return dict.fromkeys(everything, why)
    except Unclear as error:
        return dict.fromkeys((*TARGETS, "temperature"), str(error))
    return {}


def _stages(blocks: Iterable[nn.Module]) -> bool:
    """Return whether the items of a list are stages, which hold lists of equal blocks."""
    return any(
        isinstance(inner, nn.ModuleList | nn.Sequential)
        and len({type(item) for item in inner.children()}) == 1
        and any(map(has_attention, inner.children()))
        for item in blocks
        for inner in item.modules()
    )


def _form(module: nn.Module) -> Form | None:
    """Return how a module computes attention; None if it is none of a known form."""
    if not QUERIES & module._modules.keys():
        return None
    output = next((path for name in OUTPUTS if (path := linear_path(module, name))), None)
    if _is_latent(module) and output:
        query = "q_a_proj" if has_module(module, "q_a_proj") else "q_proj"  # that reads the hidden state
        return Form(latent, {"query": query}, output)
    for names in SEPARATE:
        paths = [path for name in names if (path := linear_path(module, name)) is not None]
        if len(paths) < len(names):
            continue
        query, key, value = paths
        widths = [features(unwrapped(submodule(module, path, of=path))) for path in (query, key, value)]
        if len({read for read, _ in widths}) > 1:  # of two inputs
            return None
        # Where some columns may be something else than the query, such as a gate
        mixed = widths[2][1] if output is None else features(unwrapped(submodule(module, output, of=output)))[0]
        unknown = _others_beside(module, names)
        if widths[0][1] != mixed:
            why = f"{type(module).__name__}: {query} has {widths[0][1]} columns, and the output reads {mixed}"
            unknown |= dict.fromkeys(TARGETS, f"{why}, so that some of them may be something else than the query")
        qkv = separate(query=query, key=key, value=value)
        return Form(qkv, dict(zip(TARGETS, (query, key, value), strict=True)), output, unknown)
    for path in filter(None, (linear_path(module, name) for name in FUSED)):
        inputs, columns = features(unwrapped(submodule(module, path, of=path)))
        mixed = inputs if output is None else features(unwrapped(submodule(module, output, of=output)))[0]
        if columns != 3 * mixed:
            return None
        kind: Any = type(unwrapped(module))
        thirds = _is_in_thirds(kind)
        why = f"{type(module).__name__} does not show the order of the columns of {path}"
        unknown = {} if thirds else dict.fromkeys(TARGETS, why)
        return Form(equal_parts(path), dict.fromkeys(TARGETS, path), output, unknown)
    return None


def _others_beside(module: nn.Module, names: tuple[str, ...]) -> dict[str, str]:
    """Return why query, key or value has more than one projection, such as another one for global tokens."""
    reasons = {}
    for target, name in zip(TARGETS, names, strict=True):
        others = [
            n
            for n, child in module.named_children()
            if n != name
            and is_linear(inner := unwrapped(child))
            and any(part is inner for part in child.modules())  # not an adapter's layer beside the projection
            and re.search(rf"(?:^|_){name}_|_{name}$", n)
        ]
        if others:
            reasons[target] = f"{type(module).__name__} computes the {target} by {', '.join(others)}, too"
    return reasons


def _is_latent(module: nn.Module) -> bool:
    query = has_module(module, "q_proj") or (has_module(module, "q_a_proj") and has_module(module, "q_b_proj"))
    return query and has_module(module, "kv_b_proj")
