"""How prompts are written: the chat template, the system message, few-shot examples as turns."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.evaluation import EvaluationSettings


def prompting(settings: EvaluationSettings) -> dict[str, Any]:
    """Return what lm-eval's ``evaluate`` takes of the settings to write the prompts."""
    as_turns = settings.fewshot_as_multiturn
    return {
        "apply_chat_template": settings.apply_chat_template,
        "system_instruction": settings.system_instruction,
        "fewshot_as_multiturn": bool(settings.apply_chat_template) if as_turns is None else as_turns,
        "confirm_run_unsafe_code": settings.confirm_run_unsafe_code,
    }


def template_arguments(tokenizer: PreTrainedTokenizerBase, asked: bool | str) -> dict[str, Any] | None:
    """Return what the tokenizer's ``apply_chat_template`` takes to use the template that is asked for.

    lm-eval 0.4.13 notes the name of a template in its results and applies the default one; here it is the named one.

    Args:
        tokenizer: the model's tokenizer, which has no template, one, or several by name.
        asked: a name; True is the only one or the one called ``default``, False is none.

    Raises:
        HfpatchError: if there is no such template.
    """
    templates: Any = tokenizer.chat_template
    if not asked:
        return None
    if not templates:
        raise HfpatchError("apply_chat_template: the tokenizer of this model has no chat template; leave it out")
    if isinstance(templates, str):
        if asked is not True:
            raise HfpatchError(f"apply_chat_template {asked}: the tokenizer has one template; give no name")
        return None
    name = "default" if asked is True else asked
    if name not in templates:
        raise HfpatchError(
            f"apply_chat_template: the tokenizer has no template {name!r}{nearest(name, templates)}; there are "
            f"{', '.join(sorted(templates))}"
        )
    return {"chat_template": templates[name]}
