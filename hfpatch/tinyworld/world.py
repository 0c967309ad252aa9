"""The world of a story: its words and two ways of using them, its people with their traits, the places of things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

T = TypeVar("T")

SHE = ("Anna", "Cora", "Ella", "Gina", "Iris", "Kate", "Mia", "Olive")
HE = ("Ben", "Dan", "Finn", "Hugo", "Jack", "Leo", "Noah", "Paul")
NAMES = tuple(name for pair in zip(SHE, HE, strict=True) for name in pair)
PLACES = ("Bath", "Bray", "Cork", "Dover", "Hull", "Kent", "Leeds", "Lund", "Oslo", "Rome", "Troy", "York")
OBJECTS = (
    *("tea", "salt", "honey", "bread", "milk", "wool", "silk", "gold", "wine", "rice"),
    *("corn", "oil", "wax", "ink", "clay", "coal", "sugar", "iron", "soap", "paper"),
)
WEATHERS = ("rain", "snow", "fog")


@dataclass(frozen=True)
class Style:
    """The frequencies of a split. Shares are probabilities; both splits have every form and rule."""

    rare: float
    """The share of sentences in the second of their two forms."""
    skew: float
    """Word k of a list has the weight (k + 1)^-skew: positive prefers the first words, negative the last ones."""
    third: float
    """The share of stories with three people instead of two."""
    dislike: float
    """The share of tastes that are dislikes."""
    combined: float
    """The weight of events that two stated facts decide together, against 1 for the others."""
    events: tuple[int, int]
    """The fewest and the most events of a story."""
    question: float
    """The share of documents that end with a question or two and their answers."""


STYLES = {
    "base": Style(rare=0.05, skew=0.6, third=0.15, dislike=0.05, combined=0.3, events=(4, 8), question=0.6),
    "shifted": Style(rare=0.75, skew=-0.6, third=0.5, dislike=0.4, combined=2.0, events=(3, 6), question=0.6),
}


def draw(rng: Random, words: Sequence[T], count: int, skew: float) -> list[T]:
    """Draw ``count`` different words, word k with a chance proportional to (k + 1)^-skew among those left."""
    weights = [(k + 1) ** -skew for k in range(len(words))]
    keyed = sorted(range(len(words)), key=lambda k: rng.random() ** (1 / weights[k]), reverse=True)
    return [words[k] for k in keyed[:count]]


@dataclass
class Person:
    """A person: constant traits (home, a taste, habit, friend) and a state (place, held object)."""

    name: str
    home: str
    place: str
    likes: str | None = None
    hates: str | None = None
    habit: tuple[str, str] | None = None
    """A weather and the place where it sends this person."""
    friend: str | None = None
    """The recipient of things that this person sends."""
    holds: str | None = None
    chose: bool = False


@dataclass
class World:
    """The state of a story: people by name, and the place of every object that was left somewhere."""

    people: dict[str, Person]
    left: dict[str, str] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    """Objects that no sentence has named yet, in the order in which they will appear."""


def draw_world(rng: Random, style: Style) -> World:
    """Draw people, their places and two facts about each of them.

    Habits for the same weather lead to different places, and tastes name different objects.
    """
    names = draw(rng, NAMES, 3 if rng.random() < style.third else 2, style.skew)
    places = draw(rng, PLACES, 2 * len(names), style.skew)
    objects = draw(rng, OBJECTS, len(OBJECTS), style.skew)
    people = {name: Person(name, home, home) for name, home in zip(names, places, strict=False)}
    away = places[len(names) :]
    for person in people.values():
        facts = rng.sample(("taste", "habit", "friend"), 2)
        if "taste" in facts:
            kind = "hates" if rng.random() < style.dislike else "likes"
            setattr(person, kind, objects.pop(0))
        if "habit" in facts:
            person.habit = (rng.choice(WEATHERS), away.pop())
        if "friend" in facts:
            person.friend = rng.choice([name for name in names if name != person.name])
    return World(people, objects=objects)
