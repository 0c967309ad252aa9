"""The arguments and options of the commands, with their help texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfpatch.support.version import __version__

if TYPE_CHECKING:
    from hfpatch.recipes.comparison import ModelSettings


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hfpatch {__version__}")
        raise typer.Exit


def of_hfpatch_itself(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a name such as quickstart.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a local folder, or tinyworld/gpt-neox.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as training.steps=60.")
]
Out = Annotated[Path | None, typer.Option(help="The run folder; runs/<recipe name> if not given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Skip what is complete and continue the rest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[Path | None, typer.Option(help="A folder that holds local copies of hub data sets.")]
Revision = Annotated[str | None, typer.Option(help="The model's hub revision.")]
DtypeOption = Annotated[str, typer.Option(help="The dtype to load the model in: float32, bfloat16 or float16.")]

TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the modelling code that the model brings along; read it first.")
]

AllowOtherBase = Annotated[
    bool, typer.Option("--allow-other-base", help="Take a patch whose base had other weights than the model.")
]

# of `hfpatch eval`
Models = Annotated[
    list[str],
    typer.Option(
        "--model",
        help="A hub id, a local folder, or tinyworld/gpt-neox; ID@REVISION for a hub revision. Repeated: whole models "
        "are compared pairwise.",
    ),
]
Tasks = Annotated[str, typer.Option(help="lm-eval task names, separated by commas.")]
IncludePath = Annotated[Path | None, typer.Option(help="A folder with more task files; code that they name is run.")]
Patches = Annotated[
    list[Path] | None,
    typer.Option("--patch", help="A folder written by save_patch, or a PEFT adapter; may be repeated."),
]
Baseline = Annotated[
    bool, typer.Option("--baseline", help="Evaluate the bare model too, and compare every patch with it.")
]
Cluster = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TASK=COLUMN",
        help="The column that says which documents of a task belong together, as questions on one passage; may be "
        "repeated. TASK= for none.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first documents of each task.")]
NumFewshot = Annotated[int | None, typer.Option(min=0, help="Examples before each question.")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Longest row in tokens; the model's limit if not given.")]
TokenBudget = Annotated[
    int | None, typer.Option(min=1, help="Tokens scored at once; chosen for the device if not given.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of one batch in text generation.")]
Output = Annotated[
    Path | None, typer.Option(help="A folder for results and records; the same command continues there.")
]
Cache = Annotated[
    bool, typer.Option("--cache/--no-cache", help="Without --output: keep answers for the next call, and use them.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="For a model that one device cannot hold: auto spreads its blocks over the devices there are."),
]
TensorParallel = Annotated[
    bool,
    typer.Option("--tp", help="Tensor parallelism: every process that the launcher starts has a piece of the model."),
]
AllowUnknownBase = Annotated[
    bool, typer.Option("--allow-unknown-base", help="Continue if the base does not have its published score.")
]


def with_data_dir(overrides: list[str] | None, data_dir: Path | None) -> list[str]:
    """Return the overrides of a recipe, with ``--data-dir`` as one of them."""
    return [*(overrides or []), *([f"data_dir={json.dumps(str(data_dir))}"] if data_dir else [])]


def read_clusters(given: list[str] | None) -> dict[str, str | None]:
    """Return the column of each task that ``--cluster TASK=COLUMN`` names.

    Raises:
        HfpatchError: if one is written otherwise.
    """
    from hfpatch.errors import HfpatchError

    pairs = {each: [part.strip() for part in each.partition("=")] for each in given or ()}
    for each, (task, equals, _) in pairs.items():
        if not task or not equals:
            raise HfpatchError(f"--cluster {each}: write it as TASK=COLUMN, such as boolq=passage")
    return {task: column or None for task, _, column in pairs.values()}


def read_models(
    given: list[str], revision: str | None, dtype: str, trust_remote_code: bool = False
) -> list[ModelSettings]:
    """Return the models that ``--model`` names, each with the revision after its ``@``.

    Raises:
        HfpatchError: if revisions contradict, or there is no such dtype.
    """
    from hfpatch.errors import HfpatchError

    models = []
    for text in given:
        name, at, own = (text, "", "") if Path(text).exists() else text.partition("@")
        if at and not own:
            raise HfpatchError(f"--model {text}: no revision after the @; write ID@REVISION, or the id alone")
        if revision is not None and (own or len(given) > 1):
            raise HfpatchError(f"--revision {revision}: write the revision of each model as --model {name}@{revision}")
        models.append(model_settings(name, own or revision, dtype, trust_remote_code))
    return models


def check_patches_go_with(models: list[str], *, patches: bool, baseline: bool) -> None:
    """Refuse options that are about the patches of one base where several models are compared.

    Raises:
        HfpatchError: naming the option.
    """
    from hfpatch.errors import HfpatchError

    if len(models) > 1 and (patches or baseline):
        raise HfpatchError(
            f"{'--patch' if patches else '--baseline'}: goes with one --model, not with {len(models)}; compare patches "
            "with their base and whole models with each other in two commands"
        )


def model_settings(name: str, revision: str | None, dtype: str, trust_remote_code: bool = False) -> ModelSettings:
    """Return the options that choose a model as a recipe's section.

    Raises:
        HfpatchError: if there is no such dtype.
    """
    from hfpatch.recipes.comparison import ModelSettings
    from hfpatch.recipes.strict import validate

    given = {"name": name, "revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code}
    return validate(given, ModelSettings, "hfpatch")
