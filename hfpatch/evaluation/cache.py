"""A cache of log-likelihoods on disk: an interrupted evaluation resumes, a repeated one costs nothing.

A score is stored by the tokens that were scored. They depend on everything that a task, its data, its few-shot
examples, the tokenizer and the truncation of long rows decide. A file holds the scores of one model, and its name has
the hash of `model_key`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import warnings
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer import Score, TokenRequest
from hfpatch.nn.matmul import choose_library
from hfpatch.support.files import hash_values
from hfpatch.support.provenance import installed_versions
from hfpatch.support.sources import CODE_SHA256, COMPUTING_SHA256
from hfpatch.surgery.bases import hash_model_code, hash_tensors, hash_weights

FORMAT = 1  # to be raised where what a line means changes: files of another one are begun again
_TRAINING = {"training", "gradient_checkpointing"}
_REDUCED_PRECISION = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_ADAPTER_STATES = ("active_adapters", "disable_adapters", "merged_adapters")


class ScoreCache:
    """The scores of one model, in a file that grows.

    The first line describes the model; each other line is ``[digest of the request, log-likelihood, is greedy]``. An
    incomplete last line, left by a killed process, is dropped, and damaged lines are ignored.

    Args:
        path: the file; it and its folder are created when the first score is added.
        key: the description of the model, see `model_key`.
        optional: continue with a warning, and without a file, if it cannot be read or written.
        rank: of the process that writes. Rank 0 reads the file, and takes over the files that other ranks left; each
            other rank reads nothing and adds to its own file beside it, so that its scores survive.

    Raises:
        HfpatchError: if the file cannot be read or written and is not optional.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], *, optional: bool = False, rank: int = 0) -> None:
        self.path = path.with_suffix(f".rank-{rank}.jsonl") if rank else path
        self._optional, self._usable = optional, True
        self._header = json.dumps({"format": FORMAT, "key": key}, sort_keys=True)
        self._scores: dict[str, Score] = {}
        try:
            if not rank:
                self._read(path)
                self.take_over([])
        except OSError as error:
            self._disable(error)

    def find(self, request: TokenRequest) -> Score | None:
        """Return the score of a request if it is known."""
        return self._scores.get(_digest(request))

    def add(self, scores: Sequence[tuple[TokenRequest, Score]]) -> None:
        """Append scores; when this returns they survive the end of the process."""
        self._append({_digest(request): score for request, score in scores})

    def take_over(self, scores: Sequence[tuple[TokenRequest, Score]]) -> None:
        """Add scores and those in the files of other ranks, and remove these files."""
        files = sorted(self.path.parent.glob(f"{glob.escape(self.path.stem)}.rank-*.jsonl"))
        before = set(self._scores)
        for file in files:
            self._read(file)
        left = {digest: score for digest, score in self._scores.items() if digest not in before}
        new = {digest: score for request, score in scores if (digest := _digest(request)) not in before}
        self._append(left | new)
        for file in files:
            file.unlink(missing_ok=True)

    def _append(self, rows: Mapping[str, Score]) -> None:
        self._scores.update(rows)
        if not self._usable or not rows:
            return
        try:
            new = not self.path.is_file()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                if new:
                    stream.write(self._header + "\n")
                stream.writelines(json.dumps([digest, *score]) + "\n" for digest, score in rows.items())
        except OSError as error:
            self._disable(error)

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        header, _, rows = complete.decode("utf-8", errors="replace").partition("\n")
        if header != self._header:
            path.unlink()
            return
        if len(complete) < len(content):
            with path.open("r+b") as stream:
                stream.truncate(len(complete))
        for line in rows.splitlines():
            try:
                digest, value, greedy = json.loads(line)
                self._scores[str(digest)] = (float(value), bool(greedy))
            except (ValueError, TypeError):
                continue

    def _disable(self, error: OSError) -> None:
        why = f"log-likelihoods cannot be saved ({error.strerror or error})"
        if not self._optional:
            raise HfpatchError(f"{self.path}: {why}; free space or choose another folder") from error
        warnings.warn(f"{self.path.parent}: {why}; the evaluation continues without", stacklevel=2)  # once a folder
        self._usable = False


def open_cache(folder: Path, task: str, key: Mapping[str, Any], *, optional: bool = False, rank: int = 0) -> ScoreCache:
    """Return the cache of a model's scores on a task, in a folder that may hold those of other models."""
    name = f"{task.replace('/', '-')}-{hash_values(key)[:16]}.jsonl"
    return ScoreCache(folder / name, key, optional=optional, rank=rank)


def _digest(request: TokenRequest) -> str:
    numbers = array("q", (len(request.targets), *request.tokens, request.targets[-1]))
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def model_key(model: Any, base_sha256: str | None = None) -> dict[str, Any]:
    """Return everything that a model's log-likelihoods of given tokens depend on.

    These are the parameters; the buffers, saved with the model (a router's bias) or not (rotary frequencies, VeRA's
    projections); the classes of the modules, their code and their numeric attributes (a scale, an epsilon); the
    configuration, the adapters; and `computed_with`. Hooks and methods replaced by hand on a single module of a model
    in memory are not detected; do not cache scores of such a model. ``base_sha256`` is the hash of its base's weights
    where that has been computed.
    """
    modules = []
    for path, module in model.named_modules():
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        numbers = {name: public[name] for name in public.keys() - _TRAINING if _is_numeric(public[name])}
        modules.append((path, type(module).__module__, type(module).__qualname__, numbers))
    adapters = None
    if "peft" in sys.modules:  # before its import no model has an adapter
        from hfpatch.tuners.adapters import AdapterWrapper, adapter_parameters, stack

        if parameters := adapter_parameters(model):
            configs = {name: config.to_dict() for name, config in stack(model).items()}
            states = [
                (name, *(str(getattr(module, state, None)) for state in _ADAPTER_STATES))
                for name, module in model.named_modules()
                if isinstance(module, AdapterWrapper)
            ]
            adapters = hash_values([_hash_tensors(parameters), configs, states])
    return {
        "base_sha256": base_sha256 or hash_weights(model),
        "adapters_sha256": adapters,
        "buffers_sha256": _hash_tensors(dict(model.named_buffers())),
        "modules_sha256": hash_values(modules),
        "modules_code": hash_model_code(model),
        "config_sha256": hashlib.sha256(model.config.to_json_string(use_diff=False).encode()).hexdigest(),
        **computed_with(model),
        "code_sha256": COMPUTING_SHA256,
    }


def computed_with(model: Any) -> dict[str, Any]:
    """Return the fields of :data:`hfpatch.results.identity.COMPUTED_WITH` for a model's scores."""
    backends: Any = torch.backends
    fp32 = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    autocast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "attention": str(model.config._attn_implementation),
        "device": model.device.type,
        "tensor_parallel": getattr(model, "tp_size", None),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "matmul": choose_library(model),
        "precision": {
            "fp32": [backend.fp32_precision for backend in fp32],
            "reduced": [getattr(backends.cuda.matmul, name) for name in _REDUCED_PRECISION],
            "autocast": {device: str(torch.get_autocast_dtype(device)) for device in autocast},
        },
        "versions": installed_versions(),
        "code_sha256": CODE_SHA256,
    }


def _hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over the names, dtypes, shapes and bytes of tensors."""
    return hash_tensors({f"{name} {tensor.dtype} {tuple(tensor.shape)}": tensor for name, tensor in tensors.items()})


def _is_numeric(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_numeric(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, bool | int | float)
