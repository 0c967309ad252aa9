"""Placing a model's weights: on one device, on all devices of a process, or in pieces on several processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from hfpatch.errors import HfpatchError, first_line
from hfpatch.recipes.base import DEVICE

_OLDEST = (5, 17)  # the first transformers whose tensor parallelism keeps pieces as DTensors
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Placement:
    """The placement of a model's weights.

    Attributes:
        device_map: as transformers takes it: ``auto`` fills the devices of this process block by block, then the
            memory of the machine; or a place for each module. None loads to the CPU, to be moved to one device.
        tp: tensor parallelism: each process has a piece of every large weight, by the model's plan.
    """

    device_map: str | dict[str, Any] | None = None
    tp: bool = False

    def check(self, processes: int) -> None:
        """Raise :class:`HfpatchError` if the options contradict each other or the device does not exist."""
        if self.tp and self.device_map is not None:
            raise HfpatchError("--tp: cannot go with --device-map, which puts whole blocks on devices; leave one out")
        if self.tp and processes == 1:
            raise HfpatchError(
                "--tp: needs a process for each device; start them with torchrun --nproc-per-node N -m hfpatch eval ..."
            )
        if self.device_map is not None and processes > 1:
            raise HfpatchError(
                f"--device-map {self.device_map}: spreads one model over the devices of one process, and there are "
                f"{processes} processes; start hfpatch without a launcher, or leave it out"
            )
        require_devices(self.device_map)


def require_devices(device_map: str | Mapping[str, Any] | None) -> None:
    """Refuse a device map with a device that is not here.

    Raises:
        HfpatchError: naming the device.
    """
    devices = {*device_map.values()} if isinstance(device_map, Mapping) else {device_map}
    for device in devices - {None}:
        if isinstance(device, str) and not DEVICE.fullmatch(device):  # auto, disk, ...
            continue
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise HfpatchError(
                f"device {device}: not available here ({first_line(error)}); leave it out, or name another"
            ) from error


def tensor_parallel_plan(config: Any, processes: int) -> Any:
    """Return the ``distributed_config`` with which ``from_pretrained`` gives each process a piece of a model.

    Raises:
        HfpatchError: if this model or this transformers has no tensor parallelism, or the number of processes does not
            divide the number of heads.
    """
    installed, oldest = version("transformers"), ".".join(map(str, _OLDEST))
    if tuple(map(int, installed.split(".")[:2])) < _OLDEST:
        raise HfpatchError(f"--tp: needs transformers {oldest}, this is {installed}")
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise HfpatchError(
            f"--tp: transformers has no plan of tensor parallelism for {config.model_type} models; use "
            "--device-map auto in one process, or leave it out"
        )
    for name in _HEADS:
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % processes:
            raise HfpatchError(f"--tp: {processes} processes cannot share {heads} heads ({name}); choose a divisor")
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_plan="auto", tp_size=processes)
