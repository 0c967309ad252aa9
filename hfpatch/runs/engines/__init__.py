"""Engines execute the units of a plan: one after the other in this process, in several, or on a cluster through Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.runs.engines.settings import EngineSettings

if TYPE_CHECKING:
    from hfpatch.runs.engines.driver import Engine


def make_engine(settings: EngineSettings) -> Engine:
    """Return the engine that the settings ask for.

    Raises:
        HfpatchError: if Ray is asked for and not installed.
    """
    from hfpatch.runs.engines.driver import Engine, Parallel

    if settings.is_sequential:
        return Engine()
    if settings.ray is not None:
        from hfpatch.runs.engines.ray import RayTasks

        return Parallel(RayTasks(settings), settings)
    from hfpatch.runs.engines.processes import Processes

    return Parallel(Processes(settings), settings)
