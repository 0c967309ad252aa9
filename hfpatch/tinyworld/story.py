"""Stories and questions about them.

An opening states facts, then come events, most of which those facts decide.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    world = draw_world(rng, style)
    teller = Teller(rng, style, world)

    # The opening: the place and the traits of every person, in random order
    facts = []
    for name, person in world.people.items():
        facts.append(teller.say(f"{name} lives in {person.home}.", f"In {person.home} is the house of {name}."))
        if person.likes:
            facts.append(teller.say(f"{name} likes {person.likes}.", f"To {name} {person.likes} is dear."))
        if person.hates:
            facts.append(teller.say(f"{name} hates {person.hates}.", f"To {name} {person.hates} is a horror."))
        if person.habit:
            weather, place = person.habit
            usual, rare = f"In {weather} {name} goes to {place}.", f"{name} makes for {place} in {weather}."
            facts.append(teller.say(usual, rare))
        if person.friend:
            facts.append(teller.say(f"{name} trusts {person.friend}.", f"{person.friend} is trusted by {name}."))
    rng.shuffle(facts)

    # The events
    events = []
    for _ in range(rng.randint(*style.events)):
        if options := teller.options():
            _, kind, person = rng.choices(options, [weight for weight, _, _ in options])[0]
            events.append(teller.happen(kind, person))

    # Often somebody looks for an object and finds it where it was last, in somebody's hands or not
    held = [person.holds for person in world.people.values() if person.holds]
    findable = sorted({*held, *world.left})
    if findable and rng.random() < 0.6:
        thing = rng.choice(findable)
        holder = next((person for person in world.people.values() if person.holds == thing), None)
        place = holder.place if holder else world.left[thing]
        who = rng.choice([name for name in world.people if not holder or name != holder.name])
        lead = teller.say(f"At night {who} looked for {thing}.", f"Where was {thing}? {who} asked at night.")
        template = teller.say("it was in {place}.", "in {place} it was.")
        events.append(Event("look", lead, template, {"place": place}, ("place",)))
    return Story(" ".join(facts), tuple(events), world)


@dataclass
class Teller:
    """Tells the events of a story and updates the world."""

    rng: Random
    style: Style
    world: World

    def say(self, usual: str, rare: str) -> str:
        """Return one of the two forms of a sentence."""
        return rare if self.rng.random() < self.style.rare else usual

    def options(self) -> list[tuple[float, str, Person]]:
        """Return the events that are possible now: weight, kind and person."""
        options: list[tuple[float, str, Person]] = []
        for person in self.world.people.values():
            friend = self.world.people[person.friend] if person.friend else None
            can_send = friend is not None and friend.holds is None
            if person.place != person.home:
                options.append((1, "return", person))
            if person.habit and person.place != person.habit[1]:
                options.append((self.style.combined if person.holds else 1, "weather", person))
            if (person.likes or person.hates) and not person.chose and not person.holds:
                options.append((2, "choose", person))
                if can_send and person.likes:
                    options.append((2 * self.style.combined, "choose_and_send", person))
            if person.holds:
                options.append((1, "leave", person))
                if can_send:
                    options.append((1, "send", person))
        return options

    def happen(self, kind: str, person: Person) -> Event:
        """Let one of the possible events happen to a person, and return it."""
        slots = {"person": person.name}
        if kind == "return":
            person.place = slots["place"] = person.home
            template = self.say("then {person} went home to {place}.", "then home to {place} {person} walked.")
            return Event(kind, "", template, slots, ("place",))
        if kind == "weather":  # it comes, and a person goes to the place of the habit, with an object or without
            assert person.habit is not None
            weather, person.place = person.habit
            lead, slots["place"] = self.say(f"There was {weather}.", f"Then came {weather}."), person.place
            if person.holds is None:
                template = self.say("{person} went to {place}.", "{person} ran off to {place}.")
                return Event(kind, lead, template, slots, ("place",))
            slots["object"] = person.holds
            template = self.say("{person} took {object} to {place}.", "{person} ran to {place} with {object}.")
            return Event("carry", lead, template, slots, ("place", "object"))
        if kind == "leave":
            slots |= {"object": str(person.holds), "place": person.place}
            self.world.left[slots["object"]], person.holds = person.place, None
            template = self.say("{person} left {object} in {place}.", "in {place} {person} dropped {object}.")
            return Event(kind, "", template, slots, ("object", "place"))
        if kind == "send":
            slots |= {"object": str(person.holds), "friend": str(person.friend)}
            self.world.people[slots["friend"]].holds, person.holds = person.holds, None
            template = self.say("{person} sent {object} to {friend}.", "{person} mailed {friend} {object}.")
            return Event(kind, "", template, slots, ("object", "friend"))

        # a person takes the right one of the objects on offer, and may send it to the friend
        others = [self.world.objects.pop(0) for _ in range(1 if person.hates else self.rng.randint(1, 2))]
        things = [str(person.likes or person.hates), *others]
        self.rng.shuffle(things)
        person.holds = others[0] if person.hates else person.likes
        person.chose = True
        listed = f"{', '.join(things[:-1])} and {things[-1]}"
        lead = self.say(f"{person.name} found {listed}.", f"Before {person.name} lay {listed}.")
        taken = {"pronoun": "she" if person.name in SHE else "he", "object": str(person.holds)}
        if kind == "choose":
            template = self.say("{pronoun} took {object}.", "it was {object} that {pronoun} took.")
            return Event(kind, lead, template, taken, ("object",), tuple(things))
        taken |= {"person": person.name, "friend": str(person.friend)}
        self.world.people[taken["friend"]].holds, person.holds = person.holds, None
        template = self.say(
            "{pronoun} took {object} and sent it to {friend}.", "so {object} was what {pronoun} sent to {friend}."
        )
        return Event(kind, lead, template, taken, ("object", "friend"), tuple(things))


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
