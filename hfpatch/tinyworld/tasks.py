"""The tasks of the tiny world: items drawn from a fixed seed, in the shifted way of speaking.

They have the forms of well-known tasks: ``cloze`` that of LAMBADA (the last word follows from the whole passage),
``endings`` that of HellaSwag (four endings, one of them consistent), ``questions`` that of ARC (a question with four
choices) and ``text`` that of WikiText (documents for a rolling perplexity).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from hfpatch.errors import HfpatchError, nearest
from hfpatch.tinyworld.language import document, draw_story
from hfpatch.tinyworld.questions import ask
from hfpatch.tinyworld.story import Event, Story
from hfpatch.tinyworld.words import NAMES, OBJECTS, PLACES

Item = dict[str, Any]

TASKS = ("cloze", "endings", "questions", "text")
ITEMS = 400
EXAMPLES = 16
_DATA = Path(__file__).parent / "items"
_WORDS = {"person": NAMES, "friend": NAMES, "place": PLACES, "object": OBJECTS}


def items(task: str) -> list[Item]:
    """Read the items of a task that are to be scored.

    Raises:
        HfpatchError: if there is no such task.
    """
    return _read(task)[:ITEMS]


def examples(task: str) -> list[Item]:
    """Read a task's solved examples for few-shot prompts; none of them is among ``items``."""
    return _read(task)[ITEMS:]


def items_file(task: str) -> Path:
    """Return the JSON Lines file of a task's items."""
    return _DATA / f"{task}.jsonl"


def draw_items(task: str, number: int = ITEMS + EXAMPLES) -> list[Item]:
    """Draw a task's items and examples again; the shipped ones were drawn by this when the package was built."""
    draw = {"cloze": _cloze, "endings": _endings, "questions": _questions, "text": _text}[task]
    stream: Iterator[Item] = (item for index in count() for item in draw(TASKS.index(task), index))
    return list(islice(stream, number))


def _read(task: str) -> list[Item]:
    if task not in TASKS:
        raise HfpatchError(f"tinyworld has no task {task!r}{nearest(task, TASKS)}; it has {', '.join(TASKS)}")
    return [json.loads(line) for line in items_file(task).read_text(encoding="utf-8").splitlines()]


def _text(seed: int, index: int) -> list[Item]:
    return [{"text": document("shifted", "eval", seed, index)}]


def _cloze(seed: int, index: int) -> list[Item]:
    """A story cut off before a last word that the story decides."""
    story, rng = draw_story("shifted", "eval", seed, index)
    open_ends = [k for k, event in enumerate(story.events) if _last_slot(event) in event.decided]
    if not open_ends:
        return []
    chosen = rng.choice(open_ends)
    event = story.events[chosen]
    text = f"{_before(story, chosen)} {event.outcome()}".removesuffix(".")
    return [{"text": text, "kind": f"{event.kind}/{_last_slot(event)}"}]


def _endings(seed: int, index: int) -> list[Item]:
    """A story cut off before an outcome that it decides, the outcome, and three that contradict it."""
    story, rng = draw_story("shifted", "eval", seed, index)
    found = [(k, wrong) for k, event in enumerate(story.events) if (wrong := _wrong_outcomes(story, k, event, rng))]
    if not found:
        return []
    chosen, wrong = rng.choice(found)
    event = story.events[chosen]
    endings, label = _shuffled(rng, event.outcome(), wrong)
    return [{"ctx": _before(story, chosen), "endings": endings, "label": label, "kind": event.kind}]


def _questions(seed: int, index: int) -> list[Item]:
    """A story, a question about it, and four answers in the same form."""
    story, rng = draw_story("shifted", "eval", seed, index)
    question = rng.choice(ask(story))
    wrong = _others(question.answer, _WORDS[question.kind], story.text(), rng, mentioned_only=False)[:3]
    texts, label = _shuffled(rng, question.reply(), [question.reply(word) for word in wrong])
    choices = {"text": texts, "label": list("ABCD")}
    item = {"passage": story.text(), "question": question.text, "choices": choices, "answerKey": "ABCD"[label]}
    return [{**item, "kind": " ".join(question.text.split()[:2]).lower()}]


def _before(story: Story, chosen: int) -> str:
    """Return the story up to the outcome of an event, its lead included."""
    parts = [story.opening, *(event.text() for event in story.events[:chosen]), story.events[chosen].lead]
    return " ".join(part for part in parts if part)


def _last_slot(event: Event) -> str | None:
    match = re.search(r"\{(\w+)\}\.$", event.template)
    return match[1] if match else None


def _wrong_outcomes(story: Story, chosen: int, event: Event, rng: Random) -> list[str]:
    """Return three outcomes that contradict the story, or none where the story names too few words to build them.

    One decided slot takes three other words; two decided slots take one other word each, alone and together, so that
    no word is more frequent in the right ending than in the wrong ones.
    """
    text = f"{_before(story, chosen)} {event.outcome()}"
    wrong = {slot: _wrong_words(event, slot, text, rng) for slot in event.decided}
    needed = 3 if len(wrong) == 1 else 1
    if not wrong or any(len(words) < needed for words in wrong.values()):
        return []
    if len(wrong) == 1:
        ((slot, words),) = wrong.items()
        return [event.outcome(**{slot: word}) for word in words[:3]]
    (first, (a, *_)), (second, (b, *_)) = wrong.items()
    return [event.outcome(**changed) for changed in ({first: a}, {second: b}, {first: a, second: b})]


def _wrong_words(event: Event, slot: str, text: str, rng: Random) -> list[str]:
    """Return wrong words for a decided slot that the text names; those on offer, where there was an offer."""
    words = event.offered if event.offered and slot == "object" else _WORDS[slot]
    return [word for word in _others(event.slots[slot], words, text, rng) if word != event.slots.get("person")]


def _others(right: str, words: tuple[str, ...], text: str, rng: Random, *, mentioned_only: bool = True) -> list[str]:
    """Return words other than the right one in random order, those that the text names first."""
    named = set(re.findall(r"\w+", text))
    others = [word for word in words if word != right]
    rng.shuffle(others)
    mentioned = [word for word in others if word in named]
    return mentioned if mentioned_only else mentioned + [word for word in others if word not in named]


def _shuffled(rng: Random, right: str, wrong: list[str]) -> tuple[list[str], int]:
    """Return all four in random order, and where the right one is."""
    texts = [right, *wrong]
    rng.shuffle(texts)
    return texts, texts.index(right)
