"""The command that begins a method: ``new-method``."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from hfpatch.errors import HfpatchError, listed, nearest
from hfpatch.recipes.sizes import NO_SIZE, SIZES
from hfpatch.support.files import write_text


class Place(NamedTuple):
    """A new method's term at a place: it adds r A B to y."""

    arguments: str  # of the place's function, after ``parts``; the first is y
    read: str  # r, one of the arguments
    inputs: str  # the width of r, as ``build`` computes it
    outputs: str  # the width of y
    returned: str  # the result, for the function's docstring


_HIDDEN, _STREAM, _MIXED = "site.hidden_size", "site.stream_size", "site.mixed_size or 0"
_HEAD = 'site.width("query") // site.head_count'
_X, _OUT = "``(batch, seq, hidden)``", "``(batch, seq, out)``"
_PROJECTED = {
    name: Place(f"{name[0]}: Tensor, x: Tensor", "x", _HIDDEN, f'site.width("{name}")', f"the {name} {_OUT}")
    for name in ("query", "key", "value")
}
_READ = "what the output projection reads ``(batch, seq, heads·size)``"
_CLASSES = ("HfpatchError", "LlamaConfig", "MethodConfig", "MethodSite", "Parts", "Tensor")  # that the files import
PLACES = {
    "entered": Place("x: Tensor", "x", _HIDDEN, _HIDDEN, f"what enters the attention {_X}"),
    **_PROJECTED,
    "heads": Place("q: Tensor", "q", _HEAD, _HEAD, "the query ``(batch, seq, heads, size)``"),
    "mixed": Place("a: Tensor, x: Tensor", "x", _HIDDEN, _MIXED, _READ),
    "output": Place("o: Tensor, a: Tensor", "a", _MIXED, _STREAM, f"what the output projection returns for a {_X}"),
    "left": Place("branch: Tensor, x: Tensor", "x", _HIDDEN, _STREAM, f"what joins the residual stream {_X}"),
    "stream": Place("h: Tensor", "h", _STREAM, _STREAM, f"the residual stream {_X}"),
}
"""The places of :data:`hfpatch.tuners.hooks.PLACES`, in their order."""


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
    import jinja2

    given = place or ["query"]
    for key in given:
        if key not in PLACES:
            hint = nearest(key, PLACES, cutoff=0.6)
            raise HfpatchError(f"--place {key}: no place of a branch{hint}; use {', '.join(PLACES)}")
    places = [key for key in PLACES if key in given]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise HfpatchError(f"{name}: use lowercase letters, digits and '_', such as output_gate")
    if keyword.iskeyword(name):
        raise HfpatchError(f"{name}: is a word of Python's syntax; choose another name")
    cls = "".join(word.capitalize() for word in name.split("_"))  # OutputGate for output_gate
    if keyword.iskeyword(cls) or cls in _CLASSES:
        raise HfpatchError(f"{name}: its class {cls} would have a name that its files use; choose another name")
    if name in SIZES or name in NO_SIZE:
        raise HfpatchError(f"{name}: is a method already; choose another name")
    names = {f"{name}.py": "method.py", f"test_{name}.py": "test_method.py", "pyproject.toml": "pyproject.toml"}
    if not package:
        del names["pyproject.toml"]
    if existing := [out / file for file in names if (out / file).exists()]:
        raise HfpatchError(f"{existing[0]}: exists already; choose another name, or --out")
    if importlib.util.find_spec(name) is not None:
        raise HfpatchError(f"{name}: a module of this name is installed already; choose another name")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hfpatch.cli"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    values = {
        "name": name,
        "cls": cls,
        "listed": listed(places),
        "places": {place: (f"{place}_" if len(places) > 1 else "", PLACES[place]) for place in places},
    }
    for file, template in names.items():
        path = out / file
        write_text(path, environment.get_template(f"{template}.jinja").render(values))
        print(f"wrote: {path}")
    print(f"check: hfpatch check tinyworld/gpt2 --method {name}:{cls}")
