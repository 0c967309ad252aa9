"""lm-eval's way of writing the options of ``eval``."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from typer.core import TyperCommand

from hfpatch.errors import HfpatchError

_SEVERAL = ("--tasks", "-t", "--model-args", "-a", "--gen-kwargs")
_OPTIONAL = ("--apply-chat-template", "--fewshot-as-multiturn")
_CALLED = {"--output-path": "--output"}
_WHOLE = "hfpatch lm_eval runs lm-eval's own command, which has it"
REFUSED = {
    "--cache-requests": "requests are built again each time",
    "--check-integrity": _WHOLE,
    "--config": "give the options one by one, or a recipe to hfpatch compare",
    "--hf-hub-log-args": _WHOLE,
    "--max-batch-size": "--token-budget bounds the memory of scoring, --batch-size that of generation",
    "--metadata": _WHOLE,
    "--predict-only": "the samples of --log-samples have the responses, and the metrics too",
    "--samples": "--limit takes the first documents",
    "--show-config": "results.json has the settings, and the files of --log-samples each task's configuration",
    "--trackio-args": _WHOLE,
    "--use-cache": "answers are kept without it, see --cache and --output",
    "--verbosity": "set LMEVAL_LOG_LEVEL in the environment",
    "--wandb-args": _WHOLE,
    "--wandb-config-args": _WHOLE,
    "--write-out": "the samples of --log-samples have each prompt",
}
"""Options of lm-eval 0.4.13 that ``eval`` does not have, each with the alternative."""


class EvalCommand(TyperCommand):
    """A command whose options may be written as lm-eval's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; an option that only lm-eval has is an error of one line."""
        return list(super().parse_args(ctx, as_hfpatch(args)))


def as_hfpatch(words: Sequence[str]) -> list[str]:
    """Return the words of a command with hfpatch's names of options, and one value after each option that takes one."""
    found: list[str] = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            name = _CALLED.get(name, name)
        if name in REFUSED:
            raise HfpatchError(f"{name}: hfpatch eval has no such option; {REFUSED[name]}")
        found.append(f"{name}{equals}{value}")
        if equals or name not in _SEVERAL + _OPTIONAL:
            continue
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
        if name in _OPTIONAL:
            found.append(values[0] if values else "true")
            del rest[: min(1, len(values))]
        elif values:
            found.append(",".join(value.strip(",") for value in values))
            del rest[: len(values)]
    return found


def read_arguments(text: str | None, option: str, *, names: Collection[str] = ()) -> dict[str, Any]:
    """Return lm-eval's ``key=value,key=value``, or a JSON object, with values of the types that they show.

    ``names`` are keys whose values stay text where they look like numbers: ``revision=1.10``.
    """
    text = (text or "").strip()
    if text.startswith("{"):
        try:
            found: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise HfpatchError(f"{option}: not valid JSON ({error.msg}); put names in double quotes") from None
        return found

    # The parts between commas outside of brackets and quotes
    pairs, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        depth = max(0, depth + (0 if quote else (char in "[({") - (char in "])}")))
        if char == "," and depth == 0 and not quote:
            pairs.append("")
        else:
            pairs[-1] += char

    found = {}
    for pair in filter(str.strip, pairs):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise HfpatchError(f"{option} {pair}: write it as key=value, with commas between several")
        if key.strip() in found:
            raise HfpatchError(f"{option} {pair}: {key.strip()} is given twice")
        read: Any = value.strip()
        if read.lower() in ("true", "false"):
            read = read.lower() == "true"
        else:
            # All that literal_eval may raise; the value is text then
            with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                read = ast.literal_eval(read)
        is_number = isinstance(read, int | float) and not isinstance(read, bool)
        found[key.strip()] = value.strip() if is_number and key.strip() in names else read
    return found
