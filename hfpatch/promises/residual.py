"""The promise that the content skip reaches the residual stream where the attention branch joins it.

The additions after an attention are traced operation by operation, independently of module names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.methods import PreProjectionConfig
from hfpatch.promises.common import changed_by, logits, rounding
from hfpatch.promises.softmax import SoftmaxMode, silence
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.support.modes import hooked
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.hidden_state import hidden_argument

SUM, PRODUCT = re.compile(r"aten::add_?$"), re.compile(r"aten::(mul|div)_?$")
MATRIX = re.compile(r"mm|matmul|linear|convolution")
VISIBLE = 1e-6  # relative, above rounding


def arrival(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """x~ W_skip of every block is added with coefficient 1 where its attention branch joins the residual stream."""
    if not isinstance(config, PreProjectionConfig) or not config.content_skip:
        return True, "does not apply: there is no content skip"
    sites = changed_by(model, config)
    patch(model, config)
    missed: dict[str, float] = {}
    seen: list[Tensor] = []
    try:
        for site in sites:
            # W_skip zero, the same with a silent attention, and W_skip random
            prefix = f"{site.host_path}.hfpatch_"
            skip = next(p for n, p in adapter_parameters(model).items() if n.startswith(prefix) and "skip" in n)
            before = skip.detach().clone()
            skip.data.zero_()
            plain = AdditionTrace(model, site, skip).run(tokens)
            silent = AdditionTrace(model, site, skip).run(tokens, silent=True)
            weight = torch.randn(skip.shape, generator=torch.Generator().manual_seed(0)).to(skip)
            skip.data.copy_(weight / weight.shape[0] ** 0.5)
            seen.clear()
            keep_input = site.entries[0].register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(hidden_argument(args, kwargs).detach().float()),
                with_kwargs=True,
            )
            with hooked([keep_input]):
                skipped = AdditionTrace(model, site, skip).run(tokens)
            expected = seen[0] @ skip.detach().float().T
            skip.data.copy_(before)
            missed[site.path] = skipped.nearest_difference(plain, silent, expected)
    finally:
        unpatch(model)
    worst = max(missed, key=lambda path: missed[path])
    text = f"the residual stream differs from x~ W_skip by {missed[worst]:.1g} of it at most ({worst})"
    return missed[worst] < 10 * rounding(model), text


@dataclass(frozen=True)
class Step:
    """One operation: a sum, a product or quotient, or a product of matrices (whose tensors are not kept)."""

    kind: str
    result: Tensor | None = None
    operands: tuple[Tensor, ...] = ()  # of a sum


class AdditionTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the sums, products and quotients that are computed from the start of an attention to the next one.

    The first pass through the block counts, in models that run their blocks several times.

    Args:
        model: the patched model.
        site: the attention where it begins.
        skip: W_skip, whose own product of matrices is not a step of the model.
    """

    def __init__(self, model: Any, site: AttentionSite, skip: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.site, self.skip = model, site, skip
        self.tracing, self.finished = False, False
        self.steps: list[Step] = []

    def run(self, tokens: Tensor, *, silent: bool = False) -> AdditionTrace:
        """Run the model once; with ``silent``, all weights of the attention are zero."""
        sites = find_sites(self.model)
        handles = [site.attention.register_forward_pre_hook(self._stop) for site in sites]
        handles.append(self.site.attention.register_forward_pre_hook(self._start))
        watched = {self.site.path: self.site.attention}
        with hooked(handles), SoftmaxMode(watched, silence if silent else None):
            try:
                logits(self.model, tokens)
            finally:
                self._stop()
        return self

    def nearest_difference(self, plain: AdditionTrace, silent: AdditionTrace, expected: Tensor) -> float:
        """Return how near the residual stream comes to differing from the plain trace's by ``expected``.

        The branch joins the residual stream in the first sum of a term that depends on the attention (it changes when
        the attention is silent) and a term that does not, but varies over tokens. From there to the next product of
        matrices, which reads the residual stream, a result or an operand of a sum has to differ by ``expected``.
        Without such a sum, the branch itself begins a new residual stream, and any sum counts. Relative to
        ``expected``; infinite without any sum.
        """
        wanted = expected.flatten()
        steps = list(zip(self.steps, plain.steps, silent.steps, strict=False))
        joins = [_joins(theirs, without, wanted.numel()) for _, theirs, without in steps]
        first = joins.index(True) if True in joins else 0
        best = float("inf")
        for mine, theirs, _ in steps[first:]:
            if mine.kind == "matrix" and True in joins:
                break
            if True in joins or mine.kind == "sum":
                for a, b in zip((mine.result, *mine.operands), (theirs.result, *theirs.operands), strict=False):
                    if a is not None and b is not None and a.numel() == b.numel() == wanted.numel():
                        apart = ((a - b).flatten().float() - wanted).abs().max() / wanted.abs().max()
                        best = min(best, float(apart))
        return best

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        is_sum = SUM.search(name)
        # Before the call: a sum in place overwrites its operand.
        operands = tuple(a.detach().clone() for a in args if isinstance(a, Tensor)) if is_sum else ()
        out = func(*args, **(kwargs or {}))
        if is_sum or PRODUCT.search(name):
            self.steps.append(Step("sum" if is_sum else "product", out.detach().clone(), operands))
        elif MATRIX.search(name) and self.skip.data_ptr() not in [a.data_ptr() for a in args if isinstance(a, Tensor)]:
            self.steps.append(Step("matrix"))
        return out

    def _start(self, *call: Any) -> None:
        if not self.finished:
            self.tracing = True
            self.__enter__()  # type: ignore[no-untyped-call]  # only for these operations: each costs time

    def _stop(self, *call: Any) -> None:
        if self.tracing:
            self.tracing, self.finished = False, True
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _joins(plain: Step, silent: Step, size: int) -> bool:
    """Return whether this sum is of the branch and the residual stream."""
    if plain.kind != "sum" or len(plain.operands) != 2 or len(silent.operands) != 2:
        return False
    if any(part.numel() != size for part in (*plain.operands, *silent.operands)):
        return False
    changes = [_changes(a, b) for a, b in zip(plain.operands, silent.operands, strict=True)]
    if changes not in ([True, False], [False, True]):
        return False
    rows = plain.operands[changes.index(False)].flatten(0, -2)
    return _changes(rows, rows[:1].expand_as(rows))


def _changes(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) > VISIBLE * float(a.abs().max())
