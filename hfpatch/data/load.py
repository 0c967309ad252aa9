"""From a recipe's data section to token blocks, tokenized once and cached in memory-mapped files."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream, has_something_to_learn, join_blocks
from hfpatch.data.completions import chat_template
from hfpatch.data.copies import Digester, Digests, Flags
from hfpatch.data.corpora import filtered_documents, open_corpus
from hfpatch.data.deciding import (
    NONE,
    RUN,
    Candidates,
    Chosen,
    TaskDocument,
    choose_documents,
    copies_of_tasks,
    digest_tasks,
    draw,
    in_order,
)
from hfpatch.data.token_file import TokenFile, open_token_file, write_token_file
from hfpatch.data.tokenizer import Integers, hash_tokenizer, start_of_document
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings, split_by_weight
from hfpatch.support.files import atomic_directory, hash_values, remove_leftovers
from hfpatch.support.folders import is_writable

_CACHE_FORMAT = 11  # to be raised where what the files hold changes: old ones are then left alone
_MEASURED = 2  # in the seed of the draw, after those of held-out and tuning documents
_LONG_BLOCK = 64  # tokens of a block that is a text by itself; shorter ones may be common phrases
_TOKENS = "tokens.bin"


@dataclass(frozen=True)
class Splits:
    """Blocks to train on, held-out blocks to measure the loss on, and blocks for tuning.

    ``cautions`` are sentences about tasks' documents in the training text; ``retained`` are more texts to measure, by
    name.
    """

    train: TokenBlocks
    held_out: TokenBlocks | None = None
    tuning: TokenBlocks | None = None
    cautions: tuple[str, ...] = ()
    retained: Mapping[str, TokenBlocks] = field(default_factory=dict)


def load_blocks(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> TokenBlocks:
    """Return the blocks to train on, see `load_splits`."""
    return load_splits(settings, tokenizer, data_dir=data_dir, cache_dir=cache_dir).train


def load_splits(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    tuning: int = 0,
    tasks: Mapping[str, Sequence[TaskDocument]] | None = None,
    evaluation: DataSettings | None = None,
    retained: Mapping[str, DataSettings] | None = None,
    by_text: bool = False,
) -> Splits:
    """Read and tokenize the text of ``settings``, or map a token file, and lay it out in blocks.

    Documents are read a few at a time and written to a file that is then mapped. No document held out or used for
    tuning equals one that is trained on, see :func:`hfpatch.data.deciding.choose_documents`.

    Args:
        settings: the recipe's data section.
        tokenizer: the base model's tokenizer.
        data_dir: local copies of hub data sets, see :func:`hfpatch.data.corpora.open_corpus`.
        cache_dir: cache the tokens here, under the hash of settings, tokenizer and text, and map them into memory on
            the next call. The embedded language is not cached: it is generated quickly.
        tuning: the number of documents for tuning.
        tasks: the documents of the evaluation tasks, by task. Their text is not trained on or tuned on; a warning
            counts the excluded documents, see :func:`hfpatch.data.deciding.digest_tasks`.
        evaluation: the text to measure the loss on instead of the held-out documents of ``settings``: ``held_out`` of
            its documents, or else all. It may be the text that is trained on, with another layout or block size.
            Documents that are trained or tuned on are left out with a warning; of the same source, also their groups.
        retained: more texts to measure, by their names in ``retention.texts``: ``held_out`` of their documents, or else
            all, less the documents that are trained on, tuned on or held out.
        by_text: draw the documents that :func:`hfpatch.data.deciding.tokenizer_documents` leaves out, for a tokenizer
            that is trained on the same text.

    Raises:
        HfpatchError: if the text is missing, malformed, empty or shorter than a block, or has too few documents to hold
            out or tune on, or all of a source is in the tasks, or the token file is damaged or of another tokenizer.
    """
    load = partial(_Text.load, tokenizer=tokenizer, data_dir=data_dir, cache_dir=cache_dir)
    texts = [load(part) for part in settings.parts()]
    chosen, cautions = _choose(texts, split_by_weight(tuning, settings.weights), tasks or {}, settings.seed, by_text)
    for caution in cautions:
        warnings.warn(caution, stacklevel=2)
    used = list(zip(texts, chosen, strict=True))
    laid_out = [text.lay_out(documents) for text, documents in used]
    splits = _mixed(laid_out, settings.weights) if settings.mixture else laid_out[0]
    if evaluation is not None:
        splits["held_out"] = _measured("evaluation_data", load(evaluation), used, ("train", "tuning"))
    others, uses = dict[str, TokenBlocks](), ("train", "tuning", "held_out")
    for name, other in (retained or {}).items():
        others[name] = _measured(f"retention.texts.{name}", load(other), used, uses)
    return Splits(**splits, cautions=tuple(cautions), retained=others)


@dataclass(frozen=True)
class _Text:
    """A text as tokens."""

    settings: DataSettings
    tokenizer: PreTrainedTokenizerBase
    file: TokenFile

    @classmethod
    def load(
        cls, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, data_dir: Path | None, cache_dir: Path | None
    ) -> _Text:
        """Map the text's token file: the source itself, or one in the cache, written there if necessary.

        Without a cache the file is removed while it is mapped, which leaves it readable.
        """

        def write(folder: Path) -> None:
            texts = filtered_documents(corpus, settings)
            write_token_file(folder / _TOKENS, texts, tokenizer, settings, revision=corpus.revision)

        if settings.is_token_file:
            return cls(settings, tokenizer, open_token_file(Path(settings.source), tokenizer))
        corpus = open_corpus(settings, data_dir)
        if cache_dir is not None:
            remove_leftovers(cache_dir)
        if cache_dir is None or not (corpus.cacheable and is_writable(cache_dir, "the tokens")):
            with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
                write(Path(temporary))
                return cls(settings, tokenizer, open_token_file(Path(temporary) / _TOKENS, tokenizer))
        chosen = settings.describe_text()
        if settings.format != "text":
            chosen["chat_template"] = chat_template(tokenizer, settings)
        key = hash_values([_CACHE_FORMAT, corpus.digest(), corpus.revision, hash_tokenizer(tokenizer), chosen])
        folder = cache_dir / key[:32]
        cached = _cached_tokens(folder, tokenizer)
        if cached is None:
            try:
                with atomic_directory(folder) as temporary_folder:
                    write(temporary_folder)
                cached = open_token_file(folder / _TOKENS, tokenizer)
            except HfpatchError:
                if (cached := _cached_tokens(folder, tokenizer)) is None:  # else another run was faster
                    raise
        return cls(settings, tokenizer, cached)

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.file)

    @cached_property
    def start(self) -> list[int]:
        """The ids that the tokenizer puts at a document's start."""
        return start_of_document(self.tokenizer)

    @property
    def usable(self) -> Flags:
        """Which documents have a token to predict among the tokens that are scored."""
        scored = self.settings.scored_tokens or sys.maxsize
        return has_something_to_learn(self.file.stream, min(self.settings.block_size, scored))

    def read_digests(self, reading: Sequence[DataSettings]) -> Digests:
        """Return the digests of documents and of what is read of them after cutting, in each way of ``reading``.

        Of longer documents that is the first tokens, where no more is read or scored, and each whole block where they
        go on in the next one. So documents count as equal that differ only beyond what is read, or have a long block in
        common.
        """
        digester, added, pieces_of = Digester(self.tokenizer), len(self.start), list[list[tuple[int, bool]]]()
        (firsts, blocks), stream = _cuts(reading), self.file.stream
        for begin, length in zip(stream.begins.tolist(), stream.lengths.tolist(), strict=True):
            pieces = [(0, size) for size in firsts | blocks if size < length]
            for size in blocks:
                pieces += [(at, size - added) for at in range(size, length - size + added + 1, size - added)]
            ids = stream.tokens[begin : begin + length]
            pieces_of.append([(digester.ids(ids[at : at + size]), True) for at, size in pieces])
        return Digests.join([self.file.digests, Digests.of(pieces_of)], [0, 0])  # of the same documents

    def shares(self, other: _Text, indices: Integers) -> Flags:
        """Return which documents are of a group, by name, of these documents of ``other``, if of the same source."""
        names, others = self.file.names, other.file.names
        if names is None or others is None or _origin(self) != _origin(other):
            return np.zeros(len(self), np.bool_)
        return np.isin(names, others[indices]) & (names >= 0)

    def lay_out(self, chosen: Chosen) -> dict[str, TokenBlocks]:
        """Return the chosen documents in blocks, whose files are removed while they are mapped."""
        file, scored = self.file, self.settings.scored_tokens
        pad_tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        blocks: dict[str, TokenBlocks] = {}
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for name, indices in vars(chosen).items():
                if not len(indices):
                    continue
                stream, decides = file.stream.take(indices), name != "train"
                if decides and scored is not None:
                    stream = replace(stream, lengths=np.minimum(stream.lengths, scored))
                made = blocks_from_stream(
                    stream,
                    self.settings.model_copy(update={"source": file.info.source}),
                    pad_token_id=next(token for token in pad_tokens if token is not None),
                    start=self.start,
                    revision=file.info.revision,
                    file=Path(folder) / f"rows-{name}.bin",
                    with_owners=decides,
                    sha256=f"{file.info.dtype} {file.info.sha256}",
                )
                if decides and file.groups is not None:
                    groups = np.unique(file.groups[indices], return_inverse=True)[1].astype(np.int32)
                    made = replace(made, groups=groups)
                blocks[name] = made
        return blocks


def _choose(
    texts: Sequence[_Text],
    tuning: Sequence[int],
    tasks: Mapping[str, Sequence[TaskDocument]],
    seed: int,
    by_text: bool,
) -> tuple[list[Chosen], list[str]]:
    """Return the documents of each text to train on, to hold out and to tune on, and sentences on what is left out."""
    parts, cautions, candidates = [text.settings for text in texts], list[str](), list[Candidates]()
    tokenizer, start = texts[0].tokenizer, texts[0].start
    decides = bool(tasks or any(tuning) or any(part.held_out for part in parts))
    for one, other in combinations(texts, 2) if decides else ():
        if one.shares(other, np.arange(len(other))).any():
            raise HfpatchError(
                f"data.mixture: two sources have documents of the same groups of {one.file.info.source}, so what is "
                "held out may be trained on; list it once, or as slices that cut no group"
            )
    cuts, with_ids = {size - len(start) for size in set.union(*_cuts(parts))}, any(part.is_token_file for part in parts)
    copies, excluded = digest_tasks(tasks, Digester(tokenizer), with_ids=with_ids, cuts=cuts)
    for text, part, share in zip(texts, parts, tuning, strict=True):
        read, count = text.read_digests(parts) if decides else text.file.digests, len(text)
        copied, counts = copies_of_tasks(read, count, copies) if copies else (np.zeros(count, np.bool_), {})
        if counts:
            listed = ", ".join(f"{name} {number}" for name, number in counts.items())
            cautions.append(
                f"data: {copied.sum()} of {count} documents of {part.source} are in the tasks, too ({listed}), and are "
                "not trained on"
            )
        if copies and part.is_token_file and count == 1:
            cautions.append(
                f"data: {part.source} has no end-of-text token between documents, so whether the tasks' documents are "
                "in it is not known"
            )
        size = {"held_out": part.held_out or 0, "tuning": share}
        digests, groups = text.file.digests, text.file.groups
        candidates.append(Candidates(part.source, digests, text.usable, copied, groups=groups, read=read, **size))
    chosen, left_out = choose_documents(candidates, excluded, seed=seed, by_text=by_text)
    return chosen, cautions + left_out


def _mixed(laid_out: Sequence[Mapping[str, TokenBlocks]], weights: Sequence[float]) -> dict[str, TokenBlocks]:
    """Return the blocks of a mixture by use; a source with a small weight may have no held-out documents."""
    splits = {}
    for name in vars(Chosen(NONE)):
        given = [(blocks[name], weight) for blocks, weight in zip(laid_out, weights, strict=True) if name in blocks]
        if given:
            splits[name] = join_blocks(*zip(*given, strict=True))
    return splits


def _measured(key: str, text: _Text, used: Sequence[tuple[_Text, Chosen]], uses: Sequence[str]) -> TokenBlocks:
    """Return the blocks of a text to measure: of ``held_out`` groups, or all, without documents of other ``uses``.

    Documents are compared as they are read, cut to the blocks of either text. A text that is trained on gives those
    that it holds out where as many are asked for with its seed, unless ``uses`` has them.
    """
    settings, count, grouped = text.settings, len(text), text.file.groups
    wanted = (settings.describe_text(), settings.held_out, settings.seed)
    for other, chosen in used if settings.held_out and "held_out" not in uses else ():
        if (other.settings.describe_text(), other.settings.held_out, other.settings.seed) == wanted:
            return text.lay_out(Chosen(NONE, held_out=chosen.held_out))["held_out"]
    reading = [settings, *(other.settings for other, _ in used)]
    taken = [np.concatenate([getattr(chosen, use) for use in uses]) for _, chosen in used]
    digests = [other.read_digests(reading).take(indices) for (other, _), indices in zip(used, taken, strict=True)]
    read = text.read_digests(reading)
    copied = read.among(Digests.join(digests, [len(other) for other, _ in used]), count)
    shared = f"of {settings.source} are in the text that is trained or tuned on, too"
    if grouped is not None:  # of the same source, a group is not split: its name tells, or a document that no other has
        alone = ~read.repeated(grouped)
        for (other, _), indices, given in zip(used, taken, digests, strict=True):
            if _origin(other) == _origin(text):
                copied |= np.isin(grouped, grouped[read.among(given, count) & alone])
            copied |= text.shares(other, indices)
        shared += ", or of its groups"
    if copied.all():
        raise HfpatchError(f"{key}: all {count} documents {shared}; evaluate on another text")
    if copied.any():
        warnings.warn(f"{key}: {copied.sum()} of {count} documents {shared}, and are not evaluated on", stacklevel=3)
    documents = np.flatnonzero(~copied)
    groups = np.arange(count) if grouped is None else grouped
    if settings.held_out is not None and settings.held_out < len(in_order(groups[~copied])):
        good = ~copied & text.usable & ~read.repeated(groups)
        free = in_order(groups[good])
        if not len(free):
            raise HfpatchError(
                f"{key}: no document of {settings.source} differs from all others after cutting to blocks; "
                "use longer blocks, or another text"
            )
        run, number = RUN if grouped is None else 1, min(settings.held_out, len(free))
        inside = draw(free, number, seed=(settings.seed, _MEASURED), run=run)
        documents = np.flatnonzero(good & np.isin(groups, inside))
    return text.lay_out(Chosen(NONE, held_out=documents))["held_out"]


def _origin(text: _Text) -> tuple[str, str | None, str | None]:
    return os.path.realpath(text.file.info.source), text.file.info.config, text.file.info.revision


def _cuts(reading: Sequence[DataSettings]) -> tuple[set[int], set[int]]:
    """Return the lengths in tokens of what is read of a longer document, and of the blocks in which it goes on."""
    goes_on = [part.format == "text" and part.layout != "padded" for part in reading]
    firsts = {part.block_size for part, more in zip(reading, goes_on, strict=True) if not more}
    firsts |= {part.scored_tokens for part in reading if part.scored_tokens is not None}
    return firsts, {
        part.block_size for part, more in zip(reading, goes_on, strict=True) if more and part.block_size >= _LONG_BLOCK
    }


def _cached_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TokenFile | None:
    try:
        return open_token_file(folder / _TOKENS, tokenizer) if folder.is_dir() else None
    except HfpatchError as error:
        warnings.warn(f"{folder}: the cached tokens cannot be read ({error}) and are made again", stacklevel=1)
        return None
