"""Write docs/architectures.md from the sweep, or read it: ``python -m architectures.table``.

With names of checks it runs these alone and leaves the rest of the page as it is.
"""

import re
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

from architectures import further, sweep, together
from architectures.catalogue import CASES, NOT_TRIED, TYPES, WITHOUT_ATTENTION, options_of

FILE = Path(__file__).parents[2] / "docs" / "architectures.md"


def promises(case):
    with tempfile.TemporaryDirectory() as folder:
        return together.promises(case, Path(folder))


# Each returns for a case ``yes``, or the words that the page has for it
CHECKS = {
    "attention": sweep.finds_the_sites,
    **{method: partial(sweep.check, method=method) for method in sweep.METHODS},
    **{control: partial(sweep.check_control, control=control) for control in sweep.CONTROLS},
    **{method: partial(further.check, name=method) for method in further.FURTHER},
    "all together": promises,
}
REFUSED = {case: why for case in CASES if (why := sweep.refusal(case, "all"))}  # whatever the method

HEADER = """# Architectures

What hfpatch does on each of the {types} causal language model types of transformers {transformers}.

`make architectures` writes this page. It builds a tiny random model of every type, patches it, and compares what it
computes with the methods' formulas, applied to an unpatched model by other means. A method works on a type if

- the default initialisation changes no bit of the logits;
- with every added tensor perturbed, the logits equal the formula's to 1e-4 and the gradients of every added tensor to
  1e-3, no other tensor receives one, and later tokens act on no earlier ones;
- a pre-projection is invisible once the attention's output projection is silenced, x~·W_skip arrives in the residual
  stream as it is, a nonlinear query or a temperature changes the query alone, and what is changed as the residual
  stream is what the next block reads;
- `unpatch` restores the model.

Where it is *refused*, `patch` raises an error and leaves the model as it was.

## Types

`type/what` is one more configuration of a type. The methods work on these types, but for those [listed by
method](#methods):

{cases}

Their options: {options}.

Refused:

{refused}

Not tried:

{untried}

"""

METHODS = """## Methods

Blocks without softmax attention are skipped; cross-attention is left alone, as are [other towers](#other-models) that
are not named. `fold` puts a linear pre-projection into the weights, so that the stock model computes the formula. It
does not where something besides the projections reads the hidden state, or a weight is shared or no plain matrix.
*All together* means that with all methods of the papers at once a saved patch loads to equal logits, generation with
and without key/value cache agrees, and an [export](export.md) computes the same in a process without hfpatch and PEFT:
logits bit for bit; gradients of every part, and logits of new tokens with a cache, to rounding.

"""


OTHER = "## Other models"
KINDS = {
    "encoders": ("distilbert", "electra", "mpnet", "albert", "modernbert", "deberta", "deberta-v2", "esmc"),
    "encoders of encoder-decoders": ("bart", "marian", "t5", "whisper"),
    "speech": ("wav2vec2", "hubert", "mimi_encoder"),
    "vision": ("vit", "deit", "beit", "dinov2", "dinov3_vit", "siglip_vision_model"),
    "text and images side by side": ("clip",),
    "vision towers of language models": ("llava", "gemma3", "qwen2_vl"),
    "time series": ("patchtst", "timesfm"),
}
ABOUT_OTHERS = f"""{OTHER}

Beside causal language models, adapters reach every tower whose self-attention has query, key and value projections that
read one hidden state: encoders, encoder-decoders, vision, speech and time series. `target_modules` names a tower's
attentions by their paths; None is the language model or, in a model without one, every tower. The summary and one line
of the log say what is left out. On these types, pre-projection, content skip and nonlinear query are compared with the
formulas at places that are written down by hand from the modelling sources (`tests/architectures/others.py`):

"""
AFTER_OTHERS = """
Refused in one line: the skip, where the block rearranges the branch or multiplies it elementwise before it joins the
residual stream (Swin, the windows of SAM, InternVL's vision tower); the nonlinear query of DeBERTa, whose relative
positions pass its query projection, and of WavLM, whose projections are never called; every method, where attention
reads several inputs (cross-attention, MobileBERT, the merged attention of T5Gemma 2) or positions are added to what
queries and keys read (DETR). Convolutional models have no attention. Recipes, lm-eval and `hfpatch pretrain` take
causal models alone.
"""


def other_section():
    """Return the section on models that are no causal language models."""
    lines = [f"- {kind}: {', '.join(f'`{name}`' for name in names)}" for kind, names in KINDS.items()]
    return ABOUT_OTHERS + "\n".join(lines) + "\n" + AFTER_OTHERS


def works(words):
    """Return on how many types, in their default configuration, a method works."""
    return sum(not word.startswith(("refused", "FAILS")) for case, word in words.items() if case in TYPES)


def by_reason(words):
    """Return a list item for each word, with its cases."""
    return [
        f"- {', '.join(f'`{case}`' for case, said in words.items() if said == word)}: {word}"
        for word in sorted(set(words.values()))
    ]


def methods_section(words_of):
    """Return the section with an item for each check, and one for each word but ``yes``, with its checks."""
    lines, exceptions = [], {}
    for name, words in words_of.items():
        counted = "one in every block" if name == "attention" else f"works on {works(words)} types"
        if name == "linear pre-projection":
            counted += f", folds on {works({case: w for case, w in words.items() if 'does not fold' not in w})}"
        lines.append(f"- **{name}**: {counted}")
        others = {case: word for case, word in words.items() if word != "yes" and case not in REFUSED}
        for item in by_reason(others):
            exceptions.setdefault(item, []).append(name)
    lines += ["", "Exceptions, with the items of this list that they belong to:", ""]
    lines += [f"{item} ({', '.join(f'*{name}*' for name in names)})" for item, names in exceptions.items()]
    return METHODS + "\n".join(lines) + "\n"


def written(words_of):
    """Return the page; ``words_of`` has of each check its word on each case."""
    header = HEADER.format(
        types=len(TYPES),
        transformers=version("transformers"),
        cases=", ".join(f"`{case}`" for case in CASES if case not in REFUSED),
        options=", ".join(f"`{case}`: `{options_of(case)}`" for case in CASES if "/" in case),
        refused="\n".join(by_reason(WITHOUT_ATTENTION | REFUSED)),
        untried="\n".join(by_reason(NOT_TRIED)),
    )
    return f"{header}{methods_section(words_of)}\n{other_section()}"


def read():
    """Return what the committed page says of each check: its word on each case."""
    page, words_of = FILE.read_text(encoding="utf-8") if FILE.exists() else "", {}
    types, _, methods = page.partition("## Methods")
    cases = [case for case in CASES if f"`{case}`" in types]  # newer versions of transformers have more
    for line in methods.partition(OTHER)[0].splitlines():
        if name := re.match(r"- \*\*(.+)\*\*: ", line):
            words = words_of[name[1]] = dict.fromkeys(cases, "yes")
            words |= {case: f"refused: {why}" for case, why in REFUSED.items()}
        elif item := re.match(r"- (`[^:]+`): (.+) \((\*.+\*)\)", line):
            for name in re.findall(r"\*([^*]+)\*", item[3]):
                words_of[name] |= dict.fromkeys(re.findall(r"`([^`]+)`", item[1]), item[2])
    return words_of


def main(names):
    """Write the page, all of it or what it says of some checks; the exit code says whether something fails."""
    names = names or list(CHECKS)
    words_of = read() | {name: {} for name in names}
    for case in (case for case in CASES if case not in REFUSED):
        for name in names:
            words_of[name][case] = sweep.failing(CHECKS[name], case)
        print(case, *(words_of[name][case] for name in names), sep="  ", file=sys.stderr)
    page = written({name: words_of[name] for name in CHECKS if name in words_of})
    FILE.write_text(page, encoding="utf-8")
    return int("FAILS" in page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
