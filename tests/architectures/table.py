"""Write docs/architectures.md from the sweep, or read it: ``python -m architectures.table``.

With names of further methods it tries these alone and leaves the rest of the page as it is.
"""

import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from architectures import sweep, together
from architectures.catalogue import CASES, NOT_TRIED, TYPES, WITHOUT_ATTENTION, options_of
from architectures.further import FURTHER, check
from architectures.places import place_of

FILE = Path(__file__).parents[2] / "docs" / "architectures.md"
COLUMNS = ("type", "attention modules, in blocks", *sweep.METHODS, *sweep.CONTROLS, "all together", "export", "why not")

HEADER = """# Architectures

What hfpatch does on each of the {types} causal language model types of transformers {transformers}.

`make architectures` writes this page. It builds a tiny random model of every type (`type/what` is one more
configuration of it), patches it, and compares what it computes with the methods' formulas, applied to an unpatched
model by other means.

- **attention modules, in blocks**: how many softmax self-attentions there are and how many of the blocks hold them; the
  other blocks are skipped. Cross-attention is left alone, as are [other towers](#other-models) that are not named.
- **{methods}**: `yes` says that the default initialisation changes
  no bit of the logits; that with every added tensor perturbed the logits equal the formula's to 1e-4, and the gradients
  of every added tensor to 1e-3, and no other tensor receives one; that later tokens act on no earlier ones; that
  `unpatch` restores the model. And that a pre-projection is invisible once the attention's output projection is
  silenced, that x~·W_skip arrives in the residual stream as it is, and that a nonlinear query or a temperature changes
  the query alone. `refused` says that `patch` raises an error and leaves the model as it was.
- **{controls}**: `yes` says the same of init and formula; `folds` that `hfpatch.fold` puts the linear
  pre-projection into the weights, so that the stock model computes the formula. Where it `does not fold`, something
  besides the projections reads the hidden state, or a weight is shared or no plain matrix; the error says which.
- **all together**: what holds of all possible methods at once: a saved patch loads to equal logits; generation with and
  without key/value cache agree.
- **export**: `yes` says that a process in which neither hfpatch nor PEFT can be imported loads the
  [exported](export.md) model of all possible methods at once and computes the same: logits bit for bit; gradients of
  every part and the logits of new tokens, with a cache, to rounding. `-`: there is no patch to export.

Types whose pre-projection works: {totals[0]}; content skip: {totals[1]}; nonlinear query: {totals[2]}; query
temperature: {totals[3]}; linear pre-projections that fold: {folding}; exports: {exports}.

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


HEADING = "## Further methods"
ABOUT = f"""{HEADING}

The same for the methods beside the papers' own: the default initialisation changes no bit of the logits; with every
added tensor perturbed, logits and gradients are the formula's; `unpatch` restores the model; and what is changed as the
residual stream is what the next block reads. Each works on the types above that have attention modules, but for those
that are listed here.

"""


def counted(rows, method):
    """How many types, their default configuration, can take a method."""
    return sum(row[method] == "yes" or "layers" in row[method] for row in rows if row["type"] in TYPES)


def row_of(case, cells):
    """Return one row: everything that is said of a case."""
    reasons = {**place_of(case).refused, **place_of(case).refused_in_some}
    why = "; ".join(f"{method}: {reason}" if method != "all" else reason for method, reason in reasons.items())
    return dict(zip(COLUMNS, (case, *cells, why), strict=True))


def all_rows():
    """Run the whole sweep, with a line of progress on each case."""
    rows = rows_without_cases()
    for case in CASES:
        cells = [sweep.failing(sweep.check, case, method) for method in sweep.METHODS]
        cells += [sweep.failing(sweep.check_control, case, control) for control in sweep.CONTROLS]
        if set(cells) == {"refused"}:
            sites, last = "-", "-"
        else:
            sites = sweep.failing(sweep.finds_the_sites, case)
            with tempfile.TemporaryDirectory() as folder:
                last = sweep.failing(together.promises, case, Path(folder))
        rows.append(row_of(case, [sites, *cells, *((last, last) if isinstance(last, str) else last)]))
        print(case, *(rows[-1][method] for method in sweep.METHODS), sep="  ", file=sys.stderr)
    return sorted(rows, key=lambda row: row["type"])


def rows_without_cases():
    """Return the rows of the types that have no attention and of those that are not tried."""
    every = (*sweep.METHODS, *sweep.CONTROLS)
    refused, unknown = ("-", *("refused" for _ in every), "-", "-"), "-" * (len(COLUMNS) - 2)
    lines = [(kind, *refused, why) for kind, why in WITHOUT_ATTENTION.items()]
    lines += [(kind, *unknown, f"not tried: {why}") for kind, why in NOT_TRIED.items()]
    return [dict(zip(COLUMNS, line, strict=True)) for line in lines]


def other_section():
    """Return the section on models that are no causal language models."""
    lines = [f"- {kind}: {', '.join(f'`{name}`' for name in names)}" for kind, names in KINDS.items()]
    return ABOUT_OTHERS + "\n".join(lines) + "\n" + AFTER_OTHERS


def further_section(words_of):
    """Return the section: a list item for each method, and in it one for each word but ``yes``."""
    lines = []
    for name, words in words_of.items():
        works = sum(not word.startswith(("refused", "FAILS")) for case, word in words.items() if case in TYPES)
        lines.append(f"- **{name}**: works on {works} types")
        by_word = {}
        for case, word in words.items():
            by_word.setdefault(word, []).append(f"`{case}`")
        lines += [f"    - {', '.join(by_word[word])}: {word}" for word in sorted(by_word) if word != "yes"]
    return ABOUT + "\n".join(lines) + "\n"


def written(rows, further):
    """Return the page.

    Args:
        rows: of the table.
        further: of each further method its word on each case.
    """
    header = HEADER.format(
        types=len(TYPES),
        transformers=version("transformers"),
        methods="**, **".join(sweep.METHODS),
        controls="**, **".join(sweep.CONTROLS),
        folding=sum(row[sweep.CONTROLS[1]].endswith(" folds") for row in rows if row["type"] in TYPES),
        exports=sum(row["export"] == "yes" for row in rows if row["type"] in TYPES),
        totals=[counted(rows, method) for method in sweep.METHODS],
    )
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(row.values()) for row in rows]
    more = [f"- `{case}`: `{options_of(case)}`" for case in CASES if "/" in case]
    table = "\n".join(f"| {line} |" for line in lines)
    options = "The options of the further configurations:\n\n" + "\n".join(more)
    return f"{header}{table}\n\n{options}\n\n{other_section()}\n{further_section(further)}"


def read():
    """Return the rows of the committed page by type."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [dict(zip(COLUMNS, line.removeprefix("| ").removesuffix(" |").split(" | "), strict=True)) for line in lines]
    return {row["type"]: row for row in rows[2:]}


def further():
    """Return what the committed page says of each further method: its word on each case."""
    page, words_of = FILE.read_text(encoding="utf-8") if FILE.exists() else "", {}
    for line in page.partition(HEADING)[2].splitlines():
        if method := re.match(r"- \*\*(.+)\*\*: ", line):
            words = words_of[method[1]] = dict.fromkeys(CASES, "yes")
        elif item := re.match(r"    - (`[^:]+`): (.+)", line):
            words |= dict.fromkeys(re.findall(r"`([^`]+)`", item[1]), item[2])
    return words_of


def main(names):
    """Write the page, all of it or what it says of some further methods; the exit code says whether something fails."""
    FILE.parent.mkdir(exist_ok=True)
    rows = list(read().values()) if names else all_rows()  # the committed rows where some methods alone are tried
    names = names or list(FURTHER)
    words_of = further() | {name: {} for name in names}
    for case in CASES:
        for name in names:
            words_of[name][case] = sweep.failing(check, case, name)
        print(case, *(words_of[name][case] for name in names), sep="  ", file=sys.stderr)
    page = written(rows, {name: words_of[name] for name in FURTHER if name in words_of})
    FILE.write_text(page, encoding="utf-8")
    return int("FAILS" in page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
