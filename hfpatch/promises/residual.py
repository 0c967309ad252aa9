"""The promise that the content skip arrives where the attention branch joins the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn

from hfpatch.promises.common import rounding
from hfpatch.promises.site import changed_sites
from hfpatch.promises.tracing import AdditionTrace
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners import PreProjectionConfig
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.hidden_state import hidden_argument


def arrival(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """x~ W_skip of every block is added with coefficient 1 where its attention branch joins the residual stream."""
    if not isinstance(config, PreProjectionConfig) or not config.content_skip:
        return True, "does not apply: there is no content skip"
    paths = {site.path for site in changed_sites(model, config)}
    patch(model, config)
    try:
        missed = {site.path: _missed(model, site, tokens) for site in find_sites(model) if site.path in paths}
    finally:
        unpatch(model)
    worst = max(missed, key=lambda path: missed[path])
    seen = f"the residual stream differs from x~ W_skip by {missed[worst]:.1g} of it at most ({worst})"
    return missed[worst] < 10 * rounding(model), seen


def _missed(model: Any, site: AttentionSite, tokens: Tensor) -> float:
    """Return how far the residual stream is from having received x~ W_skip of one block, relative to it."""
    prefix = f"{site.host_path}.hfpatch_"
    skip = next(p for n, p in adapter_parameters(model).items() if n.startswith(prefix) and "skip" in n)
    before = skip.detach().clone()
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(hidden_argument(args, kwargs).detach().float())

    skip.data.zero_()
    plain = AdditionTrace(model, site, skip).run(tokens)
    silent = AdditionTrace(model, site, skip).run(tokens, silent=True)
    weight = torch.randn(skip.shape, generator=torch.Generator().manual_seed(0)).to(skip)
    skip.data.copy_(weight / weight.shape[0] ** 0.5)
    handle = site.entries[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        skipped = AdditionTrace(model, site, skip).run(tokens)
        expected = seen[0] @ skip.detach().float().T
    finally:
        handle.remove()
        skip.data.copy_(before)
    return skipped.nearest_difference(plain, silent, expected)
