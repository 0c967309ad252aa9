"""The commands of ``hfpatch``: they read arguments, call the packages below, and print a summary or JSON."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from hfpatch.cli import exploring, options, planning, sharing
from hfpatch.cli.help import Group
from hfpatch.cli.options import (
    AsJson,
    DataDir,
    Out,
    Overrides,
    RecipeArgument,
    Resume,
    model_settings,
    with_data_dir,
)
from hfpatch.cli.quiet import quiet_libraries
from hfpatch.support.lazy import collection_paused

_RESUME = "the same command with --resume continues in {}"

app = typer.Typer(
    name="hfpatch",
    cls=Group,
    callback=options.of_hfpatch_itself,
    help="Model surgery on the attention branch of causal language models, with honest measurements.",
    no_args_is_help=True,
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

    loaded = load_recipe(recipe, with_data_dir(overrides, data_dir))
    folder = out or Path("runs") / loaded.name
    quiet_libraries()
    with collection_paused():
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import compare as run_compare

    gc.freeze()  # collecting garbage then takes no time for what the libraries imported
    with _interruptible(_RESUME.format(folder)), choose_progress() as progress:
        run_compare(loaded, folder, resume=resume, progress=progress)
    _print_report(folder)


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

    `compare` with --resume and the same run folder continues from there. On several processes:
    accelerate launch -m hfpatch train RECIPE --method NAME

    Example: hfpatch train quickstart --method pre_projection training.steps=60
    """
    from hfpatch.recipes.comparison import load_recipe

    loaded = load_recipe(recipe, with_data_dir(overrides, data_dir))
    folder = out or Path("runs") / loaded.name
    quiet_libraries()
    with collection_paused():
        from hfpatch.training.processes import start_processes

    start_processes()  # before imports that take seconds, so that mistakes show at once
    from hfpatch.cli.progress import choose_progress, is_first_process
    from hfpatch.runs import train as run_train

    gc.freeze()
    with _interruptible(_RESUME.format(folder)), choose_progress() as progress:
        patches = run_train(loaded, method, folder, resume=resume, progress=progress)
    if is_first_process():
        print("\n".join(f"patch: {patch}" for patch in patches))


@app.command("eval")
def evaluate(
    model: options.Models,
    tasks: options.Tasks,
    include_path: options.IncludePath = None,
    cluster: options.Cluster = None,
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
    revision: options.Revision = None,
    dtype: options.DtypeOption = "float32",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model, bare or with each of several patches, on lm-eval tasks; or compare several whole models.

    Example: hfpatch eval --model EleutherAI/pythia-160m --tasks lambada_openai,arc_easy --limit 100
    """
    from hfpatch.recipes.evaluation import EvaluationSettings
    from hfpatch.recipes.strict import validate

    given = {
        "tasks": [name.strip() for name in tasks.split(",") if name.strip()],
        "include_path": str(include_path) if include_path else None,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "max_length": max_length,
        "token_budget": token_budget,
        "batch_size": batch_size,
        "allow_unknown_base": allow_unknown_base,
        "cluster": options.read_clusters(cluster),
    }
    settings = validate(given, EvaluationSettings, "hfpatch eval")
    options.check_patches_go_with(model, patches=bool(patch), baseline=baseline)
    models = options.read_models(model, revision, dtype)
    quiet_libraries()
    with collection_paused():
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import evaluate as run_evaluate
    gc.freeze()
    from hfpatch.support.cache import cache_folder, is_writable

    answers = cache_folder("answers")
    kept = answers if cache and output is None and is_writable(answers, "the answers") else None
    folder = output or kept
    advice = f"the same command continues from what is in {folder}" if folder else "nothing is kept with --no-cache"
    with _interruptible(advice), choose_progress() as progress:
        common: dict[str, Any] = {"settings": settings, "data_dir": data_dir, "output": output, "cache_dir": kept}
        of_one: dict[str, Any] = {"patches": patch or [], "allow_other_base": allow_other_base, "baseline": baseline}
        if len(models) > 1:
            from hfpatch.runs import evaluate_models

            found = evaluate_models(models, progress=progress, **common)
        else:
            found = run_evaluate(models[0], progress=progress, **of_one, **common)
    from hfpatch.reporting.evaluation import evaluation_document
    from hfpatch.reporting.terminal import print_document

    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_document(evaluation_document(found))


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders that compare, pretrain or eval wrote.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the report of several runs goes.")] = None,
) -> None:
    """Write the report of a run folder again, from its result files; or one report of several comparisons.

    Several comparisons share tables where they measured the same model on the same documents, and are shown one after
    the other where they did not. The figures are written as PDF too.

    Example: hfpatch report runs/quickstart
    """
    from hfpatch.reporting import default_out, write_joint_report, write_report
    from hfpatch.reporting.terminal import print_document

    if len(run_dirs) == 1 and out is None:
        written = write_report(run_dirs[0], pdf=True)
        print_document(written.document)
    else:
        written = write_joint_report(run_dirs, out or default_out(run_dirs), pdf=True)
    print(f"report: {written.html}")


@app.command()
def check(
    model: options.ModelArgument,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the method, as in a recipe.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A part's type, as in a recipe; without it every kind of method is checked.")
    ] = None,
    config_only: Annotated[
        bool, typer.Option(help="Check a tiny random twin of the model's config.json, without its weights.")
    ] = False,
    revision: options.Revision = None,
    dtype: options.DtypeOption = "float32",
    as_json: AsJson = False,
) -> None:
    """Test on a model what hfpatch promises: no-op at first, the right place, gradients, generation, saving, removing.

    Exits with code 1 if a test fails.

    Example: hfpatch check tinyworld/gpt2 --method nonlinear_query form=literal
    """
    from hfpatch.errors import HfpatchError
    from hfpatch.recipes.strict import read_override

    if options and method is None:
        raise HfpatchError(f"{options[0]}: options belong to a method; name it, as in --method pre_projection")
    part = None if method is None else {**dict(read_override(option) for option in options or []), "type": method}
    base = model_settings(model, revision, dtype)
    quiet_libraries()
    with collection_paused():
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
    model: options.ModelArgument,
    patch: Annotated[Path | None, typer.Option(help="A folder written by save_patch, or a PEFT adapter.")] = None,
    allow_other_base: options.AllowOtherBase = False,
    text: Annotated[
        str | None,
        typer.Option(help="Text to measure on, as data.source in a recipe; best one that no patch was trained on."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of it; 8 times the hidden size if not given.")
    ] = None,
    reparametrisation: Annotated[
        bool, typer.Option("--reparametrisation", help="Verify (X, W) -> (XΘ, Θ⁻¹W), and what it can remove.")
    ] = False,
    as_json: AsJson = False,
    as_html: Annotated[bool, typer.Option("--html", help="Write a page with figures.")] = False,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("inspection.html"),
    data_dir: DataDir = None,
    revision: options.Revision = None,
    dtype: options.DtypeOption = "float32",
) -> None:
    """Show what a model's attention does: where it is, the Q-K relation of every head, and what a patch changes.

    Example: hfpatch inspect tinyworld/gpt-neox --patch runs/quickstart/runs/pre_projection/seed-0/patch --html
    """
    base = model_settings(model, revision, dtype)
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
    from hfpatch.reporting.inspection.document import inspection_document
    from hfpatch.reporting.terminal import print_document

    if as_html:
        from hfpatch.reporting.html import html
        from hfpatch.reporting.inspection.figures import figures
        from hfpatch.support.files import write_text

        write_text(out, html(inspection_document(found, figures(found))))
        print(f"page: {out}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif not as_html:
        print_document(inspection_document(found))


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
    of its sweep, and the report compares them with the baseline. On several processes:
    accelerate launch -m hfpatch pretrain RECIPE

    Example: hfpatch pretrain my-model.yaml training.steps=1000 --out runs/my-model
    """
    from hfpatch.errors import HfpatchError
    from hfpatch.recipes.pretraining import PretrainRecipe, load_pretrain_or_study

    loaded = load_pretrain_or_study(recipe, with_data_dir(overrides, data_dir))
    folder = out or Path("runs") / loaded.name
    if isinstance(loaded, PretrainRecipe) and variant is not None:
        raise HfpatchError(f"--variant {variant}: {recipe} has no variants; leave the option out")
    quiet_libraries()
    with collection_paused():
        from hfpatch.cli.progress import choose_progress, is_first_process
        from hfpatch.runs import pretrain as run_pretrain
        from hfpatch.runs import pretrain_study

    gc.freeze()
    with _interruptible(_RESUME.format(folder)), choose_progress() as progress:
        if isinstance(loaded, PretrainRecipe):
            step = run_pretrain(loaded, folder, resume=resume, progress=progress)["train"]["diverged_step"]
        else:
            pretrain_study(loaded, folder, resume=resume, variant=variant, progress=progress)
    if not is_first_process():
        return
    if isinstance(loaded, PretrainRecipe):
        print(f"model: {folder / 'model'}" if step is None else f"diverged at step {step}: {folder / 'metrics.jsonl'}")
    elif variant is None:
        _print_report(folder)
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

    The text is read once, piece by piece; NAME.json beside the file describes it. A data.source that is a token file of
    another tool gets only its NAME.json.

    Example: hfpatch tokenize my-model.yaml data.source=Skylion007/openwebtext --out openwebtext.bin
    """
    from hfpatch.recipes.pretraining import load_pretrain_or_study

    loaded = load_pretrain_or_study(recipe, with_data_dir(overrides, data_dir))
    quiet_libraries()
    from hfpatch.cli.progress import TokensSoFar
    from hfpatch.runs import tokenize as run_tokenize

    made = run_tokenize(loaded, out, on_part=TokensSoFar())
    print(f"tokens: {made.file} ({made.info.tokens:,} tokens, {made.info.documents:,} documents)")
    print(f"to train on them: {' '.join(made.overrides)}")


app.command()(planning.plan)
app.command()(exploring.explore)
app.command()(sharing.push)
app.command()(sharing.export)


def _print_report(folder: Path) -> None:
    """Print the summary of a report and where it is."""
    from hfpatch.reporting.report import document_of
    from hfpatch.reporting.terminal import print_document

    print_document(document_of(folder))
    print(f"report: {folder / 'report.html'}")


@contextmanager
def _interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one line that says how to continue."""
    from hfpatch.training.interruption import Terminated

    try:
        yield
    except KeyboardInterrupt:
        print(f"hfpatch: interrupted; {advice}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Terminated as end:
        print(f"hfpatch: ended by SIGTERM after step {end.step}, which is saved; {advice}", file=sys.stderr)
        raise
