"""What a recipe says about its training text."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hfpatch.recipes.strict import Section

Layout: TypeAlias = Literal["packed", "padded", "stream"]
TOKEN_FILE = ".bin"
PLAN_LIMIT = 2**28
"""Blocks that a batch plan names at most: 2 GiB of indices, and 275 thousand million tokens of blocks of 1,024."""
_TEXT = (
    "source",
    "config",
    "split",
    "revision",
    "text_column",
    "max_documents",
    "min_characters",
    "append_eos",
)


class DataSettings(Section):
    """Where the training text comes from and how it becomes token blocks."""

    source: str = "tinyworld/shifted"
    """``tinyworld/base``, ``tinyworld/shifted``, a hub data set id, a local file or folder
    (.jsonl, .txt, .parquet, the first two also as .gz or .xz), or a token file (.bin) of ``hfpatch tokenize``."""
    config: str | None = None
    """The hub data set's configuration, such as ``wikitext-103-raw-v1``."""
    split: str = "train"
    """The hub data set's split."""
    revision: str | None = None
    """The hub data set's revision; None takes the newest and records which one it was."""
    text_column: str = "text"
    """The column that holds the text."""
    max_documents: PositiveInt | None = None
    """Take only the first documents that pass the filter; None takes all."""
    min_characters: NonNegativeInt = 1
    """Leave out documents shorter than this many characters, surrounding white space not counted."""
    block_size: Annotated[int, Field(ge=2)] = 512
    """Tokens in a block, the unit of a batch."""
    layout: Layout = "packed"
    """``packed`` fills each block with several documents, attention kept inside each; ``padded`` pads one document
    a block; ``stream`` cuts blocks from one stream of all documents, wherever they end, attention crossing them."""
    held_out: PositiveInt | None = None
    """Keep the last so many of the documents out of training and measure the loss on them; None keeps none."""
    streaming: bool = False
    """Read a hub data set over the network as far as it is needed, without downloading it; needs max_documents, unless
    the layout is ``stream``."""
    append_eos: bool = True
    """End each document with the tokenizer's end-of-text token, unless the tokenizer did so itself."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> DataSettings:
        if self.streaming and self.max_documents is None and self.layout != "stream":
            raise ValueError("data.streaming reads as far as it is needed; say how far with data.max_documents")
        if self.layout == "stream" and self.held_out and not self.append_eos:
            raise ValueError("data.held_out finds a stream's documents by their end-of-text; leave data.append_eos on")
        if mistake := self._token_file_mistake():
            raise ValueError(mistake)
        if self.held_out and self.max_documents and self.held_out >= self.max_documents:
            raise ValueError(
                f"data.held_out is {self.held_out}; must be below data.max_documents ({self.max_documents}), of which "
                "it is a part"
            )
        return self

    @property
    def is_token_file(self) -> bool:
        """Whether the source is a file of token ids rather than text."""
        return self.source.endswith(TOKEN_FILE)

    @property
    def text_id(self) -> tuple[str | None, ...]:
        """What names the text, whichever of its documents are chosen."""
        return self.source, self.config, self.split, self.revision

    def describe_text(self) -> dict[str, Any]:
        """Return the settings that decide which tokens there are, and not how they are laid out in blocks."""
        return self.model_dump(mode="json", include=set(_TEXT))

    def reset_text(self) -> list[str]:
        """Return the overrides that undo what these settings say about reading text, which a token file refuses."""
        defaults = type(self).model_fields
        return [f"data.{name}={json.dumps(defaults[name].default)}" for name in self._changed()]

    def _token_file_mistake(self) -> str | None:
        if not self.is_token_file:
            return None
        if self.layout != "stream":
            return f"data.source {self.source} is a token file, which is one stream; set data.layout=stream"
        if changed := self._changed():
            return f"data.{changed[0]} sets how text is read, and {self.source} already contains tokens; leave it out"
        return None

    def _changed(self) -> list[str]:
        names = [name for name in (*_TEXT, "streaming") if name != "source"]
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def overlap_mistake(training: DataSettings, evaluation: DataSettings) -> str | None:
    """Return what is wrong where the settings show that documents are both trained and evaluated on, or None."""
    if training.text_id != evaluation.text_id:
        return None
    if evaluation.held_out is None:
        return (
            f"evaluation_data is {evaluation.source}, the text that is trained on; set data.held_out in its place, or "
            "give both sections the same held_out"
        )
    same = training.describe_text() == evaluation.describe_text()
    if not same or (training.held_out or 0) < evaluation.held_out:
        return (
            f"evaluation_data holds out {evaluation.held_out} documents of {evaluation.source}, and data may train on "
            f"some of them; set data.held_out={evaluation.held_out} and choose the documents alike"
        )
    return None


def plan_mistake(steps: int, batch_size: int) -> str | None:
    """Return what is wrong where a batch plan of so many steps would not fit into memory."""
    if steps * batch_size <= PLAN_LIMIT:
        return None
    return (
        f"training.steps is {steps}; with a training.batch_size of {batch_size} at most {PLAN_LIMIT // batch_size} are "
        "possible, as the batch plan names every block of every step"
    )
