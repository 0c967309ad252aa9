"""The results of ``hfpatch plan``: a comparison's size, its time, and what its primary questions can decide."""

from __future__ import annotations

from pydantic import Field

from hfpatch.results.layout import Match, SizeMatch
from hfpatch.results.parts import Part, Values


class PlannedMethod(Part):
    """A method: its trained parameters, and the kind that its times are those of."""

    kind: str
    trainable: int
    match: Match | SizeMatch | None = None


class MeasuredKind(Part):
    """The times of a step and of the tasks on this machine with a kind of method.

    Attributes:
        method: the method that was measured, the largest of its kind.
        step_s: seconds of an optimiser step; None for the base, which is not trained.
        step_share: the share of the step's blocks that was run to measure it.
        training_memory_bytes: the peak while it was.
        evaluation_s: seconds of each task's evaluation: the base's, in proportion to a forward pass of one row.
        evaluation_memory_bytes: the base's peak while it was measured, plus the method's parameters.
    """

    method: str
    step_s: float | None = None
    step_share: float | None = None
    training_memory_bytes: int | None = None
    evaluation_s: dict[str, float] = Field(default_factory=dict)
    evaluation_memory_bytes: int | None = None


class PlannedTask(Part):
    """A task: its size, and where a primary question names it the base's score on a sample.

    Attributes:
        metric: the primary metric; None where nothing was scored.
        documents: how many it has.
        requests: log-likelihoods that are asked for.
        tokens: of their contexts and continuations.
        generated: texts to generate, whose time is not estimated.
        timed: tokens that the base was timed on.
        sampled: documents that the base was scored on.
        score: the base's score on them.
    """

    metric: str | None = None
    documents: int
    requests: int
    tokens: int
    generated: int = 0
    timed: int = 0
    sampled: int = 0
    score: float | None = None


class PlannedQuestion(Part):
    """What the recipe can decide of a pair of a primary question, from the variances of an earlier run or assumed ones.

    Attributes:
        question: ``gain`` or ``keep``.
        method, other: the pair.
        task: the task or text.
        metric: the measure that decides it.
        seeds: of the recipe; with looks at the last one.
        documents: documents, or groups of them.
        like: the pair of the earlier run whose variance is taken; None where there is none.
        is_assumed: whether the variance is that of the base's documents and of the assumptions of the forecast. Where
            there is neither, all that follows is None.
        difference: the true difference that is found in 80 % of cases, in the metric's unit; None with one seed.
        smallest_margin: the margin within which equal methods are found to be equivalent in 80 % of cases; None with
            one seed.
        margin: the recipe's margin, if the measure has one.
        seeds_needed: the fewest seeds, fixed ones, that with the recipe's documents decide equal methods within its
            margin in 80 % of cases; None where no number does.
        documents_needed: the same of documents, or groups, with the recipe's seeds; None with one seed.
    """

    question: str
    method: str
    other: str
    task: str
    metric: str = ""
    seeds: int
    documents: int | None = None
    like: tuple[str, str] | None = None
    is_assumed: bool = False
    difference: float | None = None
    smallest_margin: float | None = None
    margin: float | None = None
    seeds_needed: int | None = None
    documents_needed: int | None = None


class Work(Part):
    """All units of one action: how many, their steps, tokens and seconds."""

    units: int = 0
    steps: int = 0
    tokens: int = 0
    requests: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return the work of both."""
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in type(self).model_fields})


class Forecast(Part):
    """The results of ``hfpatch plan``.

    Attributes:
        name: the recipe's name.
        model: the base: name, revision, hash, dtype, size.
        methods: every method but the baseline.
        kinds: the measurements by kind; ``base`` is the base itself.
        tasks: the tasks.
        work: by action: ``tune``, ``train``, ``evaluate``, ``retain``, ``rewind``.
        questions: what the primary questions can decide.
        first_look_s: with looks, the seconds until the first of them.
        jobs: how many runs at a time were asked about.
        jobs_s: the seconds of everything with so many, a device for each of them.
        assumptions: the assumptions of the estimates.
        warnings: the cautions.
        provenance: the machine and the versions.
    """

    name: str
    model: Values
    seeds: list[int]
    methods: dict[str, PlannedMethod]
    kinds: dict[str, MeasuredKind]
    tasks: dict[str, PlannedTask]
    work: dict[str, Work]
    questions: list[PlannedQuestion] = Field(default_factory=list)
    first_look_s: float | None = None
    jobs: int | None = None
    jobs_s: float | None = None
    assumptions: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    provenance: Values = Field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The estimated time of everything."""
        return sum(work.seconds for work in self.work.values())

    @property
    def memory_bytes(self) -> int:
        """The largest peak that was measured."""
        kinds = self.kinds.values()
        return max(max(kind.training_memory_bytes or 0, kind.evaluation_memory_bytes or 0) for kind in kinds)
