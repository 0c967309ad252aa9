"""One source of text in a recipe: its place, the part of it that is read, and the format of its rows."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from pydantic import PositiveFloat, PositiveInt, model_validator

from hfpatch.recipes.strict import PathText, Section

Format: TypeAlias = Literal["text", "messages", "prompt_completion"]
TOKEN_FILE = ".bin"
EMBEDDED = "tinyworld/"
_EMBEDDED_LIMIT = 1_000_000
"""The largest number of documents of the embedded language; every command generates them again."""
COLUMNS: dict[Format, tuple[str, ...]] = {
    "text": ("text_column",),
    "messages": ("messages_column",),
    "prompt_completion": ("prompt_column", "completion_column"),
}
"""The settings that name the columns of each format."""

WIKITEXT = "wikitext"
"""The ``group`` of WikiText: an article begins with a line such as ``= Title =``."""
_BEGINNINGS = {WIKITEXT: r"^\s*= [^=\n][^\n]* =\s*(\n|$)"}

_SPLIT = re.compile(r"(?P<name>[^\[\]()+]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


class SplitPart(NamedTuple):
    """A split or a slice of it, ``train[10%:20%]``; a bound is a number of rows or, with ``%``, of hundredths.

    Hundredths are rounded to the nearest row.
    """

    name: str
    start: str | None
    stop: str | None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the split."""
        return self.start is None and self.stop is None

    @property
    def is_relative(self) -> bool:
        """Whether the number of rows decides where it is."""
        return any(bound and ("%" in bound or "-" in bound) for bound in (self.start, self.stop))

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the first row and the one after the last of ``total``, rounded as `datasets` does."""
        rows = []
        for bound in (self.start or "0", self.stop or str(total)):
            row = int(bound.rstrip("%"))
            if bound.endswith("%"):
                row = round(row * total / 100)
            rows.append(min(max(row + total if row < 0 else row, 0), total))
        return rows[0], max(rows)


class TextSource(Section):
    """One source of text."""

    source: PathText
    """``tinyworld/base``, ``tinyworld/shifted``, a hub data set id, a local file, a folder, a pattern such as
    ``text/*.jsonl`` (.jsonl, .json, .csv, .txt or .parquet; all but the last also as .gz, .xz, .bz2 or .zst), a folder
    of ``save_to_disk``, or a token file (.bin) of ``hfpatch tokenize``. ``$NAME`` and ``~`` are replaced."""
    config: str | None = None
    """The hub data set's configuration, such as ``wikitext-103-raw-v1``."""
    split: str = "train"
    """The split of a hub data set or a ``save_to_disk`` folder, or a slice: ``train[:1%]``, ``train[100:200]``. A local
    file has the one split ``train``."""
    revision: str | None = None
    """The hub data set's revision; None takes the newest and records which one it was."""
    format: Format = "text"
    """The format of a row: a ``text``; ``messages``, a conversation of which the assistant's turns are learned; or
    ``prompt_completion``, of which the completion is learned. The loss counts learned tokens only."""
    text_column: str = "text"
    """The column that holds the text."""
    messages_column: str = "messages"
    """The column of ``messages``: a list of objects with ``role`` and ``content``."""
    prompt_column: str = "prompt"
    """The column of the prompt: text, or a list of messages."""
    completion_column: str = "completion"
    """The column of the completion: text, or a list of messages."""
    prompt_template: str = "{}"
    """The text around each prompt that is text, whose place is ``{}``: ``"Question: {}\\nAnswer:"``."""
    group: str | None = None
    """What makes several documents one group, the independent unit: a column with the name of each row's group, or a
    regular expression beginning with ``^`` that the text of a group's first row matches, or ``wikitext`` for the lines
    of WikiText's articles. Documents that decide are chosen by whole groups; None takes each document as a group."""
    max_documents: PositiveInt | None = None
    """Take only the first documents that pass the filter; None takes all."""
    streaming: bool = False
    """Read a hub data set over the network as far as it is needed, without downloading it; needs max_documents, unless
    the layout is ``stream``."""

    @model_validator(mode="after")
    def _one_meaning(self) -> TextSource:
        split_parts(self.split)
        if self.source.startswith(EMBEDDED) and (changed := self.changed(("config", "revision", "streaming"))):
            raise ValueError(
                f"data.{changed[0]} applies to hub data sets, and {self.source} is embedded in hfpatch; leave it out"
            )
        if self.source.startswith(EMBEDDED) and self.format == "text" and self.changed(COLUMNS["text"]):
            raise ValueError(f"data.text_column: {self.source} is embedded in hfpatch and has no columns; leave it out")
        if self.source.startswith(EMBEDDED) and (self.max_documents or 0) > _EMBEDDED_LIMIT:
            raise ValueError(
                f"data.max_documents is {self.max_documents}, and of {self.source}, which is generated, there are at "
                f"most {_EMBEDDED_LIMIT}"
            )
        for format_, columns in COLUMNS.items():
            of_format = (*columns, "prompt_template") if format_ == "prompt_completion" else columns
            if format_ != self.format and (idle := self.changed(of_format)):
                raise ValueError(
                    f"data.{idle[0]} applies to data.format={format_}, and data.format is {self.format}; change one of "
                    "them"
                )
        if self.group is not None and self.group_beginning is not None:
            if self.format != "text":
                raise ValueError(
                    f"data.group is {self.group!r}, which groups texts, and data.format is {self.format}; name a column"
                )
            try:
                re.compile(self.group_beginning)
            except re.error as error:
                raise ValueError(f"data.group is {self.group!r}, not a regular expression ({error})") from None
        if self.prompt_template.count("{}") != 1:
            raise ValueError(
                f"data.prompt_template is {self.prompt_template!r}; write {{}} once, where the prompt goes"
            )
        return self

    @property
    def group_beginning(self) -> str | None:
        """The regular expression that the first text of a group matches; None where a column names groups, or none."""
        pattern = _BEGINNINGS.get(self.group or "", self.group or "")
        return pattern if pattern.startswith("^") else None

    @property
    def is_token_file(self) -> bool:
        """Whether the source is a file of token ids rather than text."""
        return self.source.endswith(TOKEN_FILE)


class WeightedSource(TextSource):
    """One source of a mixture."""

    weight: PositiveFloat = 1.0
    """Its share of the blocks that are trained on, relative to the weights of the others."""


def split_parts(split: str) -> list[SplitPart]:
    """Return the parts of a split, ``train[:10%]+test``.

    Raises:
        ValueError: if it is written otherwise, its bounds are of two kinds, or a percentage is beyond 100.
    """
    parts = []
    for text in split.split("+"):
        match = _SPLIT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"data.split is {split!r}; write a name or a slice of it, such as train[:1%]")
        part = SplitPart(match["name"], match["start"], match["stop"])
        if part.start and part.stop and part.start.endswith("%") != part.stop.endswith("%"):
            raise ValueError(f"data.split is {split!r}; both bounds must be numbers or both percentages")
        for bound in (part.start, part.stop):
            if bound and bound.endswith("%") and abs(int(bound[:-1])) > 100:
                raise ValueError(f"data.split is {split!r}; a percentage must be between -100% and 100%")
        parts.append(part)
    return parts
