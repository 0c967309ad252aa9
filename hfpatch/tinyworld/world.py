"""The people of a story with their traits, and the places of things."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hfpatch.tinyworld.words import NAMES, OBJECTS, PLACES, WEATHERS, Style, draw


@dataclass
class Person:
    """A person: constant traits (home, taste, habit, friend) and a state (place, held object)."""

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

    @property
    def taste(self) -> str | None:
        """The object that determines this person's choices."""
        return self.likes or self.hates


@dataclass
class World:
    """The state of a story: people by name, and the place of every object that was left somewhere."""

    people: dict[str, Person]
    left: dict[str, str] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    """Objects that no sentence has named yet, in the order in which they will appear."""

    def place_of(self, thing: str) -> str | None:
        """Return where an object is, or None if it was not taken yet."""
        holder = self.holder(thing)
        return holder.place if holder else self.left.get(thing)

    def holder(self, thing: str) -> Person | None:
        """Return the holder of an object."""
        return next((person for person in self.people.values() if person.holds == thing), None)


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
