import re
from collections import Counter
from statistics import fmean

import pytest
from tinyworld.build import EXAMPLES, draw_items

from hfpatch.errors import HfpatchError
from hfpatch.tinyworld.tasks import ITEMS, TASKS, examples, items
from hfpatch.tinyworld.world import NAMES, OBJECTS, PLACES


class Replay:
    """Reads a story sentence by sentence, by its own patterns, and judges whether a next sentence is consistent."""

    def __init__(self, text):
        self.home, self.place = {}, {}
        self.likes, self.hates, self.habit, self.friend = {}, {}, {}, {}
        self.holds, self.left, self.weather, self.offered, self.chooser, self.sought = {}, {}, None, [], None, None
        for sentence in re.split(r"(?<=[.?]) ", text):
            if not self.read_fact(sentence) and not self.read_lead(sentence):
                changes = self.outcome(sentence)
                assert changes is not None, f"not consistent or not understood: {sentence!r} in {text!r}"
                changes()

    def read_fact(self, s):
        if m := re.fullmatch(r"(\w+) lives in (\w+)\.", s):
            self.home[m[1]] = self.place[m[1]] = m[2]
        elif m := re.fullmatch(r"In (\w+) is the house of (\w+)\.", s):
            self.home[m[2]] = self.place[m[2]] = m[1]
        elif (m := re.fullmatch(r"(\w+) likes (\w+)\.", s)) or (m := re.fullmatch(r"To (\w+) (\w+) is dear\.", s)):
            self.likes[m[1]] = m[2]
        elif (m := re.fullmatch(r"(\w+) hates (\w+)\.", s)) or (m := re.fullmatch(r"To (\w+) (\w+) is a horror\.", s)):
            self.hates[m[1]] = m[2]
        elif m := re.fullmatch(r"In (\w+) (\w+) goes to (\w+)\.", s):
            self.habit[m[2], m[1]] = m[3]
        elif m := re.fullmatch(r"(\w+) makes for (\w+) in (\w+)\.", s):
            self.habit[m[1], m[3]] = m[2]
        elif m := re.fullmatch(r"(\w+) trusts (\w+)\.", s):
            self.friend[m[1]] = m[2]
        elif m := re.fullmatch(r"(\w+) is trusted by (\w+)\.", s):
            self.friend[m[2]] = m[1]
        else:
            return False
        return True

    def read_lead(self, s):
        if m := re.fullmatch(r"There was (\w+)\.|Then came (\w+)\.", s):
            self.weather = m[1] or m[2]
        elif m := re.fullmatch(r"(\w+) found (.+)\.|Before (\w+) lay (.+)\.", s):
            self.chooser, listed = m[1] or m[3], m[2] or m[4]
            self.offered = re.split(", | and ", listed)
        elif m := re.fullmatch(r"At night \w+ looked for (\w+)\.|Where was (\w+)\?", s):
            self.sought = m[1] or m[2]
        elif not re.fullmatch(r"\w+ asked at night\.", s):
            return False
        return True

    def where(self, thing):
        holder = next((name for name, held in self.holds.items() if held == thing), None)
        return self.place[holder] if holder else self.left.get(thing)

    def right_choice(self, thing):
        if self.chooser in self.likes:
            return thing == self.likes[self.chooser] and thing in self.offered
        return thing in self.offered and thing != self.hates[self.chooser]

    def outcome(self, s):
        """Return what the sentence changes as a function to call, or None where it contradicts the story."""
        if m := re.fullmatch(r"Then (\w+) went home to (\w+)\.|Then home to (\w+) (\w+) walked\.", s):
            who, place = m[1] or m[4], m[2] or m[3]
            return (lambda: self.place.update({who: place})) if self.home[who] == place else None
        if m := re.fullmatch(r"(\w+) (?:went to|ran off to) (\w+)\.", s):
            consistent = m[1] not in self.holds and self.habit.get((m[1], self.weather)) == m[2]
            return (lambda: self.place.update({m[1]: m[2]})) if consistent else None
        if m := re.fullmatch(r"(\w+) took (\w+) to (\w+)\.", s):
            return self.carry(m[1], m[2], m[3])
        if m := re.fullmatch(r"(\w+) ran to (\w+) with (\w+)\.", s):
            return self.carry(m[1], m[3], m[2])
        if m := re.fullmatch(r"(?:She|He) took (\w+) and sent it to (\w+)\.", s):
            return self.choose_and_send(m[1], m[2])
        if m := re.fullmatch(r"So (\w+) was what (?:she|he) sent to (\w+)\.", s):
            return self.choose_and_send(m[1], m[2])
        if m := re.fullmatch(r"(?:She|He) took (\w+)\.|It was (\w+) that (?:she|he) took\.", s):
            thing = m[1] or m[2]
            return (lambda: self.holds.update({self.chooser: thing})) if self.right_choice(thing) else None
        if m := re.fullmatch(r"(\w+) left (\w+) in (\w+)\.", s):
            return self.leave(m[1], m[2], m[3])
        if m := re.fullmatch(r"In (\w+) (\w+) dropped (\w+)\.", s):
            return self.leave(m[2], m[3], m[1])
        if m := re.fullmatch(r"(\w+) sent (\w+) to (\w+)\.", s):
            return self.send(m[1], m[2], m[3])
        if m := re.fullmatch(r"(\w+) mailed (\w+) (\w+)\.", s):
            return self.send(m[1], m[3], m[2])
        if m := re.fullmatch(r"It was in (\w+)\.|In (\w+) it was\.", s):
            return (lambda: None) if self.where(self.sought) == (m[1] or m[2]) else None
        return None

    def carry(self, who, thing, place):
        consistent = self.holds.get(who) == thing and self.habit.get((who, self.weather)) == place
        return (lambda: self.place.update({who: place})) if consistent else None

    def choose_and_send(self, thing, friend):
        consistent = self.right_choice(thing) and self.friend.get(self.chooser) == friend
        return (lambda: self.holds.update({friend: thing})) if consistent else None

    def leave(self, who, thing, place):
        consistent = self.holds.get(who) == thing and self.place[who] == place
        return (lambda: self.left.update({self.holds.pop(who): place})) if consistent else None

    def send(self, who, thing, friend):
        consistent = self.holds.get(who) == thing and self.friend.get(who) == friend
        return (lambda: self.holds.update({friend: self.holds.pop(who)})) if consistent else None

    def answer(self, question):
        if m := re.fullmatch(r"Where does (\w+) live\?", question):
            return f"in {self.home[m[1]]}"
        if m := re.fullmatch(r"What does (\w+) like\?", question):
            return self.likes[m[1]]
        if m := re.fullmatch(r"What does (\w+) have\?", question):
            return self.holds[m[1]]
        if m := re.fullmatch(r"Where does (\w+) go in (\w+)\?", question):
            return f"to {self.habit[m[1], m[2]]}"
        if m := re.fullmatch(r"Where is (\w+)\?", question):
            return f"in {self.where(m[1])}"
        if m := re.fullmatch(r"Who has (\w+)\?", question):
            return next(name for name, held in self.holds.items() if held == m[1])
        raise AssertionError(question)


@pytest.mark.parametrize("task", TASKS)
def test_shipped_items_are_what_the_generator_draws(task):
    assert items(task) + examples(task) == draw_items(task)
    assert (len(items(task)), len(examples(task))) == (ITEMS, EXAMPLES)


@pytest.mark.parametrize("task", TASKS)
def test_items_differ_from_one_another(task):
    everything = [str(item) for item in items(task) + examples(task)]
    assert len(set(everything)) == len(everything)


def test_cloze_has_exactly_one_right_word():
    for item in items("cloze"):
        *story, last = re.split(r"(?<=[.?]) ", item["text"])
        unfinished, word = last.rsplit(" ", 1)
        replay = Replay(" ".join(story))
        kind = next(words for words in (NAMES, PLACES, OBJECTS) if word in words)
        right = [w for w in kind if replay.outcome(f"{unfinished} {w}.") is not None]
        assert right == [word], item


def test_endings_have_exactly_one_consistent_with_the_story():
    for item in items("endings"):
        replay = Replay(item["ctx"])
        consistent = [replay.outcome(ending) is not None for ending in item["endings"]]
        assert consistent == [k == item["label"] for k in range(4)], item


def test_questions_have_exactly_one_right_answer():
    for item in items("questions"):
        right = Replay(item["passage"]).answer(item["question"])
        texts = item["choices"]["text"]
        assert len(set(texts)) == 4
        assert texts[item["choices"]["label"].index(item["answerKey"])] == right, item


def test_right_answers_stand_in_every_place_equally_often():
    labels = {
        "endings": Counter(item["label"] for item in items("endings")),
        "questions": Counter(item["answerKey"] for item in items("questions")),
    }
    for task, counts in labels.items():
        assert len(counts) == 4
        chi_squared = sum((n - ITEMS / 4) ** 2 / (ITEMS / 4) for n in counts.values())
        assert chi_squared < 16.3, (task, counts)  # 0.001 with 3 degrees of freedom


def share_of_firsts(rows, best):
    """The share of (values, label) whose first best value is at the label."""
    return fmean(values.index(best(values)) == label for values, label in rows)


@pytest.mark.parametrize("best", [min, max])
def test_length_does_not_betray_the_right_ending(best):
    endings = [(list(map(len, i["endings"])), i["label"]) for i in items("endings")]
    choices = [(list(map(len, i["choices"]["text"])), "ABCD".index(i["answerKey"])) for i in items("questions")]
    assert 0.15 < share_of_firsts(endings, best) < 0.4
    assert 0.15 < share_of_firsts(choices, best) < 0.4


@pytest.mark.parametrize("best", [min, max])
def test_how_often_the_story_names_the_words_does_not_solve_the_endings(best):
    def named(item, ending):
        story = re.findall(r"\w+", item["ctx"])
        return sum(story.count(word) for word in re.findall(r"\w+", ending) if word in NAMES + PLACES + OBJECTS)

    rows = [([named(item, ending) for ending in item["endings"]], item["label"]) for item in items("endings")]
    assert share_of_firsts(rows, best) < 0.5


def test_last_words_are_spread():
    words = Counter(item["text"].split()[-1] for item in items("cloze"))
    assert len(words) > 30
    assert words.most_common(1)[0][1] < 0.1 * ITEMS
    with pytest.raises(HfpatchError, match="did you mean 'endings'"):
        items("ending")
