"""From a recipe's data section to token blocks, tokenized once and cached in memory-mapped files."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream
from hfpatch.data.completions import chat_template, tokenize_completions
from hfpatch.data.corpora import Corpus, filtered_documents, open_corpus
from hfpatch.data.mixture import join_blocks, tuning_texts
from hfpatch.data.token_file import TokenFile, none_left, open_token_file, write_token_file
from hfpatch.data.tokenizer import TokenStream, hash_tokenizer, tokenize
from hfpatch.data.tuning import TuningText, choose_documents, put_last
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.support.cache import is_writable
from hfpatch.support.files import (
    atomic_directory,
    check_manifest,
    read_json,
    remove_leftovers,
    temporary_path,
    write_json,
    write_manifest,
)

_CACHE_FORMAT = 4
_STREAM = "tokens.bin"
_OPTIONAL = "learned"
_ARRAYS = ("rows", "sizes", "offsets", _OPTIONAL)
_SCALARS = ("layout", "documents", "source", "revision", "sha256")


@dataclass(frozen=True)
class Splits:
    """Blocks to train on, those to measure the loss on if the settings hold documents out, and those of tuning."""

    train: TokenBlocks
    held_out: TokenBlocks | None = None
    tuning: TokenBlocks | None = None


def load_blocks(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> TokenBlocks:
    """Return the blocks to train on, see `load_splits`."""
    return load_splits(settings, tokenizer, data_dir=data_dir, cache_dir=cache_dir).train


def load_evaluation(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> TokenBlocks:
    """Return the blocks to measure the loss on: the held-out documents if ``settings`` hold some out, else all.

    So an evaluation section may use the text that is trained on, with another layout or block size; see
    :func:`hfpatch.recipes.data.overlap_mistake` and `load_splits`.
    """
    splits = load_splits(settings, tokenizer, data_dir=data_dir, cache_dir=cache_dir)
    return splits.held_out or splits.train


def load_splits(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    tuning: TuningText | None = None,
) -> Splits:
    """Read and tokenize the text of ``settings``, or map a token file, and lay it out in blocks.

    Documents are read a few at a time and written to a file that is then mapped.

    Args:
        settings: the recipe's data section.
        tokenizer: the base model's tokenizer.
        data_dir: local copies of hub data sets, see :func:`hfpatch.data.corpora.open_corpus`.
        cache_dir: cache the blocks (of a stream, its tokens) here, under the hash of settings, tokenizer and text, and
            map them into memory on the next call. The embedded language is not cached: it is generated quickly.
        tuning: which documents are taken away for tuning; None takes none.

    Raises:
        HfpatchError: if the text is missing, malformed, empty or shorter than a block, or has too few documents for
            tuning, or the token file is damaged or was made with another tokenizer.
    """
    parts = settings.parts()
    wanted = tuning_texts(settings, tuning, data_dir) if tuning is not None else [None] * len(parts)
    found = [
        _load_part(part, tokenizer, data_dir=data_dir, cache_dir=cache_dir, tuning=taken)
        for part, taken in zip(parts, wanted, strict=True)
    ]
    return _join(found, settings.weights) if settings.mixture else found[0]


def _join(splits: Sequence[Splits], weights: Sequence[float]) -> Splits:
    """Return the splits of a mixture; a source with a small weight may hold nothing out."""
    joined: dict[str, TokenBlocks] = {}
    for name in ("train", "held_out", "tuning"):
        found = [(getattr(each, name), weight) for each, weight in zip(splits, weights, strict=True)]
        given = [(blocks, weight) for blocks, weight in found if blocks is not None]
        if given:
            joined[name] = join_blocks(*zip(*given, strict=True))
    return Splits(**joined)


def _load_part(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None,
    cache_dir: Path | None,
    tuning: TuningText | None,
) -> Splits:
    """Return the splits of one source, see `load_splits`."""
    if settings.is_token_file:
        return Splits(**open_token_file(Path(settings.source), tokenizer).cut_splits(settings))
    corpus = open_corpus(settings, data_dir)
    if cache_dir is not None:
        remove_leftovers(cache_dir)
    usable = cache_dir is not None and corpus.cacheable and is_writable(cache_dir, "the tokens")
    if settings.layout == "stream":
        stream = _load_stream(corpus, settings, tokenizer, cache_dir if usable else None, tuning)
        return Splits(**stream.cut_splits(settings, tuning.documents if tuning else 0))
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    if cache_dir is None or not usable:
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            return _build(corpus, settings, tokenizer, pad, Path(temporary), tuning)
    chosen = {**settings.model_dump(mode="json"), "pad": pad}
    if settings.format != "text":
        chosen["chat_template"] = chat_template(tokenizer, settings)
    folder = cache_dir / _cache_key(corpus, chosen, tokenizer, tuning)
    if folder.is_dir() and (cached := _read_cache(folder)) is not None:
        return cached
    with _scratch(folder) as scratch:
        built = _build(corpus, settings, tokenizer, pad, scratch, tuning)
        try:
            _write_cache(folder, built)
        except HfpatchError as error:  # the cache is optional
            warnings.warn(f"the tokens are not cached for the next run: {error}", stacklevel=2)
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


def _build(
    corpus: Corpus,
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    pad: int,
    folder: Path,
    tuning: TuningText | None,
) -> Splits:
    """Tokenize and lay out, with files in ``folder`` that may be removed afterwards: mapped files stay readable."""
    texts = _texts(corpus, settings, tuning)
    if settings.format == "text":
        stream = tokenize(texts, tokenizer, folder / "tokens.bin", append_eos=settings.append_eos)
    else:
        stream = tokenize_completions(texts, tokenizer, folder, settings)
    last = {"held_out": settings.held_out or 0, "tuning": tuning.documents if tuning else 0}
    kept = len(stream.lengths) - sum(last.values())
    if kept < 1:
        raise HfpatchError(none_left(last["held_out"], len(stream.lengths)))
    blocks, first, begin = {}, 0, 0
    for name, documents in {"train": kept, **last}.items():
        if not documents:
            continue
        lengths = stream.lengths[first : first + documents]
        end = begin + int(lengths.sum())
        learned = None if stream.learned is None else stream.learned[begin:end]
        part, file = TokenStream(stream.tokens[begin:end], lengths, learned), folder / f"rows-{name}.bin"
        blocks[name] = blocks_from_stream(part, settings, pad_token_id=pad, revision=corpus.revision, file=file)
        first, begin = first + documents, end
    return Splits(**blocks)


def _texts(corpus: Corpus, settings: DataSettings, tuning: TuningText | None) -> Iterator[str]:
    """Yield the documents: those to train on, those held out, those of tuning."""
    texts = filtered_documents(corpus, settings)
    if tuning is None:
        return texts
    chosen = choose_documents(filtered_documents(corpus, settings), tuning, held_out=settings.held_out or 0)
    return put_last(texts, chosen)


def _load_stream(
    corpus: Corpus,
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path | None,
    tuning: TuningText | None,
) -> TokenFile:
    """Return the text's token file from the cache, written there if necessary.

    Without a cache the file is removed while it is mapped, which leaves it readable.
    """

    def write(folder: Path) -> None:
        texts = _texts(corpus, settings, tuning)
        write_token_file(folder / _STREAM, texts, tokenizer, settings, revision=corpus.revision)

    if cache_dir is None:
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            write(Path(temporary))
            return open_token_file(Path(temporary) / _STREAM, tokenizer)
    chosen = settings.describe_text() | ({"held_out": settings.held_out} if tuning else {})
    folder = cache_dir / _cache_key(corpus, chosen, tokenizer, tuning)
    if (cached := _cached_stream(folder, tokenizer)) is not None:
        return cached
    try:
        with atomic_directory(folder) as temporary_folder:
            write(temporary_folder)
    except HfpatchError:
        if (cached := _cached_stream(folder, tokenizer)) is None:
            raise
        return cached  # another run was faster
    return open_token_file(folder / _STREAM, tokenizer)


def _cached_stream(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFile | None:
    try:
        return open_token_file(folder / _STREAM, tokenizer) if folder.is_dir() else None
    except HfpatchError as error:
        _warn_of_damage(folder, error)
        return None


def _warn_of_damage(folder: Path, error: Exception) -> None:
    warnings.warn(f"{folder}: the cached tokens cannot be read ({error}) and are made again", stacklevel=2)


def _cache_key(
    corpus: Corpus, chosen: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tuning: TuningText | None
) -> str:
    parts = [_CACHE_FORMAT, corpus.digest, corpus.revision, hash_tokenizer(tokenizer), chosen]
    parts += [tuning.to_json()] if tuning else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _write_cache(folder: Path, splits: Splits) -> None:
    with atomic_directory(folder) as temporary:
        for split, blocks in vars(splits).items():
            if blocks is None:
                continue
            (temporary / split).mkdir()
            for name in _ARRAYS:
                if (array := getattr(blocks, name)) is not None:
                    np.save(temporary / split / f"{name}.npy", array, allow_pickle=False)
            write_json(temporary / split / "blocks.json", {name: getattr(blocks, name) for name in _SCALARS})
        write_manifest(temporary)


def _read_cache(folder: Path) -> Splits | None:
    """Map what `_write_cache` wrote, after comparing all files with their hashes; None if they are damaged."""
    try:
        check_manifest(folder)
        splits = {}
        for path in filter(Path.is_dir, folder.iterdir()):
            files = [path / f"{name}.npy" for name in _ARRAYS]
            there = [file for file in files if file.stem != _OPTIONAL or file.is_file()]
            arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in there}
            splits[path.name] = TokenBlocks(**arrays, **read_json(path / "blocks.json"))
        return Splits(**splits)
    except (HfpatchError, ValueError, TypeError, OSError, EOFError) as error:
        _warn_of_damage(folder, error)
        return None
