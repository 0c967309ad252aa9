"""Joining the processes that a launcher started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import PartialState

from hfpatch.errors import HfpatchError, first_line
from hfpatch.support.environment import CPU_ONLY, is_set
from hfpatch.support.ranks import Ranks
from hfpatch.training.interruption import end_with_launcher

_LONGEST_WAIT = timedelta(days=2)  # for a rank whose share takes longer; a lost one is noticed at once
_OF_RECIPES = ("the recipe's training.autocast", "training.autocast=bfloat16")
_OF_EVAL = ("--dtype", "--dtype bfloat16")
_RANKS: dict[bool, Ranks] = {}  # by ``split``


def start_processes(precision: tuple[str, str] = _OF_RECIPES) -> PartialState:
    """Join the other processes, if the launcher started any; later calls return the same state.

    From then on this process ends when the launcher does. For its error, ``precision`` names the setting that decides
    the precision, and an example of it.

    Raises:
        HfpatchError: if the address and port by which they meet cannot be used, or the launcher asks for mixed
            precision.
    """
    asked = (os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    if asked != "no":
        raise HfpatchError(
            f"the launcher asks for mixed precision ({asked}), and {precision[0]} decides that; launch "
            f"with --mixed_precision no, and set {precision[1]} if that is what you want"
        )
    end_with_launcher()
    try:
        return PartialState(cpu=runs_on_cpu())
    except (torch.distributed.DistError, ConnectionError, RuntimeError) as error:
        if "WORLD_SIZE" not in os.environ:
            raise
        reason = first_line(error)
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            reason = "the port is in use; choose another (accelerate launch --main_process_port N)"
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise HfpatchError(f"the processes cannot meet at {address}: {reason}") from error


def start_ranks(*, split: bool = False) -> Ranks:
    """Join the other processes as the ranks of one evaluation, as `start_processes`; later calls return the same ranks.

    With ``split`` every process holds a piece of the model, as in tensor parallelism.
    """
    if split in _RANKS:
        return _RANKS[split]
    state, ranks = start_processes(_OF_EVAL), Ranks()
    if state.num_processes > 1:
        group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        ranks = Ranks(state.process_index, state.num_processes, split, group)
    return _RANKS.setdefault(split, ranks)


def runs_on_cpu() -> bool:
    """Whether there is no accelerator, or the launcher was asked not to use it (``accelerate launch --cpu``).

    Without this, accelerate takes several processes on a machine without GPUs for as many runs of their own.
    """
    return is_set(CPU_ONLY) or torch.accelerator.current_accelerator(check_available=True) is None
