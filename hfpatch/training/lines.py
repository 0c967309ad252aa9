"""Files of JSON lines that grow with a run, each line of a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.support.files import write_text


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
        """Return all whole lines; a last line that a crash cut off is left out, a missing file has none.

        Raises:
            HfpatchError: if a line is damaged.
        """
        found = []
        for number, line in enumerate(self._whole_lines(), start=1):
            value = _parse(line)
            if value is None:
                raise self.damaged(number)
            found.append(value)
        return found

    def values_until(self, step: int) -> list[dict[str, Any]]:
        """Return the whole lines of steps up to ``step``, none behind a damaged one; before the first step, none."""
        parsed = map(_parse, self._whole_lines() if step else [])
        return [
            value for value in takewhile(lambda value: value is not None and value["step"] <= step, parsed) if value
        ]

    def damaged(self, number: int) -> HfpatchError:
        """Return the error of a damaged line."""
        return HfpatchError(
            f"{self.path}: line {number} is damaged; delete the folder {self.path.parent} and resume, which trains "
            "that run again"
        )

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
        if not self.path.exists():
            return []
        return self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def _parse(line: str) -> dict[str, Any] | None:
    """Return a line's object; None where it is none, or has no step."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with null in the place of numbers that are not finite, for which JSON has no word."""
    return {name: None if _is_not_finite(value) else value for name, value in values.items()}


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
