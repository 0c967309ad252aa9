"""Local copies of hub data: the files in ``eval/local`` say which tasks read which files of a data folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.data.readers import read_json_lines
from hfpatch.errors import HfpatchError
from hfpatch.recipes.strict import Section, read_yaml, validate
from hfpatch.support.folders import eval_dir

if TYPE_CHECKING:
    from datasets import DatasetDict

Stamp = tuple[tuple[int, int], ...]

_SPLITS = {"train": "training_split", "validation": "validation_split", "test": "test_split"}


class LocalData(Section):
    """One file of ``eval/local``."""

    tasks: tuple[str, ...]
    """The tasks that read these files; everything else about them stays as it is."""
    data_files: dict[Literal["train", "validation", "test"], str]
    """A path below the data folder for each split; a split that is not named is not used."""
    fields: tuple[str, ...]
    """The fields that every row must have."""


def local_data() -> dict[str, LocalData]:
    """Return, by task name, where each task finds its data below a data folder.

    Raises:
        HfpatchError: if a file of ``eval/local`` has a mistake.
    """
    found = [validate(read_yaml(file), LocalData, str(file)) for file in sorted((eval_dir() / "local").glob("*.yaml"))]
    return {task: data for data in found for task in data.tasks}


def local_overrides(data: LocalData, data_dir: Path) -> dict[str, Any]:
    """Return the keys that make an lm-eval task configuration read local files instead of the hub."""

    def load(**_metadata: Any) -> DatasetDict:
        from datasets import Dataset, DatasetDict

        found = DatasetDict()
        for split, name in data.data_files.items():
            file = data_dir / name
            documents = read_documents(file, data.fields)
            try:
                found[split] = Dataset.from_list(documents)
            except (ValueError, TypeError) as error:  # base classes of pyarrow's errors
                odd = next((n for n, other in enumerate(documents) if not _same_types(documents[0], other)), 0)
                raise HfpatchError(
                    f"{file}, document {odd} (counted from 0): a field has another type than in document 0 ({error})"
                ) from error
        return found

    unused = {key: None for split, key in _SPLITS.items() if split not in data.data_files}
    return {**unused, "dataset_path": "json", "dataset_name": None, "custom_dataset": load}


def file_stamp(files: Iterable[Path]) -> Stamp:
    """Return the modification time and size of each file that exists, which change when a file does."""
    return tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())


def _same_types(first: dict[str, Any], other: dict[str, Any]) -> bool:
    from datasets import Dataset

    try:
        Dataset.from_list([first, other])
    except (ValueError, TypeError):
        return False
    return True


def read_documents(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the documents of a ``.jsonl`` or ``.jsonl.gz`` file, reduced to ``fields``.

    Raises:
        HfpatchError: if the file is missing, unreadable or empty, or a line is not UTF-8, not a JSON object or lacks a
            field; the message has the line's number, counted from 1.
    """
    if not path.is_file():
        raise HfpatchError(f"{path}: no such data file; put it there or leave out the data folder to use the hub")
    documents = []
    for place, row in read_json_lines(path):
        missing = [field for field in fields if field not in row]
        if missing:
            raise HfpatchError(f"{place}: no field {missing[0]!r}; required fields: {', '.join(fields)}")
        documents.append({field: row[field] for field in fields})
    if not documents:
        raise HfpatchError(f"{path}: contains no documents; use a file with one JSON object per line")
    return documents
