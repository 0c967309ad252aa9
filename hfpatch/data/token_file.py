"""Token files: one stream of token ids on disk, and two files that describe it.

``NAME.bin`` has only the ids, documents one after the other, as little-endian uint16 or uint32, like nanoGPT's
train.bin. ``NAME.json`` beside it is a :class:`TokenFileInfo`, ``NAME.safetensors`` has the ``lengths`` of the
documents, their digests, see :mod:`hfpatch.data.copies`, and the ``groups`` that they come in, if any, with digests of
their ``names``. Where a part of each document is learned, ``NAME.learned`` has a byte for each id, 1 or 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from hfpatch.data.completions import tokenize_completions
from hfpatch.data.copies import Digester, Digests
from hfpatch.data.rows import Document, hash_groups, number_groups
from hfpatch.data.tokenizer import (
    Integers,
    TokenArray,
    TokenStream,
    hash_tokenizer,
    largest_id,
    token_dtype,
    tokenize_in_parts,
)
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.sources import TOKEN_FILE
from hfpatch.recipes.strict import Section, validate
from hfpatch.support.files import atomic_file, read_json, sha256_file, write_json

SIDECAR = ".json"
DOCUMENTS = ".safetensors"
LEARNED = ".learned"
_CHUNK_TOKENS = 1 << 22  # read at once, 8 or 16 MiB


class TokenFileInfo(Section):
    """The sidecar of a token file."""

    dtype: Literal["uint16", "uint32"]
    """The type of an id, little-endian."""
    tokens: PositiveInt
    """How many ids there are."""
    documents: PositiveInt
    """How many documents they came from."""
    vocabulary_size: PositiveInt
    """One more than the largest id of the tokenizer's vocabulary; every id is below it."""
    end_of_text: NonNegativeInt | None
    """The id at the end of every document, or None."""
    tokenizer_sha256: str
    """The tokenizer, see :func:`hfpatch.data.tokenizer.hash_tokenizer`."""
    source: str
    """The ``data.source`` of its text."""
    config: str | None = None
    """The hub data set's configuration."""
    split: str | None = None
    """The hub data set's split."""
    revision: str | None = None
    """The hub data set's revision."""
    sha256: str
    """Hash of the ids, as ``sha256sum NAME.bin`` gives it."""
    documents_sha256: str
    """Hash of ``NAME.safetensors``."""
    learned_sha256: str | None = None
    """Hash of ``NAME.learned``, if there is one."""


@dataclass(frozen=True)
class TokenFile:
    """A token file mapped into memory: the ``stream`` of its documents, their digests, and ``info``, its sidecar.

    ``groups``, (documents,), has the group of each document, counted from 0; None where each is one by itself.
    ``names``, (documents,), has their names, see :func:`hfpatch.data.rows.hash_groups`.
    """

    stream: TokenStream
    digests: Digests
    info: TokenFileInfo
    groups: Integers | None = None
    names: Integers | None = None

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.stream.lengths)


def write_token_file(
    path: Path,
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    *,
    revision: str | None = None,
    on_part: Callable[[int, int], None] | None = None,
) -> TokenFileInfo:
    """Tokenize documents into a token file, a few million characters at a time.

    The file, ``NAME.bin``, is written atomically, then its descriptions; none of them may exist. ``on_part`` is called
    from time to time with the numbers of documents and tokens so far.

    Raises:
        HfpatchError: if the file exists or cannot be written, or no token is predicted.
    """
    check_free(path)
    groups: list[str | None] = []

    def texts() -> Iterator[str]:
        for document in documents:
            groups.append(document.group)
            yield document.text

    if settings.format == "text":
        parts = tokenize_in_parts(texts(), tokenizer, append_eos=settings.append_eos)
    else:
        parts = tokenize_completions(texts(), tokenizer, settings)
    tokens, count, masks = 0, 0, path.with_suffix(LEARNED)
    lengths, digests, kept = list[Integers](), list[Digests](), list[Integers]()
    hashes = {file: hashlib.sha256() for file in ([path] if settings.format == "text" else [path, masks])}
    with ExitStack() as files:
        streams = [files.enter_context(files.enter_context(atomic_file(file)).open("wb")) for file in hashes]
        for part in parts:
            arrays = (array for array in (part.stream.tokens, part.stream.learned) if array is not None)
            for stream, sha256, array in zip(streams, hashes.values(), arrays, strict=True):
                content = array.tobytes()
                stream.write(content)
                sha256.update(content)
            lengths.append(part.stream.lengths)
            digests.append(part.digests)
            kept.append(part.kept)
            tokens, count = tokens + len(part.stream.tokens), count + len(part.kept)
            if on_part is not None:
                on_part(count, tokens)
        if count == 0:
            unit = "document" if settings.format == "text" else "example"
            raise HfpatchError(
                f"{settings.source}: no {unit} has two tokens, so no token is predicted; choose another data.source"
            )
    grouped = dict[str, Integers]()
    if settings.group is not None:
        names = [groups[index] for index in np.concatenate(kept)]
        grouped = {"groups": number_groups(names), "names": hash_groups(names, settings.group)}
    return _write_descriptions(
        path,
        tokenizer,
        np.concatenate(lengths),
        Digests.join(digests, list(map(len, lengths))),
        grouped,
        tokens=tokens,
        end_of_text=tokenizer.eos_token_id if settings.append_eos else None,
        **settings.model_dump(include={"source", "config", "split"}),
        revision=revision,
        sha256=hashes[path].hexdigest(),
        learned_sha256=hashes[masks].hexdigest() if masks in hashes else None,
    )


def describe_token_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFileInfo:
    """Describe a file from another tool, after reading all of it.

    It must have the format of :func:`write_token_file` with this tokenizer: uint16 ids if the vocabulary allows
    it, else uint32, and an end-of-text after each document. Ids must be in the vocabulary; whether they are of this
    tokenizer cannot be checked.

    Raises:
        HfpatchError: if there is already a sidecar, or the file is missing, empty, or of another format.
    """
    dtype, end, vocabulary = token_dtype(tokenizer), tokenizer.eos_token_id, largest_id(tokenizer) + 1
    if path.with_suffix(SIDECAR).exists():
        raise HfpatchError(f"{path.with_suffix(SIDECAR)}: exists already, so {path.name} can be used as it is")
    size = path.stat().st_size if path.is_file() else 0
    if size == 0 or size % dtype.itemsize:
        problem = f"has {size} bytes, no whole number of {dtype.name} ids" if size else "is missing or empty"
        raise HfpatchError(f"{path}: {problem}")
    tokens: TokenArray = np.memmap(path, dtype=dtype, mode="r")

    # The ids, some at a time.
    chunks = [tokens[start : start + _CHUNK_TOKENS] for start in range(0, len(tokens), _CHUNK_TOKENS)]
    largest = max(int(chunk.max()) for chunk in chunks)
    if largest >= vocabulary:
        raise HfpatchError(
            f"{path}: read as {dtype.name} it has the id {largest}, beyond the tokenizer's vocabulary of {vocabulary}; "
            "use the tokenizer it was made with"
        )
    if len(tokens) > 1 and not chunks[0][1::2].any():
        raise HfpatchError(
            f"{path}: every second {dtype.name} in it is 0, so its ids use a wider type; write them as {dtype.name}"
        )

    # Documents of at least two tokens, between the places of the id that ends each. If it comes twice, as with a
    # tokenizer that begins documents with it, the second one begins the next document.
    parts = [] if end is None else [np.flatnonzero(chunk == end) + n * _CHUNK_TOKENS for n, chunk in enumerate(chunks)]
    ends = np.concatenate(parts) if parts else np.empty(0, np.int64)
    fresh = np.ones(len(ends), np.bool_)
    fresh[1:] = ends[1:] != ends[:-1] + 1
    runs = np.flatnonzero(fresh)
    rank = np.arange(len(ends)) - np.repeat(runs, np.diff([*runs, len(ends)]))
    if len(ends) and ends[0] == 0:  # no document before it
        rank[: runs[1] if len(runs) > 1 else len(ends)] += 1
    last = ends[rank % 2 == 0] + 1
    rest = [len(tokens)] if not len(last) or last[-1] < len(tokens) else []
    lengths = np.diff([0, *last, *rest]).astype(np.int64)

    digester, bounds = Digester(tokenizer), np.cumsum([0, *lengths]).tolist()
    digests = [digester.tokens(tokens[start:stop]) for start, stop in pairwise(bounds)]
    return _write_descriptions(
        path,
        tokenizer,
        lengths,
        Digests.of(digests),
        {},
        tokens=len(tokens),
        end_of_text=end if len(lengths) > 1 or tokens[-1] == end else None,
        source=path.name,
        sha256=sha256_file(path),
    )


def _write_descriptions(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Integers,
    digests: Digests,
    groups: dict[str, Integers],
    **facts: Any,
) -> TokenFileInfo:
    with atomic_file(path.with_suffix(DOCUMENTS)) as temporary:
        save_file({"lengths": lengths, **vars(digests), **groups}, temporary)
    facts |= {
        "documents": len(lengths),
        "dtype": token_dtype(tokenizer).name,
        "vocabulary_size": largest_id(tokenizer) + 1,
        "tokenizer_sha256": hash_tokenizer(tokenizer),
        "documents_sha256": sha256_file(path.with_suffix(DOCUMENTS)),
    }
    info = TokenFileInfo.model_validate(facts)
    write_json(path.with_suffix(SIDECAR), info.model_dump(mode="json"))
    return info


def open_token_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFile:
    """Map a token file into memory, after reading it once to check its hash.

    Raises:
        HfpatchError: if it or its sidecar is missing, they do not match, the ids have changed, or it was made with
            another tokenizer.
    """
    if not path.is_file():
        raise HfpatchError(f"{path}: no such token file; hfpatch tokenize RECIPE --out {path} makes one")
    side = path.with_suffix(SIDECAR)
    if not side.is_file():
        raise HfpatchError(
            f"{path}: its description {side.name} is missing; for a file from another tool, hfpatch tokenize "
            f"RECIPE data.source={path} data.layout=stream writes it"
        )
    info = validate(read_json(side), TokenFileInfo, str(side))
    dtype = np.dtype(info.dtype).newbyteorder("<")
    if path.stat().st_size != info.tokens * dtype.itemsize:
        raise HfpatchError(
            f"{path}: has {path.stat().st_size} bytes, but {info.tokens} ids of {info.dtype} ({side.name}) "
            f"have {info.tokens * dtype.itemsize}; it is truncated or another file, so make it again (hfpatch tokenize)"
        )
    vocabulary = largest_id(tokenizer) + 1
    if info.tokenizer_sha256 != hash_tokenizer(tokenizer) or info.vocabulary_size > vocabulary:
        raise HfpatchError(
            f"{path}: made with another tokenizer, whose vocabulary has {info.vocabulary_size} ids instead of "
            f"{vocabulary}; use that tokenizer, or make the file again (hfpatch tokenize)"
        )
    if (sha256 := sha256_file(path)) != info.sha256:
        raise HfpatchError(
            f"{path}: has other ids than {side.name} describes (sha256 {info.sha256[:12]} there, {sha256[:12]} "
            "in the file); restore the file, or make it again (hfpatch tokenize)"
        )
    for file, expected in (
        (path.with_suffix(DOCUMENTS), info.documents_sha256),
        (path.with_suffix(LEARNED), info.learned_sha256),
    ):
        if expected is not None and (not file.is_file() or sha256_file(file) != expected):
            raise HfpatchError(
                f"{file}: is missing, or not the one that {side.name} describes; restore it beside "
                f"{path.name}, or make both again (hfpatch tokenize)"
            )
    arrays = load_file(path.with_suffix(DOCUMENTS))
    lengths, groups, names = arrays.pop("lengths"), arrays.pop("groups", None), arrays.pop("names", None)
    learned = None
    if info.learned_sha256 is not None:
        learned = np.memmap(path.with_suffix(LEARNED), dtype=np.bool_, mode="r")
    tokens: TokenArray = np.memmap(path, dtype=dtype, mode="r")
    return TokenFile(TokenStream(tokens, lengths, learned), Digests(**arrays), info, groups, names)


def check_free(path: Path) -> None:
    """Refuse a path of a token file that is no ``.bin``, or that exists or has a sidecar, before the text is read."""
    if path.suffix != TOKEN_FILE:
        raise HfpatchError(f"{path}: the name of a token file must end with {TOKEN_FILE}")
    for file in (path, path.with_suffix(SIDECAR), path.with_suffix(DOCUMENTS)):
        if file.exists():
            raise HfpatchError(f"{file}: exists already; delete it or choose another name")
