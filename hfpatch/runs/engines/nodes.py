"""What every machine of a cluster must have: the run folder, and the driver's versions.

Nothing here needs Ray: a machine reports on itself with `inspect_node`, and the driver compares with `check_nodes`.
"""

from __future__ import annotations

import platform
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.support.files import clear_about_writing

PACKAGES = ("hfpatch", "torch", "transformers", "peft", "ray")
WAIT_S = 5.0
"""How long a file may take to be seen from another machine, which network file systems may remember as absent."""
_POLL_S = 0.2


@dataclass(frozen=True)
class Token:
    """A file in the run folder, and what is written in it."""

    path: Path
    text: str


@dataclass(frozen=True)
class NodeReport:
    """What one machine says of itself.

    Attributes:
        node: its name.
        sees_folder: whether it read the token.
        versions: of Python and of each package; empty text for one that is not there.
    """

    node: str
    sees_folder: bool
    versions: Mapping[str, str]


@contextmanager
def shared_token(out: Path) -> Iterator[Token]:
    """Write a token into the run folder, and remove it afterwards.

    Raises:
        HfpatchError: if the folder cannot be written.
    """
    token = Token(out.absolute() / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex)
    with clear_about_writing(token.path):
        token.path.write_text(token.text, encoding="utf-8")
    try:
        yield token
    finally:
        token.path.unlink(missing_ok=True)


def inspect_node(token: Token, *, wait_s: float = WAIT_S) -> NodeReport:
    """Return this machine's report."""
    deadline, seen = time.monotonic() + wait_s, False
    while True:
        with suppress(OSError):
            seen = token.path.read_text(encoding="utf-8") == token.text
        if seen or time.monotonic() >= deadline:
            return NodeReport(socket.gethostname(), seen, current_versions())
        time.sleep(_POLL_S)


def current_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a number here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def check_nodes(reports: Sequence[NodeReport], token: Token, versions: Mapping[str, str]) -> None:
    """Compare what machines say of themselves with the driver.

    Args:
        reports: one of each machine.
        token: what they were asked to read.
        versions: the driver's.

    Raises:
        HfpatchError: in one line with every machine that does not see the folder, or else with every version that
            differs and where.
    """
    blind = list(dict.fromkeys(report.node for report in reports if not report.sees_folder))
    if blind:
        raise HfpatchError(
            f"{token.path.parent}: cannot be seen from {', '.join(blind)}; choose an --out on a file system that all "
            "machines mount under the same path, such as NFS"
        )
    differ = [
        f"{name} is {report.versions.get(name) or 'missing'} on {report.node} and {own or 'missing'} here"
        for report in reports
        for name, own in versions.items()
        if report.versions.get(name) != own
    ]
    if differ:
        raise HfpatchError(f"versions differ: {'; '.join(dict.fromkeys(differ))}; install the same on all machines")
