"""What identifies the code of an installed package: its version, and its files where the version does not tell."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from hfpatch.support.files import sha256_file
from hfpatch.support.provenance import PACKAGES


@functools.cache
def describe_package(package: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line for each distribution that a package is of, and for each one that these require.

    A distribution is known by its version; one that was installed from a folder, a file or a repository, whose version
    need not change with its code, by the content of its Python files, too; and any other one by the files that changed
    since. A package of no distribution is known by its files. The libraries whose versions results record
    are left out. Everything is read once a process.

    Args:
        package: the name that is imported.
        path: ``sys.path``.
    """
    owners = list(_owners(path).get(package, ()))
    if not owners:
        files = [(home.parent, file) for home in module_paths(package) for file in python_files(home)]
        return tuple(f"{package} {file.relative_to(above).as_posix()} {sha256_file(file)}" for above, file in files)
    lines: dict[str, list[str]] = {}
    for owner in owners:  # as it grows by what they require
        name = _normal(owner.metadata["Name"] or package)
        if name in lines or name in map(_normal, PACKAGES):
            continue
        lines[name] = [f"{name} {owner.version}", *(f"{name} {file} {sha}" for file, sha in _changed_files(owner))]
        for required in owner.requires or ():
            wanted = re.match(r"[\w.-]+", required)
            if wanted is not None and "extra ==" not in required:
                owners += list(distributions(name=wanted[0], path=list(path)))[:1]
    return tuple(line for described in lines.values() for line in described)


@functools.cache
def _owners(path: tuple[str, ...]) -> dict[str, list[Distribution]]:
    """Return the distributions that each name at the top of a package is of."""
    owners: dict[str, list[Distribution]] = {}
    for owner in distributions(path=list(path)):
        tops = set((owner.read_text("top_level.txt") or "").split())
        tops |= set(re.findall(r"^(\w+)[/.]", owner.read_text("RECORD") or "", re.MULTILINE))
        for top in tops:
            owners.setdefault(top, []).append(owner)
    return owners


def _changed_files(distribution: Distribution) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of the Python files that are not as an index has them."""
    is_local = distribution.read_text("direct_url.json") is not None  # PEP 610
    for file in distribution.files or ():
        if file.suffix != ".py":
            continue
        path = Path(str(file.locate()))
        digest = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
        recorded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if is_local or file.hash is None or file.hash.value != recorded:
            yield file.as_posix(), digest.hex()


def module_paths(name: str) -> list[Path]:
    """Return the folders of a package at the top, or the file of a module; none if it is built in or does not exist."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    file = [spec.origin] if spec.has_location and spec.origin else []
    return list(map(Path, spec.submodule_search_locations or file))


def python_files(path: Path) -> list[Path]:
    """Return the files of a folder and below in order, or the path itself if it is a file."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
