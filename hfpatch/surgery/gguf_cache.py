"""Models of GGUF files as dequantised before: reading one takes a quarter of the time of dequantising it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hfpatch.errors import HfpatchError
from hfpatch.support.files import atomic_directory, read_json, remove_leftovers, sha256_file, write_json
from hfpatch.support.folders import cache_folder
from hfpatch.support.version import __version__
from hfpatch.surgery.gguf_files import GgufFile

LEAST_BYTES, MOST_BYTES = 1 << 24, 1 << 31
"""The sizes of models that are kept: smaller ones are dequantised at once, larger ones would fill disks."""
KEPT = 4
"""How many models are kept, the last ones that were read."""
RECORD, TOKENIZER = "kept.json", "tokenizer"
_BROKEN = (AttributeError, HfpatchError, OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)


def dequantised(file: GgufFile, dtype: str) -> Path:
    """Return the folder of a file's model: named by the file's content, the dtype, and the versions that read it."""
    versions = [__version__, *map(version, ("gguf", "torch", "transformers"))]
    key = hashlib.sha256(json.dumps([file.sha256, dtype, *versions]).encode()).hexdigest()
    return cache_folder("gguf") / key


def read_dequantised(
    folder: Path, load: Callable[[Path], tuple[Any, Any]], hash_weights: Callable[[Any], str]
) -> tuple[Any, Any | None, str] | None:
    """Return the model, the tokenizer if it is kept, and the hash of the weights; None if the folder is not whole.

    Args:
        folder: where :func:`keep_dequantised` put them.
        load: returns the model in a folder, and what transformers found.
        hash_weights: hashes the weights of a model, which is done anyway.
    """
    from transformers import AutoTokenizer

    with suppress(*_BROKEN):
        record = read_json(folder / RECORD)
        if _hashes(folder) == record["files"]:
            model, report = load(folder)
            sha256 = hash_weights(model)
            if sha256 == record["weights"] and not report["missing_keys"]:
                with suppress(OSError):  # a cache that can only be read
                    folder.touch()
                kept = folder / TOKENIZER
                return model, AutoTokenizer.from_pretrained(kept) if kept.is_dir() else None, sha256
    return None


def keep_dequantised(folder: Path, model: Any, tokenizer: Any, sha256: str) -> None:
    """Save a model and its tokenizer in a folder, and remove the ones that were not read for longest.

    Nothing is kept of a model that is too small or large, or where nothing can be written, and no tokenizer that reads
    back as another one, as those of some families do.
    """
    from transformers import AutoTokenizer

    size = sum(parameter.nbytes for parameter in model.parameters())
    if not LEAST_BYTES <= size <= MOST_BYTES:
        return
    with suppress(*_BROKEN):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        if shutil.disk_usage(folder.parent).free < 4 * size:
            return
        with atomic_directory(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary / TOKENIZER)
            if _content(AutoTokenizer.from_pretrained(temporary / TOKENIZER)) != _content(tokenizer):
                shutil.rmtree(temporary / TOKENIZER)
            write_json(temporary / RECORD, {"weights": sha256, "files": _hashes(temporary)})
        kept = [entry for entry in folder.parent.iterdir() if not entry.name.startswith(".")]
        for other in sorted(kept, key=lambda entry: entry.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(other, ignore_errors=True)


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the record and the weights."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.name != RECORD and path.suffix != ".safetensors")
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in kept}


def _content(tokenizer: Any) -> tuple[Any, ...]:
    """Return all that a tokenizer does."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    lengths = tokenizer.model_max_length, tokenizer.padding_side, tokenizer.truncation_side
    return tokenizer.backend_tokenizer.to_str(), special, tokenizer.chat_template, type(tokenizer), lengths
