"""The section of docs/architectures.md on the further methods: on which types each works, and why not on the others."""

import re
import sys

from architectures import sweep
from architectures.catalogue import CASES, TYPES
from architectures.further import check

HEADING = "## Further methods"
ABOUT = f"""{HEADING}

The same for the methods beside the papers' own: the default initialisation changes no bit of the logits; with every
added tensor perturbed, logits and gradients are the formula's; `unpatch` restores the model; and what is changed as the
residual stream is what the next block reads. Each works on the types above that have attention modules, but for those
that are listed here.

"""


def tried(names):
    """Return for each method its word on each case, with a line of progress on each case."""
    found = {name: {} for name in names}
    for case in CASES:
        for name in names:
            found[name][case] = sweep.failing(check, case, name)
        print(case, *(found[name][case] for name in names), sep="  ", file=sys.stderr)
    return found


def section(found):
    """Return the section: a list item for each method, and in it one for each word but ``yes``."""
    lines = []
    for name, words in found.items():
        works = sum(not word.startswith(("refused", "FAILS")) for case, word in words.items() if case in TYPES)
        lines.append(f"- **{name}**: works on {works} types")
        by_word = {}
        for case, word in words.items():
            by_word.setdefault(word, []).append(f"`{case}`")
        lines += [f"    - {', '.join(by_word[word])}: {word}" for word in sorted(by_word) if word != "yes"]
    return ABOUT + "\n".join(lines) + "\n"


def read(page):
    """Return what the text of the page says of each method: its word on each case."""
    found = {}
    for line in page.partition(HEADING)[2].splitlines():
        if method := re.match(r"- \*\*(.+)\*\*: ", line):
            words = found[method[1]] = dict.fromkeys(CASES, "yes")
        elif item := re.match(r"    - (`[^:]+`): (.+)", line):
            words |= dict.fromkeys(re.findall(r"`([^`]+)`", item[1]), item[2])
    return found
