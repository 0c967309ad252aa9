"""The methods of a comparison, or the variants of a study, with their sizes, runs, curves and layers."""

from __future__ import annotations

from statistics import fmean, median

from pydantic import Field

from hfpatch.results.parts import Number, Part, Score, TrainResult, Values
from hfpatch.results.retention import Rewound


class Curve(Part):
    """A method's training loss, the mean over the seeds that all methods have; a seed's is in its ``metrics.jsonl``.

    Attributes:
        steps: optimiser steps that every seed has, ascending; thinned out where a run has very many.
        loss: the mean loss at each of them, nats per predicted token.
        seeds: how many seeds there are.
        held_out: the mean loss on held-out text, by the steps after which every seed measured it.
    """

    steps: list[int]
    loss: list[Number]
    seeds: int
    held_out: dict[int, float] = Field(default_factory=dict)


class LayerSeries(Part):
    """One quantity of one method, layer by layer, the mean over seeds.

    Attributes:
        quantity: the name of the quantity.
        group: what distinguishes several series of one quantity (an adapter, a target), or nothing.
        points: layer -> value.
        reference: a value to compare them with, such as that at the paper's init.
    """

    quantity: str
    group: str = ""
    points: dict[int, float]
    reference: float | None = None


class Run(Part):
    """One method with one seed; ``train`` is None where nothing is trained.

    ``computed_with`` is what its scores were computed with, see :data:`hfpatch.results.identity.COMPUTED_WITH`;
    ``retention`` has the scores on text that should be kept, ``rewound`` those at other scales of its patch.
    """

    computed_with: Values | None = None
    commit: str | None = None
    train: TrainResult | None = None
    evaluation: dict[str, Score] = Field(default_factory=dict)
    retention: dict[str, Score] | None = None
    rewound: dict[str, Rewound] | None = None

    @property
    def diverged_step(self) -> int | None:
        """The step at which the run diverged, or None."""
        return None if self.train is None else self.train.diverged_step


class Parameters(Part):
    """Parameter counts: trained by the method, added to the base, and of the base itself.

    Of a model from scratch all are trained and added to nothing; ``non_embedding`` counts those outside of the
    embeddings of tokens and positions and a head.
    """

    trainable: int
    added: int
    base: int
    non_embedding: int | None = None


class Diagnostic(Part):
    """f of one query path after a step, the mean over tokens: a line of diagnostics.jsonl; in results over seeds, too.

    Attributes:
        step: optimiser steps done.
        layer: index of the block.
        target: ``query``, ``key`` or ``value``.
        size: ‖f(x)‖/‖A(x)‖. A is what f is added to: x for an identity anchor, x W_Q for a weight anchor. f of a
            residual path Q = x + xW is xW.
        cosine: that between f(x) and A(x); 0 where one of them is 0.
        size_beside_x: ‖f(x)‖/‖x‖, whatever the anchor.
    """

    step: int
    layer: int
    target: str = "query"
    size: float | None = None
    cosine: float | None = None
    size_beside_x: float | None = None


class Variant(Part):
    """One variant of a study of models from scratch.

    Attributes:
        description: a sentence.
        query: its query path in a line of maths.
        architecture: its whole architecture, as in a recipe.
        training: its own settings of training, beside those of all variants and the chosen values.
        diagnostics: f of its query paths by step, over the seeds that came to the end; empty without an f.
    """

    description: str = ""
    query: str = ""
    architecture: Values = Field(default_factory=dict)
    training: Values = Field(default_factory=dict)
    diagnostics: list[Diagnostic] = Field(default_factory=list)


class _Matched(Part):
    """How near a part's parameter count is to that of another method; ``difference`` is relative."""

    to: str
    parameters: int
    target_parameters: int
    difference: float | None = None


class Match(_Matched):
    """The rank solved for another method's parameter count."""

    rank: int

    @property
    def words(self) -> str:
        """The size in words: ``rank 320``."""
        return f"rank {self.rank}"


class SizeMatch(_Matched):
    """A size other than a rank, solved for another method's parameter count: the option and its value."""

    size: str
    value: int | float

    @property
    def words(self) -> str:
        """The size in words: ``block size 64``."""
        return f"{self.size.replace('_', ' ')} {self.value:g}"


class Cost(Part):
    """What a training step of a method costs, measured beside the other methods.

    Attributes:
        steps_s: seconds of a step in each round; a round has one step of every method, on the same batch.
        memory_bytes: the peak memory of a step, the median over rounds; on a CPU the process's resident memory, None
            where the system cannot reset that measurement.
        share: the share of a step's blocks that were run; ``steps_s`` are those of a whole step, in proportion.
        shared: whether other programs used the machine meanwhile; None where that is not known.
    """

    steps_s: list[float]
    memory_bytes: int | None = None
    share: float = 1.0
    shared: bool | None = None

    def steps_over(self, other: Cost) -> float:
        """Return the time of a step over that of another method: the median over rounds of the ratio in each."""
        return median(ours / theirs for ours, theirs in zip(self.steps_s, other.steps_s, strict=True))

    def memory_over(self, other: Cost) -> float | None:
        """Return the peak memory over that of another method; None where one is not known."""
        return self.memory_bytes / other.memory_bytes if self.memory_bytes and other.memory_bytes else None


class Method(Part):
    """One method: its parts, its parameters, its runs by seed, and over seeds its loss curve and layers.

    ``label`` is what reports call it; None is the name under which the results have it. ``cost`` is that of a training
    step, where it was measured; ``merges`` whether the method can be merged into the base's weights, where known;
    ``variant`` says what a model from scratch is, which has no parts.
    """

    label: str | None = None
    parts: list[Values] = Field(default_factory=list)
    parameters: Parameters
    match: Match | SizeMatch | None = None
    form: str | None = None
    runs: dict[int, Run] = Field(default_factory=dict)
    curve: Curve | None = None
    layers: list[LayerSeries] = Field(default_factory=list)
    cost: Cost | None = None
    merges: bool | None = None
    variant: Variant | None = None

    @property
    def trainable(self) -> int:
        """How many parameters it trains."""
        return self.parameters.trainable

    @property
    def compared_size(self) -> int:
        """The parameters that its size is told by: those it trains, of a model from scratch without embeddings."""
        return self.parameters.non_embedding or self.parameters.trainable

    @property
    def trained(self) -> list[TrainResult]:
        """The outcomes of its trainings; none where nothing is trained."""
        return [run.train for run in self.runs.values() if run.train is not None]

    def mean(self, field: str) -> float | None:
        """Return the mean over seeds of a field of the training outcome, or None where nothing was trained."""
        values = [getattr(train, field) for train in self.trained]
        return fmean(values) if values else None

    @property
    def least_survival(self) -> float | None:
        """The smallest share of a tensor's weights that its updates really changed; None where it was not counted."""
        return min((share for train in self.trained for share in train.update_survival.values()), default=None)

    @property
    def diverged(self) -> dict[int, int]:
        """The seeds that diverged and the step of each."""
        steps = {seed: run.diverged_step for seed, run in sorted(self.runs.items())}
        return {seed: step for seed, step in steps.items() if step is not None}

    @property
    def all_diverged(self) -> bool:
        """Whether it has runs, all of which diverged."""
        return 0 < len(self.runs) == len(self.diverged)


class Study(Part):
    """What a study of models from scratch has in place of a base.

    Attributes:
        baseline: the variant that the others are compared with, itself trained with every seed.
        architecture: what all variants share of it.
        tokenizer: its size and hash.
    """

    baseline: str
    architecture: Values = Field(default_factory=dict)
    tokenizer: Values = Field(default_factory=dict)
