"""Which attentions a configuration names, by the options that PEFT's configurations have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import AttentionSite
from hfpatch.tuners.config import MethodConfig

FILLED_IN = "_filled_in"
"""Of a configuration: the paths that an injection listed in ``target_modules``, and what was given."""


def chosen_modules(config: MethodConfig) -> set[str] | str | None:
    """Return ``target_modules`` as they were given, before an injection filled them in."""
    paths, given = getattr(config, FILLED_IN, (None, None))
    return given if paths is not None and config.target_modules == paths else config.target_modules


def require_pattern(option: str, pattern: str) -> re.Pattern[str]:
    """Return a compiled regular expression of an option.

    Raises:
        HfpatchError: if it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise HfpatchError(f"{option}={pattern!r} is not a regular expression: {error}") from error


def shortest_names(model: nn.Module, sites: Sequence[AttentionSite], every: Sequence[AttentionSite]) -> set[str]:
    """Return the names to store for sites: without the body's own, so that they hold below another head, too.

    PEFT reads a name as the end of a path. Where another attention ends alike, the whole paths stay.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = {site.host_path.removeprefix(prefix) for site in sites}
    alike = {site.host_path for site in every if any(f".{site.host_path}".endswith(f".{name}") for name in names)}
    whole = {site.host_path for site in sites}
    return names if alike == whole else whole


def named_sites(sites: Sequence[AttentionSite], config: MethodConfig, *, body: str = "") -> list[AttentionSite]:
    """Return the sites that ``target_modules``, ``exclude_modules`` and ``modules_to_save`` leave, as PEFT reads them.

    Two paths name an attention: its own, and the host's of its layers. Names of a model with a head, which begin with
    that of the ``body`` (``base_model_prefix``), name those of the body, too.

    Raises:
        HfpatchError: if a name or a pattern is of no attention: a method changes these as a whole.
    """
    targets = chosen_modules(config)
    paths = [path for site in sites for path in (site.path, site.host_path)]
    if targets is not None and not isinstance(targets, str):
        ends = [f".{path}" for path in paths]
        inside = {name: any(end.endswith(f".{name}") for end in ends) for name in targets}
        targets = {name if is_known else name.removeprefix(f"{body}.") for name, is_known in inside.items()}
    for option, given in (("target_modules", targets), ("exclude_modules", config.exclude_modules)):
        for name in [given] if isinstance(given, str) else sorted(given or ()):
            is_one = require_pattern(option, name if isinstance(given, str) else rf"(.*\.)?{re.escape(name)}")
            if not any(map(is_one.fullmatch, paths)):
                raise HfpatchError(
                    f"{config.spec.label}: {option}={name!r} names no attention of this model, such as {paths[0]}; the "
                    "method changes whole attention branches: name those, or choose layers with layers_to_transform"
                )
    every = {*paths}
    options = SimpleNamespace(
        target_modules=every if targets is None else targets,
        target_parameters=None,
        exclude_modules=config.exclude_modules,
        modules_to_save=config.modules_to_save,
    )
    left = SimpleNamespace(**{**vars(options), "target_modules": every})  # excluded by one name is excluded
    return [
        site
        for site in sites
        if all(check_target_module_exists(left, path) for path in (site.path, site.host_path))
        and any(check_target_module_exists(options, path) for path in (site.path, site.host_path))
    ]


def wanted_layers(sites: Sequence[AttentionSite], config: MethodConfig) -> set[int] | None:
    """Return the indices of the layers that ``layers_to_transform`` names; None means all.

    Raises:
        HfpatchError: if ``layers_pattern`` is the name of no list of layers, or a list does not have a layer.
    """
    layers, pattern = config.layers_to_transform, config.layers_pattern
    if layers is None:
        return None
    wanted = {layers} if isinstance(layers, int) else {*layers}
    if not pattern:
        return wanted
    names = [pattern] if isinstance(pattern, str) else pattern
    for name in names:
        require_pattern("layers_pattern", name)
    by_index: dict[int, set[int]] = {}
    for site in sites:
        for match in (re.match(rf"(?:^|.*?\.){name}\.(?P<index>\d+)$", site.block_path) for name in names):
            if match is not None:
                by_index.setdefault(int(match["index"]), set()).add(site.layer)
    if missing := sorted(wanted - by_index.keys()):
        where = f"has layers {min(by_index)} to {max(by_index)}" if by_index else "no list of this model is called"
        raise HfpatchError(f"layers_to_transform: {missing} are not in layers_pattern={pattern!r}, which {where}")
    return set().union(*(by_index[index] for index in wanted))
