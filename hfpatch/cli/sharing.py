"""The commands that share results: ``push`` and ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfpatch.cli.options import AllowOtherBase, GgufFile
from hfpatch.cli.running import quiet_libraries
from hfpatch.errors import HfpatchError


def push(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder; also a patch or an export.")],
    to: Annotated[str, typer.Option(metavar="ID", help="The repository on the hub, user/name.")],
    method: Annotated[str | None, typer.Option(help="Share this method's patch alone, at the top.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of that patch; the first if not given.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is made.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files.")] = False,
) -> None:
    """Put a run with its report and patches on the hub.

    Checkpoints and the per-document records, which hold text of the data sets, stay here.

    Example: hfpatch push runs/quickstart --to me/quickstart --method pre_projection
    """
    quiet_libraries()
    from hfpatch.sharing import push as run_push

    pushed = run_push(folder, to, method=method, seed=seed, private=private, dry_run=dry_run)
    print("\n".join(pushed.files))
    print(f"{len(pushed.files)} files, not sent" if pushed.url is None else f"pushed: {pushed.url}")


def export(
    patch: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by save_patch, or a PEFT adapter.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write; DIR-standalone if not given.")] = None,
    model: Annotated[str | None, typer.Option(help="The base; the one that the patch names if not given.")] = None,
    gguf_file: GgufFile = None,
    revision: Annotated[str | None, typer.Option(help="The base's hub revision.")] = None,
    dtype: Annotated[str, typer.Option(help="The dtype of the base: float32, bfloat16 or float16.")] = "float32",
    scale: Annotated[float, typer.Option(help="Multiply the change of the patch: 0 is the base, 1 the patch.")] = 1.0,
    allow_other_base: AllowOtherBase = False,
) -> None:
    """Write a base and its patch as one Hugging Face folder that needs neither hfpatch nor PEFT.

    It loads with AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

    Example: hfpatch export runs/quickstart/runs/pre_projection/seed-0/patch --out my-model
    """
    if gguf_file is not None and model is None:
        raise HfpatchError(f"--gguf-file {gguf_file}: goes with --model, the repository or folder that it is in")
    quiet_libraries()
    from hfpatch.export import export_patch

    written = export_patch(
        patch,
        out or patch.with_name(f"{patch.name}-standalone"),
        model=f"{model}/{gguf_file}" if model and gguf_file else model,
        revision=revision,
        dtype=dtype,
        allow_other_base=allow_other_base,
        scale=scale,
    )
    print(f"{written.model_class}, {written.added:,} added parameters: {written.directory}")
