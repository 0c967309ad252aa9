"""The command that hands over to lm-eval: ``lm_eval``."""

from __future__ import annotations

import typer

ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose arguments, ``--help`` among them, belong to another program."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command, which then knows `--model hfpatch`; all arguments are lm-eval's.

    Example: hfpatch lm_eval --model hfpatch --model_args pretrained=ID,patch=DIR --tasks lambada_openai
    """
    from hfpatch.evaluation.harness import run_lm_eval

    run_lm_eval(context.args)
