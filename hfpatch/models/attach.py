"""Rebuilding a stock model as a plan says. Plain torch: exported folders hold a copy of this file."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfpatch.nn.anchors import IdentityAnchoredQuery, WeightAnchoredQuery
from hfpatch.nn.calls import CALLS, SharedLinear, shared
from hfpatch.nn.initialization import normal_
from hfpatch.nn.mixed import MixedProjection
from hfpatch.nn.nonlinear import NonlinearProjection, init_nonlinear
from hfpatch.nn.preprojection import ContentSkip, PreProjection

Plan = dict[str, Any]


def attach(model: nn.Module, plan: Plan) -> None:
    """Give a stock model, in place, the query paths and the pre-projections of a plan, and no biases if it says so.

    What stays of a stock matrix keeps its values, so that variants of one seed start from the same weights.

    Args:
        model: just built, on any device.
        plan: ``biases``, ``seed``, ``std``, ``projections`` and ``pre_projections``, as ``hfpatch.models.plan`` writes
            it.
    """
    if not plan["biases"]:
        remove_biases(model)
    for item in plan["projections"]:
        _replace(model, item, plan)
    for item in plan.get("pre_projections", ()):  # models that were saved before there were any have none
        _pre_project(model, item, plan)
    owners = [module for module in model.modules() if isinstance(module, SharedLinear)]
    if owners:
        model.register_forward_hook(partial(_forget, owners), always_call=True)


def _forget(owners: list[SharedLinear], model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Clear the values that a failed call left."""
    for owner in owners:
        CALLS.values.pop(owner, None)


def _pre_project(model: nn.Module, item: dict[str, Any], plan: Plan) -> None:
    """Put a pre-projection, and a content skip if there is one, around an attention."""
    attention, size = model.get_submodule(item["at"]), item["options"]["hidden_size"]
    kind = next(attention.parameters()).dtype
    before = PreProjection(seed=plan["seed"], name=f"{item['at']}.preproj", **item["options"])
    for name in ("up", "gate"):
        if (matrix := getattr(before, name)) is not None:
            normal_(matrix.weight, std=plan["std"], seed=plan["seed"], name=f"{item['at']}.preproj_{name}")
    attention.preproj_mlp = before.to(kind)
    attention.register_forward_pre_hook(_enter, with_kwargs=True)
    if item["content_skip"]:
        attention.preproj_skip = ContentSkip(hidden_size=size).to(kind)
        attention.register_forward_hook(_leave, with_kwargs=True)


def _enter(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the attention read x~ ``(batch, seq, hidden)`` in place of x."""
    if args:
        return (attention.preproj_mlp(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": attention.preproj_mlp(kwargs["hidden_states"])}


def _leave(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Add x~ W_skip to the attention's output."""
    x = args[0] if args else kwargs["hidden_states"]
    if isinstance(output, tuple):
        return (attention.preproj_skip(output[0], x), *output[1:])
    return attention.preproj_skip(output, x)


def remove_biases(model: nn.Module) -> None:
    """Remove the biases of a stock model."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "nf"):  # a Conv1D cannot be without a bias
            _set(model, name, _linear(*_rows(module), keep_bias=False))
        elif getattr(module, "bias", None) is not None:
            module.bias = None


def _replace(model: nn.Module, item: dict[str, Any], plan: Plan) -> None:
    """Exchange one stock projection."""
    stock = model.get_submodule(item["at"])
    weight, bias = _rows(stock)
    partners = []
    for path in item["joins"]:  # whose product may then be computed with another's
        partners.append(shared(_linear(*_rows(model.get_submodule(path)), keep_bias=True)))
        _set(model, path, partners[-1])
    paths: dict[str, nn.Module] = {}
    for name, (_, length) in item["spans"].items():
        sizes = {"hidden_size": weight.shape[1], "out_features": item["groups"] * length}
        if item["anchor"] == "weight":
            paths[name] = WeightAnchoredQuery(**sizes, bias=bias is not None, **item["options"])
        else:
            paths[name] = IdentityAnchoredQuery(**sizes, f=item["f"], **item["options"])
    new = MixedProjection(
        inputs=weight.shape[1],
        groups=item["groups"],
        width=item["width"],
        paths=paths,
        spans={name: (start, length) for name, (start, length) in item["spans"].items()},
        bias=bias is not None,
        fused=item["fused"],
        partners=partners,
    ).to(weight.dtype)
    new.train(stock.training)
    for name, (start, length) in new.spans.items():
        # the anchor, or a linear f, takes the values of the stock matrix; other f are drawn
        columns, path, named = list(range(start, start + length)), new.paths[name], f"{item['at']}.{name}"
        f = path.f
        if isinstance(path, WeightAnchoredQuery):
            _fill(path.anchor, _chosen(weight, columns, new), _chosen(bias, columns, new))
        if isinstance(f, NonlinearProjection):
            drawn = {"seed": plan["seed"], "std": plan["std"]}
            init_nonlinear(up=f.up, down=f.down, norm_out=f.norm_out, silent=False, name=named, **drawn)
        elif isinstance(f, nn.Linear):
            _fill(f, _chosen(weight, columns, new), None)
    if new.rest is not None:
        _fill(new.rest, _chosen(weight, new.rest_columns(), new), _chosen(bias, new.rest_columns(), new))
    _set(model, item["at"], new)


def _chosen(tensor: Tensor | None, columns: list[int], shape: MixedProjection) -> Tensor | None:
    """Return the rows ``columns`` of every group of a matrix ``(groups·width, ...)``."""
    if tensor is None:
        return None
    index = torch.tensor([g * shape.width + c for g in range(shape.groups) for c in columns], device=tensor.device)
    return tensor.index_select(0, index)


def _rows(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight ``(out, in)`` and bias of a Linear or of transformers' Conv1D, which holds its transpose."""
    weight: Tensor = projection.weight  # type: ignore[assignment]  # typed as tensor or module
    bias: Tensor | None = getattr(projection, "bias", None)
    return (weight.detach().t() if hasattr(projection, "nf") else weight.detach()), bias


@torch.no_grad()
def _fill(linear: nn.Linear, weight: Tensor | None, bias: Tensor | None) -> None:
    if weight is not None:
        linear.weight.copy_(weight)
    if bias is not None and linear.bias is not None:
        linear.bias.copy_(bias)


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _linear(weight: Tensor, bias: Tensor | None, *, keep_bias: bool) -> nn.Linear:
    """Return a Linear of a weight ``(out, in)`` and a bias."""
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None and keep_bias, device=weight.device, dtype=weight.dtype)
    _fill(made, weight, bias)
    return made
