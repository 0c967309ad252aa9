"""The commands of ``hfpatch``: arguments in, the work done by the rooms below, a table or JSON out."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfpatch.recipe import ModelSettings

app = typer.Typer(
    name="hfpatch",
    help="Model surgery on the attention branch of causal language models, measured honestly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a name such as quickstart.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as training.steps=60.")
]
Out = Annotated[Path | None, typer.Option(help="The run folder; runs/<recipe name> if not given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Skip what is complete, continue what is not.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[Path | None, typer.Option(help="A folder that holds local copies of hub data sets.")]
Revision = Annotated[str | None, typer.Option(help="The model's hub revision.")]
DtypeOption = Annotated[str, typer.Option(help="The dtype to load the model in: float32, bfloat16 or float16.")]


@app.command()
def compare(recipe: RecipeArgument, overrides: Overrides = None, out: Out = None, resume: Resume = False) -> None:
    """Train and evaluate every method of a recipe, then report.

    Example: hfpatch compare quickstart training.seeds=[0] --out runs/first
    """
    from hfpatch.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    folder = out or Path("runs") / loaded.name
    _quiet_libraries()
    from hfpatch.cli.progress import choose_progress
    from hfpatch.cli.tables import print_comparison
    from hfpatch.pipeline import compare as run_compare

    gc.freeze()  # the libraries' objects stay; each Trainer collects garbage twice, which then takes no time
    with _interruptible(folder), choose_progress() as progress:
        run_compare(loaded, folder, resume=resume, progress=progress)
    print_comparison(folder)


@app.command()
def train(
    recipe: RecipeArgument,
    method: Annotated[str, typer.Option(help="The method of the recipe to train.")],
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Train one method of a recipe, for each of its seeds, and save its patches.

    The run folder is the one of `compare`, which takes up from there with --resume. On several processes:
    accelerate launch -m hfpatch train RECIPE --method NAME

    Example: hfpatch train quickstart --method pre_projection training.steps=60
    """
    from hfpatch.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    folder = out or Path("runs") / loaded.name
    _quiet_libraries()
    from hfpatch.training.processes import start_processes

    start_processes()  # before what takes seconds to import, so that a mistake shows at once
    from hfpatch.cli.progress import choose_progress, is_first_process
    from hfpatch.pipeline import train as run_train

    with _interruptible(folder), choose_progress() as progress:
        patches = run_train(loaded, method, folder, resume=resume, progress=progress)
    if is_first_process():
        print("\n".join(f"patch: {patch}" for patch in patches))


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Option(help="A hub id, a local folder, or tinyworld/gpt-neox.")],
    tasks: Annotated[str, typer.Option(help="lm-eval task names, separated by commas.")],
    patch: Annotated[Path | None, typer.Option(help="A folder written by save_patch, or a PEFT adapter.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first documents of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in one forward pass.")] = 16,
    data_dir: DataDir = None,
    revision: Revision = None,
    dtype: DtypeOption = "float32",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model, patched or not, on lm-eval tasks.

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    from hfpatch.evaluation.settings import EvaluationSettings
    from hfpatch.strict import validate

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    settings = validate({"tasks": names, "limit": limit, "batch_size": batch_size}, EvaluationSettings, "hfpatch eval")
    _quiet_libraries()
    from hfpatch.cli.progress import choose_progress
    from hfpatch.cli.tables import print_scores
    from hfpatch.pipeline import evaluate as run_evaluate

    base = _model_settings(model, revision, dtype)
    with choose_progress() as progress:
        scores = run_evaluate(base, patch=patch, settings=settings, data_dir=data_dir, progress=progress)
    if as_json:
        print(json.dumps({task: result.to_json() for task, result in scores.items()}, indent=2))
    else:
        print_scores(scores, f"{model} with {patch}" if patch else model)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder that compare wrote.")]) -> None:
    """Write the report of a run folder again, from its result files.

    Example: hfpatch report runs/quickstart
    """
    from hfpatch.cli.tables import print_comparison
    from hfpatch.reporting import write_report

    write_report(run_dir)
    print_comparison(run_dir)


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a local folder, or tinyworld/gpt-neox.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the part, as in a recipe.")
    ] = None,
    method: Annotated[str, typer.Option(help="The part's type, as in a recipe.")] = "pre_projection",
    revision: Revision = None,
    dtype: DtypeOption = "float32",
    as_json: AsJson = False,
) -> None:
    """Run hfpatch's promises on a model: no-op at first, gradients, saving, loading, restoring.

    Exits with code 1 if one of them is broken.

    Example: hfpatch check tinyworld/gpt2 --method nonlinear_query form=literal
    """
    from hfpatch.strict import read_override

    part = {**dict(read_override(option) for option in options or []), "type": method}
    base = _model_settings(model, revision, dtype)
    _quiet_libraries()
    from hfpatch.pipeline import check as run_check

    outcome = run_check(base, part)
    print(json.dumps(outcome.to_json(), indent=2) if as_json else str(outcome))
    if not outcome.passed:
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a local folder, or tinyworld/gpt-neox.")],
    patch: Annotated[Path | None, typer.Option(help="A folder written by save_patch, or a PEFT adapter.")] = None,
    revision: Revision = None,
    dtype: DtypeOption = "float32",
) -> None:
    """Show where a model's attention branches are, and what a patch adds to them.

    Example: hfpatch inspect tinyworld/gpt-neox
    """
    base = _model_settings(model, revision, dtype)
    _quiet_libraries()
    from hfpatch.cli.tables import print_inspection
    from hfpatch.pipeline import inspect as run_inspect

    print_inspection(run_inspect(base, patch))


@app.command()
def pretrain(recipe: RecipeArgument, overrides: Overrides = None, out: Out = None, resume: Resume = False) -> None:
    """Pretrain a small model from scratch and write it as a Hugging Face folder, OUT/model.

    Example: hfpatch pretrain my-model.yaml training.steps=1000 --out runs/my-model
    """
    from hfpatch.recipe import load_pretrain_recipe

    loaded = load_pretrain_recipe(recipe, overrides or [])
    folder = out or Path("runs") / loaded.name
    _quiet_libraries()
    from hfpatch.cli.progress import choose_progress, is_first_process
    from hfpatch.pipeline import pretrain as run_pretrain

    with _interruptible(folder), choose_progress() as progress:
        model = run_pretrain(loaded, folder, resume=resume, progress=progress)
    if is_first_process():
        print(f"model: {model}")


def _model_settings(name: str, revision: str | None, dtype: str) -> ModelSettings:
    from hfpatch.recipe import ModelSettings
    from hfpatch.strict import validate

    return validate({"name": name, "revision": revision, "dtype": dtype}, ModelSettings, "hfpatch")


def _quiet_libraries() -> None:
    """Keep the libraries' progress bars, advice and retries out of the output; hfpatch's own warnings remain."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(?!hfpatch)")


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one line that says how to go on."""
    from hfpatch.training.interruption import Terminated

    try:
        yield
    except KeyboardInterrupt:
        print(f"hfpatch: interrupted; the same command with --resume continues in {folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Terminated as end:
        saved = f"ended by SIGTERM after step {end.step}, which is saved"
        print(f"hfpatch: {saved}; the same command with --resume continues in {folder}", file=sys.stderr)
        raise
