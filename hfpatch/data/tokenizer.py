"""Tokenizers: text to one flat array of token ids, in parallel batches; hashing and training a tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfpatch.errors import HfpatchError
from hfpatch.support.files import clear_about_writing

TokenArray: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
END_OF_TEXT = "<|endoftext|>"
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class TokenStream:
    """Documents one after the other.

    Attributes:
        tokens: (total,) token ids, uint16 if the vocabulary allows it, else uint32.
        lengths: (documents,) int64, tokens of each document.
        learned: (total,) which tokens the loss counts; None if it counts all.
    """

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    learned: npt.NDArray[np.bool_] | None = None


def tokenize(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, file: Path, *, append_eos: bool
) -> TokenStream:
    """Tokenize documents with the tokenizer's own special tokens and an end-of-text token at the end of each.

    Documents of fewer than two tokens have nothing to predict and are left out. The ids are written to ``file`` as they
    come and mapped; memory use is a few million characters, and eight bytes per document.

    Raises:
        HfpatchError: if an end-of-text token is wanted and the tokenizer has none, nothing is left, or the file cannot
            be written.
    """
    lengths = []
    with clear_about_writing(file), file.open("wb") as stream:
        for part in tokenize_in_parts(documents, tokenizer, append_eos=append_eos):
            stream.write(part.tokens.data)
            lengths.append(part.lengths)
    return TokenStream(np.memmap(file, dtype=token_dtype(tokenizer), mode="r"), np.concatenate(lengths))


def tokenize_in_parts(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, append_eos: bool
) -> Iterator[TokenStream]:
    """Yield the stream of :func:`tokenize` in parts of a few million characters; only one is in memory at a time."""
    eos, dtype, found = end_of_text(tokenizer, append=append_eos), token_dtype(tokenizer), False
    for batch in batches(documents):
        rows = _encode(batch, tokenizer)
        for row in rows:
            if eos is not None and (not row or row[-1] != eos):
                row.append(eos)
        rows = [row for row in rows if len(row) > 1]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        if len(ids):
            check_ids(int(ids.max()), tokenizer)
        found = found or len(rows) > 0
        tokens: TokenArray = np.empty(len(ids), dtype)
        tokens[:] = ids
        yield TokenStream(tokens, lengths)
    if not found:
        raise HfpatchError("no document has two tokens, so there is nothing to predict; choose another data.source")


def end_of_text(tokenizer: PreTrainedTokenizerBase, *, append: bool) -> int | None:
    """Return the end-of-text token to append, or None.

    Raises:
        HfpatchError: if there is none to append.
    """
    if append and tokenizer.eos_token_id is None:
        raise HfpatchError("the tokenizer has no end-of-text token; set data.append_eos=false or set its eos_token")
    return tokenizer.eos_token_id if append else None


def check_ids(found: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the largest id that a tokenizer gave.

    Raises:
        HfpatchError: if its vocabulary does not have it.
    """
    if found > (largest := largest_id(tokenizer)):
        raise HfpatchError(
            f"the tokenizer gives the id {found}, beyond {largest}, the largest of its vocabulary; its files do not "
            "match, so load it again"
        )


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the dtype of the tokenizer's ids: uint16 if the largest one allows it, else uint32."""
    return np.dtype("<u2") if largest_id(tokenizer) <= np.iinfo(np.uint16).max else np.dtype("<u4")


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of a tokenizer's vocabulary; as ids may have gaps, it can exceed the vocabulary's size."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return max(ids.values())


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 64 hex digits that change when the ids of some text do.

    It covers vocabulary, rules and special tokens, but not padding and truncation, which callers change.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return hashlib.sha256(json.dumps([rules, special], sort_keys=True, default=str).encode()).hexdigest()


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return ``tokenizer(texts)["input_ids"]``, without computing offsets and masks if the backend is in Rust."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rows: list[list[int]] = tokenizer(texts, verbose=False)["input_ids"]
        return rows
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [encoding.ids for encoding in backend.encode_batch_fast(texts)]


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield batches of documents of a few million characters: enough for all cores, little memory."""
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


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's: it encodes any text, and decoding returns the text.

    Token 0 is ``<|endoftext|>``, which is also the beginning-of-text, padding and unknown token.

    Raises:
        HfpatchError: if ``vocab_size`` is below 257, the 256 bytes and the end-of-text token.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise HfpatchError(f"a vocabulary of {vocab_size} is too small; byte-level BPE needs more than {len(alphabet)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
