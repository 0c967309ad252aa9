"""Writing an export, and comparing it with the patched model before the folder appears."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from hfpatch.errors import HfpatchError
from hfpatch.export.write import write_model
from hfpatch.models import take_apart
from hfpatch.support.files import atomic_directory, read_json, write_text
from hfpatch.surgery.bases import load_base, locate_base
from hfpatch.surgery.card import base_licence, export_card, shown_base
from hfpatch.surgery.folder import MANIFEST, load_patch


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        directory: the folder.
        model_class: the class in its modelling file.
        added: how many parameters the patch adds.
        merged: the modules whose weights contain an adapter, because it can be no part of its own.
    """

    directory: Path
    model_class: str
    added: int
    merged: list[str]


def export_patch(
    patch: Path,
    out: Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    allow_other_base: bool = False,
) -> Export:
    """Write a base with a patch as one folder that transformers alone loads, with ``trust_remote_code=True``.

    The folder holds the weights of both, the base's tokenizer, a modelling file in plain torch and a card. Its logits
    are compared with the patched model's, bit for bit, before the folder appears.

    Args:
        patch: what ``save_patch`` wrote, or a PEFT adapter.
        out: the folder to write; it must not exist or must be empty.
        model: the base; None takes the one that the patch names.
        revision: the base's hub revision.
        dtype: the dtype that the base is loaded and written in; the patch keeps its own.
        allow_other_base: take a patch whose base had other weights.

    Raises:
        HfpatchError: if the base or the patch cannot be loaded, a part cannot be exported, or ``out`` is not free.
    """
    if (patch / "results.json").is_file():
        raise HfpatchError(f"{patch}: is a run; give one of its patches, runs/METHOD/seed-N/patch")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HfpatchError(f"{out}: exists already; choose another --out")
    name = model or _named_base(patch)
    base = load_base(name, revision=revision, dtype=dtype)
    if take_apart(base.model.config) is not None:
        raise HfpatchError(
            f"{name}: was pretrained with another query path and has its own modelling file; only patches of "
            "stock models can be exported (save_patch and load_patch work on it)"
        )
    load_patch(base.model, patch, allow_other_base=allow_other_base)
    with atomic_directory(out) as folder:
        written = write_model(base.model, folder)
        AutoTokenizer.from_pretrained(locate_base(name), revision=revision).save_pretrained(str(folder))
        card = export_card(shown_base(name), written.model_class, base_licence(name))
        write_text(folder / "README.md", card)
    return Export(out, written.model_class, written.added, written.merged)


def _named_base(patch: Path) -> str:
    """Return the base that a patch was made for."""
    if not (patch / MANIFEST).is_file():
        raise HfpatchError(f"{patch}: names no base ({MANIFEST} is missing); give the base with --model")
    base = read_json(patch / MANIFEST).get("base")
    name = base.get("name") if isinstance(base, dict) else None
    if not isinstance(name, str) or not name:
        raise HfpatchError(f"{patch / MANIFEST}: names no base; give it with --model")
    shown = shown_base(name)
    return shown if shown.startswith("tinyworld/") else name
