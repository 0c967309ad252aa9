"""Text to one flat array of token ids, in parallel batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from hfpatch.errors import HfpatchError

TokenArray: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class TokenStream:
    """Documents one after the other.

    Attributes:
        tokens: (total,) token ids, uint16 where the vocabulary allows it, else uint32.
        lengths: (documents,) int64, tokens of each document.
    """

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]


def tokenise(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, append_eos: bool) -> TokenStream:
    """Tokenise documents with the tokenizer's own special tokens, each ended by its end-of-text token.

    Documents of fewer than two tokens hold nothing to predict and are left out.

    Raises:
        HfpatchError: if an end-of-text token is asked for and the tokenizer has none, or if nothing is left.
    """
    eos = tokenizer.eos_token_id
    if append_eos and eos is None:
        raise HfpatchError("the tokenizer has no end-of-text token; set data.append_eos=false or give it one")
    dtype = np.uint16 if len(tokenizer) <= np.iinfo(np.uint16).max + 1 else np.uint32
    chunks: list[Any] = []
    lengths: list[int] = []
    for batch in _batches(documents):
        rows = tokenizer(batch, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
        for row in rows:
            if append_eos and (not row or row[-1] != eos):
                row.append(eos)
        rows = [row for row in rows if len(row) > 1]
        lengths.extend(map(len, rows))
        chunks.extend(np.asarray(row, dtype=dtype) for row in rows)
        chunks = [np.concatenate(chunks)] if len(chunks) > 100_000 else chunks
    if not chunks:
        raise HfpatchError("no document has two tokens, so there is nothing to predict; choose another data.source")
    return TokenStream(np.concatenate(chunks), np.asarray(lengths, dtype=np.int64))


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 64 hex digits that change when the tokenizer's vocabulary, rules or special tokens do."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{rules}\n{special}".encode()).hexdigest()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Group documents into batches of a few million characters: enough for all cores, little memory."""
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
