"""The documents of the tiny world: each drawn from its own seed; training and evaluation text are disjoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random
from typing import Literal

from hfpatch.errors import HfpatchError, nearest
from hfpatch.tinyworld.story import Story, ask, tell
from hfpatch.tinyworld.world import STYLES

Split = Literal["base", "shifted"]
Use = Literal["train", "eval"]

DOCUMENTS = 10_000
"""The default number of documents of a split."""

_EVALUATION_SHARE = 16
"""One opening in 16 belongs to evaluation."""


def documents(split: Split, *, count: int | None = None, seed: int = 0) -> Iterator[str]:
    """Yield ``count`` training documents of a split, or `DOCUMENTS`; document i depends only on split, seed and i.

    Raises:
        HfpatchError: if there is no such split.
    """
    if split not in STYLES:
        raise HfpatchError(f"tinyworld has no split {split!r}{nearest(split, STYLES)}; it has {', '.join(STYLES)}")
    return (document(split, "train", seed, index) for index in range(DOCUMENTS if count is None else count))


def document(split: Split, use: Use, seed: int, index: int) -> str:
    """Return one document: a story, sometimes followed by one or two questions and their answers."""
    story, rng = draw_story(split, use, seed, index)
    if rng.random() >= STYLES[split].question:
        return story.text()
    asked = rng.sample(ask(story), rng.randint(1, 2))
    return "\n".join([story.text(), *(f"Question: {question.text}\nAnswer: {question.reply()}" for question in asked)])


def draw_story(split: Split, use: Use, seed: int, index: int) -> tuple[Story, Random]:
    """Draw stories until one has an opening that belongs to ``use``; return it with the generator that drew it.

    The hash of an opening decides its use, so no evaluation opening is trained on.
    """
    rng = Random(f"tinyworld {split} {use} {seed} {index}")
    while True:
        story = tell(rng, STYLES[split])
        trained = hashlib.sha256(story.opening.encode()).digest()[0] % _EVALUATION_SHARE != 0
        if trained == (use == "train"):
            return story, rng
