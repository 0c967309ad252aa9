"""Conversations, and prompts with completions, as token ids and which of them the model learns to predict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hfpatch.data.rows import ASSISTANT
from hfpatch.data.tokenizer import TokenStream, batches, check_ids, end_of_text, token_dtype
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings
from hfpatch.support.files import clear_about_writing

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages: TypeAlias = list[dict[str, Any]]


class Example(NamedTuple):
    """An example as text.

    Attributes:
        text: all of it.
        learned: the first character and the one after the last of each stretch that is learned.
        templated: whether a chat template wrote it, special tokens and ends of turns included.
    """

    text: str
    learned: list[tuple[int, int]]
    templated: bool


class Completions:
    """Turns examples into token ids and a mask: through the tokenizer's chat template where they are conversations.

    Learned are the assistant's turns, with what ends them; of a prompt and its completion the completion, with the
    end-of-text. A template with ``{% generation %}`` says itself what an assistant's turn is. Of any other it is what
    the template adds to the messages before it and the header of a reply:

    .. math::
        turn_i = render(m_1 ... m_i) - render(m_1 ... m_{i-1}, add_generation_prompt)

    A token is learned if any of its characters is.

    Args:
        tokenizer: the tokenizer.
        settings: ``append_eos``, and the chat template if it is not the tokenizer's own.

    Raises:
        HfpatchError: if the tokenizer does not tell which characters a token is from, an end-of-text token is wanted
            and it has none, or the template cannot be read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> None:
        if not tokenizer.is_fast:
            raise HfpatchError(
                f"data.format={settings.format} needs to know which characters a token is from, which "
                f"{type(tokenizer).__name__} does not tell; use a tokenizer with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.eos = end_of_text(tokenizer, append=settings.append_eos) if settings.format != "messages" else None
        self._template = chat_template(tokenizer, settings)

    def encode(self, documents: list[str]) -> list[tuple[list[int], list[bool]]]:
        """Return the token ids of examples, and which of them are learned."""
        examples = [self.example(json.loads(document)) for document in documents]
        found = []
        for templated in (False, True):
            chosen = [place for place, example in enumerate(examples) if example.templated == templated]
            texts = [examples[place].text for place in chosen]
            options = {"add_special_tokens": not templated, "return_offsets_mapping": True, "verbose": False}
            encoded: Any = self.tokenizer(texts, **options) if texts else {"input_ids": [], "offset_mapping": []}
            for place, ids, offsets in zip(chosen, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                found.append((place, *self._with_end(ids, _learned(offsets, examples[place].learned), templated)))
        return [(ids, mask) for _, ids, mask in sorted(found, key=lambda each: each[0])]

    def example(self, value: dict[str, Any]) -> Example:
        """Return ``messages``, or ``prompt`` and ``completion``, as text."""
        if "messages" in value:
            return self._conversation(value["messages"], first=0)
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, str):
            text = prompt + completion
            return Example(text, [(len(prompt), len(text))], templated=False)
        return self._conversation(prompt + completion, first=len(prompt))

    def _conversation(self, messages: Messages, first: int) -> Example:
        """Return a conversation whose assistant's turns from message ``first`` on are learned."""
        text, marked = self._render(messages, marks=True)
        places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT and place >= first]
        if marked:
            begin = len(self._render(messages[:first])[0]) if first else 0
            return Example(text, [pair for pair in marked if pair[0] >= begin], templated=True)
        turns = []
        for place in places:
            before = self._render(messages[:place], reply=True)[0] if place else ""
            after = self._render(messages[: place + 1])[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise HfpatchError(
                    f"the chat template writes message {place + 1} of a conversation otherwise once others follow, or "
                    "after another header, so where a reply is cannot be found; give one with {% generation %} around "
                    f"replies as data.chat_template (the conversation begins {_short(messages)})"
                )
            turns.append((len(before), len(after)))
        return Example(text, turns, templated=True)

    def _render(
        self, messages: Messages, *, reply: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, with the header of a reply; and what ``{% generation %}`` marks in it."""
        if self._template is None:
            raise HfpatchError(
                "the tokenizer has no chat template; give a file with one as data.chat_template, or use the tokenizer "
                "of a chat model"
            )
        marks = marks and _GENERATION.search(self._template) is not None
        try:
            texts, marked = render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                add_generation_prompt=reply,
                return_assistant_tokens_mask=marks,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template may raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise HfpatchError(f"the chat template refuses a conversation ({reason}): {_short(messages)}") from error
        return texts[0], [tuple(pair) for pair in marked[0]] if marks else []

    def _with_end(self, ids: list[int], mask: list[bool], templated: bool) -> tuple[list[int], list[bool]]:
        """Return a completion with its end-of-text, which is learned."""
        if templated or self.eos is None:
            return ids, mask
        if ids and ids[-1] == self.eos:
            return ids, [*mask[:-1], True]
        return [*ids, self.eos], [*mask, True]


def chat_template(tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> str | None:
    """Return the recipe's chat template, else the tokenizer's, else None.

    Raises:
        HfpatchError: if the recipe names a file that cannot be read, or the tokenizer has several templates and none of
            them is the default.
    """
    if settings.chat_template is not None:
        return _read_template(Path(settings.chat_template))
    if not tokenizer.chat_template:
        return None
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise HfpatchError(
            "the tokenizer has several chat templates and no default; give a file with one as data.chat_template"
        ) from error
    return template


def tokenize_completions(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, folder: Path, settings: DataSettings
) -> TokenStream:
    """Tokenize examples like :func:`hfpatch.data.tokenizer.tokenize`, with which tokens are learned beside them.

    Args:
        documents: examples as JSON, see :mod:`hfpatch.data.rows`.
        tokenizer: the tokenizer.
        folder: where the ids and the mask are written, to be mapped.
        settings: see :class:`Completions`.

    Raises:
        HfpatchError: as :class:`Completions`, or if a conversation does not suit the template, or nothing is left.
    """
    completions, dtype = Completions(tokenizer, settings), token_dtype(tokenizer)
    ids_file, mask_file = folder / "tokens.bin", folder / "learned.bin"
    lengths: list[int] = []
    largest = 0
    with clear_about_writing(ids_file), ids_file.open("wb") as to_ids, mask_file.open("wb") as to_mask:
        for ids, mask in chain.from_iterable(map(completions.encode, batches(documents))):
            if len(ids) > 1:
                largest = max(largest, *ids)
                to_ids.write(np.asarray(ids, dtype).data)
                to_mask.write(np.asarray(mask, bool).data)
                lengths.append(len(ids))
    if not lengths:
        raise HfpatchError("no example has two tokens, so there is nothing to predict; choose another data.source")
    check_ids(largest, tokenizer)
    tokens = np.memmap(ids_file, dtype=dtype, mode="r")
    return TokenStream(tokens, np.asarray(lengths, np.int64), np.memmap(mask_file, dtype=bool, mode="r"))


def _learned(offsets: list[tuple[int, int]], stretches: list[tuple[int, int]]) -> list[bool]:
    """Return which tokens have a character in one of the stretches.

    Tokens of white space alone may have an empty offset, at their end; special tokens that the tokenizer added have
    (0, 0).
    """
    mask = np.zeros(len(offsets), bool)
    first, last = np.asarray(offsets, np.int64).reshape(-1, 2).T
    for begin, end in stretches:
        mask |= (last > begin) & ((first < end) | ((first == last) & (last == end)))
    found: list[bool] = mask.tolist()
    return found


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise HfpatchError(f"data.chat_template: {path} cannot be read ({reason}); give a file with Jinja") from error


def _short(messages: Messages) -> str:
    text = json.dumps(messages[0], ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
