"""The promise that the content skip reaches the residual stream where the attention branch joins it.

The additions after an attention are traced operation by operation, independently of module names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.methods import PreProjectionConfig
from hfpatch.promises.common import Apart, changed_by, compared
from hfpatch.promises.inputs import Inputs, logits
from hfpatch.promises.softmax import SoftmaxMode, silence
from hfpatch.sites import AttentionSite, survey
from hfpatch.support.modes import hooked
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.hidden_state import hidden_argument

UNITS = 32  # of rounding, of the values that are subtracted
SUM, PRODUCT = re.compile(r"aten::add_?$"), re.compile(r"aten::(mul|div)_?$")
MATRIX = re.compile(r"mm|matmul|linear|convolution")
VISIBLE = 1e-6  # relative, above rounding


def arrival(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """x~ W_skip of every block is added with coefficient 1 where its attention branch joins the residual stream.

    It does nothing else: what changes the sum of branch and stream as it does changes all later values as it does.
    """
    if not isinstance(config, PreProjectionConfig) or not config.content_skip:
        return True, "does not apply: there is no content skip"
    sites = changed_by(model, config)
    patch(model, config)
    differs: dict[str, Apart] = {}
    try:
        for site in sites:
            prefix = f"{site.host_path}.hfpatch_"
            skip = next(p for n, p in adapter_parameters(model).items() if n.startswith(prefix) and "skip" in n)
            before = skip.detach().clone()
            differs[site.path], elsewhere = _arrival_at(partial(AdditionTrace, model, site, skip), inputs)
            skip.data.copy_(before)
            if elsewhere is not None and not elsewhere.is_rounding:
                text = f"the model differs by {elsewhere.difference:.1g} of the largest logit from one where x~ W_skip"
                return False, f"{text} is added where the attention branch joins the residual stream ({site.path})"
    finally:
        unpatch(model)
    worst = max(differs, key=lambda path: differs[path].difference / differs[path].rounding)
    text = f"the residual stream differs from x~ W_skip by {differs[worst].difference:.1g} of it at most ({worst})"
    return differs[worst].is_rounding, text


def _arrival_at(trace: Callable[..., AdditionTrace], inputs: Inputs) -> tuple[Apart, Apart | None]:
    """Compare what W_skip of one site changes, with what it should change.

    Args:
        trace: makes a trace of the site.
        inputs: the arguments of its forward.

    Returns:
        How far the residual stream is from differing by x~ W_skip; and how far the logits are from those where the
        sum of branch and stream is changed by hand, None without such a sum.
    """
    plain, silent, skipped = trace().run(inputs), trace().run(inputs, silent=True), trace(random=True).run(inputs)
    join = plain.join(silent, skipped.expected.numel())
    nearest = skipped.nearest_difference(plain, join)
    if join is None:
        return nearest, None

    # By hand: the sum changed as W_skip changed it, or by x~ W_skip where that is added to the sum later
    mine, theirs = skipped.steps[join].result, plain.steps[join].result
    assert mine is not None
    assert theirs is not None
    change = mine - theirs if _changes(theirs, mine) else skipped.expected.reshape(theirs.shape).to(theirs)
    ways = [lambda: trace(random=True).run(inputs).output, lambda: trace(changes={join: change}).run(inputs).output]
    return nearest, compared(plain.model, *ways)


@dataclass(frozen=True)
class Step:
    """One operation: a sum, a product or quotient, or a product of matrices (whose tensors are not kept)."""

    kind: str
    result: Tensor | None = None
    operands: tuple[Tensor, ...] = ()  # of a sum


class AdditionTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Keeps the sums, products and quotients that are computed from the start of an attention to the next one.

    The first pass through the block counts, in models that run their blocks several times.

    Args:
        model: the patched model.
        site: the attention where it begins.
        skip: W_skip; its own product of matrices is not a step of the model.
        random: set W_skip to random values during the trace, instead of zero.
        changes: what to add to the results of steps, by index.

    Attributes:
        expected: x~ W_skip, fp32.
        output: the logits.
    """

    expected: Tensor
    output: Tensor

    def __init__(
        self,
        model: Any,
        site: AttentionSite,
        skip: Tensor,
        *,
        random: bool = False,
        changes: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self.model, self.site, self.skip, self.changes = model, site, skip, changes or {}
        self.weight = torch.zeros_like(skip)
        if random:
            drawn = torch.randn(skip.shape, generator=torch.Generator().manual_seed(0))
            self.weight.copy_(drawn / len(drawn) ** 0.5)
        self.tracing, self.finished = False, False
        self.steps: list[Step] = []

    def run(self, inputs: Inputs, *, silent: bool = False) -> AdditionTrace:
        """Run the model once; with ``silent``, all weights of the attention are zero."""
        self.skip.data.zero_()
        sites = survey(self.model).with_others().sites
        handles = [site.attention.register_forward_pre_hook(self._stop) for site in sites]
        handles.append(self.site.attention.register_forward_pre_hook(self._start))
        handles.append(self.site.entries[0].register_forward_pre_hook(self._expect, with_kwargs=True))
        watched = {self.site.path: self.site.attention}
        with hooked(handles), SoftmaxMode(watched, silence if silent else None):
            try:
                self.output = logits(self.model, inputs)
            finally:
                self._stop()
        return self

    def join(self, silent: AdditionTrace, size: int) -> int | None:
        """Return the index of the sum where the branch joins the residual stream; None if there is none.

        It is the first of a term that depends on the attention (it changes when the attention is silent) and a term
        that does not, but varies over tokens. Without one, the branch itself begins a new residual stream.

        Args:
            silent: the trace with a silent attention.
            size: the number of values in the residual stream.
        """
        steps = zip(self.steps, silent.steps, strict=False)
        return next((index for index, (step, without) in enumerate(steps) if _joins(step, without, size)), None)

    def nearest_difference(self, plain: AdditionTrace, join: int | None) -> Apart:
        """Return how near the residual stream comes to differing from the plain trace's by x~ W_skip.

        From the sum at ``join`` to the next product of matrices, which reads the residual stream, a result or an
        operand of a sum has to differ by it. Without ``join`` any sum counts. Relative to x~ W_skip, and so is the
        rounding of the values that are subtracted; infinite without any sum.
        """
        wanted = self.expected.flatten()
        nearest = Apart(float("inf"), 1)
        for mine, theirs in itertools.islice(zip(self.steps, plain.steps, strict=False), join, None):
            if mine.kind == "matrix" and join is not None:
                break
            if join is not None or mine.kind == "sum":
                for a, b in zip((mine.result, *mine.operands), (theirs.result, *theirs.operands), strict=False):
                    if a is not None and b is not None and a.numel() == b.numel() == wanted.numel():
                        apart = ((a.float() - b.float()).flatten() - wanted).abs().max() / wanted.abs().max()
                        size = float(a.abs().max() + b.abs().max()) / float(wanted.abs().max())
                        rounding = UNITS * torch.finfo(a.dtype).eps * max(1.0, size)
                        nearest = min(nearest, Apart(float(apart), rounding), key=lambda pair: pair.difference)
        return nearest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        is_sum = SUM.search(name)
        # Before the call: a sum in place overwrites its operand.
        operands = tuple(a.detach().clone() for a in args if isinstance(a, Tensor)) if is_sum else ()
        out = func(*args, **(kwargs or {}))
        if is_sum or PRODUCT.search(name):
            if len(self.steps) in self.changes:
                out += self.changes[len(self.steps)]
            self.steps.append(Step("sum" if is_sum else "product", out.detach().clone(), operands))
        elif MATRIX.search(name) and self.skip.data_ptr() not in [a.data_ptr() for a in args if isinstance(a, Tensor)]:
            self.steps.append(Step("matrix"))
        return out

    def _start(self, *call: Any) -> None:
        if not self.finished:
            self.tracing = True
            self.skip.data.copy_(self.weight)
            self.__enter__()  # type: ignore[no-untyped-call]  # only for these operations: each costs time

    def _stop(self, *call: Any) -> None:
        if self.tracing:
            self.tracing, self.finished = False, True
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no type for it
            self.skip.data.zero_()

    def _expect(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.tracing:
            self.expected = hidden_argument(args, kwargs).detach().float() @ self.weight.float().T


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
