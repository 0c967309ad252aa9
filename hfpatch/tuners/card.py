"""What the card of an adapter says about loading it, whoever writes the adapter: PEFT, a trainer or hfpatch."""

from __future__ import annotations

from pathlib import Path

_FRONT = "---\nlibrary_name: peft\ntags: [hfpatch]\n---\n\n# PEFT adapter of hfpatch\n"
_OURS = (
    "The method is one of hfpatch, which registers it with PEFT: `pip install hfpatch`, and import it before loading."
)
_THEIRS = """\
The method is defined in the module `{module}`, with hfpatch, which registers it with PEFT: install both, and import the
module before loading."""
_HOW_TO_LOAD = """
## How to load this adapter

{about}

    import {module}
    from peft import PeftModel

    model = PeftModel.from_pretrained(base_model, "this folder")
"""


def describe_loading(card: Path, module: str | None = None) -> None:
    """Add to the card what to import before loading, if it does not say so; write the card if there is none.

    Args:
        card: the file.
        module: the module of the method's class; None if it is one of hfpatch.
    """
    text = card.read_text(encoding="utf-8") if card.is_file() else _FRONT
    needed = module or "hfpatch"
    if f"import {needed}" not in text:
        about = _THEIRS.format(module=module) if module else _OURS
        card.write_text(f"{text.rstrip()}\n{_HOW_TO_LOAD.format(about=about, module=needed)}", encoding="utf-8")
