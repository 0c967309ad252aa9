"""The options of ``eval``: one dataclass, and keys of recipes; what lm-eval has too is called as there."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from hfpatch.cli import options
from hfpatch.errors import HfpatchError, nearest

_OUTPUT = "Output"
_SHORT = {"-f": "--num-fewshot", "-b": "--batch-size"}  # of lm-eval


@dataclass(frozen=True)
class EvalOptions:
    """The options of ``hfpatch eval`` as they were given."""

    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys of a recipe's sections evaluation and model that have no option here; also as options: "
            "evaluation.num_fewshot=5 is --num-fewshot 5, model.load_in_4bit=true is --load-in-4bit.",
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-M",
            help="A hub id, a local folder, a GGUF file, or tinyworld/gpt-neox; ID@REVISION for a hub revision. "
            "Repeated: whole models are compared pairwise.",
        ),
    ] = None
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            "-t",
            help="Tasks, groups and tags of lm-eval, or patterns such as 'arc_*', separated by commas; list, "
            "list_groups, list_tags or list_subtasks prints what there is.",
        ),
    ] = None
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with more task files; code that they name is run.")
    ] = None
    patch: Annotated[
        list[Path] | None,
        typer.Option("--patch", help="A folder written by save_patch, or a PEFT adapter; may be repeated."),
    ] = None
    scale: Annotated[
        str,
        typer.Option(
            "--scale",
            metavar="A,B,...",
            help="Multiply the change of each patch by each of these numbers: 0 is the base, 1 the patch.",
        ),
    ] = "1"
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Evaluate the bare model too, and compare every patch with it.")
    ] = False
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            "-L",
            metavar="[TASK=]N",
            help="Only the first documents of each task, or of one: --limit 100 --limit wikitext=5; below 1 a share.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A folder for results and records; the same command continues there.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Without --output: keep answers for the next call, and use them.")
    ] = True
    allow_other_base: options.AllowOtherBase = False
    data_dir: options.DataDir = None
    gguf_file: options.GgufFile = None
    revision: options.Revision = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="The dtype to load the model in and to compute in: float32 (the default, whatever the "
            "checkpoint's), bfloat16 or float16. A CPU without bfloat16 instructions computes products of bfloat16 "
            "weights in float32; the output says so."
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Where to load the model: cpu, cuda, cuda:1, mps; a GPU if there is one.")
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(
            help="For a model that one device cannot hold: auto spreads its blocks over the devices there are."
        ),
    ] = None
    tp: Annotated[
        bool,
        typer.Option(
            "--tp", help="Tensor parallelism: every process that the launcher starts has a piece of the model."
        ),
    ] = False
    trust_remote_code: options.TrustRemoteCode = False
    trust_code: options.TrustCode = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=_OUTPUT)] = (
        False
    )
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the scores as a Markdown table.", rich_help_panel=_OUTPUT)
    ] = False
    as_latex: Annotated[
        bool, typer.Option("--latex", help="Print the scores as a LaTeX table.", rich_help_panel=_OUTPUT)
    ] = False


class EvalCommand(TyperCommand):
    """A command whose options may be keys of recipes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; the option of a key is the override of it."""
        options = {name for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
        words = args if ctx.resilient_parsing else with_overrides(args, options)  # a shell completes the former
        return list(super().parse_args(ctx, words))


def with_overrides(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return a command line with ``evaluation.KEY=VALUE`` or ``model.KEY=VALUE`` for what is not among its options.

    A key that may be true needs no value; ``A=B,C=D`` are the entries of one that is a mapping.

    Raises:
        HfpatchError: if something else is no key, or lacks its value.
    """
    read, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        if word[:2] in _SHORT:  # click reads -b8, too
            word = f"{_SHORT[word[:2]]}={word[2:].removeprefix('=')}" if word[2:] else _SHORT[word]
        name, equals, value = word.partition("=")
        if name == "--":  # no option is behind it
            return [*read, word, *left]
        if not name.startswith("--") or name.replace("_", "-") in options:
            read.append(word)
            continue
        from hfpatch.recipes.base import ModelSettings  # imports pydantic
        from hfpatch.recipes.evaluation import EvaluationSettings

        keys = {f"evaluation.{key}": field.annotation for key, field in EvaluationSettings.model_fields.items()}
        keys |= {f"model.{key}": field.annotation for key, field in ModelSettings.model_fields.items()}
        by_option = {f"--{key.partition('.')[2].replace('_', '-')}": key for key in keys}
        key = by_option.get(name.replace("_", "-"))
        if key is None:
            raise HfpatchError(
                f"{name}: eval has no such option{nearest(name, [*options, *by_option])}; for others of lm-eval use "
                "hfpatch lm_eval --model hfpatch --model_args pretrained=ID,patch=DIR"
            )
        kind = keys[key]
        kinds = {kind, *get_args(kind)}
        if not equals and bool in kinds and (not left or left[0][:1] == "-" or "=" in left[0]):
            value = "true"
        elif not equals and (not left or left[0].startswith("--")):
            raise HfpatchError(f"{name}: needs a value; write {name} VALUE")
        elif not equals:
            value = left.pop(0)
        if str in kinds and bool not in kinds and get_origin(kind) is not dict:
            value = json.dumps(value)  # text as it was given, whatever YAML makes of it
        is_mapping = get_origin(kind) is dict and "=" in value
        read += [f"{key}.{entry}" for entry in value.split(",")] if is_mapping else [f"{key}={value}"]
    return read


def command_of(run: Callable[[EvalOptions], None]) -> Callable[..., None]:
    """Return a function with a parameter for each option, as typer needs it, which calls ``run``."""

    def command(**given: Any) -> None:
        run(EvalOptions(**given))

    hints = get_type_hints(EvalOptions, include_extras=True)
    parameters = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(EvalOptions)
    ]
    command.__doc__, command.__annotations__ = run.__doc__, hints
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # functions may have one
    return command
