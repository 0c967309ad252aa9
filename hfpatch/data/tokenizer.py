"""Tokenizers: text to one flat array of token ids, in parallel batches; hashing and training a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfpatch.data.copies import Digester, Digests
from hfpatch.errors import HfpatchError
from hfpatch.support.files import hash_values

TokenArray: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Integers: TypeAlias = npt.NDArray[np.int64]
END_OF_TEXT = "<|endoftext|>"
_BATCH_CHARACTERS = 4_000_000  # about a million tokens, whose offsets fit into memory
_BYTES = frozenset(pre_tokenizers.ByteLevel.alphabet())  # a character for each byte
_FALLBACK = re.compile("<0x[89A-F][0-9A-F]>")


@dataclass(frozen=True)
class TokenStream:
    """Documents in one array of token ids.

    Attributes:
        tokens: (total,) token ids, uint16 if the vocabulary allows it, else uint32.
        lengths: (documents,) int64, tokens of each document.
        learned: (total,) which tokens the loss counts; None if it counts all.
        starts: (documents,) int64, where each begins; None if they follow one another.
    """

    tokens: TokenArray
    lengths: Integers
    learned: npt.NDArray[np.bool_] | None = None
    starts: Integers | None = None

    @property
    def begins(self) -> Integers:
        """Where each document begins: (documents,) int64."""
        return np.cumsum(self.lengths) - self.lengths if self.starts is None else self.starts

    def take(self, indices: Integers) -> TokenStream:
        """Return the documents at these places, in their order; no token is copied."""
        return replace(self, lengths=self.lengths[indices], starts=self.begins[indices])

    def ranges(self) -> list[tuple[int, int]]:
        """Return the start and end of each stretch of documents that follow one another."""
        begins = self.begins
        ends = begins + self.lengths
        breaks = np.flatnonzero(begins[1:] != ends[:-1])
        return list(zip(begins[[0, *breaks + 1]].tolist(), ends[[*breaks, -1]].tolist(), strict=True))

    def joined(self) -> TokenStream:
        """Return the documents one after the other; views if they are so already."""
        ranges = self.ranges()
        learned = None if self.learned is None else _gather(self.learned, ranges)
        return TokenStream(_gather(self.tokens, ranges), self.lengths, learned)


class TokenizedPart(NamedTuple):
    """Some of the documents of a text: their tokens, their digests, and which of the texts (documents,) they are."""

    stream: TokenStream
    digests: Digests
    kept: Integers


def _gather(array: npt.NDArray[Any], ranges: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
    """Return stretches of an array one after the other; a view if there is one stretch."""
    if len(ranges) == 1:
        return array[slice(*ranges[0])]
    return np.concatenate([array[:0], *(array[start:stop] for start, stop in ranges)])


def tokenize_in_parts(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, append_eos: bool
) -> Iterator[TokenizedPart]:
    """Tokenize documents with the tokenizer's own special tokens and an end-of-text token at the end of each.

    Documents of fewer than two tokens are left out. One part, of a few million characters, is in memory at a time.

    Raises:
        HfpatchError: if an end-of-text token is wanted and the tokenizer has none.
    """
    eos, digester, given = end_of_text(tokenizer, append=append_eos), Digester(tokenizer), 0
    for batch in batches(documents):
        # What tokenizer(batch)["input_ids"] is; a backend in Rust then computes no offsets and masks.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            rows: list[list[int]] = tokenizer(batch, verbose=False)["input_ids"]
        else:
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = tokenizer.split_special_tokens
            rows = [encoding.ids for encoding in backend.encode_batch_fast(batch)]

        for row in rows:
            if eos is not None and (not row or row[-1] != eos):
                row.append(eos)
        kept = [index for index, row in enumerate(rows) if len(row) > 1]
        stream = join_rows([rows[index] for index in kept], tokenizer)
        parts = np.split(stream.tokens, stream.begins[1:])
        digests = [digester.document(batch[index], part) for index, part in zip(kept, parts, strict=False)]
        yield TokenizedPart(stream, Digests.of(digests), given + np.array(kept, np.int64))
        given += len(batch)


def end_of_text(tokenizer: PreTrainedTokenizerBase, *, append: bool) -> int | None:
    """Return the end-of-text token to append, or None; HfpatchError if the tokenizer has none to append."""
    if append and tokenizer.eos_token_id is None:
        raise HfpatchError("the tokenizer has no end-of-text token; set data.append_eos=false or set its eos_token")
    return tokenizer.eos_token_id if append else None


def start_of_document(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a tokenizer puts at the start of a document, such as ``<bos>``; most put none there."""
    special = set(tokenizer.all_special_ids)
    for word in sorted(set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens)):
        whole, bare = (tokenizer(word, add_special_tokens=added, verbose=False)["input_ids"] for added in (True, False))
        if bare and special.isdisjoint(bare):  # else where the word begins cannot be seen
            indices = range(len(whole) - len(bare) + 1)
            return next((whole[:index] for index in indices if whole[index : index + len(bare)] == bare), [])
    return []


class ByteCounter:
    """Counts the bytes of the text that tokens stand for, also of tokens that begin or end inside a character.

    Decoding gives U+FFFD for the bytes of half a character. So the letter A takes the place of each byte beyond ASCII
    first: in tokens of a byte-level vocabulary, and as the tokens ``<0x80>`` to ``<0xFF>`` of byte fallback.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        # Of a byte-level vocabulary alone: elsewhere these characters stand for themselves.
        halves = (letter for letter in _BYTES if tokenizer.convert_tokens_to_string([letter]) == "\ufffd")
        self._letters = dict.fromkeys(map(ord, halves), "A")

    def count(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 bytes of the text of these tokens; special ones have none."""
        tokens: list[str] = self._tokenizer.convert_ids_to_tokens([id_ for id_ in ids if id_ not in self._special])
        return len(self._tokenizer.convert_tokens_to_string(list(map(self._in_ascii, tokens))).encode("utf-8"))

    def _in_ascii(self, token: str) -> str:
        if _FALLBACK.fullmatch(token):
            return "<0x41>"
        return token.translate(self._letters) if _BYTES.issuperset(token) else token  # else an added token, as it is


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer without tokens of its own, or with tokens that have no embedding.

    Special tokens, which plain text does not give, may have none: Gemma 3 1B has none for ``<image_soft_token>``.
    """
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise HfpatchError(
            "the tokenizer has only special tokens, like the one that transformers creates if the model's folder has "
            "none; save the model's own tokenizer in that folder"
        )
    rows, largest = embeddings_of(model), max(set(tokenizer.get_vocab().values()) - special_ids(tokenizer))
    if largest >= rows:
        raise HfpatchError(
            f"the tokenizer has ids up to {largest} and the model {rows} embeddings; use the model's own tokenizer"
        )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the tokens that are not text."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def embeddings_of(model: Any) -> int:
    """Return for how many ids a model has embeddings."""
    return int(model.get_input_embeddings().weight.shape[0])


def join_rows(rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> TokenStream:
    """Return documents of a tokenizer's ids as one stream; HfpatchError if its vocabulary does not have one of them."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    if (highest := int(ids.max(initial=0))) > (largest := largest_id(tokenizer)):
        raise HfpatchError(
            f"the tokenizer gives the id {highest}, beyond {largest}, the largest of its vocabulary; its files do not "
            "match, so load it again"
        )
    tokens: TokenArray = np.empty(len(ids), token_dtype(tokenizer))
    tokens[:] = ids
    return TokenStream(tokens, lengths)


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the dtype of the tokenizer's ids: uint16 if the largest one allows it, else uint32."""
    return np.dtype("<u2") if largest_id(tokenizer) <= np.iinfo(np.uint16).max else np.dtype("<u4")


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of a tokenizer's vocabulary; as ids may have gaps, it can exceed the vocabulary's size."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return max(ids.values())


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 64 hex digits that change when the ids of some text do.

    It covers vocabulary, rules and special tokens, but not padding and truncation, which callers change. Of a tokenizer
    without a backend in Rust the rules are its code, and not covered.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    split = [True] if getattr(tokenizer, "split_special_tokens", False) else []  # special tokens in the text
    return hash_values([rules, special, *split])


def identify_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer and its chat templates, which together turn messages into ids."""
    return hash_values([hash_tokenizer(tokenizer), getattr(tokenizer, "chat_template", None)])


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
