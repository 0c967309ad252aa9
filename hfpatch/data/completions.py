"""Conversations, and prompts with completions, as token ids and which of them the model learns to predict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hfpatch.data.copies import LONG, Digester, Digests
from hfpatch.data.rows import ASSISTANT
from hfpatch.data.tokenizer import TokenizedPart, batches, end_of_text, join_rows
from hfpatch.errors import HfpatchError, first_line
from hfpatch.recipes.data import DataSettings

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
Messages: TypeAlias = list[dict[str, Any]]


class Example(NamedTuple):
    """An example as text.

    Attributes:
        text: the whole text.
        learned: the start and end of each stretch of characters that is learned.
        templated: whether a chat template wrote it, special tokens and ends of turns included.
        parts: the text of each message, or of the prompt and the completion, and whether it is learned.
    """

    text: str
    learned: list[tuple[int, int]]
    templated: bool
    parts: list[tuple[str, bool]]


class Encoded(NamedTuple):
    """An example as token ids, which of them are learned, and its digests."""

    ids: list[int]
    learned: list[bool]
    digests: list[tuple[int, bool]]


class Completions:
    """Turns examples into token ids and a mask, conversations through the tokenizer's chat template.

    Learned are the assistant's turns with their end, or the completion of a prompt with the end-of-text.
    A template with ``{% generation %}`` marks an assistant's turns. With other templates, a turn is the text added to
    the messages before it and the header of a reply:

    .. math::
        turn_i = render(m_1 ... m_i) - render(m_1 ... m_{i-1}, add_generation_prompt)

    A token is learned if any of its characters is.

    Raises:
        HfpatchError: if the tokenizer does not give the characters of a token or has no end-of-text token where one is
            wanted, or the template cannot be read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> None:
        if not tokenizer.is_fast:
            raise HfpatchError(
                f"data.format={settings.format} needs the character offsets of tokens, which "
                f"{type(tokenizer).__name__} does not tell; use a tokenizer with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.eos = end_of_text(tokenizer, append=settings.append_eos) if settings.format != "messages" else None
        self.template = chat_template(tokenizer, settings)
        self._digester = Digester(tokenizer)

    def encode(self, documents: list[str]) -> list[Encoded]:
        """Return examples as token ids: ``messages``, or a ``prompt`` and its ``completion``, as JSON."""
        examples = []
        for value in map(json.loads, documents):
            given = {"tools": value.get("tools"), **value.get("chat_template_kwargs", {})}
            if "messages" in value:
                examples.append(self._conversation(value["messages"], 0, given))
                continue
            prompt, completion = value["prompt"], value["completion"]
            if isinstance(prompt, str):
                text, parts = prompt + completion, [(prompt, False), (completion, True)]
                examples.append(Example(text, [(len(prompt), len(text))], False, parts))
            else:
                examples.append(self._conversation(prompt + completion, len(prompt), given))

        # Texts as token ids, those of the chat template without special tokens.
        digest = self._digester.text
        encodings: list[Encoded | None] = [None] * len(examples)
        for templated in (False, True):
            chosen = [index for index, example in enumerate(examples) if example.templated == templated]
            texts = [examples[index].text for index in chosen]
            options = {"add_special_tokens": not templated, "return_offsets_mapping": True, "verbose": False}
            encoded: Any = self.tokenizer(texts, **options) if texts else {"input_ids": [], "offset_mapping": []}
            for index, ids, offsets in zip(chosen, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                # Tokens with a character in a learned stretch. Tokens of only white space may have an empty offset, at
                # their end; special tokens that the tokenizer added have (0, 0).
                example, learned = examples[index], np.zeros(len(offsets), bool)
                first, last = np.asarray(offsets, np.int64).reshape(-1, 2).T
                for begin, end in example.learned:
                    learned |= (last > begin) & ((first < end) | ((first == last) & (last == end)))
                mask: list[bool] = learned.tolist()
                if self.eos is not None and not templated:  # the end-of-text is learned
                    ids, mask = (ids[:-1], mask[:-1]) if ids and ids[-1] == self.eos else (ids, mask)
                    ids, mask = [*ids, self.eos], [*mask, True]
                # The whole, each reply with the messages before it, and each message; a long learned one is a document.
                digests = self._digester.document(example.text, ids)
                digests += [(digest(example.text[:end]), True) for _, end in example.learned]
                digests += [(digest(reply), counts and len(reply) >= LONG) for reply, counts in example.parts]
                encodings[index] = Encoded(ids, mask, digests)
        return [encoding for encoding in encodings if encoding is not None]

    def _conversation(self, messages: Messages, first: int, given: dict[str, Any]) -> Example:
        """Return a conversation whose assistant's turns from message ``first`` on are learned.

        The template is ``given`` the tools and other values of the example.
        """
        render = partial(self._render, given)
        text, marked = render(messages, marks=True)
        replies = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT and index >= first]
        parts = [(str(message.get("content", "")), index in replies) for index, message in enumerate(messages)]
        if marked:
            begin = len(render(messages[:first])[0]) if first else 0
            return Example(text, [pair for pair in marked if pair[0] >= begin], True, parts)
        turns = []
        for index in replies:
            before = render(messages[:index], reply=True)[0] if index else ""
            after = render(messages[: index + 1])[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise HfpatchError(
                    f"the chat template writes message {index + 1} of a conversation differently once other messages "
                    "follow, or after another header, so replies cannot be located; give one with {% generation %} "
                    f"around replies as data.chat_template (the conversation begins {_short(messages)})"
                )
            turns.append((len(before), len(after)))
        return Example(text, turns, True, parts)

    def _render(
        self, given: dict[str, Any], messages: Messages, *, reply: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, with the header of a reply, and the ranges that ``{% generation %}`` marks."""
        if self.template is None:
            raise HfpatchError(
                "the tokenizer has no chat template; give a file with one as data.chat_template, or use the tokenizer "
                "of a chat model"
            )
        marks = marks and _GENERATION.search(self.template) is not None
        try:
            texts, marked = render_jinja_template(
                conversations=[messages],
                chat_template=self.template,
                add_generation_prompt=reply,
                return_assistant_tokens_mask=marks,
                **{**self.tokenizer.special_tokens_map, **given},
            )
        except Exception as error:  # a template may raise anything
            reason = first_line(error)
            raise HfpatchError(f"the chat template refuses a conversation ({reason}): {_short(messages)}") from error
        return texts[0], [tuple(pair) for pair in marked[0]] if marks else []


def chat_template(tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> str | None:
    """Return the recipe's chat template, else the tokenizer's, else None.

    Raises:
        HfpatchError: if the recipe names a file that cannot be read, or the tokenizer has several templates and none of
            them is the default.
    """
    if settings.chat_template is not None:
        path = Path(settings.chat_template)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            problem = f"data.chat_template: {path} cannot be read ({reason})"
            raise HfpatchError(f"{problem}; give a file with Jinja") from error
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
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, settings: DataSettings
) -> Iterator[TokenizedPart]:
    """Tokenize examples in parts, as :func:`hfpatch.data.tokenizer.tokenize_in_parts`, with a mask of learned tokens.

    ``documents`` are examples as JSON, see :mod:`hfpatch.data.rows`.

    Raises:
        HfpatchError: as :class:`Completions`, or if the template refuses a conversation.
    """
    completions, given = Completions(tokenizer, settings), 0
    for batch in batches(documents):
        encoded = completions.encode(batch)
        indices = np.array([index for index, example in enumerate(encoded) if len(example.ids) > 1], np.int64)
        kept = [encoded[index] for index in indices.tolist()]
        stream = join_rows([example.ids for example in kept], tokenizer)
        learned = np.fromiter(chain.from_iterable(example.learned for example in kept), np.bool_, len(stream.tokens))
        digests = Digests.of([example.digests for example in kept])
        yield TokenizedPart(replace(stream, learned=learned), digests, given + indices)
        given += len(batch)


def _short(messages: Messages) -> str:
    text = json.dumps(messages[0], ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
