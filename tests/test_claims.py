"""Claims about methods in the pages are verdicts of the committed results.

A claim is a comment behind its sentence, ``RUN: METHOD < OTHER, METHOD ? OTHER on TASK``: worse, undecided, with ``>``
better, with ``=`` equivalent or kept, with ``/`` not tested.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from hfpatch import load_results

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "results/README.md",
    "docs/what-a-real-model-shows.md",
    *(f"docs/methods/{path.name}" for path in sorted((ROOT / "docs" / "methods").glob("*.md"))),
)
MEANING = {"<": "worse", "=": "same", ">": "better", "?": "undecided", "/": "not tested"}
CLAIM = re.compile(r"<!-- ([\w-]+): (.+?)\s+on\s+([\w ]+?)\s*-->", re.DOTALL)


@cache
def verdicts_of(run):
    return load_results(ROOT / "results" / run, kind=None).verdicts


def claims():
    for page in PAGES:
        for run, pairs, task in CLAIM.findall((ROOT / page).read_text(encoding="utf-8")):
            for pair in pairs.split(","):
                yield pytest.param(run, *pair.split(), task, id=f"{page}: {run} {' '.join(pair.split())} {task}")


@pytest.mark.parametrize(("run", "method", "sign", "other", "task"), list(claims()))
def test_a_claim_is_a_verdict(run, method, sign, other, task):
    asked = (method, other, task)
    tones = {pair.tone for pair in verdicts_of(run) if (pair.method, pair.other, pair.task) == asked}
    assert tones == {MEANING[sign]}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_marks_its_claims(page):
    """A paragraph or list item that says "worse" or "better than" of methods has a claim."""
    text = (ROOT / page).read_text(encoding="utf-8")
    items = re.split(r"\n\n|\n(?=\d+\. |- )", text)
    for item in items:
        if re.search(r"\b(worse|better) than\b", CLAIM.sub("", item)):
            assert CLAIM.search(item), item
