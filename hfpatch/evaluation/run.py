"""Running lm-eval's tasks on a model: scores, and a record of every document."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import getfile
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.evaluator import evaluate as run_lm_eval
from lm_eval.utils import handle_non_serializable
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpatch.data.rows import number_groups
from hfpatch.errors import HfpatchError, first_line
from hfpatch.evaluation.cache import model_key, open_cache
from hfpatch.evaluation.clusters import count_groups
from hfpatch.evaluation.examples import others_as_examples
from hfpatch.evaluation.harness import quiet, templates_compiled_once
from hfpatch.evaluation.low_noise import chance, low_noise_scores, low_noise_values, ties
from hfpatch.evaluation.metrics import Aggregation, metric_named, primary_metric
from hfpatch.evaluation.model import BrokenModelError, HfpatchLM
from hfpatch.evaluation.selection import Selection, prompting, template_arguments
from hfpatch.evaluation.stats import over_documents
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.results.parts import Clusters, FewShot, LeftOut, TaskResult
from hfpatch.results.records import hash_documents, write_values
from hfpatch.support.code import hash_code
from hfpatch.support.files import hash_values, json_value, write_text
from hfpatch.support.modes import evaluating, replaced
from hfpatch.support.ranks import Ranks, ended_together

_OF_DOCUMENTS = {
    *("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
}
"""Keys of a task that say where its documents are from; these have a hash of their own."""
_SEEDING: tuple[Callable[[int], Any], ...] = (random.seed, np.random.seed, torch.manual_seed)


@dataclass(frozen=True)
class Storage:
    """What an evaluation keeps on disk.

    Attributes:
        records: where ``<task>.jsonl`` goes as soon as a task is scored, one line a document: ``doc_id``, ``doc_hash``,
            ``target``, ``doc``, its ``cluster`` if documents come in groups, and each metric's value, a number or a
            pair (log-likelihood, count). ``values.safetensors`` there has the numbers of all tasks.
        answers: the folder of the cache of log-likelihoods (`hfpatch.evaluation.cache`), which are saved as they come.
            The scores of an interrupted evaluation, or of one with a smaller limit, are reused.
        answers_optional: continue without that cache if the folder cannot be written (the disk is full).
        base_sha256: the hash of the base's weights, if computed before; it is part of the cache's key.
    """

    records: Path | None = None
    answers: Path | None = None
    answers_optional: bool = False
    base_sha256: str | None = None


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    selection: Selection,
    *,
    storage: Storage = Storage(),
    scored: Mapping[str, TaskResult] | None = None,
    on_task: Callable[[str], None] | None = None,
    on_scored: Callable[[str, int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, TaskResult]:
    """Score a model on tasks with lm-eval, and return the result of each task.

    Args:
        model: a causal language model, patched or not; its mode (training or evaluation) is restored.
        tokenizer: the model's tokenizer.
        selection: the tasks, and how to run them.
        storage: what is kept on disk; nothing by default.
        scored: earlier results, with their records in ``storage.records``; they come first in the results.
        on_task: called with each task's name before it is scored.
        on_scored: called with a task's name, its scored requests and all of them, while it is scored.
        ranks: the processes that share the requests. Each calls this with the same arguments and has all results in
            the end; the first one writes the records. None is this process alone.

    Raises:
        HfpatchError: if a task, its data, the tokenizer or its chat template is unsuitable, a log-likelihood is NaN or
            memory is too small; the answers so far are kept.
    """
    ranks, settings = ranks or Ranks(), selection.settings
    if not ranks.is_first:
        storage = replace(storage, records=None)
    if taken := sorted({*(scored or ())} & {*selection.tasks}):
        raise HfpatchError(
            f"task {taken[0]}: results have the loss on the documents of data.held_out by this name; give the task "
            "another one, or leave out data.held_out"
        )
    with evaluating(model), quiet(), templates_compiled_once(), ended_together(ranks):
        scorer = HfpatchLM(model, **scorer_options(tokenizer, settings))
        scorer.ranks = ranks
        for set_seed, seed in zip(_SEEDING, settings.seed or (), strict=False):  # the last is for few-shot examples
            if seed is not None:
                set_seed(seed)
        answers, optional = storage.answers, storage.answers_optional
        if answers is not None:
            key = ranks.same(model_key(model, storage.base_sha256))
        results = dict(scored or {})
        for name in selection.tasks:
            if on_task is not None:
                on_task(name)
            cache = open_cache(answers, name, key, optional=optional, rank=ranks.index) if answers is not None else None
            scorer.begin(cache, on_scored and partial(on_scored, name))
            results[name] = _score(scorer, name, selection, storage)
        if storage.records is not None:
            write_values(storage.records, results)
        return results


def scorer_options(tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings) -> dict[str, Any]:
    """Return the arguments of `HfpatchLM` besides the model; an unknown chat template is an error."""
    return {
        "tokenizer": tokenizer,
        "batch_size": settings.batch_size,
        "max_length": settings.max_length,
        "token_budget": settings.token_budget,
        "chat_template_args": template_arguments(tokenizer, settings.apply_chat_template),
    }


@dataclass(frozen=True)
class Answered:
    """lm-eval's output for one task, and what is to be known of its documents."""

    output: Mapping[str, Any]
    few_shot: FewShot | None
    left_out: LeftOut | None


def run_task(scorer: HfpatchLM, name: str, selection: Selection) -> Answered:
    """Let lm-eval run one task on its first documents.

    Every call draws the same few-shot examples. A document that the task's templates do not fit is an error that names
    it; one whose tokens have no score is left out.
    """
    task, limit, settings = selection.tasks[name], selection.limits[name], selection.settings
    if not len(task.eval_docs):
        raise HfpatchError(f"task {name}: has no documents; its data or its filter is empty")
    try:
        asked: dict[str, Any] = {"limit": limit, "bootstrap_iters": 0, **prompting(settings)}
        task.set_fewshot_seed(settings.fewshot_seed)
        examples = others_as_examples(name, task, selection.clusters.get(name))
        with examples as few_shot, _scorable(scorer, name, task) as left_out:
            output: Mapping[str, Any] = run_lm_eval(scorer, {"tasks": {name: task}}, **asked)
    except HfpatchError:
        raise
    except OverflowError as error:
        raise BrokenModelError(f"task {name}: a metric, such as a perplexity, exceeds the largest number") from error
    except Exception as error:
        # the first document on which a template fails; templates and functions of tasks can raise anything
        where, reason = "", error
        templates = [task.doc_to_text, task.doc_to_target]
        if task.get_config("doc_to_choice") is not None:
            templates.append(task.doc_to_choice)
        for index, document in enumerate(islice(task.eval_docs, limit)):
            try:
                for template in templates:
                    template(document)
            except Exception as failure:
                where, reason = f", document {index}", failure
                break
        if not where and not isinstance(error, TemplateError):
            frames = extract_tb(error.__traceback__)
            files, what = {frame.filename for frame in frames}, first_line(error, kind=True)
            if getfile(HfpatchLM) in files:  # of the model, not of the task
                is_argument = isinstance(error, TypeError | ValueError | ArithmeticError)
                if task.OUTPUT_TYPE != "generate_until" or not is_argument or getfile(torch.nn.Module) in files:
                    raise
                raise HfpatchError(
                    f"task {name}: no text can be generated with {task.get_config('generation_kwargs')} ({what}); "
                    "correct gen_kwargs, or the task's generation_kwargs"
                ) from error
            raise HfpatchError(
                f"task {name}: its prompts, filters or metrics fail ({what}; {frames[-1].filename}, line "
                f"{frames[-1].lineno}); correct the task or its settings"
            ) from error
        raise HfpatchError(
            f"task {name}{where}: does not fit the task's templates ({first_line(reason, kind=True)})"
        ) from error
    first = min(left_out, default=0)
    without = LeftOut(documents=len(left_out), first=first, why=left_out[first]) if left_out else None
    return Answered(output, few_shot(), without)


@contextmanager
def _scorable(scorer: HfpatchLM, name: str, task: Any) -> Iterator[dict[int, str]]:
    """Leave out the documents that cannot be scored inside the ``with`` block; yield why, which grows, by document."""
    left_out, iterate = dict[int, str](), task.doc_iterator

    def doc_iterator(**given: Any) -> Iterator[tuple[int, Any]]:
        documents = list(iterate(**given))
        kept = [(index, document) for index, document in documents if index not in left_out]
        if documents and not kept:
            raise HfpatchError(f"task {name}: none of its documents can be scored; document 0: {left_out[0]}")
        return iter(kept)

    with replaced(task, doc_iterator=doc_iterator), replaced(scorer, left_out=left_out):
        yield left_out


def _score(scorer: HfpatchLM, name: str, selection: Selection, storage: Storage) -> TaskResult:
    task, cluster = selection.tasks[name], selection.clusters.get(name)
    answered = run_task(scorer, name, selection)
    samples = answered.output["samples"][name]
    low_noise = low_noise_values(task, samples)
    records = _records(samples, low_noise, cluster)
    if storage.records is not None:
        lines = (json.dumps(record, default=handle_non_serializable, ensure_ascii=False) for record in records)
        write_text(storage.records / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))

    scores = {key.removesuffix(",none"): value for key, value in answered.output["results"][name].items() if "," in key}
    metrics = {key: float(value) for key, value in scores.items() if "_stderr" not in key}
    if not metrics:
        raise HfpatchError(
            f"task {name}: lm-eval gives it no score; set a metric of its output_type, {task.OUTPUT_TYPE}, in its "
            "metric_list"
        )
    primary = primary_metric(name, list(metrics))
    if not math.isfinite(metrics[primary]):
        raise BrokenModelError(
            f"task {name}: its metric {primary} is {metrics[primary]} over {len(records)} documents; one of them has a "
            "score that is not a number, or the metric is not defined on them"
        )
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}  # JSON has no other numbers
    metrics |= low_noise_scores(low_noise)
    groups = number_groups([record["cluster"] for record in records]) if cluster is not None else None
    return TaskResult(
        task=name,
        n=len(records),
        metrics=metrics,
        stderr=_standard_errors(task, metrics, records, groups),
        primary=primary,
        higher_is_better=bool(task.higher_is_better().get(primary.partition(",")[0], True)),
        num_fewshot=task.get_config("num_fewshot") or 0,
        data_sha256=hash_documents(record["doc_hash"] for record in records),
        version=str(task.VERSION),
        task_sha256=hash_task(task, selection.settings.seed),
        **scorer.prompts.to_json(),
        clusters=None if groups is None else Clusters(column=str(cluster), groups=count_groups(groups)),
        chance=chance(task, samples, primary),
        few_shot=answered.few_shot,
        left_out=answered.left_out,
        ties=ties(task, samples),
        reused=scorer.reused,
    )


def _records(
    samples: Iterable[Mapping[str, Any]], low_noise: Mapping[int, Mapping[str, Any]], cluster: str | None
) -> list[dict[str, Any]]:
    """Return one record per document; lm-eval has one sample for each document and answer filter."""
    records: dict[int, dict[str, Any]] = {}
    for sample in samples:
        identity = {key: sample[key] for key in ("doc_id", "doc_hash", "target", "doc")}
        if cluster is not None:
            value = sample["doc"].get(cluster)  # without one, the document is a group of its own
            identity["cluster"] = None if value is None else hash_values(value)[:16]
        record = records.setdefault(sample["doc_id"], identity)
        suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
        record.update({f"{metric}{suffix}": json_value(sample[metric]) for metric in sample["metrics"]})
    for number, record in records.items():
        record.update({key: json_value(value) for key, value in low_noise.get(number, {}).items()})
    return [records[number] for number in sorted(records)]


def _standard_errors(
    task: Any, metrics: Mapping[str, float], records: Sequence[Mapping[str, Any]], groups: Any
) -> dict[str, float]:
    """Return the standard error over documents, or over their groups, of each metric that is a ratio of sums."""
    functions, errors = task.aggregation(), {}
    units = len(records) if groups is None else count_groups(groups)
    for key, value in metrics.items() if units > 1 else ():
        metric = metric_named(key, functions.get(key.partition(",")[0]))
        if metric.aggregate is None:
            terms = metric.ratio_terms([record[key] for record in records])
            error = over_documents(*terms, groups=groups).error
            errors[key] = value * error if metric.exponential else error
    return errors


def all_aggregations(tasks: Mapping[str, Any]) -> dict[str, dict[str, Aggregation]]:
    """Return each task's own functions from documents to a score, by metric."""
    return {name: dict(task.aggregation()) for name, task in tasks.items()}


def hash_task(task: Any, seed: Any = None) -> str:
    """Return the SHA-256 of the code from answers to scores: a task's configuration, its class, metrics and filters.

    ``seed`` has the seeds of the evaluation, which decide text that is drawn.
    """
    config = {key: value for key, value in vars(task.config).items() if key not in _OF_DOCUMENTS}
    config["metadata"] = {key: value for key, value in (config["metadata"] or {}).items() if key != "config_source"}
    made = [(name, vars(task).get(name)) for name in ("_metric_fn_list", "_aggregation_list", "_metric_fn_kwargs")]
    used = [(name, *(setting or {}).items()) for name, setting in made]
    drawn = seed if task.OUTPUT_TYPE == "generate_until" else None
    return hash_code(
        [("class", type(task)), *config.items(), *used, ("filters", *vars(task).get("_filters", ())), (drawn,)]
    )
