"""The Markdown card of a patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_METHODS = {
    "pre_projection": "Pre-projection and content skip (arXiv 2604.10791)",
    "nonlinear_query": "Anchored nonlinear query (arXiv 2603.13381)",
    "lora": "LoRA (arXiv 2106.09685)",
}


def patch_card(base: Mapping[str, Any], adapters: Sequence[Mapping[str, str]]) -> str:
    """Return the card of a patch: its base, its parts and how to load it."""
    name = base["name"] or base["class"]
    rows = "\n".join(
        f"| `{a['name']}` | {_METHODS.get(a['method'], a['method'])} | `{a['sha256'][:16]}` |" for a in adapters
    )
    return f"""---
library_name: peft
base_model: {name}
tags: [hfpatch]
---
# Patch for {name}

A stack of adapters for a frozen {base["model_type"]} model, made with hfpatch. The licence of the base applies.

| adapter | method | SHA-256 of its tensors |
|---|---|---|
{rows}

The whole stack:

    import hfpatch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained({str(name)!r})
    hfpatch.load_patch(model, "this folder")

One adapter alone is a PEFT adapter: `import hfpatch.tuners`, then `PeftModel.from_pretrained(model, "its folder")`.
"""
