import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfpatch.errors import HfpatchError
from hfpatch.tinyworld.language import DOCUMENTS, document, documents, draw_story
from hfpatch.tinyworld.tasks import TASKS, items

SPLITS = st.sampled_from(["base", "shifted"])


@given(SPLITS, st.integers(0, 2**32), st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_a_seed_gives_the_same_text_and_another_one_another(split, seed, start):
    whole = list(documents(split, count=start + 2, seed=seed))
    assert whole == list(documents(split, count=start + 2, seed=seed))
    assert whole[start] == document(split, "train", seed, start)
    assert not set(whole) & set(documents(split, count=start + 2, seed=seed + 1))


def test_text_does_not_depend_on_the_process_and_importing_it_is_light():
    code = (
        "import sys; from hfpatch.tinyworld import documents; print('\\n'.join(documents('shifted', count=20, seed=3)))"
    )
    code += "; print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [*"\n".join(documents("shifted", count=20, seed=3)).splitlines(), "[]"]


@pytest.mark.parametrize("split", ["base", "shifted"])
def test_number_of_documents(split):
    assert sum(1 for _ in documents(split)) == DOCUMENTS
    assert list(documents(split, count=0)) == []


@given(SPLITS, st.integers(0, 2**32), st.sampled_from(["train", "eval"]))
@settings(max_examples=30, deadline=None)
def test_an_opening_belongs_to_training_or_to_evaluation(split, seed, use):
    opening = draw_story(split, use, seed, 0)[0].opening
    assert (hashlib.sha256(opening.encode()).digest()[0] % 16 == 0) is (use == "eval")


def test_no_evaluation_text_occurs_in_training_text():
    training = "\n".join(text for split in ("base", "shifted") for text in documents(split, count=3000))
    openings = [draw_story("shifted", "eval", TASKS.index("text"), index)[0].opening for index in range(100)]
    assert not [opening for opening in openings if opening in training]
    for task, key in (("text", "text"), ("cloze", "text"), ("endings", "ctx"), ("questions", "passage")):
        assert not [item for item in items(task) if item[key] in training]


def test_the_splits_differ_in_words_and_order():
    base, shifted = (" ".join(documents(split, count=500)) for split in ("base", "shifted"))
    for usual, rare in (("likes", "dear"), ("left", "dropped"), ("looked", "asked"), ("Anna", "Paul")):
        assert base.count(usual) > 1.5 * base.count(rare) > 0
        assert shifted.count(rare) > 1.5 * shifted.count(usual) > 0
    with pytest.raises(HfpatchError, match="did you mean 'shifted'"):
        documents("shift")
