"""Writing an export, and comparing it with the patched model before the folder appears."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from hfpatch.errors import HfpatchError, first_line
from hfpatch.export.write import Export, write_model
from hfpatch.models import take_apart
from hfpatch.support.files import atomic_directory, read_json, write_text
from hfpatch.surgery.bases import load_base, locate
from hfpatch.surgery.card import base_licence, export_card, shown_base
from hfpatch.surgery.folder import load_patch
from hfpatch.surgery.manifest import CONFIG, MANIFEST, read_manifest, require_patch

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_TEMPLATE, _GENERATION = "chat_template.jinja", "generation_config.json"


def export_patch(
    patch: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    allow_other_base: bool = False,
    scale: float = 1.0,
) -> Export:
    """Write a base with a patch as one folder for transformers, loaded with ``trust_remote_code=True``.

    The folder holds the weights of both, a tokenizer, a modelling file in plain torch and a card, and appears after
    :func:`write_model` has compared the loaded export with the patched model. A tokenizer, a chat template and
    generation settings beside the adapter replace the base's.

    Args:
        patch: a folder written by ``save_patch``, or a PEFT adapter.
        out: the folder to write; it must not exist or must be empty.
        model: the base; None takes the one that the patch names.
        revision: the base's hub revision.
        dtype: the dtype that the base is loaded and written in; the patch keeps its own.
        allow_other_base: take a patch whose base had other weights.
        scale: factor of the patch's change, see :func:`hfpatch.scale_patch`.

    Raises:
        HfpatchError: if the base or the patch cannot be loaded, a part cannot be exported, or ``out`` is not free.
    """
    patch, out = Path(patch), Path(out)
    require_patch(patch)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HfpatchError(f"{out}: exists already; choose another --out")
    name = _named_base(patch) if model is None else model
    base = load_base(name, revision=revision, dtype=dtype)
    if (patch / MANIFEST).is_file():
        made_for = read_manifest(patch / MANIFEST).base.class_name
        if made_for != type(base.model).__name__:
            raise HfpatchError(
                f"{patch}: made for a {made_for}, and an export is a causal model, here {type(base.model).__name__}; "
                "load it with hfpatch.load_patch instead"
            )
    if take_apart(base.model.config) is not None:
        raise HfpatchError(
            f"{name}: was pretrained with another query path and has its own modelling file; only patches of "
            "stock models can be exported (save_patch and load_patch work on it)"
        )

    tokenizer, generation = _beside(patch, name, revision)
    load_patch(base.model, patch, allow_other_base=allow_other_base, scale=scale)
    with atomic_directory(out) as folder:
        written = write_model(base.model, folder)
        tokenizer.save_pretrained(str(folder))
        if generation is not None:
            generation.save_pretrained(str(folder))
        card = export_card(shown_base(name), written.model_class, base_licence(name))
        write_text(folder / "README.md", card)
    return replace(written, directory=out)


def _beside(patch: Path, base: str, revision: str | None) -> tuple[Any, GenerationConfig | None]:
    """Return the tokenizer and the generation settings beside the adapter, else the base's tokenizer."""
    has_tokenizer = any((patch / file).is_file() for file in _TOKENIZER)
    source, gguf = (str(patch), None) if has_tokenizer else locate(base, revision)
    options = {"revision": None if has_tokenizer else revision, **({} if gguf is None else {"gguf_file": str(gguf)})}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        generation = GenerationConfig.from_pretrained(str(patch)) if (patch / _GENERATION).is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise HfpatchError(f"{patch}: its tokenizer or {_GENERATION} cannot be loaded: {reason}") from error
    if (patch / _TEMPLATE).is_file():
        tokenizer.chat_template = (patch / _TEMPLATE).read_text(encoding="utf-8")
    return tokenizer, generation


def _named_base(patch: Path) -> str:
    """Return the base that a patch or an adapter was made for."""
    name: Any
    if (patch / MANIFEST).is_file():
        first, file = read_manifest(patch / MANIFEST).adapters[0], MANIFEST
        name = read_json(patch / first.name / CONFIG).get("base_model_name_or_path")  # a path of this machine too
    else:
        name, file = read_json(patch / CONFIG).get("base_model_name_or_path"), CONFIG
    if not isinstance(name, str) or not name:
        raise HfpatchError(f"{patch / file}: names no base; give it with --model")
    shown = shown_base(name)
    return shown if shown.startswith("tinyworld/") else name
