"""The command that looks ahead: ``plan``."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Annotated

import typer

from hfpatch.cli.options import (
    AsJson,
    BaseModel,
    DataDir,
    GgufFile,
    Methods,
    Overrides,
    RecipeArgument,
    TrustCode,
    only_methods,
    with_options,
)
from hfpatch.cli.quiet import quiet_libraries
from hfpatch.support.lazy import collection_paused


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    methods: Methods = None,
    effect: Annotated[
        float | None,
        typer.Option(help="A difference to find the documents and seeds for: 0.01 is one point, or 1 % of perplexity."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="About how long to measure, beside loading.")] = 20.0,
    data_dir: DataDir = None,
    model: BaseModel = None,
    gguf_file: GgufFile = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Say what `compare` would run, how long it would take here, and what differences it could show.

    Parts of a training step and of the tasks are run for each kind of method; nothing is written but caches.

    Example: hfpatch plan pythia-160m --effect 0.01
    """
    from hfpatch.recipes.comparison import load_recipe

    loaded = load_recipe(
        recipe, with_options(overrides, data_dir, model=model, gguf_file=gguf_file), trust_code=trust_code
    )
    loaded = only_methods(loaded, methods)
    quiet_libraries()
    with collection_paused():
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import forecast
    from hfpatch.runs.progress import Progress

    with nullcontext(Progress()) if as_json else choose_progress() as progress:
        found = forecast(loaded, effect=effect, seconds=seconds, progress=progress)
    from hfpatch.reporting.forecast import forecast_document
    from hfpatch.reporting.terminal import print_document

    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_document(forecast_document(found))
