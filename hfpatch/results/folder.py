"""Reading the ``results.json`` of a folder that hfpatch wrote, and its layout for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, overload

from pydantic import Field, TypeAdapter

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.strict import validate
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.parts import SCHEMA
from hfpatch.support.files import printable, read_json

RESULTS = "results.json"
Results = ComparisonResults | EvaluationResults
"""Any ``results.json``; ``kind`` says which."""
_KINDS: dict[str, type[Results]] = {
    "comparison": ComparisonResults,
    "evaluation": EvaluationResults,
}
_COMMANDS = {"comparison": "compare or pretrain", "evaluation": "eval"}
_NOT_YET = "{}: no results yet (no results.json); hfpatch compare, or pretrain, with --resume completes this run"


@overload
def load_results(folder: str | Path, kind: Literal["comparison"] = "comparison") -> ComparisonResults: ...
@overload
def load_results(folder: str | Path, kind: Literal["evaluation"]) -> EvaluationResults: ...
@overload
def load_results(folder: str | Path, kind: None) -> Results: ...


def load_results(folder: str | Path, kind: Literal["comparison", "evaluation"] | None = "comparison") -> Results:
    """Read the results of ``hfpatch compare``, of a study of ``hfpatch pretrain`` or of ``hfpatch eval --output``.

    Args:
        folder: the folder that the command wrote.
        kind: ``comparison``, which a study is, too, or ``evaluation``; None reads either.

    Returns:
        :class:`ComparisonResults` or :class:`EvaluationResults`. Text has the characters replaced that neither XML nor
        UTF-8 can hold.

    Raises:
        HfpatchError: if there is no ``results.json``, it is not hfpatch's or of another kind, another version of
            hfpatch wrote it, or it is damaged; the message names the first thing that is wrong.
    """
    if kind is not None and kind not in _KINDS:
        raise HfpatchError(f"kind={kind!r}{nearest(kind, _KINDS)}: give {', '.join(_KINDS)} or None")
    folder = Path(folder)
    path = folder / RESULTS
    if not path.is_file():
        if (folder / "recipe.yaml").is_file():
            raise HfpatchError(_NOT_YET.format(folder))
        why = "it is a file" if folder.is_file() else f"{RESULTS} is missing"
        raise HfpatchError(f"{folder}: no run here ({why}); give the folder that hfpatch wrote")
    raw = read_json(path)
    schema, stored = raw.get("schema"), str(raw.get("kind"))
    if not isinstance(schema, int) or stored not in _KINDS:
        raise HfpatchError(f"{path}: not written by hfpatch; give the folder that hfpatch wrote")
    if schema != SCHEMA:
        advice = "update hfpatch" if schema > SCHEMA else "run the command again"
        raise HfpatchError(f"{path}: has layout {schema}, this version reads {SCHEMA}; {advice}")
    results = validate(printable(raw), _KINDS[stored], str(path))
    if kind is not None and kind != stored:
        raise HfpatchError(
            f"{folder}: these are the results of hfpatch {_COMMANDS[stored]}, not of hfpatch {_COMMANDS[kind]}"
        )
    return results


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of ``results.json``; verdicts follow from the rest, and may be missing."""
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Results, Field(discriminator="kind")])
    schema = adapter.json_schema(by_alias=True, mode="serialization")
    for model in schema["$defs"].values():
        model["required"] = [name for name in model.get("required", []) if name != "verdicts"]
    return schema
