"""The arguments and options of the commands, with their help texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.support.version import __version__

if TYPE_CHECKING:
    from hfpatch.recipes.base import ModelSettings
    from hfpatch.recipes.comparison import Recipe


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
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A hub id, a local folder, a GGUF file, or tinyworld/gpt-neox.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as training.steps=60.")
]
Out = Annotated[Path | None, typer.Option(help="The run folder; runs/<recipe name> if not given.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Skip what is complete and continue the rest; where there is no run, start one."),
]
Methods = Annotated[
    str | None, typer.Option(metavar="A,B", help="Some of the recipe's methods; the baseline is always among them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[Path | None, typer.Option(help="A folder that holds local copies of hub data sets.")]
GgufFile = Annotated[
    str | None, typer.Option(metavar="NAME", help="The GGUF file in the model's hub repository or folder.")
]
BaseModel = Annotated[
    str | None, typer.Option("--model", help="Another base than the recipe's: a hub id, a local folder or a GGUF file.")
]
Revision = Annotated[str | None, typer.Option(help="The model's hub revision.")]
DtypeOption = Annotated[str, typer.Option(help="The dtype to load the model in: float32, bfloat16 or float16.")]

TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the modelling code that the model brings along; read it first.")
]

TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="Run code outside the installed packages that the recipe or patch names; read it first."
    ),
]

AllowOtherBase = Annotated[
    bool, typer.Option("--allow-other-base", help="Take a patch whose base had other weights than the model.")
]


def with_options(
    overrides: list[str] | None, data_dir: Path | None, *, model: str | None = None, gguf_file: str | None = None
) -> list[str]:
    """Return the overrides of a recipe, with ``--data-dir``, ``--model`` and ``--gguf-file`` among them."""
    options = {"data_dir": data_dir, "model.name": model, "model.gguf_file": gguf_file}
    given = {key: str(value) for key, value in options.items() if value is not None}
    return [*(overrides or []), *(f"{key}={json.dumps(value)}" for key, value in given.items())]


def read_comparison(
    recipe: str,
    overrides: list[str] | None,
    data_dir: Path | None,
    model: str | None,
    gguf_file: str | None,
    trust_code: bool,
) -> Recipe:
    """Return the recipe of a comparison that a command line names."""
    from hfpatch.recipes.comparison import load_recipe

    given = with_options(overrides, data_dir, model=model, gguf_file=gguf_file)
    return load_recipe(recipe, given, trust_code=trust_code)


def only_methods(recipe: Recipe, methods: str | None, also: Collection[str] = ()) -> Recipe:
    """Return the recipe with the methods that ``--methods`` names, and ``also``; print the comparisons left out."""
    from hfpatch.recipes.pairs import left_out_of_pairs
    from hfpatch.support.ranks import prints_errors

    if methods is None:
        return recipe
    named = [name for name in map(str.strip, methods.split(",")) if name]
    some = recipe.only([*named, *(name for name in also if named and name in recipe.methods)])
    for sentence in left_out_of_pairs(recipe, some) if prints_errors() else ():
        print(f"note: {sentence}", file=sys.stderr)
    return some


def model_settings(
    name: str, revision: str | None, dtype: str, trust_remote_code: bool = False, **more: Any
) -> ModelSettings:
    """Return the options that choose a model as a recipe's section; ``more`` are other keys of it."""
    from hfpatch.recipes.base import ModelSettings
    from hfpatch.recipes.strict import validate

    given = {"name": name, "revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code}
    return validate({**given, **more}, ModelSettings, f"model {name}")
