"""The lm-eval model ``hfpatch``: lm-eval's Hugging Face model with an optional patch and a faster exact scorer."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hfpatch.data.tokenizer import ByteCounter, check_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer import Score, Scorer, TokenRequest
from hfpatch.evaluation.scorer.batching import BatchLimits, Unit
from hfpatch.models.attention import fast_attention
from hfpatch.nn.matmul import choose_library, fast_matmul
from hfpatch.sites import input_device
from hfpatch.support.cpu import keep_freed_memory
from hfpatch.support.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hfpatch.evaluation.cache import ScoreCache

logger = logging.getLogger(__name__)

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]
_POSITIONS = re.compile(r"pos|wpe")
_OFFSETS = 8  # extra rows at the start of some tables of position embeddings


@dataclass
class Prompts:
    """Hashes of the prompts of one task, in order, whatever the batches and the processes.

    They are hashed as they are sent, so that every setting of a task, a tokenizer or a template counts.
    """

    _texts: Any = field(default_factory=hashlib.sha256)
    _tokens: Any = field(default_factory=hashlib.sha256)

    def add_texts(self, requests: Iterable[Any]) -> None:
        """Add lm-eval's requests as they are asked: contexts, continuations and arguments of generation."""
        for request in requests:
            asked = [request.request_type, *request.args]
            self._texts.update(json.dumps(asked, sort_keys=True, default=str).encode() + b"\n")

    def add_tokens(self, rows: Iterable[Sequence[int]]) -> None:
        """Add the token ids of requests, after truncation."""
        for row in rows:
            self._tokens.update(array("q", (len(row), *row)).tobytes())

    def to_json(self) -> dict[str, str]:
        """Return the two hashes as fields of a task's result."""
        return {"prompts_sha256": self._texts.hexdigest(), "tokens_sha256": self._tokens.hexdigest()}


class BrokenModelError(HfpatchError):
    """A model whose log-likelihoods, or a score of them, are not finite."""


class HfpatchLM(HFLM):
    """lm-eval's ``hf`` model with an optional patch, and log-likelihoods from `hfpatch.evaluation.scorer`.

    Log-likelihoods, greedy decisions, the truncation of long rows and the first token are those of ``hf``; the
    log-softmax is always computed in fp32. The tasks in ``eval/paper``, which count tokens, use two more kinds of
    request: `loglikelihood_per_token` and `paragraph_loglikelihood`. Text generation is that of ``hf``, unchanged.

    Not supported: encoder-decoder models, ``enable_thinking`` with log-likelihoods, ``softmax_dtype`` below fp32. The
    arguments ``batch_size`` and ``max_batch_size`` only affect text generation: scoring uses ``token_budget``.

    Args:
        pretrained: a model, or what `hfpatch.surgery.bases.load_base` takes as name.
        backend: ``default`` or ``causal``, as ``HFLM`` takes it.
        patch: a folder that `hfpatch.save_patch` wrote; it is applied to the model.
        allow_other_base: accept a patch whose base had other weights.
        device: the device that an id or folder is loaded to; None uses a GPU if there is one.
        token_budget: tokens that are scored at once; None uses the default of the device.
        **options: all other arguments of ``HFLM``, such as ``tokenizer``, ``dtype``, ``peft``, ``max_length``.

    Attributes:
        score_cache: a cache that scores are read from and added to as they come; None is no cache.
        prompts: the hashes of the requests so far.
        reused: how many scores came from the cache so far.
        on_scored: called during scoring with the number of requests scored so far and of all; where ranks share them,
            with those of this rank.
        left_out: the documents with a request that cannot be scored and why, which grows where it is a dictionary: such
            a request then has log-likelihood 0, or no text, for the caller to leave out. None, as in lm-eval's own
            calls, is an error at the first one.
        ranks: the processes that hold this model, or pieces of it, and answer the same requests together. Each scores
            its share of the batches that one process would make; all have all answers afterwards.

    Raises:
        HfpatchError: if an option is not supported, or the tokenizer or the patch does not fit the model.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        backend: Literal["default", "causal", "seq2seq"] = "default",
        *,
        patch: str | Path | None = None,
        allow_other_base: bool = False,
        device: str | None = None,
        token_budget: int | None = None,
        **options: Any,
    ) -> None:
        softmax_dtype = options.pop("softmax_dtype", None)
        if softmax_dtype not in (None, "float32", torch.float32):
            raise HfpatchError(f"softmax_dtype is {softmax_dtype}; hfpatch scores in float32 only: leave it out")
        if backend == "seq2seq":
            raise HfpatchError("backend is seq2seq; hfpatch scores causal language models only")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(pretrained, str):
            from hfpatch.surgery.bases import locate

            named = options.pop("gguf_file", None)
            pretrained, file = locate(f"{pretrained}/{named}" if named else pretrained, options.get("revision"))
            options |= {} if file is None else {"gguf_file": str(file)}
        elif not pretrained.config.is_encoder_decoder:  # for BART and others lm-eval decides by the type, not the class
            backend = "causal" if backend == "default" else backend
        super().__init__(pretrained, backend, device=device, softmax_dtype="float32", **options)
        if self.backend != "causal":
            raise HfpatchError(f"{type(self.model).__name__} is not a causal language model; hfpatch scores no other")
        self._device = input_device(self.model)
        check_tokenizer(self.model, self.tokenizer)
        if self.prefix_token_id is None:
            raise HfpatchError(
                "the tokenizer has neither a bos_token nor an eos_token, with one of which lm-eval begins a text with "
                "no context; set one of them in the tokenizer's files"
            )

        # are rows longer than the model's table of position embeddings, if it has one?
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        asked = options.get("max_length")
        if asked is not None and longest is not None and asked > longest:
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            tables = (tensor for name, tensor in tensors if _POSITIONS.search(name) and tensor.dim() == 2)
            if any(longest <= len(table) < longest + _OFFSETS for table in tables):
                raise HfpatchError(
                    f"max_length is {asked}, but {type(self.model).__name__} has only {longest} position embeddings; "
                    f"use a max_length of at most {longest}"
                )

        if patch is not None:
            from hfpatch.surgery.folder import load_patch

            load_patch(self.model, Path(patch), allow_other_base=allow_other_base)
        self.begin()
        self.left_out: dict[int, str] | None = None
        self.ranks = Ranks()
        self._token_budget = token_budget
        self._probed: tuple[list[torch.nn.Module], Scorer] | None = None

    def _create_model(self, pretrained: str, *arguments: Any, gguf_file: str | None = None, **options: Any) -> None:
        from hfpatch.surgery.gguf_files import as_plain, gguf_loading

        options |= gguf_loading() if gguf_file else {}
        super()._create_model(pretrained, *arguments, gguf_file=gguf_file, **options)
        if gguf_file:
            as_plain(self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model)

    def begin(self, score_cache: ScoreCache | None = None, on_scored: Callable[[int, int], None] | None = None) -> None:
        """Begin a task, with another cache and listener: no request has been hashed, no score reused so far."""
        self.score_cache, self.on_scored = score_cache, on_scored
        self.prompts, self.reused = Prompts(), 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return ``(log-likelihood, is greedy)`` of each continuation."""
        return [score for score, _ in self._score_texts(requests)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the longest row, each token predicted once."""
        self.prompts.add_texts(requests)
        owners: list[int] = []
        windows: list[tuple[list[int], list[int]]] = []
        longest = self.max_length
        for index, request in enumerate(requests):
            made = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=longest,
                context_len=1,
            )
            windows += [make_disjoint_window(window) for window in made]
            owners += [index] * (len(windows) - len(owners))
        encoded = [(None, *window) for window in windows]
        scores = self._loglikelihood_tokens(encoded, [requests[index] for index in owners])
        sums = [0.0] * len(requests)
        for index, (value, _) in zip(owners, scores, strict=True):
            sums[index] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def loglikelihood_per_token(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, int]]:
        """Return ``(log-likelihood, tokens)`` of each continuation, for scores that divide by the tokens.

        A request's arguments are ``(context, continuation)``; tokens are split between the two as in `loglikelihood`.
        """
        return [(value, tokens) for (value, _), tokens in self._score_texts(requests)]

    def paragraph_loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, int, int]]:
        """Return ``(log-likelihood, predicted tokens, their UTF-8 bytes)`` of each text's beginning, given one token.

        A request's arguments are ``(text, tokens)``: the text is truncated to so many tokens, or to the model's longest
        row if that is shorter. No token is added before the first one, which is given and not predicted.
        """
        self.prompts.add_texts(requests)
        encoded, sizes, most = [], [], self.max_length
        bytes_of = ByteCounter(self.tokenizer).count
        for request in requests:
            text, longest = request.args
            tokens = self.tok_encode(text)[: min(longest, most)]
            encoded.append(((text, ""), tokens[:1], tokens[1:]))
            sizes.append(bytes_of(tokens) - bytes_of(tokens[:1]))
        scores = self._loglikelihood_tokens(encoded, requests)
        counts = [len(targets) for _, _, targets in encoded]
        return [(value, count, size) for (value, _), count, size in zip(scores, counts, sizes, strict=True)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text of each request; ranks share the batches that one process would make."""
        sizes = self._add_prompts(requests)
        indices = [index for index, size in enumerate(sizes) if size]
        if self.ranks.shares:
            collated = Collator(  # as HFLM does
                [(*requests[index].args, index) for index in indices],
                sort_fn=lambda asked: (-sizes[asked[-1]], asked[0]),
                group_by="gen_kwargs",
                group_fn=lambda asked: asked[1],
            )
            batches = [[asked[-1] for asked in batch] for batch in collated.get_batched(n=self.batch_size)]
            costs = [len(batch) * (sizes[batch[0]] + self.max_gen_toks) for batch in batches]
            owners = self.ranks.share_out(costs)
            mine = (batch for batch, owner in zip(batches, owners, strict=True) if owner == self.ranks.index)
            indices = [index for batch in mine for index in batch]
        quiet = disable_tqdm or self.ranks.shares
        texts = super().generate_until([requests[index] for index in indices], disable_tqdm=quiet)
        made = dict(zip(indices, texts, strict=True))
        by_index = {index: text for part in self.ranks.everyone(made) for index, text in part.items()}
        return [by_index.get(index, "") for index in range(len(requests))]

    def _add_prompts(self, requests: Sequence[Any]) -> list[int]:
        """Hash requests of generation, check that they can be answered, and return how many tokens each prompt has."""
        self.prompts.add_texts(requests)
        rows = [self.tok_encode(request.args[0]) for request in requests]
        self.prompts.add_tokens([self.max_length, *row] for row in rows)
        for position, (request, row) in enumerate(zip(requests, rows, strict=True)):
            asked = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if asked >= self.max_length:
                raise HfpatchError(
                    f"{_where(requests, position)}max_gen_toks is {asked}, and the longest row {self.max_length} "
                    "tokens, prompt included; set a smaller one in gen_kwargs"
                )
            if not row:
                self._leave_out(requests, position, "its prompt has no token")
        return list(map(len, rows))

    def _leave_out(self, requests: Sequence[Any], position: int, why: str) -> None:
        if self.left_out is None:
            raise HfpatchError(f"{_where(requests, position)}{why}")
        self.left_out.setdefault(requests[position].doc_id, why)

    def _score_texts(self, requests: Sequence[Any]) -> list[tuple[Score, int]]:
        """Return the score and the number of tokens of each continuation."""
        if self.enable_thinking:
            raise HfpatchError(
                "enable_thinking: log-likelihoods are scored without thinking; use it for generation only"
            )
        self.prompts.add_texts(requests)
        encoded = list(self._encode([request.args for request in requests]))
        scores = self._loglikelihood_tokens(encoded, requests)
        return [(score, len(targets)) for score, (_, _, targets) in zip(scores, encoded, strict=True)]

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Encoded]:
        """Yield the texts of a context and a continuation, and their tokens, split as HFLM splits them.

        White space at the end of a context is scored with the continuation. An empty context is the first token of a
        row. The tokenizer encodes many texts at once, which is faster.
        """
        stripped = [context.rstrip() for context, _ in pairs]
        wholes = [context + continuation for context, continuation in pairs if context]
        texts = dict.fromkeys(filter(None, stripped + wholes))
        start, tokens = self.tokenizer.decode(self.prefix_token_id), {"": cast("list[int]", self.tok_encode(""))}
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        for begins, options in ((False, special), (True, {"add_special_tokens": False})):  # as a chat template does
            alike = [text for text in texts if has_bos_prefix(text, start) is begins]
            if alike:
                tokens |= zip(alike, self.tokenizer(alike, **options)["input_ids"], strict=True)
        for (context, continuation), text in zip(pairs, stripped, strict=True):
            if context:
                first, rest = tokens[text], tokens[context + continuation][len(tokens[text]) :]
            else:
                first, rest = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
                rest = rest[1:] if rest[:1] == first else rest
            yield (context, continuation), first, rest

    def _loglikelihood_tokens(self, encoded: Sequence[Encoded], requests: Sequence[Any] = ()) -> list[Score]:
        """Return the score of each ``(texts, context tokens, continuation tokens)``; errors name its request."""
        positions, cut = self._cut(encoded, requests)
        cache = self.score_cache
        cached = ((index, cache.find(request)) for index, request in enumerate(cut)) if cache is not None else ()
        scores = self.ranks.same({index: score for index, score in cached if score is not None})
        self.reused += len(scores)
        if len(scores) < len(cut):
            computed = self._score(cut, scores, [requests[position] for position in positions] if requests else ())
            parts = self.ranks.everyone(computed) if self.ranks.shares else [self.ranks.same(computed)]
            new = {index: score for part in reversed(parts) for index, score in part.items()}
            if self.ranks.is_first and cache is not None:
                cache.take_over([(cut[index], score) for index, score in new.items()])
            scores |= new
        for index, position in enumerate(positions):
            if (texts := encoded[position][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, scores[index])
        by_position = dict(zip(positions, (scores[index] for index in range(len(cut))), strict=True))
        return [by_position.get(position, (0.0, False)) for position in range(len(encoded))]

    def _score(
        self, cut: Sequence[TokenRequest], cached: Mapping[int, Score], requests: Sequence[Any]
    ) -> dict[int, Score]:
        """Return the new scores of this process's share of the requests, by index; cache them as they come."""
        scores: dict[int, Score] = {}
        total = len(cut)

        def share(units: Sequence[Unit], done: Collection[int]) -> set[int]:
            nonlocal total
            owners = self.ranks.share_out([unit.cost(done) for unit in units])
            others = [unit for unit, owner in zip(units, owners, strict=True) if owner != self.ranks.index]
            elsewhere = {index for unit in others for index in unit.requests()} - set(cached)
            total -= len(elsewhere)
            return elsewhere

        def take(batch: Sequence[tuple[int, Score]]) -> None:
            new = [(index, score) for index, score in batch if index not in cached and index not in scores]
            valid = [(index, score) for index, score in new if not math.isnan(score[0])]
            scores.update(valid)
            if self.score_cache is not None:
                self.score_cache.add([(cut[index], score) for index, score in valid])
            if len(valid) < len(new):
                index = min(index for index, (value, _) in new if math.isnan(value))
                raise BrokenModelError(
                    f"{_where(requests, index)}the log-likelihood is NaN; the model's weights or dtype are broken (try "
                    "dtype float32)"
                )
            if self.on_scored is not None:
                self.on_scored(len(cached) + len(scores), total)

        mixed = self.mixed_precision_dtype
        autocast = torch.autocast(self.device.type, dtype=mixed) if mixed is not None else nullcontext()
        library = self.ranks.same(choose_library(self.model))  # each rank measures, and may find another one faster
        if library is not None:
            keep_freed_memory()
        with autocast, fast_matmul(self.model, library=library), fast_attention():
            self._scorer().score(cut, take, scored=list(cached), share=share if self.ranks.shares else None)
        return scores

    def _scorer(self) -> Scorer:
        """Return a scorer of the model as it is now, a new one after patching or unpatching."""
        modules = list(self.model.modules())
        if self._probed is None or list(map(id, self._probed[0])) != list(map(id, modules)):
            limits = BatchLimits.for_device(self.device)
            if self._token_budget is not None:
                limits = replace(limits, tokens=self._token_budget)
            self._probed = (modules, Scorer(self.model, self.max_length, limits))
        return self._probed[1]

    def _cut(self, encoded: Sequence[Encoded], requests: Sequence[Any]) -> tuple[list[int], list[TokenRequest]]:
        """Return the positions of the requests that can be scored, and these, cut to the longest row; warn of cuts."""
        words = self.model.get_input_embeddings().weight.shape[0]
        longest, long = self.max_length, 0  # HFLM looks for it in the configuration each time
        positions: list[int] = []
        for position, (_, context, targets) in enumerate(encoded):
            if why := _why_not(context, targets, longest):
                self._leave_out(requests, position, why)
                continue
            if (largest := max(*context, *targets)) >= words:
                raise HfpatchError(
                    f"{_where(requests, position)}token {largest} is not among the model's {words} embeddings; use the "
                    "model's own tokenizer"
                )
            long += len(context) + len(targets) > longest + 1
            positions.append(position)
        if long:
            logger.warning(
                "%s of %s requests have more than %s tokens; their contexts are truncated from the left, as in lm-eval",
                long, len(encoded), longest,
            )  # fmt: skip
        cut = [TokenRequest.cut(*encoded[position][1:], longest) for position in positions]
        self.prompts.add_tokens((len(request.targets), *request.tokens, request.targets[-1]) for request in cut)
        return positions, cut


def _where(requests: Sequence[Any], index: int) -> str:
    """Return the beginning of an error about one of the requests, if they are given."""
    return f"task {requests[index].task_name}, document {requests[index].doc_id}: " if requests else ""


def _why_not(context: Sequence[int], targets: Sequence[int], longest: int) -> str:
    """Return why a document's tokens have no log-likelihood; "" where they have one."""
    if not context or not targets:
        return "its context or its continuation has no token of its own"
    if len(targets) > longest:
        return f"its continuation has {len(targets)} tokens and the model's longest row {longest}"
    return ""
