"""What ``match`` solves for: the option that is a tuner's size, and the values that it may have.

This is the one table of sizes. A tuner's values come as runs, in each of which the parameter count never falls from one
value to the next; the runs together hold every value. The counts themselves come from twins of the model
(`hfpatch.surgery.matching`), which cannot say what the values are: PEFT takes another OFT block size than one that does
not divide, DEFT ranks above the widest add nothing, and counts of LoKr and RandLoRA fall and rise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Part = Mapping[str, Any]
Widths = Sequence[tuple[int, int]]
"""(input, output) width of every module that a part adapts."""
Runs = list[Sequence[Any]]

_NO_LIMIT = 2**40
_STEPS = 10_000  # of a size that is a share


@dataclass(frozen=True)
class Size:
    """A tuner's size.

    Attributes:
        key: the option.
        runs: the values that it may have in a part, given the widths of the modules.
        smallest: a value that every model takes.
    """

    key: str
    runs: Callable[[Part, Widths], Runs]
    smallest: Callable[[Part], Any] = lambda part: 1


def _any(part: Part, widths: Widths) -> Runs:
    return [range(1, _NO_LIMIT)]


def _up_to(limit: Callable[[Widths], int]) -> Callable[[Part, Widths], Runs]:
    return lambda part, widths: [range(1, limit(widths) + 1)]


def _widest_rank(widths: Widths) -> int:
    """Return the largest rank that a module's matrix can have; a larger size adds nothing."""
    return max(min(pair) for pair in widths)


def _divisors(numbers: Iterable[int], *, least: int = 1) -> list[int]:
    common = math.gcd(*numbers)
    return [value for value in range(least, common + 1) if common % value == 0]


def _multiples(part: Part, widths: Widths) -> Runs:
    step = int(part.get("gralora_k", 2))
    return [range(step, _NO_LIMIT, step)]


def _miss(part: Part, widths: Widths) -> Runs:
    if part.get("init_weights") == "bat":  # blocks of r x r
        return [_divisors(width for pair in widths for width in pair)]
    return [range(1, min(inputs for inputs, _ in widths) + 1)]


def _frequencies(part: Part, widths: Widths) -> Runs:
    weights = [inputs * outputs for inputs, outputs in widths]
    shared_out = part.get("proportional_parameters", False)
    return [range(1, (sum(weights) // len(weights) if shared_out else min(weights)) + 1)]


def _butterflies(part: Part, widths: Widths) -> Runs:
    blocks = 2 ** (int(part.get("boft_n_butterfly_factor", 1)) - 1)
    common = math.gcd(*(inputs for inputs, _ in widths))
    return [[size for size in _divisors([common]) if common % (size * blocks) == 0]]


def _lokr(part: Part, widths: Widths) -> Runs:
    """A factor whose larger side is n becomes a whole matrix at r = n / 2, which can have fewer parameters."""
    sides = {side for pair in widths for width in pair for side in _divisors([width])}
    starts = sorted({max(1, -(-side // 2)) for side in sides})
    return [range(start, end) for start, end in zip(starts, [*starts[1:], starts[-1] + 1], strict=True)]


def _randlora(part: Part, widths: Widths) -> Runs:
    """The smaller side is covered by ceil(side / r) bases; where that is constant, the count rises with r."""
    sides = {min(pair) for pair in widths}
    bases = [tuple(-(-side // rank) for side in sides) for rank in range(1, max(sides) + 1)]
    starts = [rank for rank in range(1, len(bases) + 1) if rank == 1 or bases[rank - 1] != bases[rank - 2]]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(bases) + 1], strict=True)]


def _sparsity(part: Part, widths: Widths) -> Runs:
    least = -(-_STEPS // min(inputs * outputs for inputs, outputs in widths))  # one weight of the smallest matrix
    return [[(_STEPS - step) / _STEPS for step in range(least + 1, _STEPS + 1)]]


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


SIZES: dict[str, Size] = {
    **dict.fromkeys(("lora", "lily", "loha", "glora", "hra", "hira", "delora", "peanut"), Size("r", _any)),
    "adamss": Size("subspace_rank", lambda part, widths: [range(1, int(part.get("r", 100)) + 1)]),
    "boft": Size("boft_block_size", _butterflies),
    "c3a": Size("block_size", lambda part, widths: [_divisors(width for pair in widths for width in pair)[::-1]]),
    "deft": Size("r", _up_to(_widest_rank)),
    "fourierft": Size("n_frequency", _frequencies),
    "gralora": Size("r", _multiples, smallest=lambda part: int(part.get("gralora_k", 2))),
    "lokr": Size("r", _lokr),
    "loreft": Size("rank", _up_to(_widest_rank)),
    "miss": Size("r", _miss),
    "nonlinear_query": Size("rank", _any),
    "oft": Size(
        "oft_block_size",
        lambda part, widths: [_divisors((inputs for inputs, _ in widths), least=2)],
        smallest=lambda part: 2,
    ),
    "osf": Size("effective_rank", lambda part, widths: [range(_widest_rank(widths) - 1, 0, -1)]),
    "pre_projection": Size("expansion", lambda part, widths: [_Expansions(max(widths)[0])], smallest=lambda part: 1.0),
    "psoft": Size("r", _up_to(lambda widths: min(map(min, widths)))),
    "randlora": Size("r", _randlora, smallest=lambda part: 32),
    "shira": Size("r", _up_to(lambda widths: min(n * m // (n + m) for n, m in widths))),
    "supertuning": Size("sparsity", _sparsity, smallest=lambda part: 0.5),
    "waveft": Size("n_frequency", _frequencies),
}
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
    """Return whether a part has a size and says nothing of it; None where that is known only once its type is loaded.

    It does not depend on what has been loaded.
    """
    kind = part.get("type")
    if kind in _REGISTERED or (kind not in SIZES and kind not in NO_SIZE):
        return None
    return kind in SIZES and SIZES[kind].key not in part and "match" not in part


def share_of(text: str) -> float | None:
    """Return the percentage of a share of the base's parameters, such as ``0.1%``; None if it is none above 0."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
    return float(found[1]) or None if found else None


def size_mistake(part: Part) -> str | None:
    """Return what is wrong with ``match`` in a part of a known type, to follow the part's place, or None."""
    kind = part["type"]
    if kind in NO_SIZE:
        return f".match: {kind} has no size to solve for: it {NO_SIZE[kind]}; leave match out"
    key = SIZES[kind].key if kind in SIZES else None  # types that cannot be injected are refused for that
    return f" has both {key} and match; match finds {key}" if key in part else None


def register_size(kind: str, key: str | None) -> None:
    """Say which option of a method is its size, a whole number from 1 on, or that it has none (None)."""
    if kind in _REGISTERED or (kind not in SIZES and kind not in NO_SIZE):
        _REGISTERED.add(kind)
        NO_SIZE.pop(kind, None)
        SIZES.pop(kind, None)
        if key is None:
            NO_SIZE[kind] = "declares none"
        else:
            SIZES[kind] = Size(key, _any)


_REGISTERED: set[str] = set()  # a method may be defined again, as a notebook's cell does
