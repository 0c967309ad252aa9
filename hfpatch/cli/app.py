"""The commands of ``hfpatch``: they read arguments, call the packages below, and print a summary or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hfpatch.cli import creating, engines, eval_options, evaluation, options, pretraining
from hfpatch.cli.help import Group
from hfpatch.cli.options import (
    AsJson,
    DataDir,
    Out,
    Overrides,
    RecipeArgument,
    Resume,
    TrustCode,
    model_settings,
    read_comparison,
)
from hfpatch.cli.running import RESUME, interruptible, loading_libraries, print_report, quiet_libraries
from hfpatch.errors import HfpatchError

app = typer.Typer(
    name="hfpatch",
    cls=Group,
    callback=options.of_hfpatch_itself,
    help="Model surgery on the attention branch of causal language models, with honest measurements.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command(cls=engines.EngineCommand)
def compare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    methods: options.Methods = None,
    out: Out = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    model: options.BaseModel = None,
    gguf_file: options.GgufFile = None,
    trust_code: TrustCode = False,
    jobs: engines.Jobs = None,
    ray: engines.Ray = None,
    gpus_per_run: engines.GpusPerRun = None,
    cpus_per_run: engines.CpusPerRun = None,
    processes_per_run: engines.ProcessesPerRun = None,
    launch_config: engines.LaunchConfig = None,
) -> None:
    """Train and evaluate every method of a recipe, then report.

    With --methods A,B only these; --resume --methods C adds C to those in the folder, --resume alone all the others.
    On several processes, which share every training and evaluation: accelerate launch -m hfpatch compare RECIPE

    Example: hfpatch compare quickstart training.seeds=[0] --out runs/first
    """
    from hfpatch.recipes.strict import read_yaml
    from hfpatch.runs.engines.settings import EngineSettings

    engine = EngineSettings(jobs, ray, gpus_per_run, cpus_per_run, processes_per_run, launch_config)
    loaded = read_comparison(recipe, overrides, data_dir, model, gguf_file, trust_code)
    folder = out or Path("runs") / loaded.name
    earlier = folder / "recipe.yaml"
    earlier_methods = read_yaml(earlier).get("methods") if resume and earlier.is_file() else None
    also = list(earlier_methods) if isinstance(earlier_methods, dict) else []
    if not (folder / "questions.json").is_file():  # only `train` was here, whose recipe has all methods
        also = [name for name in also if (folder / "runs" / name).is_dir()]
    loaded = options.only_methods(loaded, methods, also)
    with loading_libraries():
        from hfpatch.cli.progress import choose_progress, is_first_process
        from hfpatch.runs import compare as run_compare

    with interruptible(RESUME.format(folder)), choose_progress() as progress:
        run_compare(loaded, folder, resume=resume, progress=progress, engine=engine)
    if is_first_process():
        print_report(folder)


@app.command()
def train(
    recipe: RecipeArgument,
    method: Annotated[str, typer.Option(help="The method of the recipe to train.")],
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    model: options.BaseModel = None,
    gguf_file: options.GgufFile = None,
    trust_code: TrustCode = False,
) -> None:
    """Train one method of a recipe, for each of its seeds, and save its patches.

    `compare` with --resume and the same run folder continues from there. On several processes:
    accelerate launch -m hfpatch train RECIPE --method NAME

    Example: hfpatch train quickstart --method pre_projection training.steps=60
    """
    loaded = read_comparison(recipe, overrides, data_dir, model, gguf_file, trust_code)
    folder = out or Path("runs") / loaded.name
    with loading_libraries():
        from hfpatch.training.processes import start_processes

        start_processes()  # before imports that take seconds, so that mistakes show at once
        from hfpatch.cli.progress import choose_progress, is_first_process
        from hfpatch.runs import train as run_train

    with interruptible(RESUME.format(folder)), choose_progress() as progress:
        patches = run_train(loaded, method, folder, resume=resume, progress=progress)
    if is_first_process():
        print("\n".join(f"patch: {patch}" for patch in patches))


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders that compare, pretrain or eval wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The report's folder; the run's if not given, of several runs or some methods a new one."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Some methods of a run; verdicts are those of the whole comparison."),
    ] = None,
) -> None:
    """Write the report of a run folder again, from its result files; or one of several comparisons or evaluations.

    Several comparisons are shown one after the other, with what differs between them. The figures are written as PDF
    too.

    Example: hfpatch report runs/quickstart
    """
    from hfpatch.reporting import write_report
    from hfpatch.reporting.terminal import print_document

    names = None if methods is None else [name for name in map(str.strip, methods.split(",")) if name]
    written = write_report(run_dirs, out, pdf=True, methods=names)
    if len(run_dirs) == 1 and (out is None or names):
        print_document(written.document)
    print(f"report: {written.html}")


@app.command()
def check(
    model: options.ModelArgument,
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the method, as in a recipe.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A part's type, as in a recipe, or package.module:Class; without it every kind.")
    ] = None,
    config_only: Annotated[
        bool,
        typer.Option("--config-only", help="Check a tiny random twin of the model's config.json, without its weights."),
    ] = False,
    gguf_file: options.GgufFile = None,
    revision: options.Revision = None,
    dtype: options.DtypeOption = "float32",
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Test on a model what hfpatch promises: no-op at first, the right place, gradients, generation, saving, removing.

    Exits with code 1 if a test fails.

    Example: hfpatch check tinyworld/gpt2 --method nonlinear_query form=literal
    """
    from hfpatch.recipes.strict import read_override

    if given and method is None:
        raise HfpatchError(f"{given[0]}: options belong to a method; name it, as in --method pre_projection")
    if config_only and dtype != "float32":
        raise HfpatchError(f"--dtype {dtype}: the twin of --config-only is float32; leave one of them out")
    options = dict(read_override(option) for option in given or [])
    if "type" in options:
        raise HfpatchError(f"type={options['type']}: --method names the method; write --method {options['type']}")
    part = None if method is None else {**options, "type": method}
    base = model_settings(model, revision, dtype, trust_remote_code, gguf_file=gguf_file)
    with loading_libraries():
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import check as run_check

    with choose_progress(shown=not as_json) as progress:
        reports, refused = run_check(base, part, config_only=config_only, progress=progress)
    passed = all(report.passed for report in reports)
    if as_json:
        values = {"passed": passed, "reports": [report.to_json() for report in reports], "refused": refused}
        print(json.dumps(values, indent=2))
    else:
        print(*reports, *(f"{name}: refused: {reason}" for name, reason in refused.items()), sep="\n")
    if not passed:
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
        int | None, typer.Option(min=2, help="Tokens of it; 8 times the hidden size, at least 2048, if not given.")
    ] = None,
    as_json: AsJson = False,
    as_html: Annotated[bool, typer.Option("--html", help="Write a page with figures.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file of the page, with --html; inspection.html if not given.")
    ] = None,
    data_dir: DataDir = None,
    gguf_file: options.GgufFile = None,
    revision: options.Revision = None,
    dtype: options.DtypeOption = "float32",
    trust_remote_code: options.TrustRemoteCode = False,
    trust_code: options.TrustCode = False,
) -> None:
    """Show what a model's attention does: where it is, the Q-K relation of every head, and what a patch changes.

    Example: hfpatch inspect tinyworld/gpt-neox --patch runs/quickstart/runs/pre_projection/seed-0/patch --html
    """
    if out is not None and not as_html:
        raise HfpatchError(f"--out {out}: is the file of the page; add --html, or leave it out")
    for option, value in {"--allow-other-base": allow_other_base, "--trust-code": trust_code}.items():
        if value and patch is None:
            raise HfpatchError(f"{option}: there is no patch; give --patch DIR")
    if data_dir is not None and text is None:
        raise HfpatchError(f"--data-dir {data_dir}: is for hub data sets; name one as --text, or leave it out")
    base = model_settings(model, revision, dtype, trust_remote_code, gguf_file=gguf_file)
    quiet_libraries()
    from hfpatch.runs import inspect as run_inspect
    from hfpatch.surgery.folder import import_methods

    if patch is not None and trust_code:
        import_methods(patch)
    inspection = run_inspect(
        base,
        patch,
        allow_other_base=allow_other_base,
        text=text,
        tokens=tokens,
        data_dir=data_dir,
    )
    from hfpatch.reporting.inspection.document import inspection_document
    from hfpatch.reporting.terminal import print_document

    if as_html:
        from hfpatch.reporting.html import html
        from hfpatch.reporting.inspection.figures import figures
        from hfpatch.support.files import write_text

        page = out or Path("inspection.html")
        write_text(page, html(inspection_document(inspection, figures(inspection))))
        print(f"page: {page}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(inspection.to_json(), indent=2))
    elif not as_html:
        print_document(inspection_document(inspection))


app.command(
    "eval",
    cls=eval_options.EvalCommand,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)(eval_options.command_of(evaluation.evaluate))
app.command(cls=engines.EngineCommand)(pretraining.pretrain)
app.command()(pretraining.tokenize)


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    methods: options.Methods = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="An earlier comparison: its variances say what the primary questions can decide."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, help="About how long to measure, beside loading; on a slow machine the least takes longer."
        ),
    ] = 20.0,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Say how long N runs at a time take, on N devices like this one, too."),
    ] = None,
    data_dir: DataDir = None,
    model: options.BaseModel = None,
    gguf_file: options.GgufFile = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Say what `compare`, or a study of `pretrain`, would run, how long it would take here, and what it could decide.

    Parts of a training step and of the tasks are run for each kind of method; nothing is written but caches.

    Example: hfpatch plan pythia-160m --jobs 8
    """
    from hfpatch.recipes.pretraining import load_study

    study = load_study(recipe, options.with_options(overrides, data_dir), trust_code=trust_code)
    for option, value in {"--methods": methods, "--model": model, "--gguf-file": gguf_file}.items():
        if study is not None and value is not None:
            raise HfpatchError(f"{option} {value}: {recipe} has variants, trained from scratch; leave the option out")
    loaded = study or options.only_methods(
        read_comparison(recipe, overrides, data_dir, model, gguf_file, trust_code), methods
    )
    with loading_libraries():
        from hfpatch.cli.progress import choose_progress
        from hfpatch.runs import forecast

    with choose_progress(shown=not as_json) as progress:
        planned = forecast(loaded, like=like, seconds=seconds, jobs=jobs, progress=progress)
    from hfpatch.reporting.forecast import forecast_document
    from hfpatch.reporting.terminal import print_document

    if as_json:
        print(json.dumps(planned.to_json(), indent=2))
    else:
        print_document(forecast_document(planned))


@app.command()
def explore(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Folders that compare, pretrain or eval wrote, or that hold such."),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("explore.html"),
) -> None:
    """Write one page over many runs: gains against parameters, time and memory, with filters.

    It is made from each folder's results.json alone; a row opens its run's report.

    Example: hfpatch explore runs/* --out explore.html
    """
    from hfpatch.reporting.explorer.page import write_explorer
    from hfpatch.reporting.terminal import print_document

    print_document(write_explorer(folders, out))
    print(f"page: {out}")


app.command("new-method")(creating.new_method)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder; also a patch or an export.")],
    to: Annotated[str, typer.Option(metavar="ID", help="The repository on the hub, user/name.")],
    method: Annotated[str | None, typer.Option(help="Share this method's patch alone, at the top.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of that patch; the first if not given.")] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private; refuse a public one.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files.")] = False,
) -> None:
    """Put a run with its report and patches on the hub.

    Checkpoints and the per-document records, which hold text of the data sets, stay here. What an earlier push put into
    the repository is replaced, and so are files of the same name; other files there stay. Its history keeps all
    versions.

    Example: hfpatch push runs/quickstart --to me/quickstart --method pre_projection
    """
    quiet_libraries()
    from hfpatch.sharing import push as run_push

    with interruptible(f"the files go in one commit, so {to} has all of them or none; repeat the command"):
        pushed = run_push(folder, to, method=method, seed=seed, private=private, dry_run=dry_run)
    removed = [f"removed: {name}" for name in pushed.removed]
    replaced = [f"replaced a file of another commit: {name}" for name in pushed.replaced]
    print(*pushed.files, *removed, *replaced, sep="\n")
    print(f"{len(pushed.files)} files, not sent" if pushed.url is None else f"pushed: {pushed.url}")


@app.command()
def export(
    patch: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by save_patch, or a PEFT adapter.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write; DIR-standalone if not given.")] = None,
    model: Annotated[str | None, typer.Option(help="The base; the one that the patch names if not given.")] = None,
    gguf_file: options.GgufFile = None,
    revision: Annotated[str | None, typer.Option(help="The base's hub revision.")] = None,
    dtype: Annotated[str, typer.Option(help="The dtype of the base: float32, bfloat16 or float16.")] = "float32",
    scale: Annotated[float, typer.Option(help="Multiply the change of the patch: 0 is the base, 1 the patch.")] = 1.0,
    allow_other_base: options.AllowOtherBase = False,
    trust_code: options.TrustCode = False,
) -> None:
    """Write a base and its patch as one Hugging Face folder that needs neither hfpatch nor PEFT.

    It loads with AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

    Example: hfpatch export runs/quickstart/runs/pre_projection/seed-0/patch --out my-model
    """
    if gguf_file is not None and model is None:
        raise HfpatchError(f"--gguf-file {gguf_file}: needs --model, its repository or folder")
    quiet_libraries()
    from hfpatch.export import export_patch
    from hfpatch.surgery.folder import import_methods

    if trust_code:
        import_methods(patch)
    written = export_patch(
        patch,
        out or Path(f"{patch if patch.name else patch.resolve()}-standalone"),  # "." has no name
        model=model if gguf_file is None else f"{model}/{gguf_file}",
        revision=revision,
        dtype=dtype,
        allow_other_base=allow_other_base,
        scale=scale,
    )
    print(f"{written.model_class}, {written.added:,} added parameters: {written.directory}")


# Its arguments, --help among them, belong to lm-eval.
@app.command(
    "lm_eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command, which then knows `--model hfpatch`; all arguments are lm-eval's.

    Example: hfpatch lm_eval --model hfpatch --model_args pretrained=ID,patch=DIR --tasks lambada_openai
    """
    from hfpatch.evaluation.harness import run_lm_eval

    run_lm_eval(context.args)
