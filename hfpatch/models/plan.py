"""Query settings as the plan that :func:`hfpatch.models.attach.attach` follows, and as a line of maths."""

from __future__ import annotations

import warnings
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.models.attach import Plan, remove_biases
from hfpatch.nn.nonlinear import bottleneck_rank
from hfpatch.nn.preprojection import inner_width
from hfpatch.recipes.models import PreProjectionSettings, QuerySettings, ScratchSettings
from hfpatch.sites import AttentionSite, find_sites

_DEFAULT_STD = 0.02  # of matrices, where a configuration names none
_ACTIVATIONS = {"gelu": "GELU", "relu": "ReLU", "relu2": "ReLU²", "silu": "SiLU", "identity": ""}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LN", "none": ""}
_SYMBOLS = {"query": "Q", "key": "K", "value": "V"}
_WITHOUT_MATRIX = {"identity": "path: identity", "residual": "path: residual", "nonlinear": "anchor: identity"}


def make_plan(outline: Any, settings: ScratchSettings, *, seed: int) -> Plan:
    """Return the plan for a model, in plain values.

    Args:
        outline: the stock model, on the meta device; biases are removed in place.
        settings: of the model to build.
        seed: seed of the initialisation.

    Raises:
        HfpatchError: if the query path is impossible in this architecture.
    """
    stds = (getattr(outline.config, name, None) for name in ("initializer_range", "init_std"))
    plan: Plan = {
        "settings": settings.model_dump(mode="json"),
        "biases": settings.biases,
        "seed": seed,
        "std": next((std for std in stds if isinstance(std, float) and std > 0), _DEFAULT_STD),
        "projections": [],
        "pre_projections": [],
    }
    if not settings.biases:
        remove_biases(outline)
    left = [name for name, _ in outline.named_parameters() if name.endswith("bias")]
    if not settings.biases and left:
        raise HfpatchError(f"architecture.biases: {left[0]} cannot be removed; leave biases out")
    pre_projection = settings.pre_projection
    if settings.query.path == "linear" and pre_projection is None:
        return plan
    key = "query" if pre_projection is None else "pre_projection"
    try:
        sites = find_sites(outline)
    except HfpatchError as error:
        raise HfpatchError(f"architecture.{key}: {error}") from error
    if pre_projection is not None:
        plan["pre_projections"] = [_pre_projection(site, pre_projection) for site in sites]
    if settings.query.path == "linear":
        return plan
    if {"query", "key"} <= set(settings.query.targets):
        terms = [] if settings.query.anchor == "weight" else ["a parameter-free x·x"]
        terms += [] if settings.query.path == "identity" else ["f(x)·f(x)"]
        warnings.warn(
            f"architecture.query.targets: with a path in both query and key the logits hold {' and '.join(terms)}",
            UserWarning,
            stacklevel=1,
        )
    for site in sites:
        plan["projections"] += _projections(site, settings.query)
    return plan


def _pre_projection(site: AttentionSite, settings: PreProjectionSettings) -> Plan:
    """Return the item of a site's pre-projection.

    Raises:
        HfpatchError: if the hidden state does not enter at the attention module, or its output does not leave there.
    """
    reason = site.refusals.get("pre_projection")
    if reason is None and (site.norm is not None or any(entry is not site.attention for entry in site.entries)):
        reason = "the hidden state does not enter at its attention module alone"
    if reason is None and settings.content_skip and (site.exit is not site.attention or site.exit_factor != 1):
        reason = "content_skip: its attention's output is normed or scaled before it is added to the residual stream"
    if reason is not None:
        raise HfpatchError(f"architecture.pre_projection: layer {site.layer}: {reason}; leave it out here")
    try:
        inner_width(site.hidden_size, settings.expansion)
    except HfpatchError as error:
        raise HfpatchError(f"architecture.pre_projection: {error}") from error
    options = {"expansion": settings.expansion, "activation_name": settings.activation, "gated": settings.gated}
    return {
        "at": site.path,
        "options": {"hidden_size": site.hidden_size, **options},
        "content_skip": settings.content_skip,
    }


def _projections(site: AttentionSite, query: QuerySettings) -> list[Plan]:
    """Return an item for each projection of a site that changes.

    Raises:
        HfpatchError: if one of them cannot be changed so.
    """
    # f, and its options
    f = {"identity": "none", "residual": "linear", "nonlinear": "nonlinear"}[query.path]
    options: Plan = {}
    if f == "nonlinear":
        try:
            options["rank"] = bottleneck_rank(site.hidden_size, query.rank)
        except HfpatchError as error:
            raise HfpatchError(f"architecture.query: {error}") from error
        options["activation_name"] = query.activation
        options["input_norm"], options["output_norm"] = query.input_norm, query.output_norm

    # The columns of each target
    items: dict[str, Plan] = {}
    for target in query.targets:
        reason = site.refusals.get(target)
        if target not in site.projections:
            reason = f"it has no {target} projection of its own"
        elif site.projections[target].source:
            reason = f"its {target} is computed from a low-rank latent, not from the hidden state"
        if reason:
            raise HfpatchError(f"architecture.query: layer {site.layer}: {target} cannot be changed: {reason}")
        projection = site.projections[target]
        columns = projection.columns
        if query.anchor == "identity" and columns.size != site.hidden_size:
            raise HfpatchError(
                f"architecture.query: layer {site.layer}, {target}: {_WITHOUT_MATRIX[query.path]} needs it as wide as "
                f"the hidden state, but it has d_q={columns.size} and d={site.hidden_size}; set path: nonlinear with "
                "anchor: weight, or make heads times head size equal to d"
            )
        at = f"{site.path}.{projection.path}"
        item = {
            "at": at,
            "groups": columns.groups,
            "width": columns.width,
            "spans": {},
            "anchor": query.anchor,
            "fused": query.fused,
            "joins": [],
            "f": f,
            "options": options,
        }
        items.setdefault(at, item)["spans"][target] = [columns.start, columns.length]

    # The projections of key and value that f's first matrix joins, where the query's has none of their columns
    paths = [f"{site.path}.{site.projections[t].path}" for t in ("key", "value") if t in site.projections]
    for at, item in items.items() if query.fused else ():
        if at in paths and site.projections["query"].path == site.projections["key"].path:
            continue
        if at in paths or not paths:
            raise HfpatchError(
                f"architecture.query.fused: layer {site.layer}: {at} has no keys and values to be computed with; "
                "leave fused out"
            )
        item["joins"] = list(dict.fromkeys(paths))
    return list(items.values())


def describe_paths(settings: ScratchSettings) -> str:
    """Return a pre-projection, if there is one, and `describe_query`.

    ``x~ = x + W_down SiLU(W_up x), residual += x~ W_skip; Q = x~ W_Q``
    """
    query, before = describe_query(settings.query), settings.pre_projection
    if before is None:
        return query
    sigma = _ACTIVATIONS[before.activation]
    inner = f"{_applied(sigma, 'W_gate x')} ⊙ W_up x" if before.gated else _applied(sigma, "W_up x")
    skip = ", residual += x~ W_skip" if before.content_skip else ""
    return f"x~ = x + W_down({inner}){skip}; x = x~ in {query}"


def describe_query(settings: QuerySettings) -> str:
    """Return how queries (keys, values) are computed: ``Q = (x + f(x))/2, f = LN(GELU(RMSNorm(x) W₁) W₂)``.

    x is the input of the attention module.
    """
    symbols = [_SYMBOLS[target] for target in settings.targets]
    left = ", ".join(symbols)
    stock = f"x W_{symbols[0]}" if len(symbols) == 1 else "x W"
    if settings.path == "linear":
        return "Q = x W_Q"
    if settings.path == "identity":
        return f"{left} = x"
    if settings.path == "residual":
        return f"{left} = x + x W"
    anchor = "x" if settings.anchor == "identity" else stock
    inner = _applied(_ACTIVATIONS[settings.activation], f"{_applied(_NORMS[settings.input_norm], 'x')} W₁")
    f = _applied(_NORMS[settings.output_norm], f"{inner} W₂")
    f += "" if settings.rank is None else f", rank {settings.rank}"
    return f"{left} = ({anchor} + f(x))/2, f = {f}"


def _applied(function: str, argument: str) -> str:
    return f"{function}({argument})" if function else argument
