"""The command that scores, ``eval``: reading its options, running it and printing the scores."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.cli.eval_options import EvalOptions
from hfpatch.cli.options import model_settings
from hfpatch.cli.running import interruptible, loading_libraries
from hfpatch.errors import HfpatchError, nearest
from hfpatch.support.folders import cache_folder, is_writable

if TYPE_CHECKING:
    from hfpatch.recipes.base import ModelSettings
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.results.evaluation import EvaluationResults

_LISTS = ("list", "list_groups", "list_subtasks", "list_tags")


def read_overrides(given: EvalOptions) -> dict[str, dict[str, Any]]:
    """Return the keys of the sections ``model`` and ``evaluation``; a key that is an option too is refused."""
    from hfpatch.recipes.comparison import Recipe
    from hfpatch.recipes.strict import put_override, read_override

    sections: dict[str, dict[str, Any]] = {"model": {}, "evaluation": {}}
    for override in given.overrides or ():
        if "=" not in override:
            raise HfpatchError(
                f"{override}: give a model as --model {override}, or a key such as model.load_in_4bit=true"
            )
        section, _, key = read_override(override)[0].partition(".")
        if section not in sections or not key:
            raise HfpatchError(
                f"{override}: eval takes keys in a recipe's sections model and evaluation, such as "
                "model.load_in_4bit=true"
            )
        option = "model" if key == "name" else key.partition(".")[0]
        if hasattr(given, option):
            raise HfpatchError(f"{override}: write it as the option --{option.replace('_', '-')}")
        put_override(sections, override, Recipe)
    return sections


def read_models(given: EvalOptions, more: dict[str, Any]) -> list[ModelSettings]:
    """Return the models, each with the revision after its ``@``; ``more`` are keys of all of them."""
    named, revision, models = given.model or [], given.revision, []
    if not named:
        raise HfpatchError("--model: missing; give a hub id or a folder")
    of_patches = {"--baseline": given.baseline, "--scale": given.scale != "1"}
    of_patches |= {"--allow-other-base": given.allow_other_base, "--trust-code": given.trust_code}
    for option in [option for option, value in {"--patch": given.patch, **of_patches}.items() if value]:
        if len(named) > 1:
            raise HfpatchError(
                f"{option}: goes with one --model, not with {len(named)}; compare patches with their base and whole "
                "models with each other in two commands"
            )
        if not given.patch:
            raise HfpatchError(f"{option}: there is no patch; give --patch DIR")
    if len(named) > 1 and given.gguf_file is not None:
        raise HfpatchError(f"--gguf-file {given.gguf_file}: name the file of each model as --model ORG/REPO/FILE.gguf")
    for text in named:
        name, at, pinned = (text, "", "") if Path(text).exists() else text.partition("@")
        if at and not pinned:
            raise HfpatchError(f"--model {text}: no revision after the @; write ID@REVISION, or the id alone")
        if revision is not None and (pinned or len(named) > 1):
            raise HfpatchError(f"--revision {revision}: write the revision of each model as --model {name}@{revision}")
        dtype = given.dtype or "float32"
        models.append(
            model_settings(name, pinned or revision, dtype, given.trust_remote_code, gguf_file=given.gguf_file, **more)
        )
    return models


def read_settings(given: EvalOptions, more: dict[str, Any]) -> EvaluationSettings:
    """Return the tasks and how to run them; ``more`` are keys without an option."""
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.recipes.strict import validate

    names = [name.strip() for name in (given.tasks or "").split(",") if name.strip()]
    if not names:
        raise HfpatchError("--tasks: missing; name tasks with commas between them, --tasks list prints what there is")
    limits: dict[str, float] = {}  # by task; the limit of all tasks has an empty name
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
    values = {
        "tasks": {name: {"limit": limits.get(name)} for name in names} if limits else names,
        "include_path": str(given.include_path) if given.include_path else None,
        "limit": limit,
    }
    return validate({**values, **more}, EvaluationSettings, "hfpatch eval")


def device_map_of(given: EvalOptions) -> str | None:
    """Return the device of the model, or how it is spread over devices."""
    from hfpatch.recipes.base import DEVICE, check_device_map

    check_device_map("--device-map", given.device_map)
    if given.device is None:
        return given.device_map
    if given.device_map is not None or given.tp:
        raise HfpatchError(f"--device {given.device}: --device-map and --tp choose the devices; leave one out")
    if not DEVICE.fullmatch(given.device):
        raise HfpatchError(f"--device {given.device}: must be cpu, cuda, cuda:1, mps or the like")
    return given.device


def _refuse_others(given: EvalOptions) -> None:
    """Refuse options beside a list of tasks, which only --include-path changes."""
    changed = [field.name for field in fields(given) if getattr(given, field.name) != field.default]
    for name in changed:
        if name not in ("tasks", "include_path"):
            option = "no-cache" if name == "cache" else name.removeprefix("as_").replace("_", "-")
            shown = given.overrides[0] if name == "overrides" and given.overrides else f"--{option}"
            raise HfpatchError(f"{shown}: --tasks {given.tasks} prints what tasks there are; leave the option out")


def evaluate(given: EvalOptions) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks; or compare several whole models.

    On several processes, which share the work: accelerate launch -m hfpatch eval --model ...

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    if given.tasks in _LISTS:
        _refuse_others(given)
        from hfpatch.evaluation.index import list_tasks

        print(list_tasks(given.tasks, given.include_path))
        return
    if given.output is not None and not given.cache:
        raise HfpatchError(f"--no-cache: answers are kept in --output {given.output}; leave one of them out")
    if given.output is not None and given.output.suffix == ".json":
        raise HfpatchError(f"--output {given.output}: is a folder for several files; give one without .json")
    forms = [name for name in ("json", "markdown", "latex") if getattr(given, f"as_{name}")]
    if len(forms) > 1:
        raise HfpatchError(f"--{forms[0]} and --{forms[1]}: print one of them")
    try:
        scales = [float(scale) for scale in given.scale.split(",")]
    except ValueError as error:
        raise HfpatchError(
            f"--scale {given.scale}: give numbers with commas between them, such as 0.25,0.5,1"
        ) from error
    more = read_overrides(given)
    settings, models = read_settings(given, more["evaluation"]), read_models(given, more["model"])
    device_map = device_map_of(given)
    with loading_libraries():
        from hfpatch.surgery.placement import Placement
        from hfpatch.training.processes import start_ranks

        placement = Placement(device_map, given.tp)
        ranks = start_ranks(split=given.tp)  # before imports that take seconds, so that mistakes show at once
        placement.check(ranks.count)
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import evaluate as run_evaluate

        if given.trust_code and given.patch:
            from hfpatch.surgery.folder import import_methods  # imports PEFT

            for patch in given.patch:
                import_methods(patch)
    answers = cache_folder("answers")
    kept = answers if given.cache and given.output is None and is_writable(answers, "the answers") else None
    folder = given.output or kept
    advice = f"the same command continues from what is in {folder}" if folder else "nothing is kept with --no-cache"
    with interruptible(advice), choose_progress() as progress:
        results = run_evaluate(
            *models,
            patches=given.patch or [],
            scales=scales,
            allow_other_base=given.allow_other_base,
            baseline=given.baseline,
            settings=settings,
            data_dir=given.data_dir,
            output=given.output,
            cache_dir=kept,
            progress=progress,
            placement=placement,
        )
    if ranks.is_first:
        _print(results, given)


def _print(results: EvaluationResults, given: EvalOptions) -> None:
    """Print results in the form that was asked for."""
    if given.as_json:
        print(json.dumps(results.to_json(), indent=2))
    elif given.as_markdown or given.as_latex:
        from hfpatch.reporting.evaluation import score_table_of
        from hfpatch.reporting.markdown import markdown_table
        from hfpatch.reporting.tabular import latex

        table = score_table_of({"": results})
        print((markdown_table(table) if given.as_markdown else latex(table)).rstrip())
    else:
        from hfpatch.reporting.evaluation import evaluation_document
        from hfpatch.reporting.terminal import print_document

        print_document(evaluation_document(results))
