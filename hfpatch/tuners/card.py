"""What the card of an adapter says about loading it, whoever writes the adapter: PEFT, a trainer or hfpatch."""

from __future__ import annotations

from pathlib import Path

_NEEDS = "import hfpatch"
_FRONT = "---\nlibrary_name: peft\ntags: [hfpatch]\n---\n\n# PEFT adapter of hfpatch\n"
_HOW_TO_LOAD = """
## How to load this adapter

The method is one of hfpatch, which registers it with PEFT: `pip install hfpatch`, and import it before loading.

    import hfpatch
    from peft import PeftModel

    model = PeftModel.from_pretrained(base_model, "this folder")
"""


def describe_loading(card: Path) -> None:
    """Add to the card that loading needs hfpatch, if it does not say so; write the card if there is none."""
    text = card.read_text(encoding="utf-8") if card.is_file() else _FRONT
    if _NEEDS not in text:
        card.write_text(f"{text.rstrip()}\n{_HOW_TO_LOAD}", encoding="utf-8")
