"""The command that begins a method: ``new-method``."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.support.files import write_text
from hfpatch.support.scaffold import PLACES, class_name, method_file, pyproject_file, test_file


def new_method(
    name: Annotated[str, typer.Argument(help="The method's name in recipes, such as output_gate.")],
    place: Annotated[
        list[str] | None, typer.Option(help=f"Where it acts: {', '.join(PLACES)}; may be given several times.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the files.")] = Path(),
    package: Annotated[
        bool, typer.Option("--package", help="Write a pyproject.toml too, whose entry point names the method.")
    ] = False,
) -> None:
    """Write the file of a new method and its test, which pass as they are: a low-rank term to begin from.

    Example: hfpatch new-method my_gate --place mixed
    """
    given = place or ["query"]
    for each in given:
        if each not in PLACES:
            raise HfpatchError(f"--place {each}: no place of a branch{nearest(each, PLACES)}; use {', '.join(PLACES)}")
    places = [each for each in PLACES if each in given]
    _require_free(name)
    files = {out / f"{name}.py": method_file(name, places), out / f"test_{name}.py": test_file(name, places)}
    if package:
        files[out / "pyproject.toml"] = pyproject_file(name)
    if there := [path for path in files if path.exists()]:
        raise HfpatchError(f"{there[0]}: exists already; choose another name, or --out")
    for path, text in files.items():
        write_text(path, text)
        print(f"wrote: {path}")
    print(f"check: hfpatch check tinyworld/gpt2 --method {name}:{class_name(name)}")


def _require_free(name: str) -> None:
    """Refuse a name that is no method's, or has a meaning already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise HfpatchError(f"{name}: a name is made of small letters, digits and '_', such as output_gate")
    if name in SIZES or name in NO_SIZE:
        raise HfpatchError(f"{name}: is a method already; choose another name")
    if importlib.util.find_spec(name) is not None:
        raise HfpatchError(f"{name}: a module of this name is installed already; choose another name")
