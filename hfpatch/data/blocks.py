"""Token blocks: the fixed-length rows that batches are drawn from, of one source or of a mixture."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hfpatch.data.copies import Flags
from hfpatch.data.packing import pack, split_pieces
from hfpatch.data.tokenizer import Integers, TokenArray, TokenStream
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings, Layout
from hfpatch.support.files import clear_about_writing

IGNORE = -100  # the label that the losses of PyTorch and transformers leave out
_CHUNK_TOKENS = 1 << 20  # laid out at once; the rest may be on disk


@dataclass(frozen=True)
class Part:
    """One source of a mixture, with the hash of its blocks, and their number and tokens, padding not counted.

    ``weight`` is its share of the blocks that are drawn, relative to the others' weights.
    """

    source: str
    revision: str | None
    sha256: str
    weight: float
    documents: int
    blocks: int
    tokens: int


class JoinedRows:
    """Arrays (rows, block_size), in memory, mapped or broadcast, read as one: by an index or an array of indices."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self.arrays = list(arrays)
        self._ends = np.cumsum([len(array) for array in arrays])
        self.shape = (int(self._ends[-1]), arrays[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        if isinstance(index, np.ndarray):
            return np.stack([self[int(number)] for number in index])
        index = range(len(self))[index]  # from the end, too
        which = int(np.searchsorted(self._ends, index, side="right"))
        array = self.arrays[which]
        row: npt.NDArray[Any] = array[index - (int(self._ends[which]) - len(array))]
        return row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate(self.arrays).astype(dtype or self.arrays[0].dtype, copy=False)


@dataclass(frozen=True)
class TokenBlocks:
    """Rows of ``block_size`` tokens, in memory or mapped from a file.

    A packed row holds several pieces; ``position_ids`` restart at each, and the first token of each is not predicted,
    so nothing is learned across documents. The rest of the row has positions of its own and is not predicted either. A
    padded row holds one piece and an ``attention_mask``. A row cut from a stream is one piece of one or several
    documents: all tokens except its first are predicted, and its positions count up from zero, the default of every
    model, so it needs neither. In examples that are learned in part, only that part is predicted.

    A piece that begins inside a document begins with what the tokenizer puts at a document's start, such as ``<bos>``,
    where it puts anything: without it some models predict nothing well (Gemma 3). Neither these added tokens nor the
    one after them are predicted, so the predicted tokens of a piece are the same with and without them.

    Attributes:
        rows: (blocks, block_size) token ids.
        sizes: (pieces,) int32, tokens of each piece, the added ones too, row by row.
        offsets: (blocks + 1,) int64, where each row's pieces start in ``sizes``.
        layout: how documents became rows, see :class:`hfpatch.recipes.data.DataSettings`.
        documents: how many documents the rows were made from.
        source: the ``data.source`` of the recipe, or of the recipe that a token file was made by.
        revision: the hub revision, or None.
        sha256: hash of the rows and their pieces; of a stream, of all its tokens and of the rows' places in it.
        learned: (blocks, block_size) which tokens are predicted, but for the first of each piece; None if all are.
        parts: the sources that the rows are from, one after the other; none if there is one.
        owners: (blocks, block_size) int32, the document that each token is from, -1 in padding; None where it is not
            kept, as for text to train on.
        groups: (documents,) int32, the group of each document, counted from 0; None where each is one by itself, or
            ``owners`` is not kept.
        added: (pieces,) int32, how many tokens each piece begins with that the document does not have there; None if
            the tokenizer puts none at a document's start.
    """

    rows: TokenArray | JoinedRows
    sizes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    layout: Layout
    documents: int
    source: str
    revision: str | None
    sha256: str
    learned: Flags | JoinedRows | None = None
    parts: tuple[Part, ...] = ()
    owners: npt.NDArray[np.int32] | None = None
    groups: npt.NDArray[np.int32] | None = None
    added: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return (block_size,) ``input_ids``, ``labels``, packed ``position_ids`` or padded ``attention_mask``."""
        index = range(len(self))[index]  # from the end, too
        ids = torch.from_numpy(self.rows[index].astype(np.int64))
        sizes = self.sizes[self._pieces(index)]
        filled = int(sizes.sum())
        labels = ids.masked_fill(torch.from_numpy(~self._predicted(index)), IGNORE)
        row = {"input_ids": ids, "labels": labels}
        if self.layout == "packed":
            stretches = [np.arange(size, dtype=np.int64) for size in (*sizes, self.block_size - filled)]
            row["position_ids"] = torch.from_numpy(np.concatenate(stretches))
        elif self.layout == "padded":
            row["attention_mask"] = (torch.arange(len(ids)) < filled).long()
        return row

    def head(self, count: int) -> TokenBlocks:
        """Return the first ``count`` rows as blocks with their own hash."""
        return self.take(np.arange(min(count, len(self))))

    def take(self, indices: npt.NDArray[np.int64]) -> TokenBlocks:
        """Return the rows with these indices, in their order, as blocks with their own hash."""
        if np.array_equal(indices, np.arange(len(self))):
            return self
        pieces_of = [self._pieces(int(index)) for index in indices]
        rows, sizes = self.rows[indices], np.concatenate([self.sizes[pieces] for pieces in pieces_of])
        offsets = np.cumsum([0, *(pieces.stop - pieces.start for pieces in pieces_of)], dtype=np.int64)
        learned = None if self.learned is None else self.learned[indices]
        owners = None if self.owners is None else self.owners[indices]
        added = None if self.added is None else np.concatenate([self.added[pieces] for pieces in pieces_of])
        sha256 = _hash_arrays(rows, sizes, offsets, learned, added)
        new = {"rows": rows, "sizes": sizes, "offsets": offsets, "learned": learned, "owners": owners, "added": added}
        return replace(self, **new, sha256=sha256, parts=())  # type: ignore[arg-type]  # fields by name

    @property
    def block_size(self) -> int:
        """Tokens in a row, padding included."""
        return int(self.rows.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(self.sizes.sum())

    @property
    def largest_id(self) -> int:
        """The largest token id; all rows are read for it."""
        arrays = self.rows.arrays if isinstance(self.rows, JoinedRows) else [self.rows]
        return max(int(array.max()) for array in arrays)

    def count_tokens(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens in the rows with these indices, padding not counted."""
        return sum(int(self.sizes[self._pieces(int(index))].sum()) for index in indices)

    def count_predicted(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens that the rows with these indices predict: the learned ones, but never the first of a piece."""
        return sum(int(self._predicted(int(index)).sum()) for index in indices)

    def to_json(self) -> dict[str, Any]:
        """Return the data's entry in results."""
        facts: dict[str, Any] = {
            "source": self.source,
            "revision": self.revision,
            "sha256": self.sha256,
            "documents": self.documents,
            "blocks": len(self),
            "tokens": self.tokens,
            "block_size": self.block_size,
            "layout": self.layout,
        }
        if self.learned is not None:
            facts["predicted_tokens"] = self.count_predicted(range(len(self)))
        if self.parts:
            facts["mixture"] = [asdict(part) for part in self.parts]
        return facts

    def _pieces(self, index: int) -> slice:
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def _predicted(self, index: int) -> Flags:
        """Return (block_size,) which tokens of a row are predicted."""
        pieces = self._pieces(index)
        ends = np.cumsum(self.sizes[pieces])
        predicted: Flags = np.arange(self.block_size) < ends[-1]
        if self.learned is not None:
            predicted &= np.asarray(self.learned[index])
        predicted[ends - self.sizes[pieces]] = False
        if self.added is not None:
            for start, added in zip(ends - self.sizes[pieces], self.added[pieces], strict=True):
                predicted[start : start + added + 1] = False
        return predicted


def blocks_from_stream(
    stream: TokenStream,
    settings: DataSettings,
    *,
    pad_token_id: int,
    start: Sequence[int] = (),
    revision: str | None = None,
    file: Path | None = None,
    with_owners: bool = False,
    sha256: str | None = None,
) -> TokenBlocks:
    """Lay out documents in rows: packed by best fit, one truncated document per row, or cut from one stream.

    Rows are written to ``file`` and mapped; None holds them in memory. Rows of a stream are a view of its tokens,
    unless ``start``, what the tokenizer puts at a document's start, goes before rows that begin inside a document.
    ``with_owners`` keeps which document each token is from; ``sha256`` is the hash of all tokens, if it is known.

    Raises:
        HfpatchError: if a stream is shorter than a block, no example is learned, a block has no space beside ``start``,
            or the file cannot be written.
    """
    size, owners, ranges = settings.block_size, None, stream.ranges()
    if start and size < len(start) + 2:
        raise HfpatchError(
            f"data.block_size is {size}; must be at least {len(start) + 2}, as blocks that begin inside a document "
            f"begin with the tokenizer's start of a document ({len(start)} tokens)"
        )
    if with_owners:
        stream = stream.joined()
        owners = np.repeat(np.arange(len(stream.lengths), dtype=np.int32), stream.lengths)
    facts: dict[str, Any] = {"documents": len(stream.lengths), "layout": settings.layout, "source": settings.source}
    blocks = partial(TokenBlocks, **facts, revision=revision)
    if settings.layout == "stream":
        rows, owners, added = _cut_rows(stream, settings, owners, start, file)
        sizes, offsets = np.broadcast_to(np.int32(size), len(rows)), np.arange(len(rows) + 1, dtype=np.int64)
        slices = "".join(f"[{begin}:{stop}]" for begin, stop in ranges)
        begun = f" that begin with {[*start]}" if start else ""
        identity = f"{sha256 or _hash_arrays(stream.tokens)} {slices} in blocks of {size}{begun}"
        sha256 = hashlib.sha256(identity.encode()).hexdigest()
        return blocks(rows=rows, sizes=sizes, offsets=offsets, sha256=sha256, owners=owners, added=added)
    pieces = _cut_documents(stream, settings, len(start))
    offsets = np.arange(len(pieces) + 1, dtype=np.int64)
    if settings.layout == "packed":
        order, offsets = pack(pieces[:, 1] + pieces[:, 2], size)
        pieces = pieces[order]
    sizes, learned = (pieces[:, 1] + pieces[:, 2]).astype(np.int32), None
    rows = _lay_out(stream.tokens, pieces, offsets, size, pad_token_id, file, start)
    if stream.learned is not None:
        learned = _lay_out(stream.learned, pieces, offsets, size, False, file and file.with_suffix(".learned"))
    if owners is not None:
        owners = _lay_out(owners, pieces, offsets, size, -1, None)
    added = pieces[:, 2].astype(np.int32) if pieces[:, 2].any() else None
    arrays: dict[str, Any] = {"rows": rows, "sizes": sizes, "offsets": offsets, "learned": learned, "added": added}
    return blocks(**arrays, owners=owners, sha256=_hash_arrays(*arrays.values()))


def _cut_documents(stream: TokenStream, settings: DataSettings, added: int) -> Integers:
    """Return the pieces of documents that fit in a row: (pieces, 3), where each begins, its tokens, how many are added.

    Padded documents and examples keep their first tokens, so all their pieces begin where the document does. Examples
    without a token to learn among them are left out, with a warning.
    """
    size = settings.block_size
    if settings.layout == "packed" and stream.learned is None:
        pieces = split_pieces(stream.begins, stream.lengths, size, added)
    else:
        lengths = np.minimum(stream.lengths, size)
        pieces = np.stack([stream.begins, lengths, np.zeros_like(lengths)], axis=1)
    if stream.learned is not None:
        kept = has_something_to_learn(stream, size)
        if not kept.any():
            raise HfpatchError(
                f"{settings.source}: no example has a token to learn among its first {size} (data.block_size); use "
                "longer blocks"
            )
        cut, out = int((stream.lengths > size).sum()), int((~kept).sum())
        if cut or out:
            warnings.warn(
                f"{settings.source}: of {len(kept)} examples {cut} are longer than data.block_size ({size}) and keep "
                f"its first tokens; {out} have none to learn and are left out",
                stacklevel=1,
            )
        pieces = pieces[kept]
    return pieces


def join_blocks(blocks: Sequence[TokenBlocks], weights: Sequence[float]) -> TokenBlocks:
    """Return the blocks of several sources of one layout and block size, one after the other, without a copy."""
    rows: list[TokenArray] = []
    for block in blocks:
        rows += block.rows.arrays if isinstance(block.rows, JoinedRows) else [block.rows]
    starts = np.cumsum([0, *(len(block.sizes) for block in blocks)])[:-1]
    learned = None
    if any(block.learned is not None for block in blocks):  # of plain text all tokens are learned: one broadcast value
        shapes = [(len(block), block.block_size) for block in blocks]
        masks = [np.True_ if block.learned is None else np.asarray(block.learned) for block in blocks]
        learned = JoinedRows([np.broadcast_to(mask, shape) for mask, shape in zip(masks, shapes, strict=True)])
    owners = groups = None
    all_owners = [block.owners for block in blocks if block.owners is not None]
    if len(all_owners) == len(blocks):
        owners = _numbered_on(all_owners)
        if any(block.groups is not None for block in blocks):
            ends = [int(ids.max()) + 1 for ids in all_owners]  # documents without a token in the rows have no owner
            groups = _numbered_on([
                np.arange(end) if block.groups is None else block.groups[:end]
                for block, end in zip(blocks, ends, strict=True)
            ])  # fmt: skip
    added = None
    if any(block.added is not None for block in blocks):
        counts = [np.zeros(len(block.sizes), np.int32) if block.added is None else block.added for block in blocks]
        added = np.concatenate(counts)
    parts = tuple(
        Part(one.source, one.revision, one.sha256, weight, one.documents, len(one), one.tokens)
        for one, weight in zip(blocks, weights, strict=True)
    )
    return TokenBlocks(
        rows=JoinedRows(rows),
        sizes=np.concatenate([block.sizes for block in blocks]),
        offsets=np.concatenate([[0], *(one.offsets[1:] + at for one, at in zip(blocks, starts, strict=True))]),
        layout=blocks[0].layout,
        documents=sum(block.documents for block in blocks),
        source=" + ".join(f"{part.weight:g} × {part.source}" for part in parts),
        revision=None,
        sha256=hashlib.sha256(" + ".join(part.sha256 for part in parts).encode()).hexdigest(),
        learned=learned,
        parts=parts,
        owners=owners,
        groups=groups,
        added=added,
    )


def _numbered_on(numbers: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int32]:
    """Return numbers of several sources, each counted from 0, one after the other and counted on; -1 stays."""
    firsts = np.cumsum([0, *(int(ids.max()) + 1 for ids in numbers[:-1])])
    moved = [np.where(ids < 0, ids, ids + first) for ids, first in zip(numbers, firsts, strict=True)]
    return np.concatenate(moved).astype(np.int32)


def has_something_to_learn(stream: TokenStream, size: int) -> Flags:
    """Return (documents,) which have a learned token among the first ``size``, apart from the very first."""
    if stream.learned is None:
        return stream.lengths > 1
    counts = np.concatenate([[0], np.cumsum(stream.learned, dtype=np.int64)])
    starts = stream.begins
    learns: Flags = counts[starts + np.minimum(stream.lengths, size)] > counts[starts + 1]
    return learns


def _lay_out(
    tokens: npt.NDArray[Any],
    pieces: Integers,
    offsets: Integers,
    size: int,
    pad: int,
    file: Path | None,
    start: Sequence[int] = (),
) -> npt.NDArray[Any]:
    """Return (rows, size) tokens, or an array of values by token.

    ``pieces`` are each a place in ``tokens``, a length, and how many values are added before it: those of ``start``, or
    else the piece's first one.
    """

    def chunks() -> Iterator[npt.NDArray[Any]]:
        for first in range(0, len(offsets) - 1, step):
            bounds = offsets[first : first + step + 1].tolist()
            rows = np.full((len(bounds) - 1, size), pad, dtype=tokens.dtype)
            for row, (begin, end) in zip(rows, pairwise(bounds), strict=True):
                parts = []
                for begin_at, length, added in pieces[begin:end].tolist():
                    if added:
                        parts.append(np.array(start, tokens.dtype) if start else tokens[[begin_at] * added])
                    parts.append(tokens[begin_at : begin_at + length])
                filled = np.concatenate(parts)
                row[: len(filled)] = filled
            yield rows

    step = max(1, _CHUNK_TOKENS // size)
    if file is None:
        return np.concatenate(list(chunks()))
    with clear_about_writing(file), file.open("wb") as stream:
        for rows in chunks():
            stream.write(rows.data)
    return np.memmap(file, dtype=tokens.dtype, mode="r", shape=(len(offsets) - 1, size))


def _cut_rows(
    stream: TokenStream,
    settings: DataSettings,
    owners: npt.NDArray[np.int32] | None,
    start: Sequence[int],
    file: Path | None,
) -> tuple[TokenArray | JoinedRows, npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]:
    """Cut documents one after the other into consecutive rows; a rest shorter than a row is left out.

    The rows are views of the tokens, and copies where they cross a gap in the stream. With ``start`` all are copies,
    in ``file`` if there is one. ``owners`` is the document of each token in a stream without gaps.

    Returns the rows, the document of each of their tokens, and how many tokens each begins with that were added.
    """
    size, total = settings.block_size, int(stream.lengths.sum())
    if start:
        pieces, offsets = _stream_pieces(stream, size, len(start))
        if count := len(offsets) - 1:
            owners = None if owners is None else _lay_out(owners, pieces, offsets, size, -1, None)
            rows = _lay_out(stream.tokens, pieces, offsets, size, 0, file, start)
            return rows, owners, pieces[offsets[:-1], 2].astype(np.int32)
    elif count := total // size:
        owners = None if owners is None else owners[: count * size].reshape(count, size)
        views = _stream_views(stream.tokens, stream.ranges(), size)
        return views[0] if len(views) == 1 else JoinedRows(views), owners, None
    raise HfpatchError(
        f"{settings.source}: the {total} tokens of {len(stream.lengths)} documents do not fill one block "
        f"(data.block_size is {size}); use more text or a smaller data.block_size"
    )


def _stream_views(tokens: TokenArray, ranges: Sequence[tuple[int, int]], size: int) -> list[TokenArray]:
    """Return the rows of stretches of tokens one after the other, each (rows, size): views, but for crossing rows."""
    views: list[TokenArray] = []
    rest = tokens[:0]
    for start, stop in ranges:
        if len(rest):
            crossing = min(start + size - len(rest), stop)
            rest, start = np.concatenate([rest, tokens[start:crossing]]), crossing
            if len(rest) < size:
                continue
            views.append(rest[None])
        cut = start + (stop - start) // size * size
        if cut > start:
            views.append(tokens[start:cut].reshape(-1, size))
        rest = tokens[cut:stop]
    return views


def _stream_pieces(stream: TokenStream, size: int, added: int) -> tuple[Integers, Integers]:
    """Return the pieces of a stream's rows and where each row's begin, as for `_lay_out`.

    A row that does not begin where a document does has ``added`` tokens first.
    """
    pieces, offsets, space, begins = list[tuple[int, int, int]](), [0], 0, stream.begins
    for start, stop in stream.ranges():
        position = start
        while position < stop:
            before = 0
            if space == 0:  # a new row
                nearest = int(np.searchsorted(begins, position))
                before = 0 if nearest < len(begins) and begins[nearest] == position else added
                space = size - before
            taken = min(space, stop - position)
            pieces.append((position, taken, before))
            position, space = position + taken, space - taken
            if space == 0:
                offsets.append(len(pieces))
    return np.array(pieces[: offsets[-1]], np.int64).reshape(-1, 3), np.array(offsets, np.int64)


def _hash_arrays(*arrays: npt.NDArray[Any] | JoinedRows | None) -> str:
    digest = hashlib.sha256()
    for array in (np.asarray(given) for given in arrays if given is not None):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows of (block_size,) to (batch, block_size).

    Position ids that only count up from zero, and masks without padding, are left out: without them a model takes its
    fast causal path.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    positions = batch.get("position_ids")
    if positions is not None and bool((positions[:, -1] == positions.shape[1] - 1).all()):
        del batch["position_ids"]
    mask = batch.get("attention_mask")
    if mask is not None and bool(mask.all()):
        del batch["attention_mask"]
    return batch
