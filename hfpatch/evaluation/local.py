"""Local copies of hub data: the files in ``eval/local`` say which tasks read which files of a data folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.documents import read_documents
from hfpatch.recipes.strict import Section, read_yaml, validate
from hfpatch.support.resources import eval_dir

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

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
    unused = {key: None for split, key in _SPLITS.items() if split not in data.data_files}
    loader: Callable[..., DatasetDict] = partial(_load, data, data_dir)
    return {**unused, "dataset_path": "json", "dataset_name": None, "custom_dataset": loader}


def local_stamp(data: LocalData, data_dir: Path) -> Stamp:
    """Return the time and size of each file at hand, which change when a file does."""
    return file_stamp(data_dir / name for name in data.data_files.values())


def file_stamp(files: Iterable[Path]) -> Stamp:
    """Return the time and size of each file that there is."""
    return tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())


def _load(data: LocalData, data_dir: Path, **_: Any) -> DatasetDict:
    """Read all splits; lm-eval passes the task's metadata, which does not matter here."""
    from datasets import DatasetDict

    files = {split: data_dir / name for split, name in data.data_files.items()}
    return DatasetDict({split: _dataset(file, data.fields) for split, file in files.items()})


def _dataset(file: Path, fields: Sequence[str]) -> Dataset:
    from datasets import Dataset

    documents = read_documents(file, fields)
    try:
        return Dataset.from_list(documents)
    except (ValueError, TypeError) as error:  # pyarrow's errors are of these kinds
        odd = next((n for n, other in enumerate(documents) if not _alike(documents[0], other)), 0)
        raise HfpatchError(
            f"{file}, document {odd} (counted from 0): a field has another type than in document 0 ({error})"
        ) from error


def _alike(first: dict[str, Any], other: dict[str, Any]) -> bool:
    from datasets import Dataset

    try:
        Dataset.from_list([first, other])
    except (ValueError, TypeError):
        return False
    return True
