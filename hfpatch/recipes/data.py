"""The section ``data`` of a recipe: the training text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, NonNegativeInt, ValidationError, model_validator

from hfpatch.errors import HfpatchError
from hfpatch.recipes.sources import Format, TextSource, WeightedSource
from hfpatch.recipes.strict import PathText, explain

Layout: TypeAlias = Literal["packed", "padded", "stream"]
PLAN_LIMIT = 2**28
"""Blocks that a batch plan names at most: 2 GiB of indices, and 275 thousand million tokens of blocks of 1,024."""
_SOURCE = tuple(TextSource.model_fields)
_TEXT = (*(name for name in _SOURCE if name != "streaming"), "chat_template", "min_characters", "append_eos")
_READING = (*(name for name in _TEXT if name != "source"), "streaming")  # which a token file needs no more


class DataSettings(TextSource):
    """Where the training text comes from and how it becomes token blocks."""

    instead_of: ClassVar[Mapping[str, str]] = {"source": "mixture", "mixture": "source"}

    source: PathText = "tinyworld/shifted"
    mixture: tuple[WeightedSource, ...] = ()
    """Several sources instead of one, each with its ``weight`` and its own keys of a source."""
    chat_template: PathText | None = None
    """A file with the Jinja template of conversations; None takes the tokenizer's own."""
    min_characters: NonNegativeInt = 1
    """Leave out documents shorter than this many characters, surrounding white space not counted; conversations by what
    their messages say, and prompts together with their completions."""
    block_size: Annotated[int, Field(ge=2, le=2**24)] = 512
    """Tokens in a block, the unit of a batch."""
    layout: Layout = "packed"
    """``packed`` fills each block with several documents, attention kept inside each; ``padded`` pads one document
    a block; ``stream`` cuts blocks from one stream of all documents, wherever they end, attention crossing them."""
    held_out: Annotated[NonNegativeInt | None, AfterValidator(lambda count: count or None)] = None
    """Keep so many groups of documents out of training and measure the loss on them; None or 0 keeps none. Without
    ``group`` these are documents that occur once. Of a mixture each source gives its share by weight."""
    seed: NonNegativeInt = 0
    """The seed by which groups of held-out, tuning and retention text are drawn over the whole of it. The seeds of
    training leave it as it is."""
    scored_tokens: Annotated[int, Field(ge=2)] | None = None
    """Score at most the first so many tokens of a held-out, tuning or retention document; None scores all."""
    append_eos: bool = True
    """End each document with the tokenizer's end-of-text token, unless the tokenizer did so itself. Conversations end
    as the chat template says."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> DataSettings:
        if len(self.mixture) == 1:
            raise ValueError("data.mixture has one source; list two or more, or write it as data.source")
        if self.mixture and (changed := self.changed(_SOURCE)):
            raise ValueError(f"data.{changed[0]} applies to one source; set it in each source of data.mixture")
        try:
            self.parts()
        except ValidationError as error:
            raise ValueError(f"data.mixture: {explain(error, DataSettings)}") from None
        if self.streaming and self.max_documents is None and self.layout != "stream":
            raise ValueError("data.streaming reads as far as it is needed; say how far with data.max_documents")
        if self.is_token_file and self.layout != "stream":
            raise ValueError(f"data.source {self.source} is a token file, which is one stream; set data.layout=stream")
        if self.is_token_file and (changed := self.changed(_READING)):
            raise ValueError(
                f"data.{changed[0]} sets how text is read, and {self.source} already contains tokens; leave it out"
            )
        if self.format != "text" and self.layout == "stream":
            raise ValueError(
                f"data.layout is stream, whose blocks begin anywhere in a document, and data.format={self.format} "
                "learns a part of each; set data.layout=packed or padded"
            )
        formats = {source.format for source in self.mixture or (self,)}
        if self.chat_template is not None and formats == {"text"}:
            raise ValueError(
                "data.chat_template applies to conversations (data.format=messages or prompt_completion), and "
                "data.format is text; leave it out"
            )
        if not self.append_eos and formats == {"messages"}:
            raise ValueError(
                "data.append_eos applies to texts and completions; the chat template ends conversations "
                "(data.format=messages); leave it out"
            )
        if self.held_out and self.max_documents and self.held_out >= self.max_documents:
            raise ValueError(
                f"data.held_out is {self.held_out}; must be below data.max_documents ({self.max_documents}), of which "
                "it is a part"
            )
        return self

    @property
    def weights(self) -> list[float]:
        """The weight of each source; of a single one 1."""
        return [source.weight for source in self.mixture] or [1.0]

    def parts(self) -> list[DataSettings]:
        """Return the settings of each source, with its share of ``held_out``; without a mixture these alone.

        Raises:
            ValidationError: if a source contradicts the other settings.
        """
        if not self.mixture:
            return [self]
        shares = split_by_weight(self.held_out or 0, self.weights)
        common = self.model_dump(exclude={*_SOURCE, "mixture", "held_out"})
        sources = []
        for source, share in zip(self.mixture, shares, strict=True):
            given = {name: value for name, value in common.items() if name not in _TEXT or not source.is_token_file}
            given |= without_effect(source.format)
            given |= {**source.model_dump(exclude={"weight"}), "held_out": share or None}
            sources.append(DataSettings.model_validate(given))
        return sources

    @property
    def named(self) -> str:
        """The sources, as messages name them."""
        return ", ".join(source.source for source in self.mixture or (self,))

    def describe_text(self) -> dict[str, Any]:
        """Return the settings that decide the tokens, but not their layout in blocks."""
        return self.model_dump(mode="json", include=set(_TEXT))

    def reset_text(self) -> list[str]:
        """Return the overrides that reset the settings of reading text, which a token file refuses."""
        defaults = type(self).model_fields
        return [f"data.{name}={json.dumps(defaults[name].default)}" for name in self.changed(_READING)]


def without_effect(format_: Format) -> dict[str, Any]:
    """Return the settings of reading text that do nothing for a format of rows, at their defaults."""
    if format_ == "text":
        return {"chat_template": None}
    return {"append_eos": True} if format_ == "messages" else {}


def split_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to weights that add up to ``total``, by largest remainder."""
    every = math.fsum(weights)
    exact = [total * weight / every for weight in weights]
    counts = [int(share) for share in exact]
    nearest_first = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in nearest_first[: total - sum(counts)]:
        counts[index] += 1
    return counts


def check_decided(data: DataSettings, any_decide: bool) -> None:
    """Refuse a setting of the documents that decide where there are none."""
    if not any_decide and (changed := data.changed(("scored_tokens", "seed"))):
        raise HfpatchError(
            f"data.{changed[0]} is for held-out, tuning or retention text, and there is none; set data.held_out, or "
            "leave it out"
        )


def check_plan_size(steps: int, batch_size: int) -> None:
    """Refuse a batch plan with too many steps for the memory."""
    if steps * batch_size <= PLAN_LIMIT:
        return
    raise HfpatchError(
        f"training.steps is {steps}; with a training.batch_size of {batch_size} at most {PLAN_LIMIT // batch_size} are "
        "possible, as the batch plan names every block of every step"
    )
