"""Which modules of a site a method acts on, and why it cannot act on some."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite
from hfpatch.sites.modules import features, is_linear, unwrapped
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hidden_state import argument_names
from hfpatch.tuners.hooks import PROJECTED, MethodSite
from hfpatch.tuners.lookback import cannot_look_back, known_attention

LOOKING_BACK = ("entered", *PROJECTED, "mixed")
"""The places where a method may read earlier positions."""
_REFUSED_AS = {"entered": ("pre_projection",), "left": ("content_skip",), "heads": ("query", "temperature")}


def method_site(site: AttentionSite) -> MethodSite:
    """Return the description of a site that a method is given."""
    output = output_projection(site)
    return MethodSite(
        layer=site.layer,
        name=site.name,
        hidden_size=site.hidden_size,
        columns={target: projection.columns for target, projection in site.projections.items()},
        heads=site.heads,
        mixed_size=None if output is None else features(output)[0],
        output_size=None if output is None else features(output)[1],
        exit_factor=site.exit_factor,
    )


def modules_at(site: AttentionSite, places: Iterable[str], method: type[MethodConfig]) -> dict[str, list[nn.Module]]:
    """Return the modules that :meth:`hfpatch.tuners.hooks.ActingModule.act_on` needs for a method at places."""
    modules: dict[str, list[nn.Module]] = {}
    for place in places:
        if place == "entered":
            modules |= {"entries": list(site.entries)} if site.norm is None else {"norm": [site.norm]}
        elif place == "heads" and site.heads is not None and site.heads.norm is not None:
            modules["query_norm"] = [site.inner_module(site.heads.norm)]
        elif place in PROJECTED or (place == "heads" and site.heads is not None):
            target = "query" if place == "heads" else place
            if target in site.projections:
                modules[target] = [site.projection_module(target)]
                if (source := site.projections[target].source) is not None:
                    modules |= {f"{target}_source": [site.inner_module(source)], "attention": [site.attention]}
        elif place == "mixed" and (output := output_projection(site)) is not None:
            first = next(iter(site.projections.values()))  # it is called with x before the output projection is
            reader = site.inner_module(first.source or first.path)
            modules |= {"mixed": [output], "reader": [reader], "attention": [site.attention]}
        elif place == "output" and (output := output_projection(site)) is not None:
            modules["output"] = [output]
        elif place == "left":
            modules |= {"exit": [site.exit]} | ({} if site.exit is site.attention else {"first": [site.entries[0]]})
        elif place == "stream":
            modules["block"] = [site.block]
    if method.steps_back is not MethodConfig.steps_back:  # whose arguments say how far a token may look back
        modules["row"] = [site.attention]
    return modules


def refused_at(site: AttentionSite, config: MethodConfig) -> str | None:
    """Return why a method with its options cannot act at a site, or None if it can."""
    for place in config.acts_at():
        for refused in _REFUSED_AS.get(place, (place,)):
            if refused in site.refusals:
                return site.refusals[refused]
        target, why = "query" if place == "heads" else place, None
        if target in PROJECTED and target not in site.projections:
            why = f"has no projection that computes the {target} alone"
        elif place == "heads" and site.heads is None:
            why = "does not say how many query heads it has"
        elif place in ("mixed", "output") and output_projection(site) is None:
            why = "has no output projection of its own"
        elif place == "stream" and site.block is site.attention:
            why = "is a block by itself, behind which there is no residual stream"
        elif place == "stream" and site.count > 1:
            why = f"is one of {site.count} in its block, whose end belongs to none of them alone"
        if why is not None:
            return f"{type(site.attention).__name__} {why}"
    if config.spec.shares and site.input_gradients:
        return "an autograd function of the model recomputes its blocks, so that layers can share nothing else"
    if config.steps_back() == 0:
        return config.refusal(site)

    # The arguments of the attention must say how far a token may look back
    attention, window = site.attention, getattr(site.attention, "sliding_window", None)
    for place in config.acts_at():
        if place not in LOOKING_BACK or (place == "mixed" and not site.output_path.startswith(f"{site.path}.")):
            return f"no earlier positions are known at {place!r}; act at {', '.join(LOOKING_BACK)} inside the attention"
    try:
        known_attention(attention)
    except HfpatchError as error:
        return str(error)
    why = site.refusals.get("earlier")
    if site.norm is not None or site.entries != (attention,):
        why = "it is not called with the hidden state"
    elif getattr(attention, "is_causal", True) is False:
        why = "it is not causal, so a token has no past alone"
    elif getattr(getattr(attention, "config", None), "attention_chunk_size", None):
        why = "it attends within chunks, so the first token of each has no past"
    elif isinstance(window, int) and window <= config.steps_back():
        why = f"it attends to {window} positions, and the method looks back {config.steps_back()}"
    elif not {"attention_mask", "position_ids"} & {*argument_names(attention)}:
        why = "none of its arguments is called attention_mask or position_ids"
    return config.refusal(site) if why is None else str(cannot_look_back(attention, why))


def output_projection(site: AttentionSite) -> nn.Module | None:
    """Return the output projection where it is one linear module that is called, else None."""
    if site.output_path == site.path:
        return None
    inside = site.output_path.startswith(f"{site.path}.")
    module = site.inner_module(site.output_path.removeprefix(f"{site.path}.")) if inside else unwrapped(site.exit)
    return module if is_linear(module) else None
