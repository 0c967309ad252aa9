"""Token files: one stream of token ids on disk, and a sidecar that describes them.

``NAME.bin`` has only the ids, documents one after the other, as little-endian uint16 or uint32, like nanoGPT's
train.bin. ``NAME.json`` beside it is a :class:`TokenFileInfo`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks, cut_blocks
from hfpatch.data.tokenizer import TokenArray, hash_tokenizer, largest_id, token_dtype, tokenize_in_parts
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.sources import TOKEN_FILE
from hfpatch.recipes.strict import Section, validate
from hfpatch.support.files import atomic_file, read_json, sha256_file, write_json

_CHUNK_TOKENS = 1 << 22


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
    """The id at the end of every document, or None. Text that contains it counts as several documents when the last
    ones are held out."""
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

    @property
    def bytes(self) -> int:
        """The size of the file of ids."""
        return self.tokens * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TokenFile:
    """A token file mapped into memory.

    Attributes:
        tokens: (total,) token ids.
        info: its sidecar.
    """

    tokens: TokenArray
    info: TokenFileInfo

    def cut(self, settings: DataSettings) -> list[TokenBlocks]:
        """Cut the stream into blocks to train on and, if ``settings`` hold documents out, blocks of the last ones.

        Raises:
            HfpatchError: if all documents are held out, or a part is shorter than a block.
        """
        return list(self.cut_splits(settings).values())

    def cut_splits(self, settings: DataSettings, tuning: int = 0) -> dict[str, TokenBlocks]:
        """Cut the stream as `cut` does into parts by name, the last ``tuning`` documents being another one.

        Raises:
            HfpatchError: as `cut`.
        """
        held_out, total = settings.held_out or 0, len(self.tokens)
        last = self._find_start_of_last(tuning) if tuning else total
        cut = self._find_start_of_last(held_out + tuning) if held_out else last
        parts = {
            "train": (0, cut, self.info.documents - held_out - tuning),
            "held_out": (cut, last, held_out),
            "tuning": (last, total, tuning),
        }
        return {
            name: cut_blocks(
                self.tokens[start:stop],
                settings.block_size,
                documents=documents,
                source=self.info.source,
                revision=self.info.revision,
                sha256=f"{self.info.dtype} {self.info.sha256} [{start}:{stop}]",
            )
            for name, (start, stop, documents) in parts.items()
            if name == "train" or documents
        }

    def _find_start_of_last(self, documents: int) -> int:
        """Return where the last so many documents start: after the end-of-text of the one before them."""
        if self.info.end_of_text is None:
            raise HfpatchError(
                f"data.held_out: the documents of {self.info.source} have no end-of-text between them, so the last "
                "ones cannot be found; tokenize them with data.append_eos on, or set evaluation_data"
            )
        if documents >= self.info.documents:
            raise HfpatchError(none_left(documents, self.info.documents))
        wanted = documents + 1
        for stop in range(len(self.tokens), 0, -_CHUNK_TOKENS):
            start = max(0, stop - _CHUNK_TOKENS)
            ends = np.flatnonzero(self.tokens[start:stop] == self.info.end_of_text)
            if len(ends) >= wanted:
                return start + int(ends[-wanted]) + 1
            wanted -= len(ends)
        raise HfpatchError(none_left(documents, self.info.documents))


def none_left(held_out: int, documents: int) -> str:
    """Return the error message if every document is held out."""
    return (
        f"data.held_out is {held_out} and there are {documents} documents, so none is left to train on; "
        "hold fewer out or take more documents"
    )


def write_token_file(
    path: Path,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    settings: DataSettings,
    *,
    revision: str | None = None,
    on_part: Callable[[int, int], None] | None = None,
) -> TokenFileInfo:
    """Tokenize documents into a token file, a few million characters at a time.

    The file is written atomically, then its sidecar.

    Args:
        path: the file, ``NAME.bin``; neither it nor its sidecar may exist.
        documents: the text.
        tokenizer: the tokenizer.
        settings: whether documents end with an end-of-text token, and their source.
        revision: the hub revision they are from.
        on_part: called from time to time with how many documents and tokens are written.

    Raises:
        HfpatchError: if there is such a file, it cannot be written, or there is nothing to predict.
    """
    check_free(path)
    digest, tokens, count = hashlib.sha256(), 0, 0
    with atomic_file(path) as temporary, temporary.open("wb") as stream:
        for part in tokenize_in_parts(documents, tokenizer, append_eos=settings.append_eos):
            ids = part.tokens.tobytes()
            stream.write(ids)
            digest.update(ids)
            tokens, count = tokens + len(part.tokens), count + len(part.lengths)
            if on_part is not None:
                on_part(count, tokens)
    return _write_sidecar(
        path,
        tokenizer,
        tokens=tokens,
        documents=count,
        end_of_text=tokenizer.eos_token_id if settings.append_eos else None,
        **settings.model_dump(include={"source", "config", "split"}),
        revision=revision,
        sha256=digest.hexdigest(),
    )


def describe_token_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFileInfo:
    """Write the sidecar of a file from another tool, after reading all of it.

    It must contain what :func:`write_token_file` would write with this tokenizer: uint16 ids if the vocabulary allows
    it, else uint32, and an end-of-text after each document. That the ids are in the vocabulary is checked; that they
    are of this tokenizer cannot be.

    Raises:
        HfpatchError: if there is already a sidecar, or the file is missing, empty, or no such file.
    """
    dtype, end, vocabulary = token_dtype(tokenizer), tokenizer.eos_token_id, largest_id(tokenizer) + 1
    if sidecar(path).exists():
        raise HfpatchError(f"{sidecar(path)}: exists already, so {path.name} can be used as it is")
    tokens = _map(path, dtype)
    chunks = [tokens[start : start + _CHUNK_TOKENS] for start in range(0, len(tokens), _CHUNK_TOKENS)]
    largest = max(int(chunk.max()) for chunk in chunks)
    if largest >= vocabulary:
        raise HfpatchError(
            f"{path}: read as {dtype.name} it has the id {largest}, beyond the tokenizer's vocabulary of {vocabulary}; "
            "use the tokenizer it was made with"
        )
    if len(tokens) > 1 and not chunks[0][1::2].any():
        raise HfpatchError(
            f"{path}: every second {dtype.name} in it is 0, so its ids are wider; write them as {dtype.name}"
        )
    ends = 0 if end is None else sum(int(np.count_nonzero(chunk == end)) for chunk in chunks)
    return _write_sidecar(
        path,
        tokenizer,
        tokens=len(tokens),
        documents=max(ends, 1),
        end_of_text=end if ends else None,
        source=path.name,
        sha256=sha256_file(path),
    )


def _write_sidecar(path: Path, tokenizer: PreTrainedTokenizerBase, **facts: Any) -> TokenFileInfo:
    facts |= {
        "dtype": token_dtype(tokenizer).name,
        "vocabulary_size": largest_id(tokenizer) + 1,
        "tokenizer_sha256": hash_tokenizer(tokenizer),
    }
    info = TokenFileInfo.model_validate(facts)
    write_json(sidecar(path), info.model_dump(mode="json"))
    return info


def open_token_file(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFile:
    """Map a token file into memory, after reading it once to check its hash.

    Raises:
        HfpatchError: if it or its sidecar is missing, they do not match, the ids have changed, or it was made with
            another tokenizer.
    """
    if not path.is_file():
        raise HfpatchError(f"{path}: no such token file; hfpatch tokenize RECIPE --out {path} makes one")
    if not sidecar(path).is_file():
        raise HfpatchError(
            f"{path}: its description {sidecar(path).name} is missing; for a file from another tool, hfpatch tokenize "
            f"RECIPE data.source={path} data.layout=stream writes it"
        )
    info = validate(read_json(sidecar(path)), TokenFileInfo, str(sidecar(path)))
    if path.stat().st_size != info.bytes:
        raise HfpatchError(
            f"{path}: has {path.stat().st_size} bytes, but {info.tokens} ids of {info.dtype} ({sidecar(path).name}) "
            f"have {info.bytes}; it is truncated or another file, so make it again (hfpatch tokenize)"
        )
    vocabulary = largest_id(tokenizer) + 1
    if info.tokenizer_sha256 != hash_tokenizer(tokenizer) or info.vocabulary_size > vocabulary:
        raise HfpatchError(
            f"{path}: made with another tokenizer, whose vocabulary has {info.vocabulary_size} ids instead of "
            f"{vocabulary}; use that tokenizer, or make the file again (hfpatch tokenize)"
        )
    if (found := sha256_file(path)) != info.sha256:
        raise HfpatchError(
            f"{path}: has other ids than {sidecar(path).name} describes (sha256 {info.sha256[:12]} there, {found[:12]} "
            "in the file); restore the file, or make it again (hfpatch tokenize)"
        )
    return TokenFile(_map(path, np.dtype(info.dtype).newbyteorder("<")), info)


def sidecar(path: Path) -> Path:
    """Return the path of a token file's sidecar."""
    return path.with_suffix(".json")


def check_free(path: Path) -> None:
    """Check that a token file can be written to a path, before the text is read.

    Raises:
        HfpatchError: if it is no ``.bin``, or it or its sidecar exists.
    """
    if path.suffix != TOKEN_FILE:
        raise HfpatchError(f"{path}: the name of a token file must end with {TOKEN_FILE}")
    for file in (path, sidecar(path)):
        if file.exists():
            raise HfpatchError(f"{file}: exists already; delete it or choose another name")


def _map(path: Path, dtype: np.dtype[np.uint16] | np.dtype[np.uint32]) -> TokenArray:
    size = path.stat().st_size if path.is_file() else 0
    if size == 0 or size % dtype.itemsize:
        what = f"has {size} bytes, no whole number of {dtype.name} ids" if size else "is missing or empty"
        raise HfpatchError(f"{path}: {what}")
    return np.memmap(path, dtype=dtype, mode="r")
