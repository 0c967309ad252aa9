"""Observe the softmax of an attention where torch computes it, independently of the declared projections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hfpatch.promises.inputs import Inputs, lengths, logits
from hfpatch.sites import AttentionSite
from hfpatch.support.modes import hooked
from hfpatch.tuners.hidden_state import hidden_argument

MASKED = -1e4  # scores below it are masked

Change = Callable[[str, int, Tensor], Tensor]


def silence(path: str, index: int, weights: Tensor) -> Tensor:
    """Set the attention weights to zero: no value passes."""
    return torch.zeros_like(weights)


class SoftmaxMode(TorchFunctionMode):
    """Keeps the scores and weights of every softmax inside attention modules, and may change the weights.

    It knows ``scaled_dot_product_attention``, ``softmax``, and ``logsumexp`` followed by ``exp``. The first call of
    each module in a forward pass is kept; later calls (models that run their blocks several times) are changed too.

    Args:
        modules: the attention modules to watch, by path.
        change: ``(path of the module, number of the softmax in its call, weights) -> weights``; None changes nothing.
    """

    def __init__(self, modules: Mapping[str, nn.Module], change: Change | None = None) -> None:
        super().__init__()
        self.scores: dict[str, list[Tensor]] = {}
        self.weights: dict[str, list[Tensor]] = {}
        self._modules, self._change = modules, change
        self._handles: list[Any] = []
        self._inside, self._index = "", 0
        self._exponents: Tensor | None = None  # the input of a logsumexp

    def __enter__(self) -> SoftmaxMode:
        """Begin to watch."""
        for path, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(partial(self._begin, path)))
            self._handles.append(module.register_forward_hook(self._end))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no type for it
        return self

    def __exit__(self, *raised: Any) -> None:
        """Remove every hook."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch has no type for it
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute attention step by step, so that its scores and weights are seen; all else as it is."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "") if self._inside else ""
        if name == "scaled_dot_product_attention":
            return self._dot_product(*args, **kwargs)
        out = func(*args, **kwargs)
        if name == "softmax":
            return self._record(args[0] if args else kwargs["input"], out)
        if name == "logsumexp":
            self._exponents = args[0]
            return self._record(args[0], out)
        if name == "exp" and self._exponents is not None and out.shape == self._exponents.shape:
            scores, self._exponents = self._exponents, None
            return self._record(scores, out)
        return out

    def _begin(self, path: str, module: nn.Module, args: Any) -> None:
        self._inside, self._index, self._exponents = path, 0, None
        self._first = path not in self.scores
        if self._first:
            self.scores[path], self.weights[path] = [], []

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = ""

    def _record(self, scores: Tensor, weights: Tensor) -> Tensor:
        if self._first:
            self.scores[self._inside].append(scores.detach().float())
            self.weights[self._inside].append(weights.detach())
        self._index += 1
        return weights if self._change is None else self._change(self._inside, self._index - 1, weights)

    def _dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ``softmax(scale · query keyᵀ + mask) value``, all ``(batch, heads, seq, head size)``."""
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        masked = scores.float()
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            masked = masked.masked_fill(~attn_mask, -torch.inf) if boolean else masked + attn_mask
        return self._record(scores, masked.softmax(-1).nan_to_num().to(value.dtype)) @ value


@dataclass(frozen=True)
class Observation:
    """The first call of an attention.

    Args:
        scores: input of the softmax, ``(batch·heads, seq, seq)``, NaN where masked; None if no softmax over the
            sequence ran.
        middle: the position that is in most of the attention's sums, both as a query and as a key.
        weights: outputs of every softmax and logsumexp inside.
        output: the first output ``(batch, seq, hidden)``.
        projected: the outputs of chosen modules below it, by path.
        calls: how often it called each of these modules.
    """

    scores: Tensor | None
    middle: int
    weights: list[Tensor]
    output: Tensor
    projected: dict[str, Tensor]
    calls: dict[str, int]


def observe(
    model: Any,
    sites: list[AttentionSite],
    inputs: Inputs,
    *,
    modules: Iterable[str] = (),
    weights: list[Tensor] | None = None,
) -> dict[str, Observation]:
    """Run a model once and return the observation of each site, by path.

    Args:
        model: the model.
        sites: where to look.
        inputs: the arguments of its forward.
        modules: the paths of modules below the attention whose output to keep.
        weights: attention weights to use instead of the computed ones, of one site.
    """
    rows: dict[str, int] = {}
    outputs: dict[str, Tensor] = {}
    projected: dict[str, dict[str, Tensor]] = {site.path: {} for site in sites}
    calls = {site.path: dict.fromkeys(modules, 0) for site in sites}

    def around(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        rows.setdefault(path, hidden_argument(args, kwargs).shape[-2])
        first = (output if isinstance(output, Tensor) else output[0]).detach().float()
        outputs.setdefault(path, first.reshape(-1, *first.shape[-2:]).clone())

    def behind(path: str, inner: str, module: nn.Module, args: Any, output: Tensor) -> None:
        projected[path].setdefault(inner, output.detach().clone())
        calls[path][inner] += path not in outputs  # in the attention's first call

    handles = []
    for site in sites:
        handles.append(site.attention.register_forward_hook(partial(around, site.path), with_kwargs=True))
        for inner in calls[site.path]:
            handles.append(site.inner_module(inner).register_forward_hook(partial(behind, site.path, inner)))
    change = None if weights is None else lambda path, index, computed: weights[index]
    with hooked(handles), SoftmaxMode({site.path: site.attention for site in sites}, change) as mode:
        logits(model, inputs)
    return {
        path: Observation(
            *self_attention(mode.scores[path], mode.weights[path], (rows[path], *lengths(inputs))),
            mode.weights[path],
            output,
            projected[path],
            calls[path],
        )
        for path, output in outputs.items()
    }


def self_attention(scores: list[Tensor], weights: list[Tensor], of_length: Sequence[int]) -> tuple[Tensor | None, int]:
    """Return the scores over the whole sequence, without those of sinks, and the position that is in most sums."""
    for score, used in zip(scores, weights, strict=True):
        rows = score.shape[-2]
        if score.shape == used.shape and score.dim() > 2 and rows in of_length and score.shape[-1] >= rows:
            whole, seen = (part.flatten(0, -3)[..., :rows] for part in (score, used > 0))
            seen = seen & ~torch.eye(rows, dtype=torch.bool, device=seen.device)
            sums = (seen.sum(-1) * seen.sum(-2)).amin(0)
            from_centre = (torch.arange(rows, device=sums.device) - rows // 2).abs()
            middle = (sums * rows - from_centre).argmax()  # of equals, as without a causal mask, the one in the centre
            return whole.masked_fill(whole <= MASKED, torch.nan), int(middle)
    return None, 0
