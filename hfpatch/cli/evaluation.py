"""The command that scores, ``eval``: reading its options, running it and printing the scores."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.cli.eval_options import EvalOptions
from hfpatch.cli.lm_eval_options import read_arguments
from hfpatch.cli.options import model_settings
from hfpatch.cli.running import interruptible, quiet_libraries
from hfpatch.errors import HfpatchError, nearest
from hfpatch.support.files import write_text
from hfpatch.support.folders import cache_folder, eval_dir, is_writable
from hfpatch.support.lazy import collection_paused

if TYPE_CHECKING:
    from hfpatch.recipes.comparison import ModelSettings
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.results.schema import EvaluationResults

_LISTS = ("list", "list_groups", "list_subtasks", "list_tags")
_KINDS = ("hf", "hf-auto", "huggingface", "hfpatch")  # lm-eval's names of its models for transformers
_OPTIONS = (
    *("revision", "dtype", "trust_remote_code", "max_length", "token_budget", "batch_size", "device", "device_map"),
    *("allow_other_base", "gguf_file"),
)
_MODEL = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "attn_implementation")
_NAMES = ("pretrained", "peft", "patch", "revision", "device", "batch_size", "gguf_file")
_OTHERS = ("pretrained", "peft", "patch", "parallelize")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def with_model_args(given: EvalOptions) -> tuple[EvalOptions, dict[str, Any]]:
    """Return the options with those of ``--model-args`` put in, and the keys of the model that have no option."""
    arguments = read_arguments(given.model_args, "--model-args", names=_NAMES)
    known = (*_OTHERS, *_OPTIONS, *_MODEL)
    for key in arguments:
        if key not in known:
            raise HfpatchError(
                f"--model-args {key}: hfpatch eval does not take it{nearest(key, known)}; hfpatch lm_eval --model "
                "hfpatch takes all of lm-eval's"
            )
    if arguments.pop("parallelize", False):
        arguments.setdefault("device_map", "auto")
    models = list(given.model or [])
    kinds = [model for model in models if model in _KINDS and not Path(model).exists()]
    if "pretrained" in arguments:  # --model is lm-eval's kind of model
        if len(models) > len(kinds):
            raise HfpatchError(
                f"--model {next(model for model in models if model not in kinds)}: with --model-args pretrained=, "
                "--model is lm-eval's kind of model, of which hfpatch eval has hf alone; leave one out"
            )
        models = [str(arguments.pop("pretrained"))]
    elif kinds:
        raise HfpatchError(f"--model {kinds[0]}: name the model as --model ID, or with --model-args pretrained=ID")
    elif not models:
        raise HfpatchError("--model: missing; give a hub id or a folder")
    changed: dict[str, Any] = {"model": models, "model_args": None}
    adapters = [Path(str(arguments.pop(key))) for key in ("peft", "patch") if key in arguments]
    changed["patch"] = [*(given.patch or []), *adapters] or None
    for key in [key for key in _OPTIONS if key in arguments]:
        value, other = arguments.pop(key), getattr(given, key)
        value = str(value) if key in ("batch_size", "device") else value
        if other not in (None, False) and other != value:
            raise HfpatchError(f"--model-args {key}={value}: --{key.replace('_', '-')} is {other}; leave one out")
        changed[key] = value
    return replace(given, **changed), arguments


def read_models(given: EvalOptions, more: dict[str, Any]) -> list[ModelSettings]:
    """Return the models, each with the revision after its ``@``; ``more`` are keys of all of them."""
    named, revision, models = given.model or [], given.revision, []
    of_one = {"--patch": given.patch, "--baseline": given.baseline, "--scale": given.scale != "1"}
    if len(named) > 1 and any(of_one.values()):
        option = next(name for name, value in of_one.items() if value)
        raise HfpatchError(
            f"{option}: goes with one --model, not with {len(named)}; compare patches with their base and whole models "
            "with each other in two commands"
        )
    if given.gguf_file is not None and len(named) > 1:
        raise HfpatchError(f"--gguf-file {given.gguf_file}: name the file of each model as --model ORG/REPO/FILE.gguf")
    for text in named:
        name, at, own = (text, "", "") if Path(text).exists() else text.partition("@")
        if at and not own:
            raise HfpatchError(f"--model {text}: no revision after the @; write ID@REVISION, or the id alone")
        if revision is not None and (own or len(named) > 1):
            raise HfpatchError(f"--revision {revision}: write the revision of each model as --model {name}@{revision}")
        dtype = given.dtype or "float32"
        models.append(
            model_settings(name, own or revision, dtype, given.trust_remote_code, gguf_file=given.gguf_file, **more)
        )
    return models


def read_settings(given: EvalOptions) -> EvaluationSettings:
    """Return the tasks and how to run them."""
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.recipes.strict import validate

    # The tasks, with limits of their own if there are any, and the limit of all others
    names = [name.strip() for name in (given.tasks or "").split(",") if name.strip()]
    if not names:
        raise HfpatchError("--tasks: missing; name tasks with commas between them, --tasks list prints what there is")
    limits: dict[str, float] = {}  # under an empty name that of all tasks
    for text in given.limit or ():
        name, equals, value = text.rpartition("=")
        if equals and not name:
            raise HfpatchError(f"--limit {text}: no task before the =; write it as TASK=N, or N alone")
        try:
            limits[name] = float(value)
        except ValueError:
            raise HfpatchError(f"--limit {text}: {value!r} is not a number of documents") from None
        if not limits[name] > 0:
            raise HfpatchError(f"--limit {text}: must be above 0; leave it out for all documents")
        if name and name not in names:
            raise HfpatchError(f"--limit {name}=: {name!r} is not among --tasks{nearest(name, names)}")
    limit = limits.pop("", None)

    # The rows of a batch, groups of documents and prompts
    rows = given.batch_size
    if rows is not None and re.fullmatch(r"auto(:\d+)?", rows):
        rows = None
    if rows is not None and (not rows.isdecimal() or int(rows) < 1):
        raise HfpatchError(f"--batch-size {rows}: must be auto or a number of rows")
    clusters: dict[str, str | None] = {}
    for each in given.cluster or ():
        task, equals, column = (part.strip() for part in each.partition("="))
        if not task or not equals:
            raise HfpatchError(f"--cluster {each}: write it as TASK=COLUMN, such as boolq=passage")
        clusters[task] = column or None
    multiturn = _flag(given.fewshot_as_multiturn)
    if isinstance(multiturn, str):
        raise HfpatchError(f"--fewshot-as-multiturn {multiturn}: must be true or false")

    # The four seeds of lm-eval's --seed: of one number all four, of three the last one is 1234
    seeds: list[int | None] | None = None
    if given.seed is not None:
        parts = [part.strip().lower() for part in given.seed.split(",")]
        seeds = [None if part == "none" else int(part) if part.isdecimal() else -1 for part in parts]
        seeds = seeds * 4 if len(seeds) == 1 else [*seeds, 1234] if len(seeds) == 3 else seeds
        if len(seeds) != 4 or -1 in seeds:
            raise HfpatchError(f"--seed {given.seed}: must be one number, or four with commas between them")
        if seeds[3] is None:
            raise HfpatchError(
                f"--seed {given.seed}: the last one chooses few-shot examples, which all models must share"
            )
    values = {
        "tasks": {name: {"limit": limits.get(name)} for name in names} if limits else names,
        "include_path": str(given.include_path) if given.include_path else None,
        "limit": limit,
        "num_fewshot": given.num_fewshot,
        "max_length": given.max_length,
        "token_budget": given.token_budget,
        **({} if rows is None else {"batch_size": int(rows)}),
        "allow_unknown_base": given.allow_unknown_base,
        "cluster": clusters,
        "apply_chat_template": _flag(given.apply_chat_template) or False,
        "system_instruction": given.system_instruction,
        "fewshot_as_multiturn": multiturn,
        "gen_kwargs": read_arguments(given.gen_kwargs, "--gen-kwargs"),
        "seed": seeds,
        "confirm_run_unsafe_code": given.confirm_run_unsafe_code,
    }
    return validate(values, EvaluationSettings, "hfpatch eval")


def device_map_of(given: EvalOptions) -> str | None:
    """Return the device of the model, or how it is spread over devices."""
    if given.device is None:
        return given.device_map
    if given.device_map is not None or given.tp:
        raise HfpatchError(f"--device {given.device}: --device-map and --tp choose the devices; leave one out")
    from hfpatch.recipes.comparison import DEVICE

    if not DEVICE.fullmatch(given.device):
        raise HfpatchError(f"--device {given.device}: must be cpu, cuda, cuda:1, mps or the like")
    return given.device


def _flag(text: str | None) -> bool | str | None:
    """Return an option that is on, off or a name."""
    lower = (text or "").lower()
    return None if text is None else True if lower in _TRUE else False if lower in _FALSE else text


def task_list(what: str, include_path: Path | None = None) -> str:
    """Return lm-eval's tables of tasks, groups and tags, with hfpatch's and the user's own.

    lm-eval reads 13,000 files to make them, so they are kept under a hash of these files' names, sizes and times.
    ``what`` is one of ``_LISTS``.
    """
    if include_path is not None and not include_path.is_dir():
        raise HfpatchError(f"{include_path}: no such folder; include_path is a folder with task files")
    spec = find_spec("lm_eval")
    tasks = [Path(place) / "tasks" for place in (spec.submodule_search_locations or ())] if spec is not None else []
    folders = [*tasks, eval_dir(), *([include_path] if include_path is not None else [])]
    found = (Path(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names)
    states = [(file, file.stat()) for file in found if file.suffix in (".yaml", ".py")]
    facts = sorted(f"{file} {state.st_size} {state.st_mtime_ns}" for file, state in states)
    stamp = hashlib.sha256("\n".join((version("lm_eval"), what, *facts)).encode()).hexdigest()
    kept = cache_folder("tasks") / f"{stamp}.txt"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    from hfpatch.evaluation.index import list_tasks

    text = list_tasks(what, include_path)
    if is_writable(kept.parent, "the lists of tasks"):
        write_text(kept, text)
    return text


def evaluate(given: EvalOptions) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks; or compare several whole models.

    Options may be written as lm-eval's are, with underscores or dashes. On several processes, which share the work:
    accelerate launch -m hfpatch eval --model ...

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    if given.tasks in _LISTS:
        print(task_list(given.tasks, given.include_path))
        return
    if given.log_samples and given.output is None:
        raise HfpatchError("--log-samples: needs --output DIR (--output_path), where the samples go")
    if given.output is not None and given.output.suffix == ".json":
        raise HfpatchError(f"--output {given.output}: is a folder for several files; give one without .json")
    forms = [name for name in ("json", "markdown", "latex") if getattr(given, f"as_{name}")]
    if len(forms) > 1:
        raise HfpatchError(f"--{forms[0]} and --{forms[1]}: print one of them")
    try:
        scales = [float(each) for each in given.scale.split(",")]
    except ValueError as error:
        raise HfpatchError(
            f"--scale {given.scale}: give numbers with commas between them, such as 0.25,0.5,1"
        ) from error
    given, more = with_model_args(given)
    settings, models, device_map = read_settings(given), read_models(given, more), device_map_of(given)
    quiet_libraries()
    with collection_paused():
        from hfpatch.surgery.placement import Placement
        from hfpatch.training.processes import start_ranks

        placement = Placement(device_map, given.tp)
        ranks = start_ranks(split=given.tp)  # before imports that take seconds, so that mistakes show at once
        placement.check(ranks.count)
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import evaluate as run_evaluate
    gc.freeze()
    answers = cache_folder("answers")
    kept = answers if given.cache and given.output is None and is_writable(answers, "the answers") else None
    folder = given.output or kept
    advice = f"the same command continues from what is in {folder}" if folder else "nothing is kept with --no-cache"
    with interruptible(advice), choose_progress() as progress:
        common: dict[str, Any] = {"settings": settings, "data_dir": given.data_dir, "output": given.output}
        common |= {"log_samples": given.log_samples, "cache_dir": kept, "placement": placement, "progress": progress}
        if len(models) > 1:
            from hfpatch.runs import evaluate_models

            found = evaluate_models(models, **common)
        else:
            of_one: dict[str, Any] = {"patches": given.patch or [], "baseline": given.baseline, "scales": scales}
            found = run_evaluate(models[0], allow_other_base=given.allow_other_base, **of_one, **common)
    if ranks.is_first:
        _print(found, given)


def _print(found: EvaluationResults, given: EvalOptions) -> None:
    """Print results in the form that was asked for."""
    if given.as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif given.as_markdown or given.as_latex:
        from hfpatch.reporting.evaluation import score_table_of
        from hfpatch.reporting.markdown import markdown_table
        from hfpatch.reporting.tabular import latex

        table = score_table_of({"": found})
        print((markdown_table(table) if given.as_markdown else latex(table)).rstrip())
    else:
        from hfpatch.reporting.evaluation import evaluation_document
        from hfpatch.reporting.terminal import print_document

        print_document(evaluation_document(found))
