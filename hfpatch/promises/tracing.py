"""Watching what a model adds up behind an attention branch, operation by operation, whatever its modules are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.promises.common import logits
from hfpatch.sites import AttentionSite, find_sites

ADD = "aten::add"
LINEAR = {ADD, "aten::add_", "aten::mul", "aten::mul_", "aten::div", "aten::div_"}


class AdditionTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the sums, products and quotients that are computed between a branch's end and the next attention.

    The first pass through the block counts, in models that run their blocks several times.
    """

    def __init__(self, model: Any, site: AttentionSite) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.site = model, site
        self.listening, self.finished = False, False
        self.steps: list[tuple[bool, list[Tensor]]] = []  # (whether it is a sum, [result, operands of a sum])

    def run(self, tokens: Tensor) -> AdditionTrace:
        """Run the model once and listen."""
        others = [site.attention for site in find_sites(self.model)]
        handles = [self.site.exit.register_forward_hook(self._start)]
        handles += [module.register_forward_pre_hook(self._stop) for module in others]
        try:
            with self:
                logits(self.model, tokens)
        finally:
            for handle in handles:
                handle.remove()
        return self

    def nearest_difference(self, other: AdditionTrace, expected: Tensor) -> float:
        """Return how near the residual stream comes to differing from the other trace's by ``expected``.

        That is the result of a sum, or of what follows one; or an operand of a sum, where the branch itself begins a
        new residual stream. Relative to ``expected``; infinite where nothing of its size was added up.
        """
        wanted = expected.flatten()
        best, summed = float("inf"), False
        for (is_sum, mine), (_, theirs) in zip(self.steps, other.steps, strict=False):
            summed = summed or is_sum
            for a, b in zip(mine, theirs, strict=False):
                if summed and a.numel() == b.numel() == wanted.numel():
                    missed = (a - b).flatten().float() - wanted
                    best = min(best, float(missed.abs().max() / wanted.abs().max()))
        return best

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name if self.listening else ""
        is_sum = name.startswith(ADD)
        # Before the call: a sum in place overwrites its operand.
        operands = [a.detach().clone() for a in args if isinstance(a, Tensor)] if is_sum else []
        out = func(*args, **(kwargs or {}))
        if name in LINEAR and isinstance(out, Tensor):
            self.steps.append((is_sum, [out.detach().clone(), *operands]))
        return out

    def _start(self, module: nn.Module, args: Any, output: Any) -> None:
        self.listening = not self.finished

    def _stop(self, module: nn.Module, args: Any) -> None:
        if self.listening:
            self.listening, self.finished = False, True
