"""The commands of ``hfpatch``: arguments in, the packages below do the work, a table or JSON out."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfpatch.cli import options, sharing
from hfpatch.cli.options import AsJson, DataDir, DtypeOption, Out, Overrides, RecipeArgument, Resume, Revision
from hfpatch.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from hfpatch.recipes.comparison import ModelSettings

app = typer.Typer(
    name="hfpatch",
    help="Model surgery on the attention branch of causal language models, measured honestly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def compare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    data_dir: DataDir = None,
) -> None:
    """Train and evaluate every method of a recipe, then report.

    Example: hfpatch compare quickstart training.seeds=[0] --out runs/first
    """
    from hfpatch.recipes.comparison import load_recipe

    loaded = load_recipe(recipe, _overrides(overrides, data_dir))
    folder = out or Path("runs") / loaded.name
    quiet_libraries()
    from hfpatch.cli.progress import choose_progress
    from hfpatch.cli.tables import print_comparison
    from hfpatch.runs import compare as run_compare

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
    data_dir: DataDir = None,
) -> None:
    """Train one method of a recipe, for each of its seeds, and save its patches.

    The run folder is the one of `compare`, which takes up from there with --resume. On several processes:
    accelerate launch -m hfpatch train RECIPE --method NAME

    Example: hfpatch train quickstart --method pre_projection training.steps=60
    """
    from hfpatch.recipes.comparison import load_recipe

    loaded = load_recipe(recipe, _overrides(overrides, data_dir))
    folder = out or Path("runs") / loaded.name
    quiet_libraries()
    from hfpatch.training.processes import start_processes

    start_processes()  # before what takes seconds to import, so that a mistake shows at once
    from hfpatch.cli.progress import choose_progress, is_first_process
    from hfpatch.runs import train as run_train

    with _interruptible(folder), choose_progress() as progress:
        patches = run_train(loaded, method, folder, resume=resume, progress=progress)
    if is_first_process():
        print("\n".join(f"patch: {patch}" for patch in patches))


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Option(help="A hub id, a local folder, or tinyworld/gpt-neox.")],
    tasks: options.Tasks,
    include_path: options.IncludePath = None,
    patch: options.Patches = None,
    baseline: options.Baseline = False,
    limit: options.Limit = None,
    num_fewshot: options.NumFewshot = None,
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = None,
    batch_size: options.BatchSize = 16,
    output: options.Output = None,
    cache: options.Cache = True,
    allow_unknown_base: options.AllowUnknownBase = False,
    allow_other_base: options.AllowOtherBase = False,
    data_dir: DataDir = None,
    revision: Revision = None,
    dtype: DtypeOption = "float32",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks.

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.recipes.strict import validate

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    given = {
        "tasks": names,
        "include_path": str(include_path) if include_path else None,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "max_length": max_length,
        "token_budget": token_budget,
        "batch_size": batch_size,
        "allow_unknown_base": allow_unknown_base,
    }
    settings = validate(given, EvaluationSettings, "hfpatch eval")
    quiet_libraries()
    from hfpatch.cli.evaluation import answer_cache, print_evaluation, says_how_to_go_on
    from hfpatch.cli.progress import choose_progress
    from hfpatch.runs import evaluate as run_evaluate

    base = _model_settings(model, revision, dtype)
    kept = answer_cache() if cache and output is None else None
    with says_how_to_go_on(output or kept), choose_progress() as progress:
        found = run_evaluate(
            base,
            patches=patch or [],
            allow_other_base=allow_other_base,
            baseline=baseline,
            settings=settings,
            data_dir=data_dir,
            output=output,
            cache_dir=kept,
            progress=progress,
        )
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_evaluation(found)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders that compare or pretrain wrote.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the report of several runs goes.")] = None,
) -> None:
    """Write the report of a run folder again, from its result files; or one report of several runs.

    Several runs share the tables where they measured the same model on the same documents, and stand side by side
    where they did not. The study of a pretraining recipe has a report of its own.

    Example: hfpatch report runs/quickstart
    """
    from hfpatch.cli.tables import print_report
    from hfpatch.reporting import default_out, write_joint_report, write_report

    if len(run_dirs) == 1 and out is None:
        write_report(run_dirs[0])
        print_report(run_dirs[0])
    else:
        print(f"report: {write_joint_report(run_dirs, out or default_out(run_dirs)).html}")


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a local folder, or tinyworld/gpt-neox.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the method, as in a recipe.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A part's type, as in a recipe; without it every kind of method is checked.")
    ] = None,
    config_only: Annotated[
        bool, typer.Option(help="Check a tiny random twin of the model's config.json, without its weights.")
    ] = False,
    revision: Revision = None,
    dtype: DtypeOption = "float32",
    as_json: AsJson = False,
) -> None:
    """Run hfpatch's promises on a model: no-op at first, the right site, gradients, generation, saving, restoring.

    Exits with code 1 if one of them is broken.

    Example: hfpatch check tinyworld/gpt2 --method nonlinear_query form=literal
    """
    from hfpatch.errors import HfpatchError
    from hfpatch.recipes.strict import read_override

    if options and method is None:
        raise HfpatchError(f"{options[0]}: options belong to a method; name it, as in --method pre_projection")
    part = None if method is None else {**dict(read_override(option) for option in options or []), "type": method}
    base = _model_settings(model, revision, dtype)
    quiet_libraries()
    from hfpatch.cli.progress import choose_progress
    from hfpatch.runs import check as run_check
    from hfpatch.runs.progress import Progress

    with nullcontext(Progress()) if as_json else choose_progress() as progress:
        outcome = run_check(base, part, config_only=config_only, progress=progress)
    print(json.dumps(outcome.to_json(), indent=2) if as_json else str(outcome))
    if not outcome.passed:
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a local folder, or tinyworld/gpt-neox.")],
    patch: Annotated[Path | None, typer.Option(help="A folder written by save_patch, or a PEFT adapter.")] = None,
    allow_other_base: options.AllowOtherBase = False,
    text: Annotated[
        str | None,
        typer.Option(help="Text to measure on, as data.source in a recipe; best what the patch was not trained on."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of it; 8 times the hidden size if not given.")
    ] = None,
    reparametrisation: Annotated[
        bool, typer.Option("--reparametrisation", help="Verify (X, W) -> (XΘ, Θ⁻¹W), and what can be removed by it.")
    ] = False,
    as_json: AsJson = False,
    as_html: Annotated[bool, typer.Option("--html", help="Write a page with figures.")] = False,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("inspection.html"),
    data_dir: DataDir = None,
    revision: Revision = None,
    dtype: DtypeOption = "float32",
) -> None:
    """Show what a model's attention does: its sites, the Q-K relation of every head, and what a patch changes.

    Example: hfpatch inspect tinyworld/gpt-neox --patch runs/quickstart/runs/pre_projection/seed-0/patch --html
    """
    base = _model_settings(model, revision, dtype)
    quiet_libraries()
    from hfpatch.runs import inspect as run_inspect

    found = run_inspect(
        base,
        patch,
        allow_other_base=allow_other_base,
        text=text,
        tokens=tokens,
        data_dir=data_dir,
        reparametrisation=reparametrisation,
    )
    if as_html:
        from hfpatch.runs.inspection_page import inspection_page
        from hfpatch.support.files import write_text

        write_text(out, inspection_page(found))
        print(f"page: {out}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif not as_html:
        from hfpatch.cli.inspection import print_inspection

        print_inspection(found)


@app.command()
def pretrain(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    variant: Annotated[
        str | None, typer.Option(help="Of a study, train this variant's runs alone; a later call reports.")
    ] = None,
) -> None:
    """Pretrain a model from scratch and write it as a Hugging Face folder, OUT/model; or run a study of variants.

    A recipe with ``variants`` is a study: every variant is trained with every seed on the same batches, at each point
    of its sweep, and the report holds them against the baseline. On several processes:
    accelerate launch -m hfpatch pretrain RECIPE

    Example: hfpatch pretrain my-model.yaml training.steps=1000 --out runs/my-model
    """
    from hfpatch.errors import HfpatchError
    from hfpatch.recipes.pretraining import PretrainRecipe, load_pretrain_or_study

    loaded = load_pretrain_or_study(recipe, _overrides(overrides, data_dir))
    folder = out or Path("runs") / loaded.name
    if isinstance(loaded, PretrainRecipe) and variant is not None:
        raise HfpatchError(f"--variant {variant}: {recipe} has no variants; leave the option out")
    quiet_libraries()
    from hfpatch.cli.progress import choose_progress, is_first_process
    from hfpatch.cli.tables import print_study
    from hfpatch.runs import pretrain as run_pretrain
    from hfpatch.runs import pretrain_study

    gc.freeze()
    with _interruptible(folder), choose_progress() as progress:
        if isinstance(loaded, PretrainRecipe):
            step = run_pretrain(loaded, folder, resume=resume, progress=progress)["train"]["diverged_step"]
        else:
            pretrain_study(loaded, folder, resume=resume, variant=variant, progress=progress)
    if not is_first_process():
        return
    if isinstance(loaded, PretrainRecipe):
        print(f"model: {folder / 'model'}" if step is None else f"diverged at step {step}: {folder / 'metrics.jsonl'}")
    elif variant is None:
        print_study(folder)
    else:
        print(f"runs of {variant}: {folder / 'runs' / variant}; without --variant and with --resume: the report")


@app.command()
def tokenize(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The token file, NAME.bin; <recipe name>.bin if not given.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Tokenise a pretraining recipe's text into a token file, which data.source can then name.

    The text is read once and never held in memory; NAME.json beside the file says what it holds. A data.source that
    is such a file of another tool's making gets only its NAME.json.

    Example: hfpatch tokenize my-model.yaml data.source=Skylion007/openwebtext --out openwebtext.bin
    """
    from hfpatch.recipes.pretraining import load_pretrain_or_study

    loaded = load_pretrain_or_study(recipe, _overrides(overrides, data_dir))
    quiet_libraries()
    from hfpatch.cli.progress import TokensSoFar
    from hfpatch.runs import tokenize as run_tokenize

    made = run_tokenize(loaded, out, on_part=TokensSoFar())
    print(f"tokens: {made.file} ({made.info.tokens:,} tokens, {made.info.documents:,} documents)")
    print(f"to train on them: {' '.join(made.overrides)}")


app.command()(sharing.push)
app.command()(sharing.export)


def _overrides(overrides: list[str] | None, data_dir: Path | None) -> list[str]:
    """Return the overrides of a recipe, with ``--data-dir`` as one of them."""
    return [*(overrides or []), *([f"data_dir={json.dumps(str(data_dir))}"] if data_dir else [])]


def _model_settings(name: str, revision: str | None, dtype: str) -> ModelSettings:
    from hfpatch.recipes.comparison import ModelSettings
    from hfpatch.recipes.strict import validate

    return validate({"name": name, "revision": revision, "dtype": dtype}, ModelSettings, "hfpatch")


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
