"""``patch.json`` of a saved patch: the order of the stack, the base it belongs to, a hash of every part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import validate
from hfpatch.support.files import printable, read_json

MANIFEST = "patch.json"
FORMAT = 2


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Fingerprint(_Part):
    """What identifies a base, see :func:`hfpatch.surgery.bases.fingerprint`; beside these, hashes after rounding."""

    dtypes: list[str]
    exact: str


class Base(_Part):
    """The model that a patch was made for.

    Attributes:
        name: its hub id, or its folder's last part alone; empty where it has none.
        model_type: its architecture.
        class_name: its class, as ``class`` in the file.
        fingerprint: what identifies its weights.
        licence: as its own card states it where the patch was made.
    """

    name: str
    model_type: str
    class_name: Annotated[str, Field(alias="class")]
    fingerprint: Fingerprint
    licence: str | None = None


class Adapter(_Part):
    """One part of the stack.

    Attributes:
        name: the adapter's name, and that of its folder.
        method: its method.
        sha256: hash of the file of its tensors.
        module: the module that defines a method which is none of hfpatch's.
    """

    name: str
    method: str
    sha256: str
    module: str | None = None


class Manifest(_Part):
    """The stack in its order, which of its adapters were active, and the version of hfpatch that wrote it."""

    format: int
    hfpatch: str | None = None
    base: Base
    active: list[str]
    adapters: Annotated[list[Adapter], Field(min_length=1)]

    @model_validator(mode="after")
    def _active_are_there(self) -> Manifest:
        names = [adapter.name for adapter in self.adapters]
        if unknown := set(self.active) - set(names):
            raise ValueError(f"active names {min(unknown)!r}, which is not among adapters {names}")
        return self


def read_manifest(path: Path) -> Manifest:
    """Read ``patch.json``.

    Raises:
        HfpatchError: if it is damaged, or of another version's format.
    """
    raw: dict[str, Any] = read_json(path)
    found = raw.get("format", FORMAT)
    if found != FORMAT:
        raise HfpatchError(
            f"{path}: format {found!r} is not {FORMAT}, which this version of hfpatch reads; load the parts by their "
            "own folders"
        )
    return validate(printable(raw), Manifest, f"{path}: not a patch manifest")


def refuse_a_run(directory: Path) -> None:
    """Say where the patches of a run are.

    Raises:
        HfpatchError: if the folder is a run.
    """
    if patches := sorted(directory.glob("runs/*/seed-*/patch")):
        raise HfpatchError(f"{directory}: is a run; give one of its patches, such as {patches[0]}")
