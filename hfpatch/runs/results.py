"""results.json: everything that was measured, in the layout that reports and other tools read."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from hfpatch.data.tokenizer import hash_tokenizer
from hfpatch.evaluation import all_aggregations, check_known_scores
from hfpatch.evaluation import compare as compare_records
from hfpatch.evaluation.exchange import frontier_of
from hfpatch.evaluation.reading import Records
from hfpatch.evaluation.retention import kept_of
from hfpatch.evaluation.selection import select
from hfpatch.models.plan import describe_paths
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.models import split_architecture
from hfpatch.recipes.pairs import Question, is_lora, question_of, references
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.cautions import comparison_cautions
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.layout import Curve, Diagnostic, Method, Parameters, Run, Study, Variant
from hfpatch.results.parts import NATS_PER_TOKEN, TaskResult
from hfpatch.results.records import DocumentLosses, write_published
from hfpatch.results.series import mean_curve, mean_series
from hfpatch.results.verdicts import LookTaken, look_parts
from hfpatch.runs.declared import growth_of, questions_of
from hfpatch.runs.folder import COSTS, RunPaths
from hfpatch.runs.identity import describe_base
from hfpatch.runs.plan import planned_runs
from hfpatch.runs.pretraining import StudySetup
from hfpatch.runs.records import Costs, Looks, Measurement, RunResult
from hfpatch.runs.retention import collect_retention, retention_records
from hfpatch.runs.setup import ComparisonSetup
from hfpatch.runs.tuning import collect_tuning
from hfpatch.support.provenance import Clock, provenance
from hfpatch.training.diagnostics import DiagnosticsFile


def collect(
    setup: ComparisonSetup | StudySetup,
    out: Path,
    clock: Clock,
    *,
    complete: bool,
    looks: Sequence[LookTaken] | None = None,
    seeds: Container[int] | None = None,
) -> ComparisonResults:
    """Return the results of all complete runs and, where the comparison is complete, the paired tests.

    Args:
        setup: what the runs share.
        out: the run folder.
        clock: gives the results their times.
        complete: whether these are all runs.
        looks: the looks taken; None reads them in the folder.
        seeds: take these seeds alone.
    """
    recipe, training, is_comparison = setup.recipe, setup.recipe.training, isinstance(setup, ComparisonSetup)
    looks = Looks.of(out) if looks is None else looks
    done: dict[str, dict[int, RunResult]] = {name: {} for name in recipe.methods}
    for run in planned_runs(recipe, out):
        if run.paths.result.is_file() and (seeds is None or run.seed in seeds):
            done[run.variant][run.seed] = RunResult.read(run.paths.result)
    results_of = [result for name in (recipe.baseline, *done) for result in done[name].values()]
    scored = next((result.evaluation for result in results_of if result.evaluation), {})

    # The texts
    data, tuning = setup.blocks.to_json(), None
    if setup.held_out:
        data["held_out"] = setup.held_out.to_json()
        base = done[recipe.baseline].get(0) if is_comparison else None  # else it has seeds
        if base is not None and HELD_OUT in base.evaluation:
            data["held_out"]["base_loss"] = base.evaluation[HELD_OUT].metrics[NATS_PER_TOKEN]
    if setup.tuning_text is not None:
        text = {**setup.tuning_text.to_json(), **setup.tuning_size}
        tuning = collect_tuning(setup.tuning, recipe, text, setup.plans[recipe.tuning_seed])

    tuned = all(recipe.tuning_of(name) is not None for name in recipe.trained)  # none is trained at the recipe's rate
    results = ComparisonResults(
        name=recipe.name,
        description=recipe.description,
        complete=complete,
        provenance={**provenance(clock), "matmul": setup.matmul},
        data=data,
        plan={
            str(seed): {"sha256": setup.plans[seed].sha256, "steps": training.steps, "batch_size": training.batch_size}
            for seed in training.all_seeds
        },
        training=training.model_dump(mode="json", exclude={"lr"} if tuned else None),
        tuning=tuning,
        tasks={task: score.shared for task, score in scored.items()},
        methods=_methods(setup, out, done),
        questions=questions_of(out, setup),
        margin=recipe.margins,
        pairs=_pairs(recipe),
        looks=list(looks) or None,
        left_out=setup.left_out or None,
        **_facts(setup),
    )
    if isinstance(setup, ComparisonSetup):
        retention = collect_retention(setup, out, results.methods, results.tasks, complete=complete)
        results = results.model_copy(update={"retention": retention})
    if complete:
        results = _compared(results, setup, out, scored)
    return results.model_copy(update={"warnings": _warnings(setup, out, results)})


def _compared(
    results: ComparisonResults, setup: ComparisonSetup | StudySetup, out: Path, tasks: Mapping[str, TaskResult]
) -> ComparisonResults:
    """Return complete results with what pairs of methods show; ``tasks`` are a run's, the baseline's if it has any."""
    recipe, methods, folders = setup.recipe, results.methods, _records(out, results.methods)
    compared = {
        name: [other for other in others if other in folders]
        for name, others in references(recipe).items()
        if name in folders
    }
    if results.looks:
        made = sum(len(methods[name].runs) for name in recipe.trained)
        saved = len(recipe.trained) * len(recipe.training.all_seeds) - made
        results = results.model_copy(update={"runs_saved": saved})
    if isinstance(setup, StudySetup):  # whose baseline has seeds, like the others
        comparisons = compare_records(Records(folders, baseline=""), tasks, compared)
        return results.model_copy(update={"comparisons": comparisons})
    aggregations = all_aggregations(select(setup.recipe.evaluation, setup.recipe.data_dir).tasks)
    records = Records(folders, recipe.baseline, aggregations)
    comparisons = compare_records(records, tasks, compared)
    kept = kept_of(records, recipe.trained, tasks, comparisons)
    results = results.model_copy(update={"comparisons": comparisons, "kept": kept})
    return results.model_copy(update={"frontier": frontier_of(results, records) if comparisons else None})


def _warnings(setup: ComparisonSetup | StudySetup, out: Path, results: ComparisonResults) -> list[str]:
    """Return every caution of some results."""
    warnings = [f"{caution}." for caution in setup.cautions]
    warnings += [f"{name} is left out: {reason}." for name, reason in setup.left_out.items()]
    warnings += growth_of(out, setup)
    if results.complete and isinstance(setup, ComparisonSetup):
        model, plain = setup.recipe.model, setup.recipe.evaluation.plain
        of_base = results.scores_of(results.methods[setup.recipe.baseline].runs[0])
        warnings += chain.from_iterable(check_known_scores(model, of_base, plain=plain))
    if results.complete:
        warnings += comparison_cautions(setup.recipe, results)
    return warnings


def _facts(setup: ComparisonSetup | StudySetup) -> dict[str, Any]:
    """Return what results say of a base and of the tasks, or of a study in their place."""
    if isinstance(setup, ComparisonSetup):
        base = describe_base(setup.base, setup.recipe.model, setup.shared)
        return {
            "protocol": setup.recipe.protocol,
            "model": {**base, "parameters": setup.sizes[setup.recipe.baseline].base},
            "evaluation": setup.recipe.evaluation.model_dump(mode="json"),
        }
    recipe = setup.recipe
    wholes = [recipe.architecture | variant.architecture for variant in recipe.variants.values()]
    common = {key: value for key, value in wholes[0].items() if all(whole.get(key) == value for whole in wholes)}
    tokenizer = {"vocab_size": len(setup.tokenizer), "sha256": hash_tokenizer(setup.tokenizer)}
    return {"study": Study(baseline=recipe.baseline, architecture=common, tokenizer=tokenizer)}


def take_look(
    setup: ComparisonSetup | StudySetup, out: Path, clock: Clock, before: Sequence[LookTaken], seeds: int
) -> tuple[ComparisonResults, LookTaken]:
    """Test the primary pairs with so many seeds, after the looks before, and say which methods get more.

    Returns:
        The results with these seeds alone, and the look.
    """
    looks = setup.recipe.training.looks
    asked = {(*pair, task) for question in setup.questions for pair in question.pairs for task in question.on}
    results = collect(setup, out, clock, complete=True, looks=before, seeds=range(seeds))
    look = LookTaken(seeds=seeds, part=look_parts(looks)[looks.index(seeds)], comparisons=results.compared_in(asked))
    results = results.model_copy(update={"looks": [*before, look]})
    growing = set[str]()
    if seeds < looks[-1]:
        growing = {
            name for verdict in results.primary if verdict.needs_seeds for name in (verdict.method, verdict.other)
        }
    return results, look.model_copy(update={"growing": [name for name in setup.recipe.trained if name in growing]})


def _methods(
    setup: ComparisonSetup | StudySetup, out: Path, done: Mapping[str, Mapping[int, RunResult]]
) -> dict[str, Method]:
    """Return each method, or variant, with its runs.

    Curves are compared, so each is the mean over the seeds that all methods have. Where they share none, as when
    different ones diverged, each is the mean over its own.
    """
    drawn = {
        name: {
            seed
            for seed, run in runs.items()  # a study's have no curve where they diverged
            if run.train is not None and (run.diverged_step is None or isinstance(setup, ComparisonSetup))
        }
        for name, runs in done.items()
    }
    having = [seeds for seeds in drawn.values() if seeds]
    shared = set.intersection(*having) if having else set()
    methods = {}
    for name, runs in done.items():
        curve = mean_curve(RunPaths.of(out, name, seed).metrics for seed in sorted(drawn[name] & shared or drawn[name]))
        if isinstance(setup, ComparisonSetup):
            methods[name] = _method(setup, out, name, runs, curve)
        else:
            folders = [RunPaths.of(out, name, seed).root for seed in sorted(drawn[name])]
            methods[name] = _variant(setup, name, runs, curve, _diagnostics(folders))
    return methods


def _method(setup: ComparisonSetup, out: Path, name: str, runs: Mapping[int, RunResult], curve: Curve | None) -> Method:
    size, match, recipe, costs = setup.sizes[name], setup.methods[name].match, setup.recipe, out / COSTS
    with_measured = {}
    for seed, result in runs.items():
        paths, values = RunPaths.of(out, name, seed), result.to_json()
        if recipe.retention is not None:  # what `retain` and `rewind` have measured of it
            if paths.retention.is_file():
                values["retention"] = Measurement.read(paths.retention).to_json()["evaluation"]
            rewound = {f"{scale:g}": paths.rewound(scale) for scale in (*recipe.rewind, 1.0) if recipe.rewind}
            measured = {at: Measurement.read(file).to_json() for at, file in rewound.items() if file.is_file()}
            values["rewound"] = measured or None
        with_measured[seed] = Run.model_validate(values)
    return Method(
        label=recipe.labels.get(name),
        parts=recipe.methods[name],
        parameters=Parameters(trainable=size.trainable, added=size.added, base=size.base),
        match=match and match.to_json(),
        form=form_of(recipe.methods[name]),
        runs=with_measured,
        curve=curve,
        layers=mean_series(series for result in runs.values() for series in result.layers),
        cost=Costs.read(costs).methods.get(name) if costs.is_file() else None,
        merges=setup.methods[name].merges,
    )


def _variant(
    setup: StudySetup, name: str, runs: Mapping[int, RunResult], curve: Curve | None, diagnostics: list[Diagnostic]
) -> Method:
    changes, (total, non_embedding) = setup.recipe.variants[name], setup.sizes[name]
    architecture = setup.recipe.architecture | changes.architecture
    return Method(
        parameters=Parameters(trainable=total, added=total, base=0, non_embedding=non_embedding),
        runs={seed: Run.model_validate(result.to_json()) for seed, result in runs.items()},
        curve=curve,
        variant=Variant(
            description=changes.description,
            query=describe_paths(split_architecture(architecture)[0]),
            architecture=architecture,
            training=changes.training,
            diagnostics=diagnostics,
        ),
    )


def _diagnostics(folders: Sequence[Path]) -> list[Diagnostic]:
    """Return the means over runs of what f does in each layer, by step."""
    by_layer: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for folder in folders:
        for line in DiagnosticsFile(folder / "diagnostics.jsonl").values():
            by_layer.setdefault((line["step"], line["layer"], line["target"]), []).append(line)
    return [
        Diagnostic(
            step=step,
            layer=layer,
            target=target,
            **{name: fmean(line[name] for line in lines) for name in ("size", "cosine", "size_beside_x")},
        )
        for (step, layer, target), lines in by_layer.items()
    ]


def form_of(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the form of a method's nonlinear query with a weight anchor, or None where it has none."""
    for part in parts:
        if part["type"] == "nonlinear_query" and part.get("anchor", "weight") == "weight":
            return str(part.get("form", "preserving"))
    return None


def _pairs(recipe: Recipe | StudyRecipe) -> dict[Question, list[tuple[str, str]]]:
    """Return the pairs of each secondary question, all that the recipe declares."""
    loras = [name for name, parts in recipe.methods.items() if is_lora(parts)]
    pairs: dict[Question, list[tuple[str, str]]] = {}
    for name, others in references(recipe).items():
        for other in others:
            pairs.setdefault(question_of((name, other), recipe.baseline, loras), []).append((name, other))
    return pairs


def publish_values(
    out: Path, results: ComparisonResults, trials: Mapping[str, Sequence[DocumentLosses | None]]
) -> None:
    """Write the values of all documents beside complete results, so that a folder can be published without its runs.

    ``trials`` are the losses of tuning's documents, see :func:`hfpatch.results.records.write_published`.
    """
    records = Records({**_records(out, results.methods), **retention_records(out, results.methods)})
    path, *_ = [path for runs in records.runs.values() for path in runs.values()]  # documents are alike
    run = next(run for method in results.methods.values() for run in method.runs.values() if run.evaluation)
    groups_of = ((task, records.read_groups(path, score)) for task, score in results.scores_of(run).items())
    groups = {task: groups for task, groups in groups_of if groups is not None}
    points = results.retention.points if results.retention is not None else []
    made = [*results.comparisons, *(comparison for point in points for comparison in point.comparisons)]
    measures = [(comparison.task, comparison.metric) for comparison in made]
    write_published(out, records.runs, measures, groups, trials)


def _records(out: Path, methods: Mapping[str, Method]) -> dict[str, dict[int, Path]]:
    """Return the folder of the records of each run that has scores, by method and seed."""
    by_method = {
        name: {seed: RunPaths.of(out, name, seed).evaluations for seed in method.runs if seed not in method.diverged}
        for name, method in methods.items()
    }
    return {name: folders for name, folders in by_method.items() if folders}
