"""The processes of one evaluation: what they exchange, and which of them prints why a run fails.

A launcher (``accelerate launch``, ``torchrun``) starts a process for each device; such a process is called a rank. They
exchange Python objects through a process group of their own over gloo, whatever the devices use, because a lost
connection shows there at once. A rank that fails or is killed so ends the others: one of them prints why, the others
end silently.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from hfpatch.errors import HfpatchError
from hfpatch.support.signals import sigterm_answered_by

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_WAIT = timedelta(days=2)  # for a rank whose share takes longer; one that is gone shows at once
_SILENCE_S = 20.0
_SAID = "hfpatch/said"


@dataclass
class Ranks:
    """The processes that evaluate together; without arguments this process alone.

    All ranks must make the same calls in the same order.

    Attributes:
        index: the rank of this process.
        count: how many there are.
        split: all ranks hold pieces of one model, so that they compute everything together and share nothing out.
        group: the process group by which they meet.
        loads: the tokens that each rank was given so far.
    """

    index: int = 0
    count: int = 1
    split: bool = False
    group: Any = None
    loads: list[int] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and shows what the others do not."""
        return self.index == 0

    @property
    def shares(self) -> bool:
        """Whether each rank does a part of the work."""
        return self.count > 1 and not self.split

    def same(self, value: T) -> T:
        """Return the first rank's value.

        Raises:
            HfpatchError: if another rank is gone.
        """
        if self.count == 1:
            return value
        values = [value if self.is_first else None]
        self._meet("broadcast_object_list", values, src=0)
        return cast("T", values[0])

    def everyone(self, value: T) -> list[T]:
        """Return the values of all ranks.

        Raises:
            HfpatchError: if another rank is gone.
        """
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        self._meet("all_gather_object", values, value)
        return values

    def on_first(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a function on the first rank while the others wait for it, and return its result."""
        return self.same(cast("T", work(*arguments, **options) if self.is_first else None))

    def share_out(self, costs: Sequence[int]) -> list[int]:
        """Return which rank each of several units of work goes to, by the first rank's view of their costs.

        The most expensive unit goes first, each to the rank that has least so far.
        """
        return self.same(self._assigned(costs))

    def _assigned(self, costs: Sequence[int]) -> list[int]:
        self.loads = self.loads or [0] * self.count
        here, owners = [0] * self.count, [0] * len(costs)
        for unit in sorted(range(len(costs)), key=lambda unit: -costs[unit]):
            rank = min(range(self.count), key=lambda rank: (here[rank], self.loads[rank]))
            owners[unit] = rank
            here[rank] += costs[unit]
        self.loads = [before + now for before, now in zip(self.loads, here, strict=True)]
        return owners

    def _meet(self, operation: str, *arguments: Any, **options: Any) -> None:
        import torch

        try:
            getattr(torch.distributed, operation)(*arguments, group=self.group, **options)
        except RuntimeError as error:
            raise _lost() from error


def join_ranks(index: int, count: int, *, split: bool = False) -> Ranks:
    """Return the ranks of a process that has joined the others; every one of them must call this.

    Args:
        index: the rank of this process.
        count: how many there are.
        split: they hold pieces of one model.
    """
    if count == 1:
        return Ranks()
    import torch

    return Ranks(index, count, split, torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT))


def ended_together(ranks: Ranks) -> AbstractContextManager[None]:
    """Turn the SIGTERM by which a launcher ends the ranks that are left into an error of one line.

    It changes nothing where there is one process, nor outside the main thread.
    """

    def raise_lost(*_: Any) -> NoReturn:
        raise _lost()

    return nullcontext() if ranks.count == 1 else sigterm_answered_by(raise_lost)


def _lost() -> HfpatchError:
    return HfpatchError(
        "a process of this run was ended, so the others end too; what it finished is kept, and the same command "
        "continues from there (compare: with --resume)"
    )


def runs_alone() -> bool:
    """Return whether no launcher has started other processes beside this one."""
    return int(os.environ.get("WORLD_SIZE") or 1) == 1


def may_speak() -> bool:
    """Return whether this process is the one that says why a run fails: the first of its ranks to ask.

    Where the ranks have not met yet, all fail alike: the first one speaks, and the others wait until the launcher ends
    them, since it would end the first rank as soon as one of them is gone.
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
