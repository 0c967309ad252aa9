"""Hashes of the sources of hfpatch that compute, taken once in each process."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hfpatch.support.distributions import python_files
from hfpatch.support.files import sha256_file


def _hash(parts: Iterable[str]) -> str:
    """Return the SHA-256 of sources of hfpatch: files and packages below it."""
    package = Path(__file__).parents[1]
    files = sorted({file for part in parts for file in python_files(package / part)})
    listing = "\n".join(f"{file.relative_to(package).as_posix()} {sha256_file(file)}" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


COMPUTING = ("nn", "sites", "tuners", "methods", "models", "surgery", "evaluation/scorer", "evaluation/model.py")
"""The sources of hfpatch that compute log-likelihoods of given tokens."""
COMPUTING_SHA256 = _hash(COMPUTING)
CODE_SHA256 = _hash((*COMPUTING, "data", "evaluation", "training"))
"""The hash of all sources that decide a number, as they were when this process imported this module."""
