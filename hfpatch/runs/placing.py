"""Loading a model to be evaluated to where it is computed, and joining the processes that evaluate it."""

from __future__ import annotations

from hfpatch.recipes.comparison import ModelSettings
from hfpatch.support.ranks import Ranks
from hfpatch.surgery.bases import Base, load_base
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
    base = load_base(model.name, revision=model.revision, dtype=model.dtype, placement=placement, processes=ranks.count)
    if not placement.places:
        base.model.to(start_processes().device)
    return base
