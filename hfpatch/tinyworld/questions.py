"""Questions about a story, each with the words of its answer and the kind of words that answer it."""

from __future__ import annotations

from dataclasses import dataclass

from hfpatch.tinyworld.story import Story


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

    def lines(self) -> str:
        """Return question and answer as a document ends with them."""
        return f"Question: {self.text}\nAnswer: {self.reply()}"


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
