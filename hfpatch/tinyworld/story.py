"""Stories and questions about them.

An opening states facts, then come events, most of which those facts decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from hfpatch.tinyworld.world import SHE, Person, Style, World, draw_world


@dataclass(frozen=True)
class Event:
    """Something that happens: a lead, and an outcome whose ``decided`` slots follow from the story so far."""

    kind: str
    lead: str
    """The sentences before the outcome; may be empty."""
    template: str
    """The outcome with a ``{slot}`` for each name, place and object."""
    slots: dict[str, str]
    decided: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    """The objects to choose from, where a choice is made."""

    def outcome(self, **changed: str) -> str:
        """Return the outcome as a sentence, with some slots changed (a wrong ending)."""
        text = self.template.format(**{**self.slots, **changed})
        return text[0].upper() + text[1:]

    def text(self) -> str:
        """Return lead and outcome."""
        return f"{self.lead} {self.outcome()}".strip()


@dataclass(frozen=True)
class Story:
    """An opening, the events, and the world as it is afterwards."""

    opening: str
    events: tuple[Event, ...]
    world: World

    def text(self) -> str:
        """Return the story as one paragraph."""
        return " ".join([self.opening, *(event.text() for event in self.events)])


def tell(rng: Random, style: Style) -> Story:
    """Tell one story: an opening, some events, and often a search for a thing at the end."""
    teller = Teller(rng, style, draw_world(rng, style))
    opening = teller.opening()
    events = []
    for _ in range(rng.randint(*style.events)):
        if options := teller.options():
            _, happen, person = rng.choices(options, [weight for weight, _, _ in options])[0]
            events.append(happen(person))
    if (search := teller.look()) is not None:
        events.append(search)
    return Story(opening, tuple(events), teller.world)


@dataclass
class Teller:
    """Tells a story sentence by sentence and updates the world."""

    rng: Random
    style: Style
    world: World

    def opening(self) -> str:
        """State the place and the traits of every person, in random order."""
        facts = []
        for name, person in self.world.people.items():
            facts.append(self._say(f"{name} lives in {person.home}.", f"In {person.home} is the house of {name}."))
            if person.likes:
                facts.append(self._say(f"{name} likes {person.likes}.", f"To {name} {person.likes} is dear."))
            if person.hates:
                facts.append(self._say(f"{name} hates {person.hates}.", f"To {name} {person.hates} is a horror."))
            if person.habit:
                weather, place = person.habit
                usual, rare = f"In {weather} {name} goes to {place}.", f"{name} makes for {place} in {weather}."
                facts.append(self._say(usual, rare))
            if person.friend:
                facts.append(self._say(f"{name} trusts {person.friend}.", f"{person.friend} is trusted by {name}."))
        self.rng.shuffle(facts)
        return " ".join(facts)

    def look(self) -> Event | None:
        """Often somebody looks for an object and finds it where it was last, in somebody's hands or not."""
        held = [person.holds for person in self.world.people.values() if person.holds]
        known = sorted({*held, *self.world.left})  # the objects whose place is known
        if not known or self.rng.random() >= 0.6:
            return None
        thing = self.rng.choice(known)
        holder = next((person for person in self.world.people.values() if person.holds == thing), None)
        place = holder.place if holder else self.world.left[thing]
        who = self.rng.choice([name for name in self.world.people if not holder or name != holder.name])
        lead = self._say(f"At night {who} looked for {thing}.", f"Where was {thing}? {who} asked at night.")
        template = self._say("it was in {place}.", "in {place} it was.")
        return Event("look", lead, template, {"place": place}, ("place",))

    def _say(self, usual: str, rare: str) -> str:
        return rare if self.rng.random() < self.style.rare else usual

    def options(self) -> list[tuple[float, Callable[[Person], Event], Person]]:
        """Return the events that are possible now: weight, event and person."""
        options: list[tuple[float, Callable[[Person], Event], Person]] = []
        for person in self.world.people.values():
            friend = self.world.people[person.friend] if person.friend else None
            can_send = friend is not None and friend.holds is None
            if person.place != person.home:
                options.append((1, self._return, person))
            if person.habit and person.place != person.habit[1]:
                options.append((self.style.combined if person.holds else 1, self._weather, person))
            if person.taste and not person.chose and not person.holds:
                options.append((2, self._choose, person))
                if can_send and person.likes:
                    options.append((2 * self.style.combined, partial(self._choose, sends=True), person))
            if person.holds:
                options.append((1, self._leave, person))
                if can_send:
                    options.append((1, self._send, person))
        return options

    def _return(self, person: Person) -> Event:
        person.place = person.home
        template = self._say("then {person} went home to {place}.", "then home to {place} {person} walked.")
        return Event("return", "", template, {"person": person.name, "place": person.place}, ("place",))

    def _weather(self, person: Person) -> Event:
        """The weather comes, and a person goes to the place of the habit, with an object or without."""
        assert person.habit is not None
        weather, person.place = person.habit
        lead = self._say(f"There was {weather}.", f"Then came {weather}.")
        slots = {"person": person.name, "place": person.place}
        if person.holds is None:
            template = self._say("{person} went to {place}.", "{person} ran off to {place}.")
            return Event("weather", lead, template, slots, ("place",))
        template = self._say("{person} took {object} to {place}.", "{person} ran to {place} with {object}.")
        return Event("carry", lead, template, {**slots, "object": person.holds}, ("place", "object"))

    def _choose(self, person: Person, *, sends: bool = False) -> Event:
        """A person takes the right one of the objects on offer, and may send it to the friend."""
        others = [self.world.objects.pop(0) for _ in range(1 if person.hates else self.rng.randint(1, 2))]
        things = [str(person.taste), *others]
        self.rng.shuffle(things)
        person.holds = others[0] if person.hates else person.likes
        person.chose = True
        listed = f"{', '.join(things[:-1])} and {things[-1]}"
        lead = self._say(f"{person.name} found {listed}.", f"Before {person.name} lay {listed}.")
        slots = {"pronoun": "she" if person.name in SHE else "he", "object": str(person.holds)}
        if not sends:
            template = self._say("{pronoun} took {object}.", "it was {object} that {pronoun} took.")
            return Event("choose", lead, template, slots, ("object",), tuple(things))
        slots |= {"person": person.name, "friend": str(person.friend)}
        self.world.people[str(person.friend)].holds, person.holds = person.holds, None
        template = self._say(
            "{pronoun} took {object} and sent it to {friend}.", "so {object} was what {pronoun} sent to {friend}."
        )
        return Event("choose_and_send", lead, template, slots, ("object", "friend"), tuple(things))

    def _leave(self, person: Person) -> Event:
        thing = str(person.holds)
        self.world.left[thing], person.holds = person.place, None
        template = self._say("{person} left {object} in {place}.", "in {place} {person} dropped {object}.")
        slots = {"person": person.name, "object": thing, "place": person.place}
        return Event("leave", "", template, slots, ("object", "place"))

    def _send(self, person: Person) -> Event:
        slots = {"person": person.name, "object": str(person.holds), "friend": str(person.friend)}
        self.world.people[str(person.friend)].holds, person.holds = person.holds, None
        template = self._say("{person} sent {object} to {friend}.", "{person} mailed {friend} {object}.")
        return Event("send", "", template, slots, ("object", "friend"))


@dataclass(frozen=True)
class Question:
    """A question, the form of its answer, and the word that fills the form."""

    text: str
    form: str
    answer: str
    kind: str
    """``person``, ``place`` or ``object``: the words that the answer is one of."""

    def reply(self, word: str | None = None) -> str:
        """Return the answer, or with ``word`` a wrong one in the same form."""
        return self.form.format(word or self.answer)


def ask(story: Story) -> list[Question]:
    """Return every question that a story answers."""
    questions = []
    for person in story.world.people.values():
        name = person.name
        questions.append(Question(f"Where does {name} live?", "in {}", person.home, "place"))
        if person.likes:
            questions.append(Question(f"What does {name} like?", "{}", person.likes, "object"))
        if person.habit:
            weather, place = person.habit
            questions.append(Question(f"Where does {name} go in {weather}?", "to {}", place, "place"))
        if person.holds:
            questions.append(Question(f"Where is {person.holds}?", "in {}", person.place, "place"))
            questions.append(Question(f"Who has {person.holds}?", "{}", name, "person"))
            questions.append(Question(f"What does {name} have?", "{}", person.holds, "object"))
    for thing, place in story.world.left.items():
        questions.append(Question(f"Where is {thing}?", "in {}", place, "place"))
    return questions
