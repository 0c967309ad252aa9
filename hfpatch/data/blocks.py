"""Token blocks: the fixed-length rows that batches are drawn from, of one source or of a mixture."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hfpatch.data.packing import Integers, pack, split_pieces
from hfpatch.data.tokenizer import TokenArray, TokenStream, gather
from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import DataSettings, Layout
from hfpatch.support.files import clear_about_writing

IGNORE = -100
Mask: TypeAlias = npt.NDArray[np.bool_]
_CHUNK_TOKENS = 1 << 20


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
            return np.stack([self[int(each)] for each in index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
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

    Attributes:
        rows: (blocks, block_size) token ids.
        sizes: (pieces,) int32, tokens of each piece, row by row.
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
    """

    rows: TokenArray | JoinedRows
    sizes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    layout: Layout
    documents: int
    source: str
    revision: str | None
    sha256: str
    learned: Mask | JoinedRows | None = None
    parts: tuple[Part, ...] = ()
    owners: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return (block_size,) ``input_ids``, ``labels``, packed ``position_ids`` or padded ``attention_mask``."""
        ids = torch.from_numpy(self.rows[index].astype(np.int64))
        sizes = self._pieces(index)
        filled = int(sizes.sum())
        stretches = [np.arange(size, dtype=np.int64) for size in (*sizes, self.block_size - filled)]
        positions = torch.from_numpy(np.concatenate(stretches))
        labels = ids.masked_fill(positions == 0, IGNORE)
        labels[filled:] = IGNORE
        if self.learned is not None:
            labels.masked_fill_(~torch.from_numpy(np.array(self.learned[index])), IGNORE)
        row = {"input_ids": ids, "labels": labels}
        if self.layout == "packed":
            row["position_ids"] = positions
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
        pieces = [self._pieces(int(index)) for index in indices]
        rows, sizes = self.rows[indices], np.concatenate(pieces)
        offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        learned = None if self.learned is None else self.learned[indices]
        owners = None if self.owners is None else self.owners[indices]
        sha256 = _hash_arrays(rows, sizes, offsets, learned)
        new = {"rows": rows, "sizes": sizes, "offsets": offsets, "learned": learned, "owners": owners}
        return replace(self, **new, sha256=sha256, parts=())  # type: ignore[arg-type]

    @property
    def block_size(self) -> int:
        """Tokens in a row, padding included."""
        return int(self.rows.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(self.sizes.sum())

    def count_tokens(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens in the rows with these indices, padding not counted."""
        return sum(int(self._pieces(int(index)).sum()) for index in indices)

    def count_predicted(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens that the rows with these indices predict: the learned ones, but never the first of a piece."""
        if self.learned is None:
            return self.count_tokens(indices) - sum(len(self._pieces(int(index))) for index in indices)
        total = 0
        for index in map(int, indices):
            sizes = self._pieces(index)
            learned = np.asarray(self.learned[index])
            total += int(learned[: sizes.sum()].sum()) - int(learned[np.cumsum(sizes) - sizes].sum())
        return total

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

    def _pieces(self, index: int) -> npt.NDArray[np.int32]:
        return self.sizes[self.offsets[index] : self.offsets[index + 1]]


def blocks_from_stream(
    stream: TokenStream,
    settings: DataSettings,
    *,
    pad_token_id: int,
    revision: str | None = None,
    file: Path | None = None,
    with_owners: bool = False,
    sha256: str | None = None,
) -> TokenBlocks:
    """Lay out documents in rows: packed by best fit, one truncated document per row, or cut from one stream.

    Rows are written to ``file`` and mapped; None holds them in memory. Rows of a stream are a view of its tokens.
    ``with_owners`` keeps which document each token is from; ``sha256`` is the hash of all tokens, if it is known.

    Raises:
        HfpatchError: if a stream is shorter than a block, no example is learned, or the file cannot be written.
    """
    size, owners, ranges = settings.block_size, None, stream.ranges()
    if with_owners:  # the documents one after the other: a view if they are so already
        learned = None if stream.learned is None else gather(stream.learned, ranges)
        stream = TokenStream(gather(stream.tokens, ranges), stream.lengths, learned)
        owners = np.repeat(np.arange(len(stream.lengths), dtype=np.int32), stream.lengths)
    if settings.layout == "stream":
        places = "".join(f"[{start}:{stop}]" for start, stop in ranges)
        identity = f"{sha256 or _hash_arrays(stream.tokens)} {places}"
        return _cut_blocks(stream, settings, revision, identity, owners)

    # Pieces of at most a row: a start and a length each; examples keep their first tokens, if one of them is learned.
    if settings.layout == "packed" and stream.learned is None:
        pieces = split_pieces(stream.begins, stream.lengths, size)
    else:
        pieces = np.stack([stream.begins, np.minimum(stream.lengths, size)], axis=1)
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

    # Rows of pieces.
    offsets = np.arange(len(pieces) + 1, dtype=np.int64)
    if settings.layout == "packed":
        order, offsets = pack(pieces[:, 1], size)
        pieces = pieces[order]
    rows: TokenArray = _lay_out(stream.tokens, pieces, offsets, size, pad_token_id, file)
    learned = None
    if stream.learned is not None:
        learned = _lay_out(stream.learned, pieces, offsets, size, False, file and file.with_suffix(".learned"))
    if owners is not None:
        owners = _lay_out(owners, pieces, offsets, size, -1, None)
    sizes = pieces[:, 1].astype(np.int32)
    return TokenBlocks(
        rows=rows,
        sizes=sizes,
        offsets=offsets,
        layout=settings.layout,
        documents=len(stream.lengths),
        source=settings.source,
        revision=revision,
        sha256=_hash_arrays(rows, sizes, offsets, learned),
        learned=learned,
        owners=owners,
    )


def join_blocks(blocks: Sequence[TokenBlocks], weights: Sequence[float]) -> TokenBlocks:
    """Return the blocks of several sources of one layout and block size, one after the other, without a copy."""
    rows: list[TokenArray] = []
    for each in blocks:
        rows += each.rows.arrays if isinstance(each.rows, JoinedRows) else [each.rows]
    starts = np.cumsum([0, *(len(each.sizes) for each in blocks)])[:-1]
    learned = None
    if any(each.learned is not None for each in blocks):  # of plain text all tokens are learned: one broadcast value
        shapes = [(len(each), each.block_size) for each in blocks]
        masks = [np.True_ if each.learned is None else np.asarray(each.learned) for each in blocks]
        learned = JoinedRows([np.broadcast_to(mask, shape) for mask, shape in zip(masks, shapes, strict=True)])
    owners = None
    known = [each.owners for each in blocks if each.owners is not None]
    if len(known) == len(blocks):
        firsts = np.cumsum([0, *(int(own.max()) + 1 for own in known[:-1])])
        moved = [np.where(own < 0, own, own + first) for own, first in zip(known, firsts, strict=True)]
        owners = np.concatenate(moved).astype(np.int32)
    parts = tuple(
        Part(each.source, each.revision, each.sha256, weight, each.documents, len(each), each.tokens)
        for each, weight in zip(blocks, weights, strict=True)
    )
    return TokenBlocks(
        rows=JoinedRows(rows),
        sizes=np.concatenate([each.sizes for each in blocks]),
        offsets=np.concatenate([[0], *(each.offsets[1:] + at for each, at in zip(blocks, starts, strict=True))]),
        layout=blocks[0].layout,
        documents=sum(each.documents for each in blocks),
        source=" + ".join(f"{part.weight:g} × {part.source}" for part in parts),
        revision=None,
        sha256=hashlib.sha256(" + ".join(part.sha256 for part in parts).encode()).hexdigest(),
        learned=learned,
        parts=parts,
        owners=owners,
    )


def has_something_to_learn(stream: TokenStream, size: int) -> Mask:
    """Return (documents,) which have a learned token among the first ``size``, apart from the very first."""
    if stream.learned is None:
        return stream.lengths > 1
    counts = np.concatenate([[0], np.cumsum(stream.learned, dtype=np.int64)])
    starts = stream.begins
    found: Mask = counts[starts + np.minimum(stream.lengths, size)] > counts[starts + 1]
    return found


def _lay_out(
    tokens: npt.NDArray[Any], pieces: Integers, offsets: Integers, size: int, pad: int, file: Path | None
) -> npt.NDArray[Any]:
    """Return (rows, size) tokens, or an array of values by token: pieces, each a start and a length in ``tokens``."""

    def chunks() -> Iterator[npt.NDArray[Any]]:
        for first in range(0, len(offsets) - 1, step):
            bounds = offsets[first : first + step + 1].tolist()
            rows = np.full((len(bounds) - 1, size), pad, dtype=tokens.dtype)
            for row, (begin, end) in zip(rows, pairwise(bounds), strict=True):
                parts = [tokens[start : start + length] for start, length in pieces[begin:end].tolist()]
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


def _cut_blocks(
    stream: TokenStream,
    settings: DataSettings,
    revision: str | None,
    identity: str,
    owners: npt.NDArray[np.int32] | None,
) -> TokenBlocks:
    """Cut documents one after the other into consecutive rows; a rest shorter than a row is left out.

    The rows are a view of the tokens up to the first gap in the stream, and a copy from there. ``identity`` identifies
    the tokens, ``owners`` is the document of each token in a stream without gaps.
    """
    size, total, ranges = settings.block_size, int(stream.lengths.sum()), stream.ranges()
    count = total // size
    if count == 0:
        raise HfpatchError(
            f"{settings.source}: the {total} tokens of {len(stream.lengths)} documents do not fill one block "
            f"(data.block_size is {size}); use more text or a smaller data.block_size"
        )
    start, stop = ranges[0]
    cut = start + (stop - start) // size * size
    rows: list[TokenArray] = [stream.tokens[start:cut].reshape(-1, size)]
    if len(ranges) > 1:
        rest = gather(stream.tokens, [(cut, stop), *ranges[1:]])
        rows.append(rest[: len(rest) // size * size].reshape(-1, size))
    rows = [part for part in rows if len(part)]
    return TokenBlocks(
        rows=rows[0] if len(rows) == 1 else JoinedRows(rows),
        sizes=np.broadcast_to(np.int32(size), count),
        offsets=np.arange(count + 1, dtype=np.int64),
        layout="stream",
        documents=len(stream.lengths),
        source=settings.source,
        revision=revision,
        sha256=hashlib.sha256(f"{identity} in blocks of {size}".encode()).hexdigest(),
        owners=None if owners is None else owners[: count * size].reshape(count, size),
    )


def _hash_arrays(*arrays: npt.NDArray[Any] | JoinedRows | None) -> str:
    digest = hashlib.sha256()
    for array in (np.asarray(each) for each in arrays if each is not None):
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
