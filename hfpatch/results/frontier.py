"""Methods at several budgets: which results are points of one frontier, and how it compares with LoRA's.

The exchange rate is computed with the results (:mod:`hfpatch.evaluation.exchange`); what is better or worse at a budget
is a verdict like all others.
"""

from __future__ import annotations

from pydantic import Field

from hfpatch.results.parts import Measured, Part


class Exchange(Part):
    """How many times the reference's parameters a method needs for equal gain.

    Attributes:
        rate: the rate, the mean over the gains that both reach; None where it cannot be told.
        low, high: ends of its 95 % interval.
        lowest, highest: the range of the gains that it is the mean over, in the metric's unit.
        why: why it cannot be told.
        more_than, less_than: bounds of a rate that cannot be told; None without one.
    """

    rate: Measured = None
    low: Measured = None
    high: Measured = None
    lowest: Measured = None
    highest: Measured = None
    why: str = ""
    more_than: Measured = None
    less_than: Measured = None


class FrontierLine(Part):
    """One method.

    Attributes:
        method: the method without a budget.
        points: its budgets, the names of methods of the results, by the parameters that they train; or itself.
        exchange: its exchange rate over the reference; None for that itself, and where there is none.
    """

    method: str
    points: list[str]
    exchange: Exchange | None = None


class Frontier(Part):
    """All methods of a comparison with budgets.

    Attributes:
        task: what gains are measured on.
        metric: by which measure, the one that decides the task.
        reference: the LoRA that exchange rates are over; None where none has two budgets.
        lines: the methods that are trained.
    """

    task: str
    metric: str
    reference: str | None = None
    lines: list[FrontierLine] = Field(default_factory=list)
