"""The options of ``eval``, as one dataclass; what lm-eval has too is called as there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from hfpatch.cli import options
from hfpatch.cli.help import CommandLineError
from hfpatch.errors import HfpatchError

_OUTPUT = "Output"


@dataclass(frozen=True)
class EvalOptions:
    """The options of ``hfpatch eval`` as they were given."""

    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys of a recipe that have no option here: evaluation.apply_chat_template=true, "
            "evaluation.gen_kwargs.temperature=0.8, model.load_in_4bit=true.",
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
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=COLUMN",
            help="The column that says which documents of a task belong together, as questions on one passage; may be "
            "repeated. TASK= for none.",
        ),
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
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", "-f", min=0, help="Examples before each question.")
    ] = None
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest row in tokens; the model's limit if not given.")
    ] = None
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens scored at once; chosen for the device if not given.")
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", min=1, help="Rows of one batch in text generation; 16 if not given."),
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
    allow_unknown_base: Annotated[
        bool, typer.Option("--allow-unknown-base", help="Continue if the base does not have its published score.")
    ] = False
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
    """A command that says what to write for an option of lm-eval that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; ``--num_fewshot``, as lm-eval writes it, is ``--num-fewshot``."""
        try:
            return list(super().parse_args(ctx, args))
        except CommandLineError as error:
            option = str(getattr(error, "option_name", ""))
            key = option.removeprefix("--").replace("-", "_")
            if not option.startswith("--") or key not in _LM_EVAL:
                raise
            where = f"write {_LM_EVAL[key]}" if _LM_EVAL[key] else "hfpatch lm_eval takes it"
            raise HfpatchError(f"--{key}: is an option of lm-eval; {where}") from None


_LM_EVAL = {
    "model_args": "keys of a recipe, such as model.revision=main, and --patch DIR",
    "gen_kwargs": "evaluation.gen_kwargs.KEY=VALUE, such as evaluation.gen_kwargs.temperature=0.8",
    "seed": "evaluation.seed=[0, 1234, 1234, 1234]",
    "apply_chat_template": "evaluation.apply_chat_template=true",
    "system_instruction": "evaluation.system_instruction=TEXT",
    "fewshot_as_multiturn": "evaluation.fewshot_as_multiturn=true",
    "confirm_run_unsafe_code": "evaluation.confirm_run_unsafe_code=true",
    "output_path": "--output DIR",
    "use_cache": "--cache, which is the default",
    "log_samples": "hfpatch lm_eval --model hfpatch --model_args pretrained=ID,patch=DIR --log_samples",
    "max_batch_size": "--token-budget N",
    **dict.fromkeys(("cache_requests", "check_integrity", "config", "hf_hub_log_args", "metadata", "predict_only"), ""),
    **dict.fromkeys(("samples", "show_config", "trackio_args", "verbosity", "wandb_args", "wandb_config_args"), ""),
    "write_out": "",
}
"""What to write for each option of lm-eval that ``eval`` has not; nothing where there is nothing."""


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
