"""From a recipe's data section to token blocks, tokenised once and kept in a memory-mapped cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream
from hfpatch.data.corpora import Corpus, filtered_documents, open_corpus
from hfpatch.data.token_file import TokenFile, none_left, open_token_file, write_token_file
from hfpatch.data.tokenise import TokenStream, hash_tokenizer, tokenise
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.support.cache import is_writable
from hfpatch.support.files import atomic_directory, check_manifest, read_json, write_json, write_manifest
from hfpatch.support.leftovers import remove_leftovers, temporary_path

_CACHE_FORMAT = 4
_STREAM = "tokens.bin"
_ARRAYS = ("rows", "sizes", "offsets")
_SCALARS = ("layout", "documents", "source", "revision", "sha256")


@dataclass(frozen=True)
class Splits:
    """Blocks to train on and, where the settings hold documents back, blocks to measure the loss on."""

    train: TokenBlocks
    held_out: TokenBlocks | None = None


def load_blocks(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> TokenBlocks:
    """Return the blocks to train on; otherwise as `load_splits`."""
    return load_splits(settings, tokenizer, data_dir=data_dir, cache_dir=cache_dir).train


def load_evaluation(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> TokenBlocks:
    """Return the blocks to measure the loss on: the held-out documents if ``settings`` hold some out, else all.

    So an evaluation section may name the text that is trained on, with a layout or block size of its own; see
    :func:`hfpatch.recipes.data.overlap_mistake`. Otherwise as `load_splits`.
    """
    splits = load_splits(settings, tokenizer, data_dir=data_dir, cache_dir=cache_dir)
    return splits.held_out or splits.train


def load_splits(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> Splits:
    """Read and tokenise the text that ``settings`` names, or map a token file, and lay it out in blocks.

    The documents of a stream pass through memory a few at a time, into a file that is then mapped.

    Args:
        settings: the recipe's data section.
        tokenizer: the base model's tokenizer.
        data_dir: local copies of hub data sets, see :func:`hfpatch.data.corpora.open_corpus`.
        cache_dir: keep the blocks (of a stream, its tokens) here, under a name made from settings, tokenizer and the
            text's hash, and map them into memory on the next call. The embedded language is not kept: it is made in
            no time.

    Raises:
        HfpatchError: if the text is missing, malformed, empty or shorter than a block, or the token file is another
            tokenizer's or damaged.
    """
    if settings.is_token_file:
        return Splits(*open_token_file(Path(settings.source), tokenizer).cut(settings))
    corpus = open_corpus(settings, data_dir)
    if cache_dir is not None:
        remove_leftovers(cache_dir)
    if settings.layout == "stream":
        return Splits(*_stream(corpus, settings, tokenizer, cache_dir).cut(settings))
    if cache_dir is None or not corpus.cacheable or not is_writable(cache_dir, "the tokens"):
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            return _build(corpus, settings, tokenizer, Path(temporary))
    laid_out = {**settings.model_dump(mode="json"), "pad": _pad_token_id(tokenizer)}
    folder = cache_dir / _cache_key(corpus, laid_out, tokenizer)
    if folder.is_dir() and (kept := _read_cache(folder)) is not None:
        return kept
    with _scratch(folder) as scratch:
        built = _build(corpus, settings, tokenizer, scratch)
        try:
            _write_cache(folder, built)
        except HfpatchError as error:  # a cache is a convenience
            warnings.warn(f"the tokens are not kept for the next run: {error}", stacklevel=2)
            return built
    return _read_cache(folder) or built


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield a folder beside ``folder`` that is removed again, at the next start at the latest."""
    scratch = temporary_path(folder, "tmp")
    try:
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _build(corpus: Corpus, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Splits:
    """Tokenise and lay out through files in ``folder``, which may go afterwards: a mapped file can still be read."""
    texts = filtered_documents(corpus, settings)
    stream = tokenise(texts, tokenizer, folder / _STREAM, append_eos=settings.append_eos)
    pad = _pad_token_id(tokenizer)
    blocks = [
        blocks_from_stream(
            part, settings, pad_token_id=pad, revision=corpus.revision, file=folder / f"rows-{number}.bin"
        )
        for number, part in enumerate(_split(stream, settings.held_out or 0))
    ]
    return Splits(*blocks)


def _split(stream: TokenStream, held_out: int) -> list[TokenStream]:
    """Return the documents to train on and, if any, the last ``held_out`` ones."""
    kept = len(stream.lengths) - held_out
    if held_out == 0:
        return [stream]
    if kept < 1:
        raise HfpatchError(none_left(held_out, len(stream.lengths)))
    cut = int(stream.lengths[:kept].sum())
    return [
        TokenStream(stream.tokens[:cut], stream.lengths[:kept]),
        TokenStream(stream.tokens[cut:], stream.lengths[kept:]),
    ]


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def _stream(
    corpus: Corpus, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, cache_dir: Path | None
) -> TokenFile:
    """Return the text's token file from the cache, written there if need be; without a cache, from a file that is gone.

    A mapped file is read as before after it was removed.
    """
    if cache_dir is None or not corpus.cacheable or not is_writable(cache_dir, "the tokens"):
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            return _write_stream(Path(temporary), corpus, settings, tokenizer)
    folder = cache_dir / _cache_key(corpus, settings.describe_text(), tokenizer)
    if (kept := _kept_stream(folder, tokenizer)) is not None:
        return kept
    try:
        with atomic_directory(folder) as temporary:
            _write_stream(temporary, corpus, settings, tokenizer)
    except HfpatchError:
        if (kept := _kept_stream(folder, tokenizer)) is None:
            raise
        return kept  # another run was quicker
    return open_token_file(folder / _STREAM, tokenizer)


def _kept_stream(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFile | None:
    try:
        return open_token_file(folder / _STREAM, tokenizer) if folder.is_dir() else None
    except HfpatchError as error:
        _warn_of_damage(folder, error)
        return None


def _write_stream(
    folder: Path, corpus: Corpus, settings: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> TokenFile:
    texts = filtered_documents(corpus, settings)
    write_token_file(folder / _STREAM, texts, tokenizer, settings, revision=corpus.revision)
    return open_token_file(folder / _STREAM, tokenizer)


def _warn_of_damage(folder: Path, error: Exception) -> None:
    warnings.warn(f"{folder}: the kept tokens cannot be read ({error}) and are made again", stacklevel=2)


def _cache_key(corpus: Corpus, chosen: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    parts = [_CACHE_FORMAT, corpus.digest, corpus.revision, hash_tokenizer(tokenizer), chosen]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _write_cache(folder: Path, splits: Splits) -> None:
    with atomic_directory(folder) as temporary:
        for split, blocks in vars(splits).items():
            if blocks is None:
                continue
            (temporary / split).mkdir()
            for name in _ARRAYS:
                np.save(temporary / split / f"{name}.npy", getattr(blocks, name), allow_pickle=False)
            write_json(temporary / split / "blocks.json", {name: getattr(blocks, name) for name in _SCALARS})
        write_manifest(temporary)


def _read_cache(folder: Path) -> Splits | None:
    """Map what `_write_cache` wrote, after comparing all of it with its hashes; None where it is damaged."""
    try:
        check_manifest(folder)
        return Splits(**{path.name: _read_split(path) for path in folder.iterdir() if path.is_dir()})
    except (HfpatchError, ValueError, TypeError, OSError, EOFError) as error:
        _warn_of_damage(folder, error)
        return None


def _read_split(folder: Path) -> TokenBlocks:
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
    return TokenBlocks(**arrays, **read_json(folder / "blocks.json"))
