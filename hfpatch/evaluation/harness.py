"""Changes to lm-eval while it runs here: its output, its templates, and its data files; its command."""

from __future__ import annotations

import glob
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from lm_eval.utils import env
from tqdm import tqdm

from hfpatch.errors import HfpatchError
from hfpatch.support.files import hash_values, sha256_file
from hfpatch.support.modes import replaced

_MODULES = ("lm_eval.api.task", "lm_eval.models.huggingface")
_LOGGERS = ("lm_eval", "datasets", "transformers.tokenization_utils_base")


@contextmanager
def quiet() -> Iterator[None]:
    """Show only errors of lm-eval and datasets inside the ``with`` block, for modules already imported."""
    import datasets

    with ExitStack() as stack:
        for module in (sys.modules[name] for name in _MODULES if name in sys.modules):
            stack.enter_context(replaced(module, tqdm=partial(tqdm, disable=True)))
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Cache lm-eval's compiled templates, which it otherwise compiles again for every document."""
    with replaced(env, from_string=lru_cache(maxsize=256)(env.from_string)):
        yield


@contextmanager
def files_by_content() -> Iterator[dict[Path, str]]:
    """Make ``datasets.load_dataset`` read local files again where their content has changed.

    Its own cache takes a file of the same path, size and modification time as the one that it has read. Yields the
    SHA-256 of the local files that were read, by path.
    """
    import datasets

    read: dict[Path, str] = {}
    load = datasets.load_dataset

    def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
        files = {file: sha256_file(file) for file in _local_files(path, options)}
        read.update(files)
        if files:
            folder = f"content-{hash_values(sorted(map(str, files.items())))[:16]}"
            options.setdefault("cache_dir", str(Path(datasets.config.HF_DATASETS_CACHE) / folder))
        return load(path, *arguments, **options)

    with replaced(datasets, load_dataset=load_dataset):
        yield read


def _local_files(path: str, options: dict[str, Any]) -> list[Path]:
    """Return the local files that a call of ``load_dataset`` may read."""
    given, folder = options.get("data_files") or [], options.get("data_dir")
    lists = list(given.values()) if isinstance(given, dict) else [given]
    names = [str(name) for entry in lists for name in (entry if isinstance(entry, list | tuple) else [entry])]
    roots = [Path(root) for root in (path, folder) if root is not None]
    files = {file for root in roots for file in ([root] if root.is_file() else root.rglob("*"))}
    for pattern in (str(root / name) for name in names for root in (Path(), *roots)):
        files |= {Path(file) for file in glob.glob(pattern, recursive=True)}  # noqa: PTH207  pathlib refuses absolute patterns
    return sorted(file.absolute() for file in files if file.is_file())


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run ``lm_eval ARGUMENTS`` with ``--model hfpatch`` registered.

    Only lm-eval up to 0.4.13 needs this; later versions find hfpatch by the entry point ``lm_eval.models``.

    Raises:
        HfpatchError: if there is no such task.
        SystemExit: as lm-eval ends, such as after its help or with wrong arguments.
    """
    from lm_eval.__main__ import cli_evaluate

    try:
        with replaced(sys, argv=["lm_eval", *arguments]):  # its parser reads them there
            cli_evaluate()
    except ValueError as error:
        if str(error).startswith("Tasks not found"):
            raise HfpatchError(f"lm_eval: {error}; hfpatch eval --tasks list prints what there is") from None
        raise
