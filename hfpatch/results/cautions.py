"""Cautions of a comparison, one sentence each, for its results, its reports and the terminal.

Where a base scores nothing, or no better than guessing, a task cannot distinguish methods: an undecided pair there
says nothing of them. A difference that is found counts, whatever the base scores.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from hfpatch.errors import listed
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.pairs import OF_SAME_SIZE, controls_of, references
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT, SAME_SIZE
from hfpatch.recipes.training import TrainingSettings, group_of
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.identity import computed_differently
from hfpatch.results.low_noise import is_share
from hfpatch.results.parts import Comparison, TaskResult
from hfpatch.results.tuning import Tuning

PRODUCTS = {
    "bf16": "of bfloat16 weights in bfloat16, by instructions of the processor",
    "fp32": "of bfloat16 weights in float32: no bfloat16 instructions, no gain by them, or HFPATCH_MATMUL=fp32",
}
"""How the products of a bfloat16 model were computed on a CPU, by the name of :mod:`hfpatch.support.cpu`."""
Level = Literal["at floor", "at chance"]

FLOOR = 0.01
"""The share of right answers up to which a base is at floor."""
_Z = 1.645
"""One-sided at 5 %: how many standard errors above guessing a base must be."""
STARTS = 2.0
"""Nats a token by which a base may be worse where rows begin inside a document than where documents begin. Gemma 3
without its ``<bos>`` is worse by 3.1 over whole rows."""
MOST_TIES = 0.01
"""Share of documents with several likeliest choices above which a caution says so."""
SURVIVAL = 0.9
"""Share of trained weights that an update must really change."""


def comparison_cautions(recipe: Recipe | StudyRecipe, results: ComparisonResults) -> Iterator[str]:
    """Yield every caution that a recipe and its complete results show."""
    methods, tuning, training = results.methods, results.tuning, recipe.training
    for run in methods[recipe.baseline].runs.values():
        scores = results.scores_of(run)
        yield from floor_cautions(scores)
        yield from document_cautions(scores)
        yield from start_cautions(scores)
    for name, method in methods.items():
        for seed, run in method.runs.items():
            yield from tie_cautions(results.scores_of(run), name if name == recipe.baseline else f"{name}, seed {seed}")

    # How the learning rates were chosen
    if tuning is None:
        yield from filter(None, [rates_sentence(results)])
    else:
        yield from _tuning_cautions(tuning)
        for name in [name for name, method in methods.items() if method.variant is not None]:
            if name not in tuning.chosen:
                yield f"{name} is not tuned: its runs take the recipe's learning rate, which may favour the others."

    yield from _size_cautions(recipe, results)
    yield from _training_cautions(results)
    if results.looks:
        taken = [str(look.seeds) for look in results.looks]
        planned = len(recipe.trained) * len(training.all_seeds)
        yield (
            f"Seeds grow until the primary pairs are decided, with looks after {listed(taken)} seeds; "
            f"{results.runs_saved} of {planned} planned trainings were not needed. A primary pair's outcome and "
            "numbers are those of the look that decided it; its plain interval, and secondary tests of "
            f"{results.noun}s that got more seeds, are not corrected for looks."
        )
        counts = {name: len(method.runs) for name, method in methods.items() if name in recipe.trained}
        if len(set(counts.values())) > 1:
            of_each = ", ".join(f"{name} {count}" for name, count in counts.items())
            yield f"Means over different seeds do not compare, their paired differences do: seeds of {of_each}."
    points = results.retention.points if results.retention is not None else []
    yield from dependence_cautions(
        [*results.comparisons, *(one for point in points for one in point.comparisons)], {*results.tasks} - {HELD_OUT}
    )
    untested = [
        verdict.task if verdict.clusters is None else f"{verdict.task} ({verdict.clusters.text})"
        for verdict in results.verdicts
        if verdict.why.startswith("too few")
    ]
    if untested:
        yield f"Too few documents to test any difference: {', '.join(dict.fromkeys(untested))}."
    yield from _origin_cautions(recipe, results)


def _size_cautions(recipe: Recipe | StudyRecipe, results: ComparisonResults) -> Iterator[str]:
    """Yield a sentence for each method whose size does not match that of methods compared with it."""
    controls = controls_of(recipe.methods)
    sizes = {name: method.trainable for name, method in results.methods.items()}
    unmatched: dict[str, list[str]] = {}
    for name, others in references(recipe).items():
        for other in others:
            part = controls.get(name, {}).get(other)
            if other == results.baseline or (part is not None and part not in OF_SAME_SIZE):  # smaller by design
                continue
            if abs(sizes[other] - sizes[name]) > SAME_SIZE * sizes[name]:
                ratio = f"{name} ({sizes[name]:,}, a ratio of {sizes[other] / sizes[name]:.2f})"
                unmatched.setdefault(other, []).append(ratio)
    for other, names in unmatched.items():
        yield (
            f"{other} has {sizes[other]:,} trainable parameters, which does not match {', '.join(names)}: "
            "a difference between them may be one of size."
        )


def _origin_cautions(recipe: Recipe | StudyRecipe, results: ComparisonResults) -> Iterator[str]:
    """Yield a sentence for literal forms, low dtypes, and runs of several commits or machines."""
    methods, tuning, training = results.methods, results.tuning, recipe.training
    for name, method in methods.items():
        if method.form == "literal":
            yield (
                f"{name} is the literal form Q = (xW_Q + f(x))/2, which halves the pretrained attention logits at "
                "step 0; it does not start from the base model."
            )
    if isinstance(training, TrainingSettings) and training.trainable_dtype != "float32":
        groups = ", ".join(f"{group} in {dtype}" for group, dtype in training.trainable_dtypes.items())
        kept = f"{training.trainable_dtype} ({groups})" if groups else training.trainable_dtype
        yield f"What is trained is kept in {kept}, which loses small updates."
    if results.provenance.get("matmul") == "fp32":
        yield f"Matrix products: {PRODUCTS['fp32']}."
    trained = [*results.runs.values(), *(tuning.trials if tuning is not None else ())]
    commits = {run.commit or "unknown" for run in trained}
    if len(commits) > 1:
        yield f"The runs were made with several commits of hfpatch: {', '.join(sorted(commits))}."
    computed = {name: dict(run.computed_with) for name, run in results.runs.items() if run.computed_with}
    if results.study is not None:  # whose variants are of several classes
        computed = {name: {**values, "class": None} for name, values in computed.items()}
    yield from computed_differently({name: [values] for name, values in computed.items()})


def _tuning_cautions(tuning: Tuning) -> Iterator[str]:
    """Yield a sentence for the methods whose best rate is at an edge of those tried, and for each that is not tuned."""
    at_edge: dict[tuple[str, float, int], list[str]] = {}
    for name, choice in tuning.chosen.items():
        if choice.is_tuned and choice.edge is not None:
            key = choice.edge, float(choice.values["lr"]), len(tuning.rates_of(name))
            at_edge.setdefault(key, []).append(name)
    for (edge, rate, tried), names in at_edge.items():
        beyond = "lower" if edge == "lowest" else "higher"
        yield (
            f"{listed(names)}: the best learning rate, {rate:g}, is the {edge} of the {tried} that were tried, so a "
            f"{beyond} one may be better."
        )
    for name, choice in tuning.chosen.items():
        if not choice.is_tuned:
            yield f"{name}: all {choice.trials} trials of tuning diverged; its runs take the lowest rate, untuned."


def _training_cautions(results: ComparisonResults) -> Iterator[str]:
    """Yield a sentence for chosen weights, small updates, diverged runs, updates left out and early stops."""
    if results.training.get("keep_best"):
        yield (
            "training.keep_best chose each run's weights by their loss on held-out text, so the loss on that text "
            "may be lower than on new text."
        )
    for name, method in results.methods.items():
        if (least := method.least_survival) is not None and least < SURVIVAL:
            yield (
                f"{name}: as little as {least:.0%} of a tensor's weights really changed in an optimiser step; "
                "the other updates were too small for the weights' dtype."
            )
    for name, run in results.runs.items():
        train = run.train
        if train is None:
            continue
        if train.diverged_step is not None:
            yield f"{name}: diverged at step {train.diverged_step}; it has no scores, and no comparison counts it."
        if train.skipped_steps:
            updates = "1 update was" if train.skipped_steps == 1 else f"{train.skipped_steps} updates were"
            yield f"{name}: {updates} left out, the loss or gradient not being finite."
        if train.stopped_early:
            yield f"{name}: stopped early after {train.steps} steps, so it saw less text."


def level_of(score: TaskResult | None) -> Level | None:
    """Say whether a base's primary metric is at floor or at chance; None if neither, or where that is not known.

    At floor: a share of at most :data:`FLOOR`. At chance: a share p of n documents (or groups of them) with
    p <= c + 1.645 sqrt(c(1 - c)/n), c the share that guessing gets.
    """
    if score is None or not score.higher_is_better or not is_share(score.primary):
        return None
    value, units = score.metrics.get(score.primary), score.clusters.groups if score.clusters else score.n
    if value is None or not units:
        return None
    if value <= FLOOR:
        return "at floor"
    chance = score.chance
    if chance is not None and value <= chance + _Z * math.sqrt(chance * (1 - chance) / units):
        return "at chance"
    return None


def level_at(results: ComparisonResults, method: str | None, task: str) -> Level | None:
    """Say whether a method, such as the baseline, is at floor or at chance on a task with every seed."""
    runs = results.methods[method].runs.values() if method in results.methods else ()
    levels = {level_of(results.scores_of(run).get(task)) for run in runs}
    return levels.pop() if len(levels) == 1 else None


def floor_cautions(scores: Mapping[str, TaskResult], name: str = "the base") -> Iterator[str]:
    """Yield a sentence for each task on which ``name`` is at floor or at chance."""
    for task, score in scores.items():
        level, value = level_of(score), score.metrics.get(score.primary, 0.0)
        right = f"{score.primary}: {100 * value:.3g} % of {score.n:,} documents"
        if level == "at chance":
            right += f", guessing gets {100 * (score.chance or 0):.3g} %"
            why = "the task measures little of this model"
        else:
            why = "a method that changes nothing and one that does harm look the same"
        if level is not None:
            alike = "so equal scores there do not show that methods are alike"
            yield f"{name} is {level} on {task} ({right}): {why}, {alike}."


def document_cautions(scores: Mapping[str, TaskResult]) -> Iterator[str]:
    """Yield what every model's scores on a task share: documents left out, and few-shot examples."""
    for task, score in scores.items():
        if (without := score.left_out) is not None:
            yield (
                f"{task}: {without.documents:,} of {score.n + without.documents:,} documents cannot be scored and are "
                f"left out (document {without.first}: {without.why})."
            )
        few = score.few_shot
        if few is not None and few.own_left_out:
            yield (
                f"{task}: its prompts differ from lm-eval's, which draws few-shot examples from all scored documents "
                "and so shows some their own answer; here each is left out of its own examples. fewshot_split in the "
                "task's file names another split for them."
            )
        if few is not None and few.related:
            yield (
                f"{task}: {few.related:,} of {score.n:,} documents have a few-shot example of their own group "
                f"({score.clusters.column if score.clusters else 'cluster'}), which may say their answer; "
                "fewshot_split in the task's file names another split for examples."
            )


def start_cautions(scores: Mapping[str, TaskResult]) -> Iterator[str]:
    """Yield a sentence for each text on which the base predicts badly where blocks begin inside a document."""
    for task, score in scores.items():
        starts = score.starts or {"documents": 0.0, "inside": 0.0}
        if starts["inside"] - starts["documents"] > STARTS:
            yield (
                f"{task}: the base's first tokens cost {starts['inside']:.2f} nats each where a row begins inside a "
                f"document, and {starts['documents']:.2f} where a document begins: it may expect a start token that "
                "its tokenizer does not add, and a gain may be the repair of that."
            )


def dependence_cautions(comparisons: Iterable[Comparison], tasks: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each task or text whose neighbouring documents vary together without declared groups.

    ``tasks`` are lm-eval's, all others texts.
    """
    for task, clusters in {one.task: one.clusters for one in comparisons}.items():
        if clusters is None or clusters.run is None:
            continue
        option = f"--cluster {task}=COLUMN (evaluation.cluster in a recipe)" if task in tasks else "data.group"
        yield (
            f"{task}: neighbouring {'groups' if clusters.column else 'documents'} vary together "
            f"(p = {clusters.p:.2g}), so they are not independent; tests take {clusters.text} as units. {option} says "
            "what belongs together."
        )


def tie_cautions(scores: Mapping[str, TaskResult], name: str) -> Iterator[str]:
    """Yield a sentence for each task on which more than 1 % of a model's decisions are ties."""
    for task, score in scores.items():
        if score.ties is not None and score.ties > MOST_TIES * score.n:
            yield (
                f"{name}: {score.ties:,} of {score.n:,} documents of {task} have several likeliest choices, and "
                "lm-eval's accuracy takes the first: there it shows where the right choice stands, not what the model "
                "knows."
            )


def baseline_cautions(results: ComparisonResults) -> Iterator[str]:
    """Yield a sentence for each task on which the baseline is at floor or at chance.

    The scores are those of its first run: seeds change nothing in a base.
    """
    runs = results.methods[results.baseline].runs if results.baseline is not None else {}
    yield from floor_cautions(results.scores_of(runs[min(runs)])) if runs else ()


def rates_sentence(results: ComparisonResults) -> str:
    """Say in one sentence how the learning rates were chosen; nothing where that is not known."""
    if (tuning := results.tuning) is not None:
        # Of how many rates each method is at its best, and which are not, as all their trials diverged
        diverged = [name for name, choice in tuning.chosen.items() if not choice.is_tuned]
        if len(diverged) == len(tuning.chosen):
            return f"No {results.noun} is tuned: all trials diverged." if diverged else ""
        counts = sorted({len(tuning.rates_of(name)) for name in tuning.chosen})
        trials = {name: choice.trials for name, choice in tuning.chosen.items()}
        more = ""
        if len(set(trials.values())) > 1:
            more = f", not all with as many trials ({', '.join(f'{name} {n}' for name, n in trials.items())})"
        elif {*trials.values()} != {*counts}:
            more = f", {max(trials.values())} trials each"
        but = f" but {listed(diverged)}, not tuned as all trials diverged," if diverged else ""
        tried = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
        return f"Each {results.tuned_noun}{but} at its best of {tried} rates{more}{_rate_errors(results)}."
    usual = results.training.get("lr")
    if not isinstance(usual, int | float) or not results.others:
        return ""
    # The rates of the tensors that the methods have; where these are not known, those of all groups
    rates: dict[str, float] = {}
    by_group: dict[str, float] = results.training.get("learning_rates") or {}
    for name, method in results.methods.items():
        if name == results.base:
            continue
        tensors = {tensor for train in method.trained for tensor in train.update_survival}
        groups: set[str] = {group_of(tensor) for tensor in tensors - {"all"}}
        settings = results.training | (method.variant.training if method.variant is not None else {})
        for group in groups or {"other", *by_group}:
            rate = by_group[group] if group in by_group else settings["lr"]
            which = f" for tensor group {group}" if group in by_group else f" for variant {name}"
            rates["" if rate == usual else which] = rate
    if len({*rates.values()}) == 1:
        if len(results.others) == 1:
            return f"One learning rate ({rate:g}), not tuned: another may change the result."
        return f"All {results.noun}s at one rate ({rate:g}), which may favour some."
    shown = ", ".join(f"{rate:g}{which}" for which, rate in sorted(rates.items()))
    if len(results.others) == 1:
        return f"No rate was tuned ({shown}): others may change the result."
    return f"No rate was tuned ({shown}), which may favour some."


def _rate_errors(results: ComparisonResults) -> str:
    """Return what the choice of the rates may be worth, to follow the sentence about them."""
    tuned = {name for name, choice in results.tuning.chosen.items() if choice.is_tuned} if results.tuning else ()
    errors = {name: error for name, error in results.rate_errors.items() if error is not None and name in tuned}
    bounded = {name: error for name, error in errors.items() if math.isfinite(error)}
    clauses = []
    if bounded:
        most = max(bounded, key=lambda name: bounded[name])
        worst = f", of {most} the most" if len(bounded) > 1 else ""
        clauses.append(f"the choice may be worth up to {bounded[most]:.2g} nats per token{worst}")
    if edges := [name for name in errors if name not in bounded]:
        clauses.append(f"for {listed(edges)} {'it' if bounded else 'what the choice may be worth'} is not bounded")
    return f": {'; '.join(clauses)}" if clauses else ""
