"""Uploading through huggingface_hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not listed

from hfpatch.errors import HfpatchError, first_line
from hfpatch.sharing.contents import contents

_TITLE = "Upload with hfpatch: "
"""How the title of every push's commit begins, by which a later push tells its files from those of others."""


@dataclass(frozen=True)
class Pushed:
    """Where a folder went, and which files; without ``url`` nothing was sent.

    Attributes:
        url: of the repository.
        files: what was sent.
        removed: files of earlier pushes which are not among them.
        replaced: those that replaced a file of another commit than a push.
    """

    url: str | None
    files: tuple[str, ...]
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


def push(
    folder: str | Path,
    repo_id: str,
    *,
    method: str | None = None,
    seed: int | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> Pushed:
    """Put a run, a patch or an export on the hub, in one commit of a model repository, created if it does not exist.

    Files that an earlier push put there are removed if this folder does not have them. Files of other commits stay,
    unless this folder has a file of the same name. The history of the repository keeps all versions.

    Args:
        folder: a folder written by `compare`, `save_patch` or `export`; see :func:`hfpatch.sharing.contents.contents`.
        repo_id: ``user/name``.
        method: of a run, the one method whose patch to share; None shares all.
        seed: the seed of that patch; None takes the first.
        private: make a new repository private; one that is public is refused.
        dry_run: send nothing.

    Raises:
        HfpatchError: if the folder cannot be shared, the name cannot be one, or the hub refuses.
    """
    folder = Path(folder)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HfpatchError(f"{repo_id!r} is not a repository name, such as user/name ({first_line(error)})") from error
    if "/" not in repo_id:
        raise HfpatchError(f"{repo_id!r} is not a repository name, such as user/name; put your user name before it")
    shared = contents(folder, method=method, seed=seed, repo_id=repo_id)
    if dry_run:
        return Pushed(None, tuple(sorted(shared)))
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise HfpatchError(
                f"{repo_id}: exists and is public; make it private on the hub first, or name another one"
            )
        others, pushed = set[str](), set[str]()
        for file in api.list_repo_tree(repo_id, recursive=True, expand=True):
            if isinstance(file, RepoFile):
                is_pushed = file.last_commit is not None and file.last_commit.title.startswith(_TITLE)
                (pushed if is_pushed else others).add(file.path)
        removed = sorted(pushed - {*shared, ".gitattributes"})  # which the hub changes in the same commit
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(name, file) for name, file in sorted(shared.items())),
            *(CommitOperationDelete(name) for name in removed),
        ]
        commit = api.create_commit(repo_id, operations, commit_message=f"{_TITLE}{folder.resolve().name}")
    except HfpatchError:
        raise
    except Exception as error:  # the client's HTTP library, and so its exceptions, depend on its version
        raise HfpatchError(
            f"{repo_id}: the hub refused the upload ({first_line(error)}); check the name, `hf auth login`, the "
            "network and HF_HUB_OFFLINE"
        ) from error
    return Pushed(str(commit.repo_url), tuple(sorted(shared)), tuple(removed), tuple(sorted(others & shared.keys())))
