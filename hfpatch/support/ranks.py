"""The processes of one evaluation: exchanging objects, and printing one error when a run fails.

A launcher (``accelerate launch``, ``torchrun``) starts a process for each device, called a rank. Ranks exchange Python
objects through a process group over gloo, which reports a lost connection at once. So a rank that fails or is killed
ends the others: one of them prints the reason, the others end silently.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from hfpatch.errors import HfpatchError
from hfpatch.support.signals import sigterm_answered_by

P = ParamSpec("P")
T = TypeVar("T")

_SILENCE_S = 20.0  # a launcher needs a few seconds to end the other ranks
_SAID = "hfpatch/said"


@dataclass
class Ranks:
    """The processes that evaluate together; without arguments this process alone.

    All ranks must make the same calls in the same order. If a rank is lost, the exchanging methods raise
    :class:`HfpatchError`.

    Attributes:
        index: the rank of this process.
        count: the number of ranks.
        split: all ranks hold pieces of one model and compute everything together.
        group: the process group of the exchange.
        loads: the tokens that each rank was given so far.
    """

    index: int = 0
    count: int = 1
    split: bool = False
    group: Any = None
    loads: list[int] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.index == 0

    @property
    def shares(self) -> bool:
        """Whether each rank does a part of the work."""
        return self.count > 1 and not self.split

    def same(self, value: T) -> T:
        """Return the first rank's value."""
        if self.count == 1:
            return value
        values = [value if self.is_first else None]
        self._meet("broadcast_object_list", values, src=0)
        return cast("T", values[0])

    def everyone(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        self._meet("all_gather_object", values, value)
        return values

    def on_first(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a function on the first rank while the others wait for it, and return its result."""
        return self.same(cast("T", work(*arguments, **options) if self.is_first else None))

    def share_out(self, costs: Sequence[int]) -> list[int]:
        """Return the rank of each of several units of work, by the first rank's view of their costs.

        Units are assigned from the most expensive one down, each to the rank with the least work so far.
        """
        self.loads = self.loads or [0] * self.count
        here, owners = [0] * self.count, [0] * len(costs)
        for unit in sorted(range(len(costs)), key=lambda unit: -costs[unit]):
            rank = min(range(self.count), key=lambda rank: (here[rank], self.loads[rank]))
            owners[unit] = rank
            here[rank] += costs[unit]
        self.loads = [before + now for before, now in zip(self.loads, here, strict=True)]
        return self.same(owners)

    def _meet(self, operation: str, *arguments: Any, **options: Any) -> None:
        import torch

        try:
            getattr(torch.distributed, operation)(*arguments, group=self.group, **options)
        except RuntimeError:
            _end_with_others()


def ended_together(ranks: Ranks) -> AbstractContextManager[None]:
    """Turn the SIGTERM by which a launcher ends the remaining ranks into an error of one line."""
    return nullcontext() if ranks.count == 1 else sigterm_answered_by(_end_with_others)


def _end_with_others(*_: Any) -> NoReturn:
    raise HfpatchError(
        "a process of this run was ended, so the others end too; what it finished is kept, and the same command "
        "continues from there (compare: with --resume)"
    )


def runs_alone() -> bool:
    """Return whether no launcher has started other processes beside this one."""
    return int(os.environ.get("WORLD_SIZE") or 1) == 1


def prints_errors() -> bool:
    """Return whether this process prints why a run fails: it is the first of its ranks to ask.

    Before the ranks have met, all fail for the same reason. Rank 0 prints it, and the others wait until the launcher
    ends them: the launcher ends rank 0 as soon as another rank is gone.
    """
    if runs_alone():
        return True
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        try:
            return bool(distributed.distributed_c10d._get_default_store().add(_SAID, 1) == 1)
        except RuntimeError:  # the process that kept the count is gone
            return True
    if os.environ.get("RANK", "0") == "0":
        return True
    time.sleep(_SILENCE_S)
    return False
