"""The lm-eval model ``hfpatch``: lm-eval's Hugging Face model with a patch put on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from hfpatch.bases import locate_base
from hfpatch.errors import HfpatchError


class HfpatchLM(HFLM):
    """lm-eval's ``hf`` model with an optional patch and a log-softmax that is always taken in fp32.

    Two more kinds of request serve the tasks in ``eval/paper``, which count tokens: `loglikelihood_per_token` and
    `paragraph_loglikelihood`.

    Args:
        pretrained: a hub id, a local folder, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``, or a model.
        patch: a folder that `hfpatch.save_patch` wrote; it is put on the model.
        device: where an id or folder is loaded to; None takes a GPU if there is one.
        **options: all other arguments of ``HFLM``, such as ``tokenizer``, ``dtype``, ``batch_size``, ``max_length``.

    Raises:
        HfpatchError: if ``softmax_dtype`` asks for less than fp32, or the patch does not fit the model.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        patch: str | Path | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        asked = options.pop("softmax_dtype", None)
        if asked not in (None, "float32", torch.float32):
            raise HfpatchError(f"softmax_dtype is {asked}; hfpatch scores in float32 only: leave it out")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(pretrained, str):
            pretrained = locate_base(pretrained)
        super().__init__(pretrained, device=device, softmax_dtype="float32", **options)
        if patch is not None:
            from hfpatch.patch_files import load_patch

            load_patch(self.model, Path(patch))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return ``(log-likelihood, is greedy)`` of each continuation, as HFLM does; NaN is an error."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        _refuse_nan(requests, [value for value, _ in answers])
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, as HFLM does; NaN is an error."""
        answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        _refuse_nan(requests, answers)
        return answers

    def loglikelihood_per_token(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, int]]:
        """Return ``(log-likelihood, tokens)`` of each continuation, for scores that divide by the tokens.

        A request's arguments are ``(context, continuation)``; tokens are split between the two as in `loglikelihood`.
        """
        encoded = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._score_tokens(requests, encoded, disable_tqdm)

    def paragraph_loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, int]]:
        """Return ``(log-likelihood, predicted tokens)`` of the head of each text, its first token given.

        A request's arguments are ``(text, tokens)``: the text is cut to so many tokens, or to the model's longest
        row if that is shorter. Nothing is put before the first token, which is not predicted.
        """
        encoded = []
        for request in requests:
            text, longest = request.args
            tokens = self.tok_encode(text)[: min(longest, self.max_length)]
            if len(tokens) < 2:
                raise HfpatchError(
                    f"task {request.task_name}, document {request.doc_id}: one token or none; nothing to predict"
                )
            encoded.append(((text, ""), tokens[:1], tokens[1:]))
        return self._score_tokens(requests, encoded, disable_tqdm)

    def _score_tokens(self, requests: list[Any], encoded: list[Any], disable_tqdm: bool) -> list[tuple[float, int]]:
        answers = self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)
        values = [value for value, _ in answers]
        _refuse_nan(requests, values)
        return [(value, len(continuation)) for value, (_, _, continuation) in zip(values, encoded, strict=True)]


def _refuse_nan(requests: Sequence[Any], values: Sequence[float]) -> None:
    for request, value in zip(requests, values, strict=True):
        if math.isnan(value):
            raise HfpatchError(
                f"task {request.task_name}, document {request.doc_id}: the log-likelihood is NaN; "
                "the model's weights or dtype are broken (try dtype float32)"
            )
