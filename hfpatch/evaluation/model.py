"""The lm-eval model ``hfpatch``: lm-eval's Hugging Face model with a patch put on and a faster exact scorer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.finite import first_not_finite
from hfpatch.evaluation.scorer import Answer, Scorer, TokenRequest
from hfpatch.evaluation.scorer.budget import Budget
from hfpatch.nn.matmul import fast_matmul

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hfpatch.evaluation.answers import Answers

logger = logging.getLogger(__name__)

_POSITIONS = re.compile(r"pos|wpe")
_OFFSETS = 8  # rows that some tables have in front
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


class UnfitRequest(HfpatchError):
    """A request that cannot be scored.

    Attributes:
        index: its place among those asked.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class HfpatchLM(HFLM):
    """lm-eval's ``hf`` model with an optional patch, and log-likelihoods from `hfpatch.evaluation.scorer`.

    Log-likelihoods, greedy decisions, the cutting of long rows and the first token are those of ``hf``; the log-softmax
    is always taken in fp32. Two more kinds of request serve the tasks in ``eval/paper``, which count tokens:
    `loglikelihood_per_token` and `paragraph_loglikelihood`. Text generation is that of ``hf``, unchanged.

    Not supported: encoder-decoder models, ``enable_thinking`` with log-likelihoods, ``softmax_dtype`` below fp32. The
    arguments ``batch_size`` and ``max_batch_size`` count for text generation only: scoring counts tokens.

    Args:
        pretrained: a hub id, a local folder, ``tinyworld/gpt-neox`` or ``tinyworld/gpt2``, or a model.
        patch: a folder that `hfpatch.save_patch` wrote; it is put on the model.
        allow_other_base: take a patch whose base had other weights.
        device: where an id or folder is loaded to; None takes a GPU if there is one.
        token_budget: tokens that are scored at once; None takes what suits the device.
        **options: all other arguments of ``HFLM``, such as ``tokenizer``, ``dtype``, ``peft``, ``max_length``.

    Attributes:
        answers: where answers are kept as they come and taken from where they are known; None keeps none.
        reused: how many answers were taken from there so far.
        on_scored: called with the number of requests that are scored and of all, as scoring goes on.

    Raises:
        HfpatchError: if something is asked that is not supported, or the tokenizer or the patch does not fit the model.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        patch: str | Path | None = None,
        allow_other_base: bool = False,
        device: str | None = None,
        token_budget: int | None = None,
        **options: Any,
    ) -> None:
        _refuse_unsupported(options)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(pretrained, str):
            from hfpatch.surgery.bases import locate_base

            pretrained = locate_base(pretrained)
        elif not pretrained.config.is_encoder_decoder:  # of BART and its kin lm-eval takes the type, not the class
            options.setdefault("backend", "causal")
        super().__init__(pretrained, device=device, softmax_dtype="float32", **options)
        if self.backend != "causal":
            raise HfpatchError(f"{type(self.model).__name__} is no causal language model; hfpatch scores no other")
        check_tokenizer(self.model, self.tokenizer)
        check_positions(self.model, options.get("max_length"))
        if patch is not None:
            from hfpatch.surgery.folder import load_patch

            load_patch(self.model, Path(patch), allow_other_base=allow_other_base)
        self.answers: Answers | None = None
        self.reused = 0
        self.on_scored: Callable[[int, int], None] | None = None
        self._token_budget = token_budget
        self._encoded: dict[str, list[int]] = {}
        self._probed: tuple[list[torch.nn.Module], Scorer] | None = None

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return ``(log-likelihood, is greedy)`` of each continuation."""
        with _naming(requests), self._encoding_at_once([request.args for request in requests]):
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the longest row, each token predicted once."""
        windows = [(index, window) for index, request in enumerate(requests) for window in self._windows(*request.args)]
        owners = [index for index, _ in windows]
        with _naming([requests[index] for index in owners]):
            answers = self._loglikelihood_tokens([(None, *window) for _, window in windows])
        sums = [0.0] * len(requests)
        for index, (value, _) in zip(owners, answers, strict=True):
            sums[index] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def loglikelihood_per_token(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, int]]:
        """Return ``(log-likelihood, tokens)`` of each continuation, for scores that divide by the tokens.

        A request's arguments are ``(context, continuation)``; tokens are split between the two as in `loglikelihood`.
        """
        with self._encoding_at_once([request.args for request in requests]):
            encoded = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._score_tokens(requests, encoded)

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
                raise _named(request, "one token or none; nothing to predict")
            encoded.append(((text, ""), tokens[:1], tokens[1:]))
        return self._score_tokens(requests, encoded)

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        """Return a text's tokens, as HFLM does."""
        if not arguments and not options and string in self._encoded:
            return self._encoded[string]
        tokens: list[int] = super().tok_encode(string, *arguments, **options)
        return tokens

    def _score_tokens(self, requests: list[Any], encoded: list[Any]) -> list[tuple[float, int]]:
        with _naming(requests):
            answers = self._loglikelihood_tokens(encoded)
        return [(value, len(targets)) for (value, _), (_, _, targets) in zip(answers, encoded, strict=True)]

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return (make_disjoint_window(window) for window in windows)

    @contextmanager
    def _encoding_at_once(self, pairs: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Encode all texts that `_encode_pair` will ask for in one call of the tokenizer, which is faster."""
        texts: dict[str, None] = {}
        for context, continuation in pairs:
            if context:
                texts[context.rstrip()] = texts[context + continuation] = None
        start = self.tokenizer.decode(self.prefix_token_id)
        plain = [text for text in texts if text and not has_bos_prefix(text, start)]
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        try:
            if plain:
                self._encoded = dict(zip(plain, self.tokenizer(plain, **special)["input_ids"], strict=True))
            yield
        finally:
            self._encoded = {}

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Return the answer to each ``(texts, context tokens, continuation tokens)``."""
        asked = self._cut(requests)
        answers: dict[int, Answer] = {}
        if self.answers is not None:
            found = ((index, self.answers.find(request)) for index, request in enumerate(asked))
            answers = {index: answer for index, answer in found if answer is not None}
            self.reused += len(answers)

        def take(batch: Sequence[tuple[int, Answer]]) -> None:
            new = [(index, answer) for index, answer in batch if index not in answers]
            sound = [(index, answer) for index, answer in new if not math.isnan(answer[0])]
            answers.update(sound)
            if self.answers is not None:
                self.answers.add([(asked[index], answer) for index, answer in sound])
            if len(sound) < len(new):
                self._refuse_nan(asked, min(index for index, (value, _) in new if math.isnan(value)))
            if self.on_scored is not None:
                self.on_scored(len(answers), len(asked))

        self._score(asked, take, answers)
        for index, (texts, _, _) in enumerate(requests):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[index])
        return [answers[index] for index in range(len(asked))]

    def _score(
        self, asked: list[TokenRequest], take: Callable[[Sequence[tuple[int, Answer]]], None], known: dict[int, Answer]
    ) -> None:
        """Score what is not known."""
        if len(known) == len(asked):
            return
        mixed = self.mixed_precision_dtype
        autocast = torch.autocast(self.device.type, dtype=mixed) if mixed is not None else nullcontext()
        with autocast, fast_matmul(self.model):
            self._scorer().score(asked, take, known=list(known))

    def _scorer(self) -> Scorer:
        """Return the scorer of the model as it is now: patching and unpatching change what it is made of."""
        modules = list(self.model.modules())
        if self._probed is None or list(map(id, self._probed[0])) != list(map(id, modules)):
            budget = Budget.usual(self.model.device)
            if self._token_budget is not None:
                budget = replace(budget, tokens=self._token_budget)
            self._probed = (modules, Scorer(self.model, self.max_length, budget))
        return self._probed[1]

    def _cut(self, requests: Sequence[Encoded]) -> list[TokenRequest]:
        """Return what is fed and scored for each request, and say how many contexts are cut."""
        words = self.model.get_input_embeddings().weight.shape[0]
        long = 0
        for index, (_, context, targets) in enumerate(requests):
            if not context or not targets:
                raise UnfitRequest(index, "its context or its continuation has no token of its own")
            if len(targets) > self.max_length:
                raise UnfitRequest(
                    index, f"its continuation has {len(targets)} tokens and the model's longest row {self.max_length}"
                )
            if max(*context, *targets) >= words:
                raise UnfitRequest(
                    index, f"token {max(*context, *targets)} is not among the model's {words} embeddings; "
                    "use the model's own tokenizer"
                )  # fmt: skip
            long += len(context) + len(targets) > self.max_length + 1
        if long:
            logger.warning(
                "%s of %s requests are longer than %s tokens; their contexts are cut from the left, as lm-eval does",
                long, len(requests), self.max_length,
            )  # fmt: skip
        return [TokenRequest.cut(context, targets, self.max_length) for _, context, targets in requests]

    def _refuse_nan(self, asked: Sequence[TokenRequest], index: int) -> None:
        place = first_not_finite(self.model, torch.tensor([asked[index].tokens], device=self.model.device))
        where = f" (first in {place})" if place else ""
        raise UnfitRequest(
            index, f"the log-likelihood is NaN{where}; the model's weights or dtype are broken (try dtype float32)"
        )


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that has tokens without an embedding, or no tokens.

    Raises:
        HfpatchError: saying which.
    """
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise HfpatchError(
            "the tokenizer has no tokens but special ones, as one has that transformers makes where a model's folder "
            "holds none; save the model's own tokenizer beside the model"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise HfpatchError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows} embeddings; use the model's own tokenizer"
        )


def check_positions(model: Any, max_length: int | None) -> None:
    """Refuse rows that are longer than the model's table of positions; rotary positions have none.

    Raises:
        HfpatchError: saying how long a row may be.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_length is None or longest is None or max_length <= longest:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tables = (tensor for name, tensor in tensors if _POSITIONS.search(name) and tensor.dim() == 2)
    if any(longest <= len(table) < longest + _OFFSETS for table in tables):
        raise HfpatchError(
            f"max_length is {max_length}, and {type(model).__name__} has a table of {longest} positions; "
            "take a max_length up to that"
        )


def _refuse_unsupported(options: dict[str, Any]) -> None:
    asked = options.pop("softmax_dtype", None)
    if asked not in (None, "float32", torch.float32):
        raise HfpatchError(f"softmax_dtype is {asked}; hfpatch scores in float32 only: leave it out")
    if options.get("backend") == "seq2seq":
        raise HfpatchError("backend is seq2seq; hfpatch scores causal language models only")


@contextmanager
def _naming(requests: Sequence[Any]) -> Iterator[None]:
    """Say of which document the request is that cannot be scored."""
    try:
        yield
    except UnfitRequest as error:
        raise _named(requests[error.index], str(error)) from error.__cause__


def _named(request: Any, why: str) -> HfpatchError:
    return HfpatchError(f"task {request.task_name}, document {request.doc_id}: {why}")
