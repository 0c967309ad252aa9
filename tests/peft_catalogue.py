"""What PEFT's tuners promise, for every method; ``python -m peft_catalogue`` writes its tables to docs/reference."""

import copy
import dataclasses
import functools
import itertools
import re
import sys
from pathlib import Path

import torch
from families import make_config, make_tokens
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hfpatch import LoReFTConfig, NonlinearLoraConfig, NonlinearQueryConfig, PreProjectionConfig, methods
from hfpatch.promises.catalogue import CATALOGUE, REFUSABLE, Base, Broken, kept
from hfpatch.promises.common import moved

FILE = Path(__file__).parents[1] / "docs" / "reference" / "peft-features.md"
CASES = {  # as the page calls it -> configuration; every method of hfpatch with its defaults, LoRA to compare with
    "LoraConfig()": LoraConfig(r=2, init_lora_weights=True),
    **{f"{name}()": getattr(methods, name)() for name in methods.__all__},
    'PreProjectionConfig(activation="identity")': PreProjectionConfig(activation="identity"),
    "PreProjectionConfig(content_skip=True)": PreProjectionConfig(content_skip=True),
    'NonlinearLoraConfig(activation="identity")': NonlinearLoraConfig(activation="identity"),
    'NonlinearQueryConfig(activation="identity", input_norm="none", output_norm="none")': NonlinearQueryConfig(
        activation="identity", input_norm="none", output_norm="none"
    ),
    'LoReFTConfig(at="branch")': LoReFTConfig(at="branch"),
}
MUST = [name for name in CATALOGUE if name not in REFUSABLE]
SECOND = "a second adapter"
FEATURES = {  # what a configuration may ask for beside its adapter; SECOND is the model's
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": sorted({*make_tokens()[0, :2].tolist()})}},
    "chosen modules": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    SECOND: {},
}
PAIRS = [
    *itertools.combinations(FEATURES, 1),
    *reversed([*itertools.combinations(FEATURES, 2)]),
    tuple(FEATURES),
]
OF_PEFT = {("dtypes", "modules_to_save")}  # PEFT trains copies of modules in the base's dtype, whatever the method
ALONE = ("configuration", "init_weights", "mixed types", "as LoRA", "weights")  # entries that make a model of their own


@functools.cache
def base():
    """Return a tiny Llama of three layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=3))
    return Base(model.eval(), {"input_ids": make_tokens()})


@dataclasses.dataclass(frozen=True)
class WithSecond(Base):
    """A base whose models have an inactive adapter too."""

    def wrapped(self, config, **options):
        model = super().wrapped(config, **options)
        model.add_adapter("idle", copy.deepcopy(config), **options)
        return moved(model, 0.3, seed=2).eval()


def beside(features):
    """Return the entries to try beside features."""
    apart = {name for name, feature in OF_PEFT if feature in features}
    return [name for name in CATALOGUE if name not in (*features, *ALONE, *apart)]


def outcome(case, features, name):
    """Return whether an entry holds beside features: "yes", "no" where it is refused, or how it is broken."""
    options = {option: value for feature in features for option, value in FEATURES[feature].items()}
    kind = WithSecond if SECOND in features else Base
    try:
        config = dataclasses.replace(copy.deepcopy(CASES[case]), **options)
        return "no" if kept(kind(base().model, base().inputs), config, name) else "yes"
    except (Broken, KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@functools.cache
def cell(case, name):
    """Return what the page says of an entry and a configuration."""
    why = kept(base(), CASES[case], name)
    if why is None:
        return "yes"
    reason = re.search(r"into the weights: (.*?)[;(]|(no bias)", why)
    return f"no: {(reason[1] or reason[2]).strip()}" if reason else "no"


def tables(cells):
    """Return the tables: what the entries are, and what each configuration refuses."""
    promises = [[name, " ".join(CATALOGUE[name].__doc__.split()).replace("``", "`")] for name in CATALOGUE]
    rows = [[f"`{case}`", *(cells[case, name] for name in REFUSABLE)] for case in CASES]
    texts = []
    for head, body in ((["feature", "test"], promises), (["configuration", *REFUSABLE], rows)):
        lines = [head, ["---"] * len(head), *body]
        texts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return texts


def page(cells):
    """Return the page with its tables."""
    text = FILE.read_text(encoding="utf-8")
    for name, table in zip(("promises", "refusals"), tables(cells), strict=True):
        before, rest = text.split(f"<!-- {name} -->\n", 1)
        text = f"{before}<!-- {name} -->\n\n{table}\n\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return text


def main():
    """Write the page."""
    cells = {(case, name): cell(case, name) for case in CASES for name in CATALOGUE}
    assert all(cells[case, name] == "yes" for case in CASES for name in MUST)
    FILE.write_text(page(cells), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
