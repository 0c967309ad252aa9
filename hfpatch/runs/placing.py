"""Loading a model to be evaluated to where it is computed, and joining the processes that evaluate it."""

from __future__ import annotations

from hfpatch.recipes.comparison import ModelSettings
from hfpatch.support.ranks import Ranks
from hfpatch.surgery.bases import Base, load_base, place_base
from hfpatch.surgery.placement import Placement
from hfpatch.training.processes import start_processes, start_ranks


def ranks_of(placement: Placement) -> Ranks:
    """Join the processes that evaluate a model together.

    Raises:
        HfpatchError: if they cannot meet, or the placement does not go with their number.
    """
    ranks = start_ranks(split=placement.tp)
    placement.check(ranks.count)
    return ranks


def load_placed(model: ModelSettings, placement: Placement, ranks: Ranks) -> Base:
    """Load a model where it is computed.

    Raises:
        HfpatchError: as `load_base`.
    """
    loading = model.loading
    if placement.device_map is not None:
        loading["device_map"] = placement.device_map
    base = load_base(model.name, **loading, tensor_parallel=ranks.count if placement.tp else None)
    place_base(base, start_processes().device)
    return base
