"""What the options of ``eval`` say: the settings of the evaluation, and the models and patches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.cli.eval_options import EvalOptions
from hfpatch.cli.lm_eval_options import read_arguments
from hfpatch.cli.options import model_settings
from hfpatch.errors import HfpatchError, nearest

if TYPE_CHECKING:
    from hfpatch.recipes.comparison import ModelSettings
    from hfpatch.recipes.evaluation import EvaluationSettings

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
    """Return the options with what ``--model-args`` says put in, and the keys of the model that have no option.

    Raises:
        HfpatchError: if it has a key that hfpatch does not know, or contradicts an option; or if there is no model.
    """
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
    """Return the models, each with the revision after its ``@``; ``more`` are keys of all of them.

    Raises:
        HfpatchError: if revisions contradict, there is no such dtype, or an option about the patches of one base is
            given with several models.
    """
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
    """Return the tasks and how to run them.

    Raises:
        HfpatchError: if an option has a mistake.
    """
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.recipes.strict import validate

    tasks, limit = _tasks(given)
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
    values = {
        "tasks": tasks,
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
        "seed": _seeds(given.seed),
        "confirm_run_unsafe_code": given.confirm_run_unsafe_code,
    }
    return validate(values, EvaluationSettings, "hfpatch eval")


def check_output_options(given: EvalOptions) -> None:
    """Refuse options of output that contradict each other.

    Raises:
        HfpatchError: naming the option.
    """
    if given.log_samples and given.output is None:
        raise HfpatchError("--log-samples: needs --output DIR (--output_path), where the samples go")
    if given.output is not None and given.output.suffix == ".json":
        raise HfpatchError(f"--output {given.output}: is a folder for several files; give one without .json")
    forms = [name for name in ("json", "markdown", "latex") if getattr(given, f"as_{name}")]
    if len(forms) > 1:
        raise HfpatchError(f"--{forms[0]} and --{forms[1]}: print one of them")


def device_map_of(given: EvalOptions) -> str | None:
    """Return where the model goes: the one device, or how it is spread.

    Raises:
        HfpatchError: if both are given, or there is no such device.
    """
    if given.device is None:
        return given.device_map
    if given.device_map is not None or given.tp:
        raise HfpatchError(f"--device {given.device}: --device-map and --tp choose the devices; leave one out")
    from hfpatch.recipes.comparison import DEVICE

    if not DEVICE.fullmatch(given.device):
        raise HfpatchError(f"--device {given.device}: must be cpu, cuda, cuda:1, mps or the like")
    return given.device


def _tasks(given: EvalOptions) -> tuple[list[str] | dict[str, Any], float | None]:
    """Return the tasks, with limits of their own if there are any, and the limit of all others."""
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
    return ({name: {"limit": limits.get(name)} for name in names} if limits else names), limit


def _flag(text: str | None) -> bool | str | None:
    """Return an option that is on, off or a name."""
    lower = (text or "").lower()
    return None if text is None else True if lower in _TRUE else False if lower in _FALSE else text


def _seeds(text: str | None) -> list[int | None] | None:
    """Return the four seeds of lm-eval's ``--seed``: of one number all four, of three the last one is 1234."""
    if text is None:
        return None
    parts = [part.strip().lower() for part in text.split(",")]
    seeds = [None if part == "none" else int(part) if part.isdecimal() else -1 for part in parts]
    seeds = seeds * 4 if len(seeds) == 1 else [*seeds, 1234] if len(seeds) == 3 else seeds
    if len(seeds) != 4 or -1 in seeds:
        raise HfpatchError(f"--seed {text}: must be one number, or four with commas between them")
    if seeds[3] is None:
        raise HfpatchError(f"--seed {text}: the last one chooses few-shot examples, which all models must share")
    return seeds


def read_scales(text: str) -> list[float]:
    """Return the numbers of ``--scale``.

    Raises:
        HfpatchError: if one is no number.
    """
    try:
        return [float(each) for each in text.split(",")]
    except ValueError as error:
        raise HfpatchError(f"--scale {text}: give numbers with commas between them, such as 0.25,0.5,1") from error
