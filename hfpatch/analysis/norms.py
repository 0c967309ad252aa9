"""How large what was added is, layer by layer: in the weights, and beside what it is added to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hfpatch.nn.skip import PAPER_SKIP_STD
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.tuners.hidden_state import hidden_argument
from hfpatch.tuners.layer import SurgeryLayer
from hfpatch.tuners.nonlinear_query.layer import NonlinearQueryLayer
from hfpatch.tuners.pre_projection.layer import PreProjectionLayer

_INPUTS = ("input_ids", "attention_mask", "position_ids")

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class SkipNorm:
    """The content skip of one layer.

    Attributes:
        layer: index of the block.
        adapter: the adapter's name.
        norm: ‖W_skip‖ in the Frobenius norm.
        at_paper_init: what ``init="paper"`` gives before any training, 1e-4·d; learned skips must be held against it.
    """

    layer: int
    adapter: str
    norm: float
    at_paper_init: float


@dataclass(frozen=True)
class PreProjectionSize:
    """How far the pre-projection of one layer moves its input.

    Attributes:
        layer: index of the block.
        size: ‖x~ − x‖ / ‖x‖, the mean over tokens, of all working adapters together.
    """

    layer: int
    size: float


@dataclass(frozen=True)
class QuerySize:
    """How large the nonlinear term of one layer is beside its anchor.

    Attributes:
        layer: index of the block.
        adapter: the adapter's name.
        target: ``query``, ``key`` or ``value``.
        size: ‖f(x)‖ / ‖A(x)‖, the mean over tokens; the preserving form counts A twice in Q = (2A + f)/2, the
            literal form once.
    """

    layer: int
    adapter: str
    target: str
    size: float


def skip_norms(model: nn.Module) -> list[SkipNorm]:
    """Return the norm of every content skip of a model, first layer first; none where there is no skip."""
    return [
        SkipNorm(site.layer, adapter, float(skip.weight.detach().norm()), PAPER_SKIP_STD * site.hidden_size)
        for site, layer in _layers(model, PreProjectionLayer)
        for adapter in layer.held("preproj_skip")
        for skip in [layer.linear("preproj_skip", adapter)]
    ]


def pre_projection_sizes(model: nn.Module, batches: Iterable[Batch]) -> list[PreProjectionSize]:
    """Run a patched model on batches and return how far each layer's pre-projection moves its input.

    Measured as the model computes it, in the dtype of its hidden state.

    Args:
        model: a model with pre-projections; its mode and hooks are left as they were.
        batches: mappings with ``input_ids`` ``(batch, seq)`` and optionally ``attention_mask`` ``(batch, seq)``,
            whose zeros are not counted, and ``position_ids``; other keys are ignored.
    """
    means = _Means()

    def hook(site: AttentionSite, layer: PreProjectionLayer) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = hidden_argument(args, kwargs)
            means.add((site.layer,), layer.project(x) - x, x)

        return seen

    with ExitStack() as hooks:
        for site, layer in _layers(model, PreProjectionLayer):
            handle = site.attention.register_forward_pre_hook(hook(site, layer), prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        _run(model, batches, means)
    return [PreProjectionSize(layer, mean) for (layer,), mean in means.items()]


def query_sizes(model: nn.Module, batches: Iterable[Batch]) -> list[QuerySize]:
    """Run a patched model on batches and return how large each nonlinear term is beside its anchor.

    Of several working adapters each is anchored in what the one before it returned.

    Args:
        model: a model with nonlinear queries; its mode and hooks are left as they were.
        batches: as for :func:`pre_projection_sizes`.
    """
    means = _Means()

    def hook(site: AttentionSite, layer: NonlinearQueryLayer, target: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            x, projected = args[0], layer.columns[target].read(output)
            for adapter in layer.working_adapters():
                if target in layer.configs[adapter].targets:
                    anchor = x if layer.configs[adapter].anchor == "identity" else projected
                    means.add((site.layer, adapter, target), layer.nonlinear(adapter, target, x), anchor)
                    projected = layer.query(adapter, target, x, projected)

        return seen

    with ExitStack() as hooks:
        for site, layer in _layers(model, NonlinearQueryLayer):
            for target in layer.columns:
                module = site.projection_module(target)
                hooks.callback(module.register_forward_hook(hook(site, layer, target), prepend=True).remove)
        _run(model, batches, means)
    return [QuerySize(layer, adapter, target, mean) for (layer, adapter, target), mean in means.items()]


_Layer = TypeVar("_Layer", bound=SurgeryLayer)


def _layers(model: nn.Module, kind: type[_Layer]) -> Iterator[tuple[AttentionSite, _Layer]]:
    for site in find_sites(model):
        layer = getattr(site.attention, kind.child_name, None)
        if isinstance(layer, kind):
            yield site, layer


class _Means:
    """Means over tokens of ‖part‖ / ‖whole‖, by key, leaving out the tokens that ``mask`` does."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self._sums: dict[tuple[Any, ...], tuple[float, int]] = {}

    def add(self, key: tuple[Any, ...], part: Tensor, whole: Tensor) -> None:
        """Take in vectors ``(batch, seq, ...)``."""
        whole_norm = whole.float().norm(dim=-1)
        ratio = part.float().norm(dim=-1) / whole_norm.clamp_min(torch.finfo(torch.float32).tiny)
        kept = ratio if self.mask is None else ratio[self.mask.to(ratio.device, torch.bool)]
        total, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = (total + float(kept.double().sum()), count + kept.numel())

    def items(self) -> Iterator[tuple[tuple[Any, ...], float]]:
        """Yield each key with its mean, in the order of the keys' first tokens."""
        return ((key, total / count) for key, (total, count) in self._sums.items() if count)


@torch.no_grad()
def _run(model: nn.Module, batches: Iterable[Batch], means: _Means) -> None:
    with _evaluating(model):
        for batch in batches:
            means.mask = batch.get("attention_mask")
            model(**{name: batch[name] for name in _INPUTS if name in batch})


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and every module back to the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
