"""Whether a tokenizer and a model belong together."""

from __future__ import annotations

from typing import Any

from hfpatch.errors import HfpatchError


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Check that a tokenizer has tokens, and an embedding for each.

    Raises:
        HfpatchError: if it does not.
    """
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise HfpatchError(
            "the tokenizer has only special tokens, like the one that transformers creates if the model's folder has "
            "none; save the model's own tokenizer in that folder"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise HfpatchError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows} embeddings; use the model's own tokenizer"
        )
