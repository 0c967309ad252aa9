"""Promises about the site: that the attention's input is changed, and where the branch ends.

Equal logits at init also hold at a wrong site. These promises observe the effect of a change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from peft import PeftConfig
from torch import Tensor, nn

from hfpatch.methods import PreProjectionConfig, QueryTemperatureConfig
from hfpatch.nn import QueryTemperature
from hfpatch.promises.common import TINY, changed_by, leak, relative, within
from hfpatch.promises.inputs import Inputs, lengths, logits, ordered
from hfpatch.promises.softmax import Observation, SoftmaxMode, observe, self_attention, silence
from hfpatch.sites import TARGETS, AttentionSite, find_sites, survey, unwrapped
from hfpatch.support.modes import hooked
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.tuners.hidden_state import argument_names, hidden_argument, replace_hidden
from hfpatch.tuners.layer import method_layer

MOVED = 1e-6  # relative; both runs have the same kernels and shapes, so that what a change does not reach is equal
NO_SOFTMAX = "no softmax over the sequence runs in {path} (attn_implementation sdpa and eager can be observed)"


def anatomy(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each attention runs a softmax over the sequence, which its output projection reads; no skipped block has one."""
    surveyed, sites = survey(model), _with_changed(model, config)
    plain = observe(model, sites, inputs)
    for site in sites:
        if site.path not in plain:
            return False, f"{site.path} is not called with these inputs"
        if plain[site.path].scores is None:
            return False, NO_SOFTMAX.format(path=site.path)

    wrong: list[str] = []  # output projections that read something although all attention weights are zero

    def reads(path: str, module: nn.Module, args: Any) -> None:
        if bool(args[0].any()):
            wrong.append(path)

    paths = [s.output_path for s in sites if s.output_path != s.path]  # else the attention computes it
    handles = [unwrapped(model.get_submodule(p)).register_forward_pre_hook(partial(reads, p)) for p in paths]
    with hooked(handles), SoftmaxMode({s.path: s.attention for s in sites}, silence):
        logits(model, inputs)
    if wrong:
        return False, f"{wrong[0]} is no output projection: it reads more than the values that the softmax weights"
    skipped = {path: model.get_submodule(path) for path in map(surveyed.blocks.__getitem__, surveyed.skipped)}
    with SoftmaxMode(skipped) as mode:
        logits(model, inputs)
    for path, scores in mode.scores.items():
        if self_attention(scores, mode.weights[path], lengths(inputs))[0] is not None:
            return False, f"{path} is left out but runs a softmax over the sequence"
    return True, f"a softmax in each of {len(sites)} attentions, none in {len(skipped)} blocks left out"


def purity(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """With every attention weight forced to zero, a changed input of the attention is invisible."""
    sites = changed_by(model, config)
    # Everywhere, as later layers may read the keys and values of earlier ones
    everywhere = {site.path: site.attention for site in _with_changed(model, config)}
    with SoftmaxMode(everywhere, silence):
        plain = logits(model, inputs)
        with hooked([handle for site in sites for handle in _entering(site, _moved)]):
            moved = logits(model, inputs)
    difference = relative(plain, moved)
    return difference <= MOVED, f"a changed input moves {difference:.1g} of the largest logit past silent branches"


def causality(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """A changed token changes no logit before it."""
    name = ordered(model, inputs)
    if name is None:
        return True, f"does not apply: {type(model).__name__} has no output for each token id"
    text = "a token changes earlier logits by {:.1g} of the largest"
    return within(model, config, text, lambda: leak(model, inputs, name))


def reach(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """x~ reaches the query, the key and the value of every head, at every site."""
    if not isinstance(config, PreProjectionConfig):
        return True, "does not apply: tested with a pre-projection"
    sites = changed_by(model, config)
    for site in sites:
        seen = observe(model, [site], inputs)[site.path]
        if seen.scores is None:
            return False, NO_SOFTMAX.format(path=site.path)
        moved = partial(_moved, at=seen.middle)
        effect = _effect_of(model, site, inputs, seen, _entering(site, moved))
        at_the_call = effect  # of x changed where the attention itself is called
        if site.norm is not None or site.entries != (site.attention,):
            at_the_call = _effect_of(model, site, inputs, seen, [_at(site.attention, moved)])
        missing = effect.missing()
        own_query_alone = site.projections.keys() == {"query"} and site.projections["query"].source is None
        if own_query_alone and at_the_call.missing() == ["key", "value"]:  # the attention reads those of another layer
            missing = [target for target in missing if target == "query"]
        if missing:
            return False, f"x~ does not reach the {' and the '.join(missing)} of every head in {site.path}"
        # The same change of query, key and value
        heads = max((effect.row - at_the_call.row).abs().max(), (effect.column - at_the_call.column).abs().max())
        if not max(float(heads), abs(effect.elsewhere - at_the_call.elsewhere)) <= MOVED:
            return False, f"x~ does not reach all that reads the hidden state in {site.path}"
    return True, f"a changed input changes query, key and value in each of {len(sites)} attentions"


def projections(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each declared projection acts as what it is called, query, key or value, at every site.

    A call of the attention calls it once, for the hidden state. The scores q·k are read where the softmax reads them.
    Columns changed at one position change: for a query, only its row of the scores; for a key, only its column; for a
    value, only the output while the attention weights are fixed. With the columns fixed, a changed hidden state no
    longer changes that part: there are no further columns.
    """
    sites = changed_by(model, config)
    tested: set[str] = set()
    for site in sites:
        targets = [target for target in site.projections if target not in site.refusals]
        modules = [path for target in targets for path in site.projections[target].paths]
        seen = observe(model, [site], inputs, modules=modules)[site.path]
        for target in targets:
            path = site.projections[target].path
            if seen.calls[path] == 0:
                return False, f"{path} is never called, so that a changed {target} has no effect in {site.path}"
            if seen.calls[path] > 1:
                how = f"is called {seen.calls[path]} times in a call of the attention"
                return False, f"{path} {how}, so that a changed {target} changes something else, too, in {site.path}"
        if seen.scores is None:
            return False, NO_SOFTMAX.format(path=site.path)
        for target in targets:
            problem = _wrong_columns(model, site, target, inputs, seen)
            if problem:
                return False, f"{problem} in {site.path}"
        tested.update(targets)
    which = ", ".join(target for target in TARGETS if target in tested)
    return True, f"columns act as {which or 'nothing'}, and no others do, in each of {len(sites)} attentions"


def own_heads(model: Any, config: PeftConfig, inputs: Inputs) -> tuple[bool, str]:
    """Each τ changes the scores of its own head where the softmax reads them, and of no other, at every site.

    The heads are distinguished by the binary digits of their numbers: one run a digit and site.
    """
    if not isinstance(config, QueryTemperatureConfig):
        return True, "does not apply: tested with a query temperature"
    sites = changed_by(model, config)
    patch(model, config)
    try:
        for site in sites:
            scores = observe(model, [site], inputs)[site.path].scores
            if scores is None:
                return False, NO_SOFTMAX.format(path=site.path)
            size = scores.nan_to_num().abs().amax((1, 2)).clamp(min=TINY)
            layer = method_layer(site, QueryTemperatureConfig)
            assert layer is not None
            tau = cast("QueryTemperature", layer.parts(layer.working_adapters()[0])["query"]).weight
            number = torch.arange(len(tau), device=tau.device)
            for digit in range(max(1, (len(tau) - 1).bit_length())):
                chosen = (number >> digit) % 2 == (0 if len(tau) == 1 else 1)
                tau.data.copy_(chosen)
                seen = observe(model, [site], inputs)[site.path].scores
                tau.data.zero_()
                if seen is None or seen.shape[0] % len(tau):
                    return False, f"the softmax does not see {len(tau)} query heads in {site.path}"
                change = (seen - scores).nan_to_num().abs().amax((1, 2)) / size
                moved = (change > MOVED).reshape(-1, len(tau))
                if not torch.equal(moved, chosen.to(moved.device).expand_as(moved)):
                    return False, f"a temperature does not act only on its own head in {site.path}"
    finally:
        unpatch(model)
    return True, f"each temperature acts only on its own head in each of {len(sites)} attentions"


def _with_changed(model: Any, config: PeftConfig) -> list[AttentionSite]:
    """Return the sites of the language model, and other sites that a configuration changes."""
    return list({site.path: site for site in (*find_sites(model), *changed_by(model, config))}.values())


@dataclass(frozen=True)
class _Effect:
    """The largest changes by a change at one position of a site, relative, with fixed attention weights.

    Args:
        row: of the scores of earlier keys where that position is the query, by head ``(batch·heads,)``.
        column: of the scores where it is the key, by head.
        others: of the scores where it is neither.
        earlier: of the scores of keys before it.
        here: of the output at that position.
        elsewhere: of the output at the other positions.
    """

    row: Tensor
    column: Tensor
    others: float
    earlier: float
    here: float
    elsewhere: float

    def missing(self) -> list[str]:
        """Return the targets that the change did not reach in every head."""
        reached = {"query": float(self.row.min()), "key": float(self.column.min()), "value": self.elsewhere}
        return [target for target, change in reached.items() if change <= MOVED]


def _effect_of(model: Any, site: AttentionSite, inputs: Inputs, plain: Observation, handles: list[Any]) -> _Effect:
    """Run the model with hooks that change something at the middle position, attention weights fixed."""
    with hooked(handles):
        seen = observe(model, [site], inputs, weights=plain.weights)[site.path]
    assert plain.scores is not None
    assert seen.scores is not None
    at = plain.middle
    others = torch.arange(plain.scores.shape[1], device=plain.scores.device) != at
    change = seen.scores - plain.scores
    change = change - change[..., :at].nanmean(-1, keepdim=True)  # the softmax does not see a constant in a row
    change = change.abs().nan_to_num() / plain.scores.nan_to_num().abs().amax((1, 2), keepdim=True).clamp(min=TINY)
    output = (seen.output - plain.output).abs().amax((0, 2)) / plain.output.abs().max().clamp(min=TINY)
    return _Effect(
        row=change[:, at, :at].amax(1),
        column=change[:, others, at].amax(1),
        others=float(change[:, others][:, :, others].max()),
        earlier=float(change[:, :, :at].max()),
        here=float(output[at]),
        elsewhere=float(output[: len(others)][others].max()),
    )


def _wrong_columns(model: Any, site: AttentionSite, target: str, inputs: Inputs, plain: Observation) -> str | None:
    """Return an error about the columns declared for a target; None if they are right."""
    declared, projection, at = site.projections[target], site.projection_module(target), plain.middle
    columns = declared.columns
    moved = partial(_moved, at=at)

    def fix(original: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if output.shape != original.shape:  # another call, with another stream
            return output
        fixed = output.clone()
        fixed[..., at, :] = original[..., at, :]
        return columns.write(output, columns.read(fixed)) if module is projection else fixed

    # Moved columns have the effect of the target in every head, and no other
    move = projection.register_forward_hook(lambda _, args, output: columns.write(output, moved(columns.read(output))))
    effect = _effect_of(model, site, inputs, plain, [move])
    row, column = float(effect.row.max()), float(effect.column.max())
    besides = {
        "query": max(column, effect.others, effect.here, effect.elsewhere),
        "key": max(effect.earlier, effect.here, effect.elsewhere),  # a convolution over time may carry it to later keys
        "value": max(row, column, effect.others),
    }
    if target in effect.missing() or not besides[target] <= MOVED:
        return f"{declared.path}: columns do not act as {target}"

    # With the columns fixed, a changed hidden state has no effect on the target
    handles = [_at(site.attention, moved)]
    for path in declared.paths:
        handles.append(site.inner_module(path).register_forward_hook(partial(fix, plain.projected[path])))
    left = _effect_of(model, site, inputs, plain, handles)
    if {"query": float(left.row.max()), "key": float(left.column.max()), "value": left.elsewhere}[target] > MOVED:
        return f"{declared.path}: columns are not all of the {target}"
    return None


def _entering(site: AttentionSite, change: Callable[[Tensor], Tensor]) -> list[Any]:
    """Change the hidden state where the pre-projection does; return the hooks."""
    if site.norm is not None:
        return [site.norm.register_forward_hook(lambda module, args, output: change(output))]
    return [_at(entry, change) for entry in site.entries]


def _at(entry: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
    names = argument_names(entry)
    return entry.register_forward_pre_hook(
        lambda module, args, kwargs: replace_hidden(names, args, kwargs, change(hidden_argument(args, kwargs))),
        with_kwargs=True,
    )


def _moved(x: Tensor, at: int | None = None) -> Tensor:
    """Return x with noise added, at one position or at all."""
    noise = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
    moved = x + noise * x.abs().mean()
    if at is None:
        return moved
    out = x.clone()
    out[..., at, :] = moved[..., at, :]  # (seq, hidden), where images are packed
    return out
