"""Reading the ``results.json`` of a folder that hfpatch wrote, and what a run's folder holds beside it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import validate
from hfpatch.results.schema import SCHEMA, ComparisonResults, EvaluationResults, Results, StudyResults
from hfpatch.support.files import read_json

Kind = TypeVar("Kind", ComparisonResults, EvaluationResults)

RESULTS = "results.json"
_KINDS: dict[str, type[Results]] = {
    "comparison": ComparisonResults,
    "pretraining": StudyResults,
    "evaluation": EvaluationResults,
}
_COMMANDS: dict[type, str] = {ComparisonResults: "compare", StudyResults: "pretrain", EvaluationResults: "eval"}
_SINGLE = "{}: is one pretrained model, which has no report; its losses are in metrics.jsonl, studies have reports"
_NOT_YET = "{}: no results yet (no results.json); hfpatch compare, or pretrain, with --resume completes this run"


def load_results(folder: str | Path) -> Results:
    """Read the results of ``hfpatch compare``, of a study of ``hfpatch pretrain`` or of ``hfpatch eval --output``.

    Args:
        folder: the folder that the command wrote.

    Returns:
        :class:`ComparisonResults`, :class:`StudyResults` or :class:`EvaluationResults`. Text has the characters
        replaced that neither XML nor UTF-8 can hold.

    Raises:
        HfpatchError: if there is no ``results.json``, it is not hfpatch's, another version of hfpatch wrote it, or it
            is damaged; the message names the first thing that is wrong.
    """
    folder = Path(folder)
    path = folder / RESULTS
    if not path.is_file():
        if (folder / "recipe.yaml").is_file():
            raise HfpatchError((_SINGLE if (folder / "result.json").is_file() else _NOT_YET).format(folder))
        raise HfpatchError(f"{folder}: no run here (results.json is missing); give the folder that hfpatch wrote")
    raw = read_json(path)
    schema, kind = raw.get("schema"), str(raw.get("kind"))
    if not isinstance(schema, int) or kind not in _KINDS:
        raise HfpatchError(f"{path}: not written by hfpatch; give the folder that hfpatch wrote")
    if schema != SCHEMA:
        advice = "update hfpatch" if schema > SCHEMA else "run the command again"
        raise HfpatchError(f"{path}: has layout {schema}, this version reads {SCHEMA}; {advice}")
    if isinstance(raw.get("low_noise"), list):  # a file that has the differences by low-noise metrics apart
        raw["comparisons"] = [*raw.get("comparisons", []), *raw["low_noise"]]
    return validate(printable(raw), _KINDS[kind], str(path))


def load_comparison(folder: Path) -> ComparisonResults:
    """Read the results of a comparison; otherwise as :func:`load_results`.

    Raises:
        HfpatchError: also if the folder holds a study or an evaluation.
    """
    return _load(folder, ComparisonResults)


def load_evaluation(folder: Path) -> EvaluationResults:
    """Read the results of an evaluation; otherwise as :func:`load_results`.

    Raises:
        HfpatchError: also if the folder holds a comparison or a study.
    """
    return _load(folder, EvaluationResults)


def _load(folder: Path, kind: type[Kind]) -> Kind:
    results = load_results(folder)
    if not isinstance(results, kind):
        found, wanted = _COMMANDS[type(results)], _COMMANDS[kind]
        raise HfpatchError(f"{folder}: these are the results of hfpatch {found}, not of hfpatch {wanted}")
    return results


def printable(value: Any) -> Any:
    """Return a JSON value, at any depth, as others can read it.

    Characters that neither XML nor UTF-8 can hold are replaced; NaN, infinities and integers beyond any float are None.
    """
    if isinstance(value, str):
        return "".join(char if _is_printable(char) else "\ufffd" for char in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable(item) for item in value]
    too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    return None if too_large or (isinstance(value, float) and not math.isfinite(value)) else value


def _is_printable(char: str) -> bool:
    code = ord(char)
    if code < 0x20:
        return char in "\t\n\r"
    return not (0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF))


def refuse_a_run(directory: Path) -> None:
    """Say where the patches of a run are.

    Raises:
        HfpatchError: if the folder is a run.
    """
    if patches := sorted(directory.glob("runs/*/seed-*/patch")):
        raise HfpatchError(f"{directory}: is a run; give one of its patches, such as {patches[0]}")
