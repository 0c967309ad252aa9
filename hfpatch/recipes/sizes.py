"""The option of each tuner that ``match`` solves for, its size, and the values that it may have.

This is the one table of sizes. A tuner's values come as runs, in each of which the parameter count never falls from one
value to the next; the runs together hold every value. The counts themselves come from twins of the model
(`hfpatch.surgery.budget`), which do not show the values: PEFT replaces OFT block sizes that do not divide,
DEFT ranks above the widest add nothing, and counts of LoKr and RandLoRA fall and rise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Part = Mapping[str, Any]
Widths = Sequence[tuple[int, int]]
"""(input, output) width of every module that a part adapts."""

_NO_LIMIT = 2**40
_STEPS = 10_000  # of a size that is a share


@dataclass(frozen=True)
class Size:
    """A tuner's size.

    Attributes:
        kind: the part's type.
        key: the option.
    """

    kind: str
    key: str

    def smallest(self, part: Part) -> Any:
        """Return a value that every model takes."""
        if self.kind == "gralora":
            return int(part.get("gralora_k", 2))
        return {"oft": 2, "pre_projection": 1.0, "randlora": 32, "supertuning": 0.5}.get(self.kind, 1)

    def runs(self, part: Part, widths: Widths) -> list[Sequence[Any]]:
        """Return the values that it may have in a part, given the widths of the modules."""
        inputs, every = [width for width, _ in widths], [width for pair in widths for width in pair]
        weights = [one * two for one, two in widths]
        ranks = [min(pair) for pair in widths]  # the largest that a module's matrix can have; more adds nothing
        values: Sequence[Any] = range(1, _NO_LIMIT)
        match self.kind:
            case "adamss":
                values = range(1, int(part.get("r", 100)) + 1)
            case "boft":
                blocks, common = 2 ** (int(part.get("boft_n_butterfly_factor", 1)) - 1), math.gcd(*inputs)
                values = [size for size in _divisors(inputs) if common % (size * blocks) == 0]
            case "c3a":
                values = _divisors(every)[::-1]
            case "deft" | "loreft":
                values = range(1, max(ranks) + 1)
            case "fourierft" | "waveft":
                shared_out = part.get("proportional_parameters", False)
                values = range(1, (sum(weights) // len(weights) if shared_out else min(weights)) + 1)
            case "gralora":
                step = int(part.get("gralora_k", 2))
                values = range(step, _NO_LIMIT, step)
            case "lokr":  # a factor of larger side n is a whole matrix from r = n / 2 on, maybe with fewer parameters
                sides = {side for width in every for side in _divisors([width])}
                starts = sorted({max(1, -(-side // 2)) for side in sides})
                return [range(start, end) for start, end in pairwise([*starts, starts[-1] + 1])]
            case "miss":  # blocks of r x r, or of r inputs
                values = _divisors(every) if part.get("init_weights") == "bat" else range(1, min(inputs) + 1)
            case "oft":
                values = [size for size in _divisors(inputs) if size > 1]
            case "osf":
                values = range(max(ranks) - 1, 0, -1)
            case "pre_projection":
                values = _Expansions(max(widths)[0])
            case "psoft":
                values = range(1, min(ranks) + 1)
            case "randlora":  # ceil(side / r) bases cover the smaller side; where that is constant, the count rises
                bases = [tuple(-(-side // rank) for side in set(ranks)) for rank in range(1, max(ranks) + 1)]
                starts = [rank for rank in range(1, len(bases) + 1) if rank == 1 or bases[rank - 1] != bases[rank - 2]]
                return [range(start, end) for start, end in pairwise([*starts, len(bases) + 1])]
            case "shira":
                values = range(1, min(one * two // (one + two) for one, two in widths) + 1)
            case "supertuning":
                least = -(-_STEPS // min(weights))  # one weight of the smallest matrix
                values = [(_STEPS - step) / _STEPS for step in range(least + 1, _STEPS + 1)]
        return [values]


def _divisors(numbers: Iterable[int]) -> list[int]:
    common = math.gcd(*numbers)
    return [value for value in range(1, common + 1) if common % value == 0]


@dataclass(frozen=True)
class _Expansions(Sequence[float]):
    """The expansions e of all inner widths int(e·d), from 1."""

    hidden: int

    def __len__(self) -> int:
        return _NO_LIMIT

    def __getitem__(self, index: Any) -> Any:
        width = range(1, len(self) + 1)[index]
        expansion = width / self.hidden
        return expansion if int(expansion * self.hidden) == width else math.nextafter(expansion, math.inf)


_KEYS = {
    **dict.fromkeys(("lora", "lily", "loha", "glora", "hra", "hira", "delora", "peanut"), "r"),
    **dict.fromkeys(("deft", "gralora", "lokr", "miss", "psoft", "randlora", "shira"), "r"),
    **dict.fromkeys(("fourierft", "waveft"), "n_frequency"),
    "adamss": "subspace_rank",
    "boft": "boft_block_size",
    "c3a": "block_size",
    "loreft": "rank",
    "nonlinear_query": "rank",
    "oft": "oft_block_size",
    "osf": "effective_rank",
    "pre_projection": "expansion",
    "supertuning": "sparsity",
}
SIZES = {kind: Size(kind, key) for kind, key in _KEYS.items()}
"""Part type -> its size."""

NO_SIZE: dict[str, str] = {
    "beft": "trains one bias per module",
    "ia3": "trains one vector per module",
    "query_temperature": "trains one number per head",
    "ln_tuning": "trains the norms that it names",
    "road": "trains as many rotations as a module has outputs, whatever its group_size",
    "trainable_tokens": "trains the tokens that token_indices names",
}
"""Part types that have no size, with the reason."""


def has_open_size(part: Part) -> bool | None:
    """Return whether a part has a size that it leaves open; None where only loading its type would show that.

    It does not depend on the types loaded so far.
    """
    kind = part.get("type")
    if kind in _REGISTERED or (kind not in SIZES and kind not in NO_SIZE):
        return None
    return kind in SIZES and SIZES[kind].key not in part and "match" not in part


def share_of(text: str) -> float | None:
    """Return the percentage of a share of the base's parameters, such as ``0.1%``; None if it is none above 0."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d*)?|\.\d+)\s*%\s*", text)
    return float(match[1]) or None if match else None


def register_size(kind: str, key: str | None) -> None:
    """Register the option of a method that is its size, a whole number from 1 on; None for no size."""
    if kind in _REGISTERED or (kind not in SIZES and kind not in NO_SIZE):
        _REGISTERED.add(kind)
        NO_SIZE.pop(kind, None)
        SIZES.pop(kind, None)
        if key is None:
            NO_SIZE[kind] = "declares none"
        else:
            SIZES[kind] = Size(kind, key)


_REGISTERED: set[str] = set()  # a method may be defined again, as a notebook's cell does
