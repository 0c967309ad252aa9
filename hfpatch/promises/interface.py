"""Promises about the tensors that a method returns: their dtype, and their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hfpatch.errors import HfpatchError
from hfpatch.promises.common import changed_by, logits, perturbed
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import MethodSite
from hfpatch.tuners.places import method_site

OTHER = "meta"  # as any device but the CPU, it takes no tensor of the CPU, but it needs no hardware
NOT_OURS = "does not apply: PEFT's own method"


class Call(NamedTuple):
    """The first call of one of a method's places: its arguments after the parts, its result's dtype, its changes."""

    given: tuple[Any, ...]
    returned: torch.dtype
    in_place: bool


def results(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """Each place returns the dtype that it was given, and a new tensor: others may read the one that it was given."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    calls = _calls(model, config, tokens)
    for place, call in calls.items():
        if call.returned != call.given[0].dtype:
            return False, f"{place} returns {call.returned} where it was given {call.given[0].dtype}"
        if call.in_place:
            return False, f"{place} changes its argument in place; return a new tensor"
    return True, f"at {', '.join(calls)}"


def devices(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """Each place takes its parts and tensors on any device, and puts none of another one beside them."""
    if not isinstance(config, MethodConfig):
        return True, NOT_OURS
    site, calls = method_site(changed_by(model, config)[0]), _calls(model, config, tokens)
    with FakeTensorMode(allow_non_fake_inputs=True):  # computes shapes, dtypes and devices only
        with torch.device(OTHER):
            parts = config.build(site, config.seed)
        for place, call in calls.items():
            if type(call.given[-1]) is not MethodSite:  # it holds tensors of the forward pass
                continue
            given = [torch.empty_like(each, device=OTHER) if isinstance(each, Tensor) else each for each in call.given]
            try:
                getattr(config, place)(parts, *given)
            except (RuntimeError, HfpatchError) as error:
                if "device" in str(error) and "cpu" in str(error):
                    return False, f"{place} puts a tensor of the CPU beside its input; create it with device=x.device"
            except Exception:  # such as a decision by a value, which a fake tensor lacks
                continue
    return True, f"at {', '.join(calls)}"


def _calls(model: Any, config: MethodConfig, tokens: Tensor) -> dict[str, Call]:
    """Run the model with the method and return the first call at each place where the method acts."""
    calls: dict[str, Call] = {}

    def recorded(place: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(self: MethodConfig, parts: Any, *given: Any) -> Tensor:
            before = [each._version for each in given if isinstance(each, Tensor)]
            result = function(self, parts, *given)
            in_place = before != [each._version for each in given if isinstance(each, Tensor)]
            calls.setdefault(place, Call(given, result.dtype, in_place))
            return result

        return record

    original = {place: getattr(type(config), place) for place in config.acts_at()}
    with perturbed(model, config):
        for place, function in original.items():
            setattr(type(config), place, recorded(place, function))
        try:
            logits(model, tokens)
        finally:
            for place, function in original.items():
                setattr(type(config), place, function)
    return calls
