"""Watching what a model adds up behind an attention, operation by operation, whatever its modules are called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.promises.common import logits
from hfpatch.promises.softmax import SoftmaxMode, attentions, keep, silence
from hfpatch.sites import AttentionSite, find_sites

SUM, PRODUCT = re.compile(r"aten::add_?$"), re.compile(r"aten::(mul|div)_?$")
MATRIX = re.compile(r"mm|matmul|linear|convolution")
VISIBLE = 1e-6  # relative: what rounding alone does not move


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
        self.listening, self.finished = False, False
        self.steps: list[Step] = []

    def run(self, tokens: Tensor, *, silent: bool = False) -> AdditionTrace:
        """Run the model once and listen; with ``silent``, all weights of the attention are zero."""
        sites = find_sites(self.model)
        handles = [site.attention.register_forward_pre_hook(self._stop) for site in sites]
        handles.append(self.site.attention.register_forward_pre_hook(self._start))
        try:
            with SoftmaxMode(attentions([self.site]), silence if silent else keep), self:
                logits(self.model, tokens)
        finally:
            for handle in handles:
                handle.remove()
        return self

    def nearest_difference(self, plain: AdditionTrace, silent: AdditionTrace, expected: Tensor) -> float:
        """Return how near the residual stream comes to differing from the plain trace's by ``expected``.

        The branch joins the residual stream in the first sum of something that depends on the attention (it changes
        where the attention is silent) and something that does not, but varies over tokens. From there to the next
        product of matrices, which reads the residual stream, a result or an operand of a sum has to differ by
        ``expected``. Where there is no such sum, the branch itself begins a new residual stream, and any sum counts.
        Relative to ``expected``; infinite where nothing of its size was added up.
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
                pairs = zip((mine.result, *mine.operands), (theirs.result, *theirs.operands), strict=False)
                best = min([best, *(_missed(a, b, wanted) for a, b in pairs)])
        return best

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name if self.listening else ""
        is_sum = SUM.search(name)
        # Before the call: a sum in place overwrites its operand.
        operands = tuple(a.detach().clone() for a in args if isinstance(a, Tensor)) if is_sum else ()
        out = func(*args, **(kwargs or {}))
        if is_sum or PRODUCT.search(name):
            self.steps.append(Step("sum" if is_sum else "product", out.detach().clone(), operands))
        elif MATRIX.search(name) and not any(self._is_skip(a) for a in args):
            self.steps.append(Step("matrix"))
        return out

    def _is_skip(self, argument: Any) -> bool:
        return isinstance(argument, Tensor) and argument.data_ptr() == self.skip.data_ptr()

    def _start(self, module: nn.Module, args: Any) -> None:
        self.listening = not self.finished

    def _stop(self, module: nn.Module, args: Any) -> None:
        if self.listening:
            self.listening, self.finished = False, True


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


def _missed(a: Tensor | None, b: Tensor | None, wanted: Tensor) -> float:
    if a is None or b is None or not a.numel() == b.numel() == wanted.numel():
        return float("inf")
    return float(((a - b).flatten().float() - wanted).abs().max() / wanted.abs().max())
