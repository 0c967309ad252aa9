"""The size of patches, layer by layer: of their weights, and relative to the activations they change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfpatch.analysis.running import Batch, TokenMeans, method_layers, norm_ratio, run
from hfpatch.errors import HfpatchError
from hfpatch.methods import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.models.paths import PathOutput, observed
from hfpatch.nn.calls import CALLS
from hfpatch.nn.preprojection import PAPER_SKIP_STD
from hfpatch.sites import AttentionSite, base_model
from hfpatch.support.modes import hooked
from hfpatch.tuners.adapters import block_of
from hfpatch.tuners.hidden_state import hidden_argument
from hfpatch.tuners.hooks import apply_method
from hfpatch.tuners.layer import MethodLayer

BUILT_IN = "built-in"
"""Used as an adapter's name where f is the model's own."""


@dataclass(frozen=True)
class SkipNorm:
    """‖W_skip‖ of one layer and adapter, and the norm after ``init="paper"``, before training, 1e-4·d."""

    layer: int
    adapter: str
    norm: float
    at_paper_init: float


@dataclass(frozen=True)
class LayerSize:
    """The change by all working adapters of a layer together, relative to the changed activations, mean over tokens."""

    layer: int
    size: float


@dataclass(frozen=True)
class QuerySize:
    """Size and direction of the nonlinear term of one layer relative to its anchor.

    Attributes:
        layer: index of the block.
        adapter: the adapter's name; :data:`BUILT_IN` for the f of a model that was pretrained with it.
        target: ``query``, ``key`` or ``value``.
        size: ‖f(x)‖ / ‖A(x)‖, the mean over tokens; the preserving form counts A twice in Q = (2A + f)/2, the
            literal form once. A is x for an identity anchor, so that this is ‖f(x)‖ / ‖x‖, and x W_Q for a weight
            anchor. f of a pretrained residual path Q = x + xW is xW.
        cosine: the cosine between f(x) and A(x), the mean over tokens; 0 where one of them is 0.
    """

    layer: int
    adapter: str
    target: str
    size: float
    cosine: float


def skip_norms(model: nn.Module) -> list[SkipNorm]:
    """Return the norm of every content skip of a model, first layer first."""
    return [
        SkipNorm(site.layer, adapter, float(weight.detach().norm()), PAPER_SKIP_STD * site.hidden_size)
        for site, layer in method_layers(model, PreProjectionConfig)
        for adapter in layer.configs
        for name, part in layer.parts(adapter).items()
        if name == "skip"
        for weight in part.parameters()
    ]


def skip_sizes(model: nn.Module, batches: Iterable[Batch]) -> list[LayerSize]:
    """Run a patched model on batches and return the size of each layer's content skips.

    The size is ‖x~ W_skip‖ / ‖attention output‖, the mean over tokens; the attention output is taken where it joins the
    residual stream, after its norm if there is one. The model's mode and hooks are left as they were.

    Raises:
        HfpatchError: if a layer's output projection runs several times in a call of the attention.
    """
    means, calls, handles = TokenMeans[int](), dict[tuple[str, int], Any](), []

    def keep(name: str, site: AttentionSite, module: nn.Module, *call: Any) -> None:
        calls[name, id(site)] = call  # args, kwargs and output

    def compare(site: AttentionSite, layer: MethodLayer, *call: Any) -> None:
        (*_, output), (args, kwargs, _) = (calls.pop((name, id(site))) for name in ("branch", "attention"))
        branch, x = output if isinstance(output, Tensor) else output[0], hidden_argument(args, kwargs)
        if branch.shape[:-1] != x.shape[:-1]:  # it is the last of several calls (ProphetNet's streams)
            raise HfpatchError(f"{site.output_path} runs in pieces, so that no output of it is the layer's branch")
        added = layer.apply_at("left", torch.zeros_like(branch), x)
        means.add(site.layer, norm_ratio(added, branch)[..., None])

    for site, layer in method_layers(model, PreProjectionConfig):
        if layer.acts("left"):
            # Some attention modules add the residual themselves (BLOOM), so the branch is read before they return.
            inside = site.exit is site.attention
            branch = base_model(model).get_submodule(site.output_path) if inside else site.exit
            # Prepended hooks run in reverse order.
            last = site.attention if inside else site.exit
            handles.append(last.register_forward_hook(partial(compare, site, layer), prepend=True))
            for name, module in (("branch", branch), ("attention", site.attention)):
                hook = partial(keep, name, site)
                handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
    with hooked(handles):
        run(model, batches, means.begin)
    return [LayerSize(layer, size) for layer, (size,) in means.overall().items()]


def pre_projection_sizes(model: nn.Module, batches: Iterable[Batch]) -> list[LayerSize]:
    """Run a patched model on batches and return how far each layer's pre-projection moves its input.

    The size is ‖x~ − x‖ / ‖x‖, the mean over tokens, as the model computes it, in the dtype of its hidden state. The
    model's mode and hooks are left as they were.
    """
    means, handles = TokenMeans[int](), []

    def measure(index: int, layer: MethodLayer, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        x = hidden_argument(args, kwargs)
        means.add(index, norm_ratio(layer.apply_at("entered", x) - x, x)[..., None])

    for site, layer in method_layers(model, PreProjectionConfig):
        if not layer.acts("entered"):  # only a skip
            continue
        hook = partial(measure, site.layer, layer)
        handles.append(site.attention.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
    with hooked(handles):
        run(model, batches, means.begin)
    return [LayerSize(layer, size) for layer, (size,) in means.overall().items()]


def query_sizes(model: nn.Module, batches: Iterable[Batch]) -> list[QuerySize]:
    """Run a model on batches and return the size of each nonlinear term, or of its own f, relative to its anchor.

    Of several active adapters, each has the output of the one before it as its anchor. Models from
    :func:`hfpatch.models.build_scratch` have an f of their own. The model's mode and hooks are left as they were.
    """
    means, handles = TokenMeans[tuple[int, str, str]](), []

    def measure(
        index: int, layer: MethodLayer, target: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> None:
        x, projected = CALLS.look(layer, target), layer.site.columns[target].read(output)
        x = args[0] if x is None else x  # the source of a low-rank image, or the input itself
        for adapter in layer.working_adapters():
            config, parts = cast("NonlinearQueryConfig", layer.configs[adapter]), layer.parts(adapter)
            if target in config.targets:
                anchor = x if config.anchor == "identity" else projected
                f = config.nonlinear(target, parts, x)
                means.add((index, adapter, target), _compared(f, anchor))
                projected = apply_method(layer.scaled(adapter), target, parts, projected, x, site=layer.sites[adapter])

    def measure_built_in(output: PathOutput) -> None:
        means.add((block_of(output.at), BUILT_IN, output.target), _compared(output.f, output.anchor))

    for site, layer in method_layers(model, NonlinearQueryConfig):
        for target in layer.site.columns:
            hook = partial(measure, site.layer, layer, target)
            handles.append(site.projection_module(target).register_forward_hook(hook, prepend=True))
    with hooked(handles), observed(model, measure_built_in):
        run(model, batches, means.begin)
    return [QuerySize(*key, *numbers) for key, numbers in means.overall().items()]


def _compared(f: Tensor, anchor: Tensor) -> Tensor:
    """Return ratio and cosine of each token: ``(batch, seq, 2)``."""
    f, anchor = f.float(), anchor.float()
    return torch.stack([norm_ratio(f, anchor), F.cosine_similarity(f, anchor, dim=-1)], dim=-1)
