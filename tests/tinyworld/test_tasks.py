import re

import pytest
from tinyworld.build import EXAMPLES, draw_items

from hfpatch.errors import HfpatchError
from hfpatch.tinyworld.tasks import ITEMS, TASKS, examples, items
from hfpatch.tinyworld.world import NAMES, OBJECTS, PLACES

ANSWERS = {
    r"Where does (\w+) live": lambda world, who: f"in {world.facts['home', who]}",
    r"What does (\w+) like": lambda world, who: world.facts["likes", who],
    r"What does (\w+) have": lambda world, who: world.holds[who],
    r"Where does (\w+) go in (\w+)": lambda world, who, when: f"to {world.facts['habit', who, when]}",
    r"Where is (\w+)": lambda world, thing: f"in {world.where(thing)}",
    r"Who has (\w+)": lambda world, thing: next(who for who, held in world.holds.items() if held == thing),
}
FORMS = {
    "home": "{who} lives in {value} | In {value} is the house of {who}",
    "likes": "{who} likes {value} | To {who} {value} is dear",
    "hates": "{who} hates {value} | To {who} {value} is a horror",
    "habit": "In {when} {who} goes to {value} | {who} makes for {value} in {when}",
    "friend": "{who} trusts {value} | {value} is trusted by {who}",
    "weather": "There was {value} | Then came {value}",
    "offer": "{who} found {values} | Before {who} lay {values}",
    "sought": "At night {other} looked for {value} | Where was {value}",
    "asks": "{other} asked at night",
    "return": "Then {who} went home to {place} | Then home to {place} {who} walked",
    "go": "{who} went to {place} | {who} ran off to {place}",
    "carry": "{who} took {thing} to {place} | {who} ran to {place} with {thing}",
    "choose": "(?:She|He) took {thing} | It was {thing} that s?he took | "
    "(?:She|He) took {thing} and sent it to {friend} | So {thing} was what s?he sent to {friend}",
    "leave": "{who} left {thing} in {place} | In {place} {who} dropped {thing}",
    "send": "{who} sent {thing} to {friend} | {who} mailed {friend} {thing}",
    "look": "It was in {place} | In {place} it was",
}
"""The usual and the rare way of saying something, in the words of the shifted split."""
PATTERNS = [
    (kind, re.sub(r"{(\w+)}", r"(?P<\1>\\w+)", form).replace(r"<values>\w", "<value>.") + "[.?]")
    for kind, forms in FORMS.items()
    for form in forms.split(" | ")
]


class World:
    """What a story says, sentence by sentence."""

    def __init__(self, text):
        self.facts, self.place, self.holds, self.left, self.chooser = {}, {}, {}, {}, None
        for sentence in re.split(r"(?<=[.?]) ", text):
            assert self.tell(sentence), f"{sentence!r} contradicts {text!r}"

    def where(self, thing):
        holder = next((name for name, held in self.holds.items() if held == thing), None)
        return self.place[holder] if holder else self.left.get(thing)

    def follow(self, kind, who):
        """Return the words that may stand in each slot of an event."""
        things, places = [self.holds.get(who)], [self.facts.get(("habit", who, self.facts.get(("weather",))))]
        if kind == "choose":
            offered, liked = re.split(", | and ", self.facts["offer", who]), self.facts.get(("likes", who))
            things = [thing for thing in offered if thing == (liked or thing)]
            things = [thing for thing in things if thing != self.facts.get(("hates", who))]
        if kind == "return":
            places = [self.facts["home", who]]
        if kind == "leave":
            places = [self.place[who]]
        if kind == "look":
            places = [self.where(self.facts[("sought",)])]
        return {"thing": things, "place": places, "friend": [self.facts.get(("friend", who))]}

    def tell(self, sentence):
        """Return whether a sentence is consistent with those before; then it changes the world."""
        ((kind, said),) = [(kind, m.groupdict()) for kind, form in PATTERNS if (m := re.fullmatch(form, sentence))]
        said.pop("other", None)
        who = said.pop("who", None if "value" in said else self.chooser)
        if "value" in said:
            self.facts[(kind, *filter(None, (who, said.get("when"))))] = said["value"]
            if kind == "home":
                self.place[who] = said["value"]
            self.chooser = who if kind == "offer" else self.chooser
            return True
        allowed = self.follow(kind, who)
        if any(word not in allowed[slot] for slot, word in said.items()):
            return False
        if kind in ("return", "go", "carry"):
            self.place[who] = said["place"]
        if kind == "leave":
            self.left[self.holds.pop(who)] = said["place"]
        if kind in ("choose", "send"):
            self.holds.pop(who, None)
            self.holds[said.get("friend", who)] = said["thing"]
        return True


@pytest.mark.parametrize("task", TASKS)
def test_shipped_items_are_what_the_generator_draws(task):
    assert items(task) + examples(task) == draw_items(task)
    assert (len(items(task)), len(examples(task))) == (ITEMS, EXAMPLES)


def test_an_unknown_task_is_refused():
    with pytest.raises(HfpatchError, match="did you mean 'endings'"):
        items("ending")


def test_one_last_word_and_one_ending_are_consistent_with_the_story():
    for item in items("cloze"):
        story, _, last = item["text"].rpartition(". ")
        unfinished, _, word = last.rpartition(" ")
        kind = next(words for words in (NAMES, PLACES, OBJECTS) if word in words)
        assert [w for w in kind if World(f"{story}.").tell(f"{unfinished} {w}.")] == [word], item
    for item in items("endings"):
        right = [World(item["ctx"]).tell(ending) for ending in item["endings"]]
        assert right == [k == item["label"] for k in range(4)], item


def test_one_answer_to_each_question_is_right():
    for item in items("questions"):
        world = World(item["passage"])
        matches = [(reply, m) for form, reply in ANSWERS.items() if (m := re.fullmatch(rf"{form}\?", item["question"]))]
        ((reply, match),), choices = matches, item["choices"]
        right = [
            label
            for label, text in zip(choices["label"], choices["text"], strict=True)
            if text == reply(world, *match.groups())
        ]
        assert right == [item["answerKey"]], item
