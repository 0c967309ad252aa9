"""``patch.json`` of a saved patch: the order of the stack, the base it belongs to, a hash of every part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import validate
from hfpatch.support.files import printable, read_json

MANIFEST = "patch.json"
CONFIG = "adapter_config.json"
PATCHES_OF_RUN, MODELS_OF_RUN = "runs/*/seed-*/patch", "runs/*/seed-*/model"
FORMAT = 2


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Fingerprint(_Part):
    """The identity of a base, see :func:`hfpatch.surgery.bases.fingerprint`; hashes after rounding are extra keys."""

    dtypes: list[str]
    exact: str


class Base(_Part):
    """The model that a patch was made for.

    Attributes:
        name: its hub id, or the last part of its folder; may be empty.
        class_name: its class, ``class`` in the file.
        licence: as its own card states it.
    """

    name: str
    model_type: str
    class_name: Annotated[str, Field(alias="class")]
    fingerprint: Fingerprint
    licence: str | None = None


class Adapter(_Part):
    """One part of the stack.

    Attributes:
        name: of the adapter and of its folder.
        sha256: hash of the file of its tensors.
        module: the module that defines the method, if hfpatch does not.
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
    raw = read_json(path)
    if (version := raw.get("format", FORMAT)) != FORMAT:
        raise HfpatchError(
            f"{path}: format {version!r} is not {FORMAT}, which this version of hfpatch reads; load the parts by their "
            "own folders"
        )
    return validate(printable(raw), Manifest, f"{path}: not a patch manifest")


def require_patch(folder: Path) -> None:
    """Raise :class:`HfpatchError` if a folder has neither a patch nor an adapter."""
    if not any((folder / file).is_file() for file in (MANIFEST, CONFIG)):
        why = "it is a file" if folder.is_file() else f"{MANIFEST} or {CONFIG} is missing"
        raise HfpatchError(f"{folder}: no patch here ({why}); those of a run are {PATCHES_OF_RUN}")
