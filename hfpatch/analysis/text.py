"""Texts to batches for the analyses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hfpatch.analysis.running import Batch
from hfpatch.errors import HfpatchError

LEAST_ROWS = 4
_CHARACTERS_PER_TOKEN = 16  # an upper bound for ordinary text, so that a book is not tokenised for its first page


def token_rows(texts: Iterable[str], tokenizer: Any, *, tokens: int, length: int) -> list[list[int]]:
    """Return at most ``length`` tokens of each of the first documents, until they have ``tokens`` together.

    Documents of fewer than two tokens are left out.

    Raises:
        HfpatchError: if fewer than four documents are left, two to fit on and two to measure on.
    """
    rows: list[list[int]] = []
    gathered = 0
    for text in texts:
        row = tokenizer(text[: length * _CHARACTERS_PER_TOKEN]).input_ids[:length]
        if len(row) > 1:
            rows.append(row)
            gathered += len(row)
        if gathered >= tokens and len(rows) >= LEAST_ROWS:
            break
    if len(rows) < LEAST_ROWS:
        raise HfpatchError("the text has fewer than four documents of two tokens; give more text")
    return rows


def batches_of(rows: Sequence[Sequence[int]], *, size: int = 4, pad: int = 0) -> list[Batch]:
    """Return padded batches of ``size`` rows with their ``attention_mask``, rows of like length side by side."""
    ordered = sorted(rows, key=len)
    batches: list[Batch] = []
    for start in range(0, len(ordered), size):
        chosen = ordered[start : start + size]
        ids = torch.full((len(chosen), len(chosen[-1])), pad)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(chosen):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches
