"""Retention in a recipe: the text and the tasks that training should not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PositiveInt, ValidationError

from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings, without_effect
from hfpatch.recipes.sources import TextSource
from hfpatch.recipes.strict import Section, check_among, explain

BASE_LANGUAGE = "base_language"
"""The name of the language that tinyworld's bases were trained on."""
_PREFIX = "retention_"


class RetentionSettings(Section):
    """Text that every method is measured on before and after its training, and is not trained on."""

    texts: dict[str, TextSource] = Field(default_factory=dict)
    """Texts by name, each with the keys of ``data`` that say where a text is. Without any, a tinyworld base has the
    language that it was trained on."""
    documents: PositiveInt = 200
    """So many groups of documents (``group``) of each text, drawn over the whole of it by ``data.seed``; all if it has
    fewer. Of a text that is streamed or generated, and has no ``max_documents``, the first ones."""
    block_size: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Tokens in a row; None takes ``data.block_size``."""
    tasks: tuple[str, ...] | None = None
    """The tasks of ``evaluation.tasks`` whose right answers should be kept; None takes all."""

    def sources(self, model: str) -> dict[str, TextSource]:
        """Return the texts for a base."""
        embedded = {BASE_LANGUAGE: TextSource(source="tinyworld/base")} if model.startswith("tinyworld/") else {}
        return self.texts or embedded

    def data(self, model: str, training: DataSettings) -> dict[str, DataSettings]:
        """Return how each text is read: as the training text is, in packed rows where that is not padded.

        ``held_out`` is the number of documents to draw, None where all that are read are measured.

        Raises:
            ValidationError: if the keys of a text contradict each other.
        """
        common = training.model_dump(include={"chat_template", "min_characters", "append_eos", "seed", "scored_tokens"})
        common |= {"block_size": self.block_size or training.block_size}
        common["layout"] = "padded" if training.layout == "padded" else "packed"
        by_name = {}
        for name, source in self.sources(model).items():
            values = source.model_dump()
            if source.streaming or source.source.startswith("tinyworld/"):  # no more is read than is needed
                values["max_documents"] = source.max_documents or self.documents
            drawn = values["max_documents"] is None or values["max_documents"] > self.documents
            values["held_out"] = self.documents if drawn else None
            by_name[name] = DataSettings.model_validate(values | common | without_effect(source.format))
        return by_name


def task_of(text: str) -> str:
    """Return the name of a text's scores in results."""
    return f"{_PREFIX}{text}"


def text_of(task: str) -> str:
    """Return a text's name in the recipe from the name of its scores in results."""
    return task.removeprefix(_PREFIX)


def check_retention(
    settings: RetentionSettings | None, model: str, training: DataSettings, tasks: Sequence[str]
) -> None:
    """Refuse a mistake in ``retention``."""
    if settings is None:
        return
    if not settings.sources(model):
        raise HfpatchError(
            f"retention.texts names no text, and only tinyworld's bases have one of their own; name one for {model}, "
            "such as texts: {wikitext: {source: Salesforce/wikitext, config: wikitext-103-raw-v1, split: test}}"
        )
    for name, source in settings.texts.items():
        if not name.replace("-", "_").isidentifier() or not name.isascii():
            raise HfpatchError(f"retention.texts.{name} becomes a file; use letters, digits, '_' and '-' only")
        if task_of(name) in tasks:
            raise HfpatchError(
                f"retention.texts.{name} is scored as {task_of(name)}, the name of a task; give it another name"
            )
        if source.is_token_file:
            raise HfpatchError(
                f"retention.texts.{name}.source {source.source} is a token file, and documents are needed; use text"
            )
    check_among("retention.tasks", settings.tasks or (), tasks, "evaluation.tasks")
    try:
        settings.data(model, training)
    except ValidationError as error:
        raise HfpatchError(f"retention.texts: {explain(error, DataSettings)}") from None
