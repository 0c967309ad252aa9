"""Documents from the embedded language, local files or the hub."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from hfpatch.data.readers import SUFFIXES, read_rows
from hfpatch.data.rows import Document, Rows, count_characters
from hfpatch.errors import HfpatchError, first_line, nearest
from hfpatch.recipes.data import DataSettings
from hfpatch.recipes.sources import SplitPart, split_parts
from hfpatch.support.files import check_data_dir, sha256_file
from hfpatch.support.lazy import needing_lab

_TINYWORLD = ("tinyworld/base", "tinyworld/shifted")
_SAVED = ("dataset_dict.json", "state.json")
_TYPES = ".jsonl, .json, .csv, .txt (all also as .gz, .xz, .bz2 or .zst) or .parquet"
_FAR = 2**62  # rows, more than any source has
_REVISION = re.compile(r"@([0-9a-f]{40})/")


@dataclass(frozen=True)
class Corpus:
    """A source of documents that can be read several times.

    Attributes:
        read: yields every document before filtering.
        digest: returns 64 hex digits that change when the documents do, if necessary by reading them.
        revision: the hub revision that was read, or None.
        cacheable: whether caching is worthwhile, and the digest is known without reading all documents.
    """

    read: Callable[[], Iterator[Document]]
    digest: Callable[[], str]
    revision: str | None = None
    cacheable: bool = True


def open_corpus(settings: DataSettings, data_dir: Path | None = None) -> Corpus:
    """Find the documents of ``settings``.

    ``data_dir`` is a folder with hub data sets as ``<name after the slash>/<config>/<split>.jsonl``, or with another
    readable ending; those without a file for each split are loaded from the hub.

    Raises:
        HfpatchError: if there is no such file, folder, ``data_dir`` or hub data set, or it cannot be reached.
    """
    check_data_dir(data_dir)
    if settings.source.startswith("tinyworld/"):
        return _tinyworld(settings)
    if settings.is_token_file:
        raise HfpatchError(
            f"data.source: {settings.source} is a token file, but text is needed here; use a text source"
        )
    path = Path(settings.source)
    is_local = path.exists() or glob.has_magic(settings.source)
    if is_local and (of_hub := settings.changed(("streaming", "config", "revision"))):
        raise HfpatchError(f"data.source: {settings.source} is local; data.{of_hub[0]} is for hub data sets")
    if any((path / name).is_file() for name in _SAVED):
        return _saved(path, settings)
    if is_local:
        return _files(path, settings)
    is_file_name = path.name.endswith(SUFFIXES) or settings.source.startswith(("/", ".", "~"))
    if is_file_name or settings.source.count("/") > 1:
        raise HfpatchError(f"data.source: {settings.source} does not exist")

    # A data set of the hub, or its local copy.
    missing = None
    if data_dir is not None:
        folder = data_dir / settings.source.rpartition("/")[2] / (settings.config or "")
        copies = []
        for part in split_parts(settings.split):
            files = [file for suffix in SUFFIXES if (file := folder / f"{part.name}{suffix}").is_file()]
            if not files:
                missing = folder / part.name
                break
            copies.append((files[:1], part))
        else:
            if settings.revision is not None:
                raise HfpatchError(
                    f"data.revision {settings.revision}: {copies[0][0][0]} is a local copy of no known revision; leave "
                    "out data.revision, or data_dir"
                )
            return _local(copies, settings)
    return _hub(settings, missing)


def _tinyworld(settings: DataSettings) -> Corpus:
    """Return the embedded language."""
    if settings.source not in _TINYWORLD:
        hint = f"{nearest(settings.source, _TINYWORLD)}; there is {' and '.join(_TINYWORLD)}"
        raise HfpatchError(f"data.source {settings.source}: no such text{hint}")
    if settings.format != "text" or settings.split != "train" or settings.group is not None:
        key = next(key for key in ("format", "split", "group") if settings.changed((key,)))
        raise HfpatchError(
            f"data.{key}: {settings.source} is plain text of one split without groups; leave data.{key} out"
        )
    from hfpatch.tinyworld import language

    split: Literal["base", "shifted"] = "base" if settings.source == "tinyworld/base" else "shifted"
    made = partial(language.documents, split, count=settings.max_documents, seed=0)
    return Corpus(lambda: map(Document, made()), lambda: _digest(made()), cacheable=False)


def _files(path: Path, settings: DataSettings) -> Corpus:
    """Return a file, or those in a folder or of a pattern (``**`` for any folders) in the order of their names."""
    if path.exists():
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
    else:
        paths = [Path(name) for name in sorted(glob.glob(settings.source, recursive=True))]  # noqa: PTH207  not pathlib, which refuses absolute ones
    files = [file for file in paths if file.is_file() and file.name.endswith(SUFFIXES)]
    if not files:
        problem = "is of an unknown type" if path.is_file() else "has no file of a known type"
        raise HfpatchError(f"data.source: {settings.source} {problem if paths else 'has no files'}; use {_TYPES}")
    if settings.changed(("text_column",)) and all(".txt" in file.suffixes for file in files):
        raise HfpatchError(f"data.text_column: {settings.source} is plain text, without columns; leave it out")
    parts = split_parts(settings.split)
    if any(part.name != "train" for part in parts):
        raise HfpatchError(
            f"data.split is {settings.split!r}, and {settings.source} is local, which has the one split 'train'; "
            "leave data.split out, or take a slice such as train[:1%]"
        )
    return _local([(files, part) for part in parts], settings)


def filtered_documents(corpus: Corpus, settings: DataSettings) -> Iterator[Document]:
    """Yield the documents of a corpus that have text, and ``min_characters`` of it, at most ``max_documents``.

    Raises:
        HfpatchError: if there is none.
    """
    with_text = (document for document in corpus.read() if document.text)
    least, form = settings.min_characters, settings.format
    long_enough = (document for document in with_text if count_characters(document.text, form) >= least)
    count = 0
    for document in islice(long_enough, settings.max_documents):
        count += 1
        yield document
    if count == 0:
        if settings.min_characters > 1:
            why = f"no document has {settings.min_characters} characters; lower data.min_characters or"
        else:
            why = f"no document has text; correct data.split ({settings.split}) or"
        raise HfpatchError(f"data.source {settings.source}: {why} choose another source")


def documents(settings: DataSettings, *, data_dir: Path | None = None) -> Iterator[str]:
    """Yield the texts of the filtered documents of ``settings``, see :func:`open_corpus`."""
    return (document.text for document in filtered_documents(open_corpus(settings, data_dir), settings))


def _local(parts: list[tuple[list[Path], SplitPart]], settings: DataSettings) -> Corpus:
    """Return the documents of the files of each split, one split after the other."""
    rows = Rows(settings)

    def read() -> Iterator[Document]:
        for files, part in parts:
            name = str(files[0]) if len(files) == 1 else settings.source
            total = sum(1 for file in files for _ in read_rows(file, rows)) if part.is_relative else _FAR
            every_row = chain.from_iterable(read_rows(file, rows) for file in files)
            start, stop = part.bounds(total)
            begin = rows.begin(start)
            yield from rows.documents(islice(every_row, begin, stop), name, part.name, start - begin)

    def digest() -> str:
        digests = []
        for files, part in parts:
            of_files = _digest(sha256_file(file) for file in files)
            digests.append(of_files if part.is_whole else _digest([of_files, f"{part.start}:{part.stop}"]))
        return digests[0] if len(digests) == 1 else _digest(digests)

    return Corpus(read, digest)


def _saved(path: Path, settings: DataSettings) -> Corpus:
    """Return the documents of a folder that `datasets`' ``save_to_disk`` wrote."""
    with needing_lab():
        import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfpatchError(
            f"{path}: cannot be read as a data set of save_to_disk ({first_line(error)}); save it again"
        ) from error
    tables, rows = [], Rows(settings)
    for part in split_parts(settings.split):
        splits = saved if isinstance(saved, datasets.DatasetDict) else {part.name: saved}
        if part.name not in splits:
            hint = nearest(part.name, splits) or f"; there are {', '.join(splits)}"
            raise HfpatchError(f"data.split: {path} has no split {part.name!r}{hint}")
        tables.append((splits[part.name], part))
    read = partial(_split_documents, tables, rows, str(path))
    return Corpus(read, lambda: _digest_documents(read()))


def _split_documents(tables: list[tuple[Any, SplitPart]], rows: Rows, name: str) -> Iterator[Document]:
    """Yield the documents of slices of whole splits."""
    for table, part in tables:
        start, stop = part.bounds(len(table))
        begin = rows.begin(start)
        cut = table if part.is_whole else table.select(range(begin, stop))
        yield from _table_documents(cut, rows, name, part.name, start - begin)


def _table_documents(table: Any, rows: Rows, name: str, split: str = "train", before: int = 0) -> Iterator[Document]:
    """Yield the documents of a `datasets` table, or of a stream whose columns are not known before it is read."""
    from datasets.exceptions import DatasetsError

    number = -1

    def numbered() -> Iterator[tuple[str, Any]]:
        nonlocal number
        for number, row in enumerate(table.select_columns(columns) if columns else table):
            yield f"{name}, row {number}", row

    columns = rows.select_columns(name, table.column_names) if table.column_names else None
    try:
        yield from rows.documents(numbered(), name, split, before)
    except (DatasetsError, OSError) as error:
        raise HfpatchError(
            f"{name}: cannot be read beyond row {number} ({first_line(error)}); check the network"
        ) from error


def _hub(settings: DataSettings, copy: Path | None) -> Corpus:
    """Return the documents of a hub data set; ``copy`` is the missing local copy, without its ending."""
    with needing_lab():
        import datasets

    name, rows, parts = f"data set {settings.source}", Rows(settings), split_parts(settings.split)
    options = {"streaming": True} if settings.streaming else {}
    # Groups that begin with a text are counted from a split's first row; a stream has no slices.
    whole = rows.beginning is not None and not settings.streaming
    splits = [part.name for part in parts] if whole else settings.split
    try:
        loaded: Any = datasets.load_dataset(
            settings.source, settings.config, split=splits, revision=settings.revision, **options
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        where = f"; {copy}.jsonl does not exist either" if copy is not None else ""
        raise HfpatchError(
            f"data set {settings.source} (config {settings.config}, split {settings.split}): "
            f"cannot be loaded ({first_line(error)}){where}; check the name and the network, or set data_dir"
        ) from error
    dataset = loaded[0] if whole else loaded
    if dataset.column_names is not None:  # a stream may not know them before it is read
        rows.select_columns(name, dataset.column_names)
    if whole:
        read = partial(_split_documents, list(zip(loaded, parts, strict=True)), rows, name)
    else:
        read = partial(_table_documents, dataset, rows, name, settings.split)

    # The commit that was read, whose files never change, where it is known.
    downloaded = _REVISION.search(" ".join(dataset.info.download_checksums or {}))
    commit: str | None = downloaded[1] if downloaded else None
    if commit is None and settings.streaming:
        import huggingface_hub

        with contextlib.suppress(huggingface_hub.errors.HfHubHTTPError, OSError):
            commit = huggingface_hub.dataset_info(settings.source, revision=settings.revision).sha
    return Corpus(
        read,
        lambda: commit or _digest_documents(read()),
        revision=commit or settings.revision,
        cacheable=commit is not None or not settings.streaming,
    )


def _digest_documents(documents: Iterable[Document]) -> str:
    return _digest(part for document in documents for part in document if part is not None)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
