"""What a recipe says about its training text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hfpatch.settings import Section


class DataSettings(Section):
    """Where the training text comes from and how it becomes token blocks."""

    source: str = "tinyworld/shifted"
    """``tinyworld/base``, ``tinyworld/shifted``, a hub data set id, or a local file or folder
    (.jsonl, .txt, .parquet, the first two also as .gz or .xz)."""
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
    packing: bool = True
    """True fills each block with several documents, attention kept inside each; False pads one document a block."""
    held_out: PositiveInt | None = None
    """Keep the last so many of the documents out of training and measure the loss on them; None keeps none."""
    streaming: bool = False
    """Read a hub data set over the network as far as it is needed, without downloading it; needs max_documents."""
    append_eos: bool = True
    """End each document with the tokenizer's end-of-text token, unless the tokenizer did so itself."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> DataSettings:
        if self.streaming and self.max_documents is None:
            raise ValueError("data.streaming reads as far as it is needed; say how far with data.max_documents")
        if self.held_out and self.max_documents and self.held_out >= self.max_documents:
            raise ValueError(
                f"data.held_out is {self.held_out}; must be below data.max_documents ({self.max_documents}), of which "
                "it is a part"
            )
        return self
