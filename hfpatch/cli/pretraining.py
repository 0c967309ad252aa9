"""The commands that train from scratch and prepare its text: ``pretrain`` and ``tokenize``."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

from hfpatch.cli import engines
from hfpatch.cli.options import DataDir, Out, Overrides, RecipeArgument, Resume, TrustCode, with_options
from hfpatch.cli.running import RESUME, interruptible, loading_libraries, print_report, quiet_libraries


def pretrain(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    trust_code: TrustCode = False,
    variant: Annotated[
        str | None, typer.Option(help="Of a study, train this variant's runs alone; a later call reports.")
    ] = None,
    jobs: engines.Jobs = None,
    ray: engines.Ray = None,
    gpus_per_run: engines.GpusPerRun = None,
    cpus_per_run: engines.CpusPerRun = None,
    processes_per_run: engines.ProcessesPerRun = None,
    launch_config: engines.LaunchConfig = None,
) -> None:
    """Pretrain a model from scratch, or variants of it, and write each as a Hugging Face folder.

    That is OUT/runs/NAME/seed-0/model, with the recipe's name or a variant's. Variants are tuned, trained with every
    seed on the same batches, and compared on held-out text. On several processes: accelerate launch -m hfpatch pretrain
    RECIPE

    Example: hfpatch pretrain my-model.yaml training.steps=1000 --out runs/my-model
    """
    from hfpatch.recipes.pretraining import load_pretraining
    from hfpatch.runs.engines.settings import EngineSettings

    engine = EngineSettings(jobs, ray, gpus_per_run, cpus_per_run, processes_per_run, launch_config)
    loaded = load_pretraining(recipe, with_options(overrides, data_dir), trust_code=trust_code)
    folder = out or Path("runs") / loaded.name
    with loading_libraries():
        from hfpatch.cli.progress import choose_progress, is_first_process
        from hfpatch.runs import compare
        from hfpatch.runs.folder import RunPaths

    with interruptible(RESUME.format(folder)), choose_progress() as progress:
        results = compare(loaded, folder, resume=resume, variant=variant, progress=progress, engine=engine)
    if not is_first_process():
        return
    if variant is None:
        print_report(folder)
    else:
        print(f"runs of {variant}: {folder / 'runs' / variant}; without --variant and with --resume: the report")
    for name in loaded.variants if variant is None else [variant]:
        for seed, run in results["methods"][name]["runs"].items():
            paths = RunPaths.of(folder, name, seed)
            if run["train"]["diverged_step"] is None and not paths.model.is_dir():
                again = f"delete {paths.root} and {folder / 'results.json'}, then --resume"
                warnings.warn(f"{paths.model}: is missing; to train it again {again}", stacklevel=1)
    if variant is None and len(loaded.variants) == 1:
        print(*(f"model: {model}" for model in sorted(folder.glob("runs/*/seed-*/model"))), sep="\n")


def tokenize(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The token file, NAME.bin; <recipe name>.bin if not given.")] = None,
    data_dir: DataDir = None,
    trust_code: TrustCode = False,
) -> None:
    """Tokenise a pretraining recipe's text into a token file, which data.source can then name.

    The text is read once, piece by piece; NAME.json and NAME.safetensors beside the file describe it. A data.source
    that is a token file of another tool gets only these two.

    Example: hfpatch tokenize my-model.yaml data.source=Skylion007/openwebtext --out openwebtext.bin
    """
    from hfpatch.recipes.pretraining import load_pretraining

    loaded = load_pretraining(recipe, with_options(overrides, data_dir), trust_code=trust_code)
    quiet_libraries()
    from hfpatch.cli.progress import PLAIN_EVERY_S
    from hfpatch.runs import tokenize as run_tokenize

    started = last = time.monotonic()

    def show(documents: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > PLAIN_EVERY_S:
            last, speed = now, tokens / (now - started)
            print(f"{documents:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s", file=sys.stderr, flush=True)

    made = run_tokenize(loaded, out, on_part=show)
    print(f"tokens: {made.file} ({made.info.tokens:,} tokens, {made.info.documents:,} documents)")
    print(f"to train on them: {' '.join(made.overrides)}")
