"""Promises on the site: that what is changed is the attention's input, and where the branch ends.

Equal logits at init pass at a wrong site too. These look at what the model does when something is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn

from hfpatch.patching import patch, unpatch
from hfpatch.promises.common import held, leak, logits, perturbed, relative, rounding
from hfpatch.promises.tracing import AdditionTrace
from hfpatch.sites import AttentionSite, find_sites, unwrapped
from hfpatch.tuners import NonlinearQueryConfig, PreProjectionConfig
from hfpatch.tuners.adapters import adapter_parameters
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.hidden_state import hidden_argument, replace_first, replace_hidden

MOVED = 1e-6  # relative: what rounding alone does not move


def purity(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """With every branch's output forced to zero, a changed input of the attention is invisible."""
    sites = _changed_sites(model, config)
    with _branches_silent(model, sites):
        plain = logits(model, tokens)
        with _inputs_moved(sites):
            moved = logits(model, tokens)
    difference = relative(plain, moved)
    return difference <= MOVED, f"a changed input moves {difference:.1g} of the largest logit past silent branches"


def arrival(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """x~ W_skip arrives in the residual stream with coefficient 1."""
    if not isinstance(config, PreProjectionConfig) or not config.content_skip:
        return True, "does not apply: there is no content skip"
    sites = _changed_sites(model, config)
    ends = [sites[0], *sites[1:][-1:]]
    if all(_is_residual(model, site, tokens) for site in ends):
        return True, "the branch ends in the residual stream itself (first and last block)"
    worst = max(_missed(model, config, tokens, site) for site in ends)
    limit = 10 * rounding(model)
    return worst < limit, f"the residual stream differs from x~ W_skip by {worst:.1g} of it (first and last block)"


def causality(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """A changed token changes no logit before it."""
    found = 0.0

    def causal() -> bool:
        nonlocal found
        found = leak(model, tokens)
        return found <= rounding(model)

    def patched() -> bool:
        with perturbed(model, config):
            return causal()

    return held(patched, lambda: f"a token changes earlier logits by {found:.1g} of the largest", causal)


def query_columns(model: Any, config: PeftConfig, tokens: Tensor) -> tuple[bool, str]:
    """What is taken for query, key and value acts as such: seen in the attention's output when columns are moved.

    A query acts at its own position alone, and not at the first, whose softmax has one key. A key acts later, not at
    its own first position. A value acts at its position and later.
    """
    if not isinstance(config, NonlinearQueryConfig):
        return True, "does not apply: no projection is changed"
    site = _changed_sites(model, config)[0]
    with _without_sinks(site.attention) as alone:
        effects = {target: _effects(model, site, target, tokens) for target in config.targets}
    wrong = [target for target, effect in effects.items() if not _acts_as(target, *effect, alone=alone)]
    return held(
        lambda: not wrong,
        lambda: f"columns {'do not ' if wrong else ''}act as {', '.join(wrong or effects)} in {site.path}",
        lambda: leak(model, tokens) <= rounding(model),
    )


def _changed_sites(model: Any, config: PeftConfig) -> list[AttentionSite]:
    """Return the sites that the configuration changes."""
    if not isinstance(config, SurgeryConfig):
        return find_sites(model)
    patch(model, config)
    hosts = {name.partition(".hfpatch_")[0] for name in adapter_parameters(model)}
    unpatch(model)
    return [site for site in find_sites(model) if site.host_path in hosts]


@contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _branches_silent(model: Any, sites: list[AttentionSite]) -> Any:
    def silent(module: nn.Module, args: Any, output: Any) -> Any:
        return replace_first(output, torch.zeros_like)

    outputs = [unwrapped(model.get_submodule(site.output_path)) for site in sites]
    return _hooks([module.register_forward_hook(silent) for module in outputs])


def _inputs_moved(sites: list[AttentionSite]) -> Any:
    def moved(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape[-1], generator=generator).to(x)
        return x + noise * x.abs().mean()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return replace_hidden(module, args, kwargs, moved(hidden_argument(args, kwargs)))

    entries = [entry for site in sites for entry in site.entries]
    return _hooks([entry.register_forward_pre_hook(enter, with_kwargs=True) for entry in entries])


def _is_residual(model: Any, site: AttentionSite, tokens: Tensor) -> bool:
    """Return whether the branch's end puts out the residual stream: something that varies when the branch is silent."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen.append((output if isinstance(output, Tensor) else output[0]).detach().float())

    with _branches_silent(model, [site]), _hooks([site.exit.register_forward_hook(keep)]):
        logits(model, tokens)
    rows = seen[0].flatten(0, -2)
    return float((rows - rows[:1]).abs().max()) > MOVED


def _missed(model: Any, config: PreProjectionConfig, tokens: Tensor, site: AttentionSite) -> float:
    """Return how far the residual stream is from having received x~ W_skip of one block, relative to it."""
    patch(model, config)
    skips = [
        p for n, p in adapter_parameters(model).items() if n.startswith(f"{site.host_path}.hfpatch_") and "skip" in n
    ]
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(hidden_argument(args, kwargs).detach().float())

    site = next(s for s in find_sites(model) if s.path == site.path)
    try:
        without = AdditionTrace(model, site).run(tokens)
        weight = torch.randn(skips[0].shape, generator=torch.Generator().manual_seed(0)).to(skips[0])
        skips[0].data.copy_(weight / weight.shape[0] ** 0.5)
        handle = site.entries[0].register_forward_pre_hook(keep, with_kwargs=True)
        with _hooks([handle]):
            with_skip = AdditionTrace(model, site).run(tokens)
        expected = seen[0] @ skips[0].detach().float().T
    finally:
        unpatch(model)
    return with_skip.nearest_difference(without, expected)


@contextmanager
def _without_sinks(attention: nn.Module) -> Iterator[bool]:
    """Take learned sinks out of the softmax; yield whether it is then over one key at the first position.

    It is not where sinks are computed from the input.
    """
    sinks = [p for name, p in attention.named_parameters() if name.endswith(("sinks", "sink"))]
    before = [p.detach().clone() for p in sinks]
    try:
        for p in sinks:
            p.data.fill_(-1e4)
        yield not any("sink" in name for name, _ in attention.named_modules())
    finally:
        for p, value in zip(sinks, before, strict=True):
            p.data.copy_(value)


def _effects(model: Any, site: AttentionSite, target: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the change of the attention's output, per position, when columns move at the first and a middle one."""
    plain = _attention_output(model, site, tokens, lambda out: out)
    columns = site.projections[target].columns

    def moved(at: int) -> Callable[[Tensor], Tensor]:
        def move(out: Tensor) -> Tensor:
            value = columns.read(out).clone()
            generator = torch.Generator().manual_seed(at)
            value[:, at] += torch.randn(columns.size, generator=generator).to(value) * value.abs().mean()
            return columns.write(out, value)

        return move

    middle = plain.shape[1] // 2
    changes = []
    for at in (0, middle):
        output = _attention_output(model, site, tokens, moved(at), at=target)
        changes.append((output - plain).abs().amax(dim=(0, 2)) / plain.abs().max())
    return changes[0], changes[1]


def _attention_output(
    model: Any, site: AttentionSite, tokens: Tensor, change: Callable[[Tensor], Tensor], *, at: str | None = None
) -> Tensor:
    """Return the first output of the attention module in a forward pass, its projection's output changed."""
    seen: list[Tensor] = []
    once = [True]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        seen.append(first.detach().float().clone())

    def project(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return change(output) if once and once.pop() else None

    handles = [site.attention.register_forward_hook(keep)]
    if at is not None:
        handles.append(site.projection_module(at).register_forward_hook(project))
    with _hooks(handles):
        logits(model, tokens)
    return seen[0]


def _acts_as(target: str, at_first: Tensor, at_middle: Tensor, *, alone: bool) -> bool:
    middle = at_middle.shape[0] // 2
    before, here, after = (bool((part > MOVED).any()) for part in at_middle.tensor_split((middle, middle + 1)))
    first, later = (bool((part > MOVED).any()) for part in at_first.tensor_split((1,)))
    if target == "query":
        return here and not (before or after or later or (first and alone))
    return later and not before and first == (target == "value")
