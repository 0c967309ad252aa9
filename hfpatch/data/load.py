"""From a recipe's data section to token blocks, tokenized once and cached in memory-mapped files."""

from __future__ import annotations

import hashlib
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream, has_something_to_learn, join_blocks
from hfpatch.data.completions import chat_template
from hfpatch.data.copies import Digester, Digests, Flags
from hfpatch.data.corpora import filtered_documents, open_corpus
from hfpatch.data.deciding import (
    NONE,
    RUN,
    Candidates,
    Chosen,
    TaskDocument,
    choose_documents,
    copies_of_tasks,
    digest_tasks,
    draw,
    in_order,
)
from hfpatch.data.token_file import TokenFile, open_token_file, write_token_file
from hfpatch.data.tokenizer import hash_tokenizer, start_of_document
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings, split_by_weight
from hfpatch.support.files import (
    atomic_directory,
    check_manifest,
    hash_values,
    read_json,
    remove_leftovers,
    temporary_path,
    write_json,
    write_manifest,
)
from hfpatch.support.folders import is_writable

_CACHE_FORMAT = 9  # to be raised where what the files hold changes: old ones are then left alone
_MEASURED = 2  # in the seed of the draw, after those of held-out and tuning documents
_LONG_BLOCK = 64  # tokens of a block that is a text by itself; shorter ones may be common phrases
_TOKENS = "tokens.bin"
_OPTIONAL = ("learned", "owners", "groups", "added")
_ARRAYS = ("rows", "sizes", "offsets", *_OPTIONAL)
_SCALARS = ("layout", "documents", "source", "revision", "sha256")
_DAMAGED = "{}: the cached tokens cannot be read ({}) and are made again"


@dataclass(frozen=True)
class Splits:
    """Blocks to train on, held-out blocks to measure the loss on, and blocks for tuning.

    ``cautions`` are sentences about tasks' documents in the training text; ``retained`` are more texts to measure, by
    name.
    """

    train: TokenBlocks
    held_out: TokenBlocks | None = None
    tuning: TokenBlocks | None = None
    cautions: tuple[str, ...] = ()
    retained: Mapping[str, TokenBlocks] = field(default_factory=dict)


class _Text(NamedTuple):
    """A text as tokens, and the folder in which blocks of it are cached."""

    file: TokenFile
    cache_dir: Path | None


def load_blocks(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> TokenBlocks:
    """Return the blocks to train on, see `load_splits`."""
    return load_splits(settings, tokenizer, data_dir=data_dir, cache_dir=cache_dir).train


def load_splits(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    tuning: int = 0,
    tasks: Mapping[str, Sequence[TaskDocument]] | None = None,
    evaluation: DataSettings | None = None,
    retained: Mapping[str, DataSettings] | None = None,
    by_text: bool = False,
) -> Splits:
    """Read and tokenize the text of ``settings``, or map a token file, and lay it out in blocks.

    Documents are read a few at a time and written to a file that is then mapped. No document held out or used for
    tuning equals one that is trained on, see :func:`hfpatch.data.deciding.choose_documents`.

    Args:
        settings: the recipe's data section.
        tokenizer: the base model's tokenizer.
        data_dir: local copies of hub data sets, see :func:`hfpatch.data.corpora.open_corpus`.
        cache_dir: cache the tokens and the blocks here, under the hash of settings, tokenizer and text, and map them
            into memory on the next call. The embedded language is not cached: it is generated quickly.
        tuning: the number of documents for tuning.
        tasks: the documents of the evaluation tasks, by task. Their text is not trained on or tuned on; a warning
            counts the excluded documents, see :func:`hfpatch.data.deciding.digest_tasks`.
        evaluation: the text to measure the loss on instead of the held-out documents of ``settings``: its held-out
            documents, or else all. It may be the text that is trained on, with another layout or block size; see
            :func:`hfpatch.recipes.data.check_overlap`. Documents that are trained or tuned on are left out, with a
            warning.
        retained: more texts to measure, by their names in ``retention.texts``: ``held_out`` of their documents, or else
            all, less the documents that are trained on, tuned on or held out.
        by_text: draw the documents that :func:`hfpatch.data.deciding.tokenizer_documents` leaves out, for a tokenizer
            that is trained on the same text.

    Raises:
        HfpatchError: if the text is missing, malformed, empty or shorter than a block, or has too few documents to hold
            out or tune on, or all of a source is in the tasks, or the token file is damaged or of another tokenizer.
    """
    load = partial(_load_text, tokenizer=tokenizer, data_dir=data_dir, cache_dir=cache_dir)
    parts = settings.parts()
    texts = [load(part) for part in parts]

    # Documents of the tasks, to hold out and to tune on.
    shares = split_by_weight(tuning, settings.weights)
    with_ids, cautions = any(part.is_token_file for part in parts), list[str]()
    cuts = {size - len(start_of_document(tokenizer)) for size in set.union(*_cuts(parts))}
    copies, task_digests = digest_tasks(tasks or {}, Digester(tokenizer), with_ids=with_ids, cuts=cuts)
    decides = bool(tasks or tuning or settings.held_out)
    read = [_read_digests(text, parts, tokenizer) if decides else text.file.digests for text in texts]
    candidates = [_candidates(*source, copies, cautions) for source in zip(texts, read, parts, shares, strict=True)]
    chosen, left_out = choose_documents(candidates, task_digests, seed=settings.seed, by_text=by_text)
    cautions += left_out
    for caution in cautions:
        warnings.warn(caution, stacklevel=2)

    # Blocks; in a mixture a source with a small weight may have no held-out documents.
    laid_out = [_lay_out(*source, tokenizer) for source in zip(texts, parts, chosen, strict=True)]
    splits: dict[str, TokenBlocks] = {} if settings.mixture else laid_out[0]
    for name in vars(Chosen(NONE)) if settings.mixture else ():
        given = [(made[name], weight) for made, weight in zip(laid_out, settings.weights, strict=True) if name in made]
        if given:
            splits[name] = join_blocks(*zip(*given, strict=True))

    # Other texts to measure the loss on.
    used, others = list(zip(texts, parts, chosen, strict=True)), {}
    if evaluation is not None:
        same = [part.held_out for _, source_of, part in used if source_of.describe_text() == evaluation.describe_text()]
        measured, uses = load(evaluation), ("train", "tuning")
        if evaluation.held_out and same and len(same[0]):  # the training text's own
            documents = Chosen(train=NONE, held_out=same[0])
        else:
            documents = _choose_measured("evaluation_data", measured, evaluation, used, uses, tokenizer)
        splits["held_out"] = _lay_out(measured, evaluation, documents, tokenizer)["held_out"]
    for name, other in (retained or {}).items():
        measured, decided = load(other), ("train", "tuning", "held_out")
        documents = _choose_measured(f"retention.texts.{name}", measured, other, used, decided, tokenizer)
        others[name] = _lay_out(measured, other, documents, tokenizer)["held_out"]
    return Splits(**splits, cautions=tuple(cautions), retained=others)


def _candidates(
    text: _Text,
    read: Digests,
    settings: DataSettings,
    tuning: int,
    tasks: Mapping[str, Digests],
    cautions: list[str],
) -> Candidates:
    """Return the documents of one source; add a sentence to ``cautions`` if tasks have some of them."""
    count = len(text.file)
    copied, counts = copies_of_tasks(read, count, tasks) if tasks else (np.zeros(count, np.bool_), {})
    if counts:
        copies = ", ".join(f"{name} {number}" for name, number in counts.items())
        cautions.append(
            f"data: {copied.sum()} of {count} documents of {settings.source} are in the tasks, too ({copies}), and are "
            "not trained on"
        )
    if tasks and settings.is_token_file and count == 1:
        cautions.append(
            f"data: {settings.source} has no end-of-text token between documents, so whether the tasks' documents are "
            "in it is not known"
        )
    return Candidates(
        settings.source,
        text.file.digests,
        _usable(text, settings),
        copied,
        held_out=settings.held_out or 0,
        tuning=tuning,
        groups=text.file.groups,
        read=read,
    )


def _choose_measured(
    key: str,
    text: _Text,
    settings: DataSettings,
    used: Sequence[tuple[_Text, DataSettings, Chosen]],
    uses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> Chosen:
    """Return the documents of a text to measure: of ``held_out`` groups, or all, without those of other ``uses``.

    Documents are compared as they are read, cut to the blocks of either text.
    """
    reading = [settings, *(other for _, other, _ in used)]
    digests = [
        _read_digests(other, reading, tokenizer).take(np.concatenate([getattr(chosen, use) for use in uses]))
        for other, _, chosen in used
    ]
    read, count = _read_digests(text, reading, tokenizer), len(text.file)
    copied = read.among(Digests.join(digests, [len(other.file) for other, _, _ in used]), count)
    shared = f"of {settings.source} are in the text that is trained or tuned on, too"
    if copied.all():
        raise HfpatchError(f"{key}: all {count} documents {shared}; evaluate on another text")
    if copied.any():
        warnings.warn(f"{key}: {copied.sum()} of {count} documents {shared}, and are not evaluated on", stacklevel=3)
    groups = np.arange(count) if text.file.groups is None else text.file.groups
    good = ~copied & _usable(text, settings)
    if settings.held_out is None or settings.held_out >= len(in_order(groups[~copied])):
        return Chosen(train=NONE, held_out=np.flatnonzero(~copied))
    good &= ~read.repeated(groups)
    free = in_order(groups[good])
    if not len(free):
        raise HfpatchError(
            f"{key}: no document of {settings.source} differs from all others in what is read of it after cutting; use "
            "longer blocks, or another text"
        )
    run = RUN if text.file.groups is None else 1
    inside = draw(free, min(settings.held_out, len(free)), seed=(settings.seed, _MEASURED), run=run)
    return Chosen(train=NONE, held_out=np.flatnonzero(good & np.isin(groups, inside)))


def _cuts(reading: Sequence[DataSettings]) -> tuple[set[int], set[int]]:
    """Return the lengths in tokens of what is read of a longer document, and of the blocks in which it goes on."""
    goes_on = [part.format == "text" and part.layout != "padded" for part in reading]
    firsts = {part.block_size for part, more in zip(reading, goes_on, strict=True) if not more}
    firsts |= {part.scored_tokens for part in reading if part.scored_tokens is not None}
    return firsts, {
        part.block_size for part, more in zip(reading, goes_on, strict=True) if more and part.block_size >= _LONG_BLOCK
    }


def _read_digests(text: _Text, reading: Sequence[DataSettings], tokenizer: PreTrainedTokenizerBase) -> Digests:
    """Return the digests of documents and of what is read of them after cutting, in each way of ``reading``.

    Of longer documents that is the first tokens, where no more is read or scored, and each whole block where they go on
    in the next one. So documents count as equal that differ only beyond what is read, or have a long block in common.
    """
    digester, added, pieces_of = Digester(tokenizer), len(start_of_document(tokenizer)), list[list[tuple[int, bool]]]()
    (firsts, blocks), file = _cuts(reading), text.file
    for begin, length in zip(file.stream.begins.tolist(), file.stream.lengths.tolist(), strict=True):
        pieces = [(0, size) for size in firsts | blocks if size < length]
        for size in blocks:
            pieces += [(at, size - added) for at in range(size, length - size + added + 1, size - added)]
        ids = file.stream.tokens[begin : begin + length]
        pieces_of.append([(digester.ids(ids[at : at + size]), True) for at, size in pieces])
    cut = Digests.of(pieces_of)
    return Digests(*(np.concatenate([getattr(digests, name) for digests in (file.digests, cut)]) for name in vars(cut)))


def _usable(text: _Text, settings: DataSettings) -> Flags:
    """Return which documents have a token to predict among the tokens that are scored."""
    return has_something_to_learn(text.file.stream, min(settings.block_size, settings.scored_tokens or sys.maxsize))


def _load_text(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, data_dir: Path | None, cache_dir: Path | None
) -> _Text:
    """Map the text's token file: the source itself, or one in the cache, written there if necessary.

    Without a cache the file is removed while it is mapped, which leaves it readable.
    """

    def write(folder: Path) -> None:
        texts = filtered_documents(corpus, settings)
        file, revision = folder / _TOKENS, corpus.revision
        write_token_file(file, texts, tokenizer, settings, revision=revision, unread=corpus.unread)

    if settings.is_token_file:
        return _Text(open_token_file(Path(settings.source), tokenizer), None)
    corpus = open_corpus(settings, data_dir)
    if cache_dir is not None:
        remove_leftovers(cache_dir)
    if cache_dir is None or not (corpus.cacheable and is_writable(cache_dir, "the tokens")):
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            write(Path(temporary))
            return _Text(open_token_file(Path(temporary) / _TOKENS, tokenizer), None)
    chosen = settings.describe_text()
    if settings.format != "text":
        chosen["chat_template"] = chat_template(tokenizer, settings)
    key = hash_values([_CACHE_FORMAT, corpus.digest(), corpus.revision, hash_tokenizer(tokenizer), chosen])
    folder = cache_dir / key[:32]
    cached = _cached_tokens(folder, tokenizer)
    if cached is None:
        try:
            with atomic_directory(folder) as temporary_folder:
                write(temporary_folder)
            cached = open_token_file(folder / _TOKENS, tokenizer)
        except HfpatchError:
            if (cached := _cached_tokens(folder, tokenizer)) is None:  # else another run was faster
                raise
    return _Text(cached, cache_dir)


def _lay_out(
    text: _Text, settings: DataSettings, chosen: Chosen, tokenizer: PreTrainedTokenizerBase
) -> dict[str, TokenBlocks]:
    """Return the chosen documents of a text in blocks, from the cache or written there if necessary."""
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    start = start_of_document(tokenizer)
    if settings.layout == "stream" and not start:
        return _build(text.file, settings, chosen, pad, start, None)
    if text.cache_dir is None:
        with TemporaryDirectory(ignore_cleanup_errors=True) as rows:
            return _build(text.file, settings, chosen, pad, start, Path(rows))
    hashes = [hashlib.sha256(documents.tobytes()).hexdigest() for documents in vars(chosen).values()]
    layout = [settings.layout, settings.block_size, settings.scored_tokens, pad, start]
    key = hash_values([_CACHE_FORMAT, text.file.info.model_dump(mode="json"), layout, hashes])
    folder = text.cache_dir / key[:32]
    if folder.is_dir() and (cached := _read_cache(folder)) is not None:
        return cached
    scratch = temporary_path(folder, "tmp")  # removed below, or after a crash at the next start
    try:
        scratch.mkdir()
        built = _build(text.file, settings, chosen, pad, start, scratch)
        try:
            with atomic_directory(folder) as temporary:
                for split, blocks in built.items():
                    (temporary / split).mkdir()
                    for name in _ARRAYS:
                        if (array := getattr(blocks, name)) is not None:
                            np.save(temporary / split / f"{name}.npy", array, allow_pickle=False)
                    write_json(temporary / split / "blocks.json", {name: getattr(blocks, name) for name in _SCALARS})
                write_manifest(temporary)
        except HfpatchError as error:  # the cache is optional
            warnings.warn(f"the tokens are not cached for the next run: {error}", stacklevel=2)
            return built
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _read_cache(folder) or built


def _build(
    file: TokenFile, settings: DataSettings, chosen: Chosen, pad: int, start: list[int], folder: Path | None
) -> dict[str, TokenBlocks]:
    """Lay out documents, with files in ``folder`` that may be removed afterwards: mapped files stay readable."""
    named = settings.model_copy(update={"source": file.info.source})
    blocks: dict[str, TokenBlocks] = {}
    for name, indices in vars(chosen).items():
        if len(indices):
            stream = file.stream.take(indices)
            if name != "train" and settings.scored_tokens is not None:
                stream = replace(stream, lengths=np.minimum(stream.lengths, settings.scored_tokens))
            made = blocks_from_stream(
                stream,
                named,
                pad_token_id=pad,
                start=start,
                revision=file.info.revision,
                file=folder and folder / f"rows-{name}.bin",
                with_owners=name != "train",
                sha256=f"{file.info.dtype} {file.info.sha256}",
            )
            if name != "train" and file.groups is not None:
                groups = np.unique(file.groups[indices], return_inverse=True)[1].astype(np.int32)
                made = replace(made, groups=groups)
            blocks[name] = made
    return blocks


def _cached_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFile | None:
    try:
        return open_token_file(folder / _TOKENS, tokenizer) if folder.is_dir() else None
    except HfpatchError as error:
        warnings.warn(_DAMAGED.format(folder, error), stacklevel=1)
        return None


def _read_cache(folder: Path) -> dict[str, TokenBlocks] | None:
    """Map the files of cached blocks after comparing them with their hashes; None if they are damaged."""
    try:
        check_manifest(folder)
        splits: dict[str, TokenBlocks] = {}
        for path in filter(Path.is_dir, folder.iterdir()):
            files = [path / f"{name}.npy" for name in _ARRAYS]
            stored = [file for file in files if file.stem not in _OPTIONAL or file.is_file()]
            arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in stored}
            splits[path.name] = TokenBlocks(**arrays, **read_json(path / "blocks.json"))
        return splits
    except (HfpatchError, ValueError, TypeError, OSError, EOFError) as error:
        warnings.warn(_DAMAGED.format(folder, error), stacklevel=1)
        return None
