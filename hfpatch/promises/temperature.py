"""The promise that each temperature scales the query of its own head."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import PeftConfig
from torch import Tensor

from hfpatch.methods import QueryTemperatureConfig
from hfpatch.nn import QueryTemperature
from hfpatch.promises.common import changed_by, rounding
from hfpatch.promises.site import NO_SOFTMAX
from hfpatch.promises.softmax import observe
from hfpatch.sites import AttentionSite
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.layer import method_layer


def own_heads(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """Each τ changes the scores of its own head where the softmax reads them, and of no other, at every site.

    The heads are distinguished by the binary digits of their numbers: one run a digit and site.
    """
    if not isinstance(config, QueryTemperatureConfig):
        return True, "does not apply: tested with a query temperature"
    sites = changed_by(model, config)
    plain = observe(model, sites, tokens)
    patch(model, config)
    try:
        for site in sites:
            scores = plain[site.path].scores
            if scores is None:
                return False, NO_SOFTMAX.format(path=site.path)
            if problem := _wrong_heads(model, site, tokens, scores):
                return False, f"{problem} in {site.path}"
    finally:
        unpatch(model)
    return True, f"each temperature acts only on its own head in each of {len(sites)} attentions"


def _wrong_heads(model: Any, site: AttentionSite, tokens: Tensor, plain: Tensor) -> str | None:
    """Return an error about the heads of a site, whose scores without temperatures are ``plain``; else None."""
    layer = method_layer(site, QueryTemperatureConfig)
    assert layer is not None
    tau = cast("QueryTemperature", layer.parts(layer.working_adapters()[0])["query"]).weight
    number = torch.arange(len(tau), device=tau.device)
    for digit in range(max(1, (len(tau) - 1).bit_length())):
        chosen = (number >> digit) % 2 == (0 if len(tau) == 1 else 1)
        tau.data.copy_(chosen)
        seen = observe(model, [site], tokens)[site.path].scores
        tau.data.zero_()
        if seen is None or seen.shape[0] % len(tau):
            return f"the softmax does not see {len(tau)} query heads"
        change = (seen - plain).nan_to_num().abs().amax((1, 2)) / plain.nan_to_num().abs().amax((1, 2)).clamp(min=1e-12)
        moved = (change > rounding(model)).reshape(-1, len(tau))
        if not torch.equal(moved, chosen.to(moved.device).expand_as(moved)):
            return "a temperature does not act only on its own head"
    return None
