"""Files of JSON lines that grow with a run, each line of a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.files import write_text


class JsonLines:
    """A file of JSON objects, one a line, each with its ``step``; steps never go back.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and flush them.

        Raises:
            HfpatchError: if the file cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write("".join(json.dumps(value) + "\n" for value in values))
        except OSError as error:
            raise HfpatchError(f"{self.path}: cannot be written ({error.strerror}); free space and resume") from error

    def values(self) -> list[dict[str, Any]]:
        """Return all whole lines; a last line that a crash cut off is left out, a missing file has none."""
        return [json.loads(line) for line in self._whole_lines()]

    def values_until(self, step: int) -> list[dict[str, Any]]:
        """Return the whole lines of steps up to ``step``; before the first step, none."""
        return [value for value in self.values() if value["step"] <= step] if step else []

    def keep(self, step: int) -> None:
        """Drop the lines of later steps than ``step``; before the first step, all."""
        kept = self._whole_lines()[: len(self.values_until(step))]
        write_text(self.path, "".join(line + "\n" for line in kept))

    def sync(self) -> None:
        """Have the system write the file, if there is one, to the disk, so that no checkpoint is ahead of it."""
        if self.path.exists():
            with self.path.open("rb") as stream:
                os.fsync(stream.fileno())

    def _whole_lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").split("\n")[:-1] if self.path.exists() else []


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with null in the place of numbers that are not finite, for which JSON has no word."""
    return {name: None if _is_not_finite(value) else value for name, value in values.items()}


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
