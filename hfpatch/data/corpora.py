"""Documents from the embedded language, local files or the hub."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from hfpatch.data.readers import is_readable, missing_column, read_documents, texts_of
from hfpatch.errors import HfpatchError, nearest
from hfpatch.recipes.data import DataSettings
from hfpatch.support.files import check_data_dir, sha256_file

_TINYWORLD = ("tinyworld/base", "tinyworld/shifted")
_REVISION = re.compile(r"@([0-9a-f]{40})/")


@dataclass(frozen=True)
class Corpus:
    """A source of documents that can be read several times.

    Attributes:
        read: yields every document before filtering.
        compute_digest: returns a hash that changes when the documents do, if necessary by reading them.
        revision: the hub revision that was read, or None.
        cacheable: whether caching is worthwhile, and the digest is known without reading all documents.
    """

    read: Callable[[], Iterator[str]]
    compute_digest: Callable[[], str]
    revision: str | None = None
    cacheable: bool = True

    @cached_property
    def digest(self) -> str:
        """64 hex digits that change when the documents do."""
        return self.compute_digest()


def open_corpus(settings: DataSettings, data_dir: Path | None = None) -> Corpus:
    """Find the documents of ``settings``.

    Args:
        settings: the recipe's data section.
        data_dir: a folder with hub data sets as ``<name after the slash>/<config>/<split>.jsonl[.gz]``; others are
            loaded from the hub.

    Raises:
        HfpatchError: if there is no such file, folder, ``data_dir`` or hub data set, or it cannot be reached.
    """
    check_data_dir(data_dir)
    if settings.source.startswith("tinyworld/"):
        return _tinyworld(settings)
    if settings.is_token_file:
        raise HfpatchError(f"data.source: {settings.source} is a token file, and text is needed here; use a text")
    path = Path(settings.source)
    if settings.streaming and path.exists():
        raise HfpatchError(f"data.source: {settings.source} is local; data.streaming is for hub data sets")
    if path.exists():
        return _local(_files_in(path), settings)
    if is_readable(path) or settings.source.startswith(("/", ".", "~")) or settings.source.count("/") > 1:
        raise HfpatchError(f"data.source: {settings.source} does not exist")
    if data_dir is not None:
        stem = _mirror_stem(settings, data_dir)
        for file in (stem.with_name(stem.name + suffix) for suffix in (".jsonl", ".jsonl.gz")):
            if file.is_file():
                return _local([file], settings)
    return _hub(settings, data_dir)


def filtered_documents(corpus: Corpus, settings: DataSettings) -> Iterator[str]:
    """Yield the documents of a corpus that have at least ``min_characters``, at most ``max_documents``.

    Raises:
        HfpatchError: if there is none.
    """
    long_enough = (text for text in corpus.read() if len(text.strip()) >= settings.min_characters)
    count = 0
    for text in islice(long_enough, settings.max_documents):
        count += 1
        yield text
    if count == 0:
        raise HfpatchError(
            f"data.source {settings.source}: no document has {settings.min_characters} characters; "
            "lower data.min_characters or choose another source"
        )


def training_documents(corpus: Corpus, settings: DataSettings) -> Iterator[str]:
    """Yield `filtered_documents` without the last ``held_out``; only so many are in memory."""
    waiting: deque[str] = deque()
    for text in filtered_documents(corpus, settings):
        waiting.append(text)
        if len(waiting) > (settings.held_out or 0):
            yield waiting.popleft()


def documents(settings: DataSettings, *, data_dir: Path | None = None) -> Iterator[str]:
    """Yield the filtered documents of ``settings``, see :func:`open_corpus`."""
    return filtered_documents(open_corpus(settings, data_dir), settings)


def _tinyworld(settings: DataSettings) -> Corpus:
    if settings.source not in _TINYWORLD:
        hint = nearest(settings.source, _TINYWORLD)
        raise HfpatchError(f"data.source {settings.source}: no such text{hint}; there is {' and '.join(_TINYWORLD)}")
    from hfpatch.tinyworld import language

    split: Literal["base", "shifted"] = "base" if settings.source == "tinyworld/base" else "shifted"
    read = partial(language.documents, split, count=settings.max_documents, seed=0)
    return Corpus(read, compute_digest=lambda: _digest(read()), cacheable=False)


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        if not is_readable(path):
            raise HfpatchError(f"{path}: unknown file type; use .jsonl, .txt (both also as .gz or .xz) or .parquet")
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and is_readable(file))
    if not files:
        raise HfpatchError(f"{path}: the folder has no .jsonl, .txt or .parquet file")
    return files


def _local(files: list[Path], settings: DataSettings) -> Corpus:
    def read() -> Iterator[str]:
        for file in files:
            yield from read_documents(file, text_column=settings.text_column)

    return Corpus(read, compute_digest=lambda: _digest(sha256_file(file) for file in files))


def _mirror_stem(settings: DataSettings, data_dir: Path) -> Path:
    name = settings.source.rpartition("/")[2]
    return data_dir / name / (settings.config or "") / settings.split


def _hub(settings: DataSettings, data_dir: Path | None) -> Corpus:
    from datasets.exceptions import DatasetsError

    dataset, name = _load_from_hub(settings, data_dir), f"data set {settings.source}"
    columns = dataset.column_names  # None if unknown before the stream is read
    if columns is not None and settings.text_column not in columns:
        raise missing_column(name, settings.text_column, columns)

    def read() -> Iterator[str]:
        rows = dataset.select_columns(settings.text_column) if columns is not None else dataset
        number = -1

        def numbered() -> Iterator[tuple[str, Any]]:
            nonlocal number
            for number, row in enumerate(rows):
                yield f"{name}, row {number}", row

        try:
            yield from texts_of(numbered(), settings.text_column, name)
        except (DatasetsError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise HfpatchError(f"{name}: cannot be read beyond row {number} ({reason}); check the network") from error

    commit = _commit(settings, dataset)
    return Corpus(
        read,
        lambda: commit or _digest(read()),
        revision=commit or settings.revision,
        cacheable=commit is not None or not settings.streaming,
    )


def _load_from_hub(settings: DataSettings, data_dir: Path | None) -> Any:
    import datasets

    options = {"streaming": True} if settings.streaming else {}
    try:
        return datasets.load_dataset(
            settings.source, settings.config, split=settings.split, revision=settings.revision, **options
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        where = f"; {_mirror_stem(settings, data_dir)}.jsonl does not exist either" if data_dir is not None else ""
        raise HfpatchError(
            f"data set {settings.source} (config {settings.config}, split {settings.split}): "
            f"cannot be loaded ({reason}){where}; check the name and the network, or set data_dir"
        ) from error


def _commit(settings: DataSettings, dataset: Any) -> str | None:
    """Return the hub commit that was read, or None if it is unknown; the files of a commit never change."""
    found = _REVISION.search(" ".join(dataset.info.download_checksums or {}))
    if found or not settings.streaming:
        return found[1] if found else None
    import huggingface_hub

    try:
        commit: str | None = huggingface_hub.dataset_info(settings.source, revision=settings.revision).sha
    except (huggingface_hub.errors.HfHubHTTPError, OSError):
        return None
    return commit


def _digest(texts: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
