"""Rows of data sets as documents: a text, or a conversation or a prompt with its completion as JSON.

Every document is one string, so that all are filtered, held out and compared alike;
:mod:`hfpatch.data.completions` reads the JSON again.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.sources import COLUMNS, Format, TextSource

ASSISTANT = "assistant"
FOR_TEMPLATE = ("tools", "chat_template_kwargs")
"""Optional columns that the chat template gets beside the messages, as in TRL."""


class Document(NamedTuple):
    """A document as one string, and the name of its group; None where it is a group by itself."""

    text: str
    group: str | None = None


class Rows:
    """How the rows of a recipe's source are read."""

    def __init__(self, settings: TextSource) -> None:
        pattern = settings.group_beginning
        self.format = settings.format
        self.columns = tuple(getattr(settings, name) for name in COLUMNS[settings.format])
        self.template = settings.prompt_template
        self.group = settings.group if pattern is None else None  # the column that names each row's group
        self.beginning = None if pattern is None else re.compile(pattern)  # matches the text of a group's first row

    def begin(self, start: int) -> int:
        """Return the first row that `documents` needs of a slice from row ``start`` on, with what its group is."""
        return start if self.beginning is None else 0

    def documents(
        self, rows: Iterable[tuple[str, dict[str, Any]]], source: str, split: str = "train", before: int = 0
    ) -> Iterator[Document]:
        """Yield the document of each row; rows with a null, or without text to learn, are left out, with a warning.

        Messages name the ``source`` and the place that is given with each row. ``split`` names the split, whose first
        row begins a group. The first rows, so many as ``before``, only tell which group goes on after them.

        Raises:
            HfpatchError: if a column of a row is missing or of another format, or every row is left out.
        """
        any_documents, skipped, begun = False, 0, 0
        left_out = " or ".join(map(repr, self.columns)) + " is null"
        left_out += " or has no assistant's message" if self.format == "messages" else ""
        try:
            for index, (where, row) in enumerate(rows):
                if (document := self._document(row, where)) is None:
                    skipped += index >= before
                    continue
                group = None
                if self.beginning is not None:
                    begun += self.beginning.match(document) is not None
                    group = f"{split}:{begun}"
                elif self.group is not None and row[self.group] is not None:
                    group = str(row[self.group])
                if index >= before:
                    any_documents = True
                    yield Document(document, group)
        finally:
            if any_documents and skipped:
                warnings.warn(f"{source}: left out rows whose {left_out}: {skipped}", stacklevel=1)
        if any_documents and self.beginning is not None and not begun:
            pattern = self.beginning.pattern
            raise HfpatchError(
                f"{source}: no text matches data.group ({pattern!r}), so all of it would be one group; correct it"
            )
        if skipped and not any_documents:
            key = COLUMNS[self.format][0]
            raise HfpatchError(f"{source}: column {left_out} in every row; set data.{key}")

    def select_columns(self, where: str, columns: Iterable[str]) -> list[str]:
        """Return which columns of a table are read.

        Raises:
            HfpatchError: if one is missing, naming it, with the columns that exist.
        """
        present = list(columns)
        wanted = [*zip(COLUMNS[self.format], self.columns, strict=True)]
        wanted += [("group", self.group)] if self.group is not None else []
        for key, name in wanted:
            if name not in present:
                listed = ", ".join(present) or "none"
                formats = {"messages": {"messages"}, "prompt_completion": {"prompt", "completion"}}
                meant = next((f" or data.format={kind}" for kind, keys in formats.items() if keys <= set(present)), "")
                raise HfpatchError(
                    f"{where}: no column {name!r}{nearest(name, present)}; the columns are: {listed}; "
                    f"set data.{key}{meant}"
                )
        return list(filter(self.reads, present))

    def reads(self, column: str) -> bool:
        """Whether a column is read where it exists."""
        optional = FOR_TEMPLATE if self.format != "text" else ()
        return column in (*self.columns, *optional, self.group)

    def _document(self, row: dict[str, Any], where: str) -> str | None:
        """Return the document of a row; None where a column is null or nothing is learned."""
        self.select_columns(where, row)
        values = [row[name] for name in self.columns]
        if any(value is None for value in values):
            return None
        if self.format == "text":
            return _text(values[0], where, self.columns[0])
        document: dict[str, Any] = {}
        templated = self.format == "messages" or not isinstance(values[0], str)
        if self.format == "messages":
            document["messages"] = _messages(values[0], where, self.columns[0])
            if not any(message["role"] == ASSISTANT for message in document["messages"]):
                return None
        else:
            if templated and self.template != "{}":
                raise HfpatchError(
                    f"{where}: prompts are messages, formatted by the chat template; leave prompt_template out"
                )
            read = _messages if templated else _text
            for key, value, name in zip(("prompt", "completion"), values, self.columns, strict=True):
                document[key] = read(value, where, name)
            if not templated:
                document["prompt"] = self.template.replace("{}", document["prompt"])

        # the tools, a list of JSON schemas or JSON of one, and other values that the chat template gets
        for name, kind in zip(FOR_TEMPLATE, (list, dict), strict=True) if templated else ():
            value = row.get(name)
            if isinstance(value, str):
                value = parse_json(value, f"{where}: column {name!r} is", f"it must be a JSON {kind.__name__}")
            if value is not None and not isinstance(value, kind):
                raise HfpatchError(f"{where}: column {name!r} is {type(value).__name__}, not a {kind.__name__}")
            if value:
                document[name] = _without_nulls(value)
        try:
            text = json.dumps(document, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise HfpatchError(f"{where}: a message is not valid JSON ({error}); correct or remove the row") from error
        return _valid(text, where, next(iter(document)))


def parse_json(text: str, where: str, wanted: str) -> Any:
    """Return the value of a JSON text; where it is not valid, ``wanted`` says what it must be."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        other = "nested too deeply" if isinstance(error, RecursionError) else "an integer has thousands of digits"
        raise HfpatchError(f"{where} not valid JSON ({getattr(error, 'msg', other)}); {wanted}") from error


def count_characters(document: str, format_: Format) -> int:
    """Return how many characters a document has, white space around each text and roles of messages not counted."""
    if format_ == "text":
        return _count(document)
    values = json.loads(document)
    return sum(_count(values[key]) for key in ("messages", "prompt", "completion") if key in values)


def number_groups(names: Sequence[str | None]) -> npt.NDArray[np.int64]:
    """Return the group of each document, counted from 0, from its name; without one, a document is one by itself."""
    numbers: dict[str | int, int] = {}
    keys = (index if name is None else name for index, name in enumerate(names))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def hash_groups(names: Sequence[str | None], kind: str) -> npt.NDArray[np.int64]:
    """Return a number of each document's group that is the same in every slice, from its name and what names it.

    A document without a name has -1.
    """
    texts = (name if name is None else f"{kind}\0{name}".encode("utf-8", "surrogatepass") for name in names)
    return np.array([-1 if text is None else xxhash.xxh3_64_intdigest(text) >> 1 for text in texts], np.int64)


def _count(said: object) -> int:
    if isinstance(said, str):
        return len(said.strip())
    if isinstance(said, dict):
        said = [value for key, value in said.items() if key not in ("role", "type")]
    return sum(map(_count, said)) if isinstance(said, list) else 0


def _text(value: object, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise HfpatchError(f"{where}: column {column!r} is {type(value).__name__}, not text")
    return _valid(value, where, column)


def _messages(value: object, where: str, column: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation without their nulls."""
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else type(value).__name__
        raise HfpatchError(f"{where}: column {column!r} is {kind}, not a list of messages")
    messages = []
    for number, message in enumerate(value):
        kept = _without_nulls(message) if isinstance(message, dict) else {}
        missing = [key for key in ("role", "content") if key not in kept]
        if "tool_calls" in kept:  # which may be all that a message says
            missing = [key for key in missing if key != "content"]
        if missing:
            hint = f" (it has {', '.join(kept)})" if kept else ""
            raise HfpatchError(
                f"{where}: message {number + 1} of column {column!r} has no {missing[0]!r}{hint}; each is an object "
                "with role and content"
            )
        messages.append(kept)
    return messages


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls of its objects, which tables add where rows differ."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _valid(text: str, where: str, column: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HfpatchError(
            f"{where}: column {column!r} has half a surrogate pair (\\u{ord(text[error.start]):04x}, character "
            f"{error.start + 1}), which is not valid Unicode; correct or remove the row"
        ) from error
    return text
