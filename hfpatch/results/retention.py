"""Results on text that training should not change, and the share of right answers that each method kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.parts import Comparison, High, Low, Measured, Number, Part, Score, Task, Values

KL, AGREEMENT, FORGETTING = "kl", "top1_agreement", "forgetting"
RETENTION = {BITS_PER_BYTE: False, KL: False, AGREEMENT: True, FORGETTING: False}
"""The measures on text that should be kept, and whether a higher value is better; see `hfpatch.training.retention`.

``kl`` is KL(base ‖ patched) in nats per token, ``top1_agreement`` the share of tokens before which both find the same
token the most likely one, ``forgetting`` the patched model's cross-entropy minus the base's in nats per token: what
PEFT's ``method_comparison`` records by that name on WikiText.
"""


class Rewound(Part):
    """One run at one scale of its patch.

    Attributes:
        tuning_loss: nats per token on the text of tuning; None where it was not finite.
        evaluation: the scores on held-out text and the texts of retention; empty at scale 1, whose run has them.
    """

    tuning_loss: Measured = None
    evaluation: dict[str, Score] = Field(default_factory=dict)


class RetentionPoint(Part):
    """A method at one scale of its patch against the base.

    Attributes:
        scale: the factor of its change; 1 is the method.
        tuning_loss: the mean over seeds of nats per token on the text of tuning; None where nothing is rewound, or
            the loss of a seed that did not diverge is not finite.
        comparisons: paired differences from the base: by each measure on each text, and below scale 1 on held-out text.
    """

    method: str
    scale: float = 1.0
    tuning_loss: Measured = None
    comparisons: list[Comparison] = Field(default_factory=list)

    def comparison(self, task: str, metric: str) -> Comparison | None:
        """Return the difference on one text by one measure, or None."""
        return next((one for one in self.comparisons if (one.task, one.metric) == (task, metric)), None)


class Retention(Part):
    """The changes on text that training should not change.

    Attributes:
        texts: the source, documents, tokens and hash of each text, by the name of its scores.
        scored: what the scores of all runs on each text share.
        tasks: the tasks whose right answers should be kept.
        points: each method, at each scale of its patch; the scales of a method ascending.
    """

    texts: dict[str, Values] = Field(default_factory=dict)
    scored: dict[str, Task] = Field(default_factory=dict)
    tasks: list[str] = Field(default_factory=list)
    points: list[RetentionPoint] = Field(default_factory=list)

    @property
    def changes(self) -> list[Comparison]:
        """The differences of the methods at the full scale of their patches, from which verdicts follow."""
        whole = [point for point in self.points if point.scale == 1]
        return [one for point in whole for one in point.comparisons if one.task in self.texts]

    def of(self, method: str) -> list[RetentionPoint]:
        """Return the points of a method, scales ascending."""
        return [point for point in self.points if point.method == method]

    def chosen(self, method: str) -> float | None:
        """Return the scale of the lowest loss on the text of tuning, of equal ones the largest; None without any."""
        losses = [(point.tuning_loss, -point.scale) for point in self.of(method) if point.tuning_loss is not None]
        return -min(losses)[1] if losses else None


class KeptAnswers(Part):
    """How many of the base's right answers on a task a method keeps, and how many of its wrong ones it wins.

    Attributes:
        seeds: seeds of the method.
        right: how many answers the base has right.
        wrong: how many it has wrong.
        kept: the share of the right ones that the method has right, too, the mean over seeds; NaN of none.
        kept_low: lower end of its 95 % interval over seeds and documents, and so on; -inf where documents come in
            groups.
        won: the share of the wrong ones that the method has right.
    """

    method: str
    task: str
    seeds: int
    right: int
    wrong: int
    kept: Number
    kept_low: Low = -math.inf
    kept_high: High = math.inf
    won: Number
    won_low: Low = -math.inf
    won_high: High = math.inf


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (forgetting, gain) of the Pareto front, by ascending forgetting."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best
