"""Joining the processes that a launcher started."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState

from hfpatch.errors import HfpatchError
from hfpatch.training.interruption import end_with_launcher

CPU_ONLY = "ACCELERATE_USE_CPU"
"""The variable that keeps accelerate from using an accelerator."""


def start_processes() -> PartialState:
    """Join the other processes, if the launcher started any; later calls return the same state.

    From then on this process ends when the launcher does.

    Raises:
        HfpatchError: if the address and port by which they meet cannot be used, or the launcher asks for mixed
            precision, which ``training.autocast`` decides.
    """
    asked = (os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    if asked != "no":
        raise HfpatchError(
            f"the launcher asks for mixed precision ({asked}), and the recipe's training.autocast decides that; launch "
            "with --mixed_precision no, and set training.autocast=bfloat16 if that is what you want"
        )
    end_with_launcher()
    try:
        return PartialState(cpu=runs_on_cpu())
    except (torch.distributed.DistError, ConnectionError, RuntimeError) as error:
        if "WORLD_SIZE" not in os.environ:
            raise
        reason = str(error).strip().partition("\n")[0]
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            reason = "the port is in use; choose another (accelerate launch --main_process_port N)"
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise HfpatchError(f"the processes cannot meet at {address}: {reason}") from error


def runs_on_cpu() -> bool:
    """Whether there is no accelerator, or the launcher was asked not to use it (``accelerate launch --cpu``).

    Without this, accelerate takes several processes on a machine without GPUs for as many runs of their own.
    """
    cpu_only = os.environ.get(CPU_ONLY, "").lower() in ("1", "true")
    return cpu_only or torch.accelerator.current_accelerator(check_available=True) is None
