"""What a model has answered so far, on disk: an interrupted evaluation resumes, a repeated one costs nothing.

An answer belongs to the tokens that were scored, which hold everything that a task, its data, its few-shot examples,
the tokenizer and the cutting of long rows decide. What else matters is the model, as `model_key` describes it: a file
holds the answers of one model, and bears the hash of its description in its name.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.evaluation.scorer import Answer, TokenRequest
from hfpatch.nn.matmul import choose_library
from hfpatch.support.files import sha256_file
from hfpatch.support.provenance import installed_versions
from hfpatch.surgery.bases import hash_weights
from hfpatch.surgery.peft_registration import peft_is_imported

FORMAT = 1
_OF_TRAINING = ("training", "gradient_checkpointing")
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_STATES = ("active_adapters", "disable_adapters", "merged_adapters")


class Answers:
    """The answers of one model, in a file that grows.

    The first line describes the model; each other line is ``[digest of the request, log-likelihood, is greedy]``. A
    last line that a kill cut short is dropped.

    Args:
        path: the file; it and its folder are made when the first answer is added.
        key: the description of the model, see `model_key`.
        optional: go on with a warning, and without a file, where it cannot be read or written.

    Raises:
        HfpatchError: if the file cannot be read or written and is not optional.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], *, optional: bool = False) -> None:
        self.path = path
        self._optional = optional
        self._usable = True
        self._header = json.dumps({"format": FORMAT, "key": key}, sort_keys=True)
        self._known: dict[str, Answer] = {}
        try:
            self._read()
        except OSError as error:
            self._give_up(error)

    def find(self, request: TokenRequest) -> Answer | None:
        """Return the answer to a request if it is there."""
        return self._known.get(_digest(request))

    def add(self, answers: Sequence[tuple[TokenRequest, Answer]]) -> None:
        """Append answers; when this returns they survive the end of the process."""
        rows = {_digest(request): answer for request, answer in answers}
        if self._usable:
            try:
                self._write(rows)
            except OSError as error:
                self._give_up(error)
        self._known.update(rows)

    def _write(self, rows: Mapping[str, Answer]) -> None:
        new = not self.path.is_file()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            if new:
                stream.write(self._header + "\n")
            stream.writelines(json.dumps([digest, *answer]) + "\n" for digest, answer in rows.items())

    def _read(self) -> None:
        if not self.path.is_file():
            return
        whole = self.path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        header, _, rows = kept.decode("utf-8", errors="replace").partition("\n")
        if header != self._header:
            self.path.unlink()
            return
        if len(kept) < len(whole):
            with self.path.open("r+b") as stream:
                stream.truncate(len(kept))
        for line in rows.splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            digest, value, greedy = json.loads(line)
            answer = (float(value), bool(greedy))
        except (ValueError, TypeError):
            return  # a damaged line is as good as none: its request is scored again
        self._known[str(digest)] = answer

    def _give_up(self, error: OSError) -> None:
        why = f"answers cannot be kept ({error.strerror or error})"
        if not self._optional:
            raise HfpatchError(f"{self.path}: {why}; free space or choose another folder") from error
        warnings.warn(f"{self.path.parent}: {why}; the evaluation goes on without", stacklevel=2)  # once a folder
        self._usable = False


def open_answers(folder: Path, task: str, key: Mapping[str, Any], *, optional: bool = False) -> Answers:
    """Return the answers of a model to a task in a folder that may hold those of other models."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Answers(folder / f"{task.replace('/', '-')}-{name}.jsonl", key, optional=optional)


def model_key(model: Any, base_sha256: str | None = None) -> dict[str, Any]:
    """Return what decides a model's log-likelihoods of given tokens.

    That is the parameters; the buffers, saved with the model (a router's bias) or not (rotary frequencies, VeRA's
    projections); the classes of the modules and the numbers that they hold (a scale, an epsilon); the configuration,
    the adapters; and how products are computed. Hooks and methods replaced by hand on a model in memory are not seen;
    do not keep answers of such a model.

    Args:
        model: a causal language model, with adapters or without.
        base_sha256: the hash of its base's weights where that is known already.
    """
    return {
        "base_sha256": base_sha256 or hash_weights(model),
        "adapters_sha256": _hash_adapters(model),
        "buffers_sha256": _hash_tensors(dict(model.named_buffers())).hexdigest(),
        "modules_sha256": _hash_modules(model),
        "config_sha256": hashlib.sha256(model.config.to_json_string(use_diff=False).encode()).hexdigest(),
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "attention": str(model.config._attn_implementation),
        "device": model.device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "matmul": choose_library(model),
        "precision": _precision(),
        "versions": installed_versions(),
        "code_sha256": code_hash(),
    }


@cache
def code_hash() -> str:
    """Return the SHA-256 of hfpatch's own source files."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    listing = "\n".join(f"{file.relative_to(package).as_posix()} {sha256_file(file)}" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _hash_adapters(model: nn.Module) -> str | None:
    """Return the SHA-256 of the adapters' configurations, state and tensors; None where there are none."""
    if not peft_is_imported():
        return None
    from hfpatch.surgery.patch import stack
    from hfpatch.tuners.adapters import AdapterWrapper, adapter_parameters

    parameters = adapter_parameters(model)
    if not parameters:
        return None
    configs = {name: config.to_dict() for name, config in stack(model).items()}
    states = [
        (name, *(str(getattr(module, state, None)) for state in _STATES))
        for name, module in model.named_modules()
        if isinstance(module, AdapterWrapper)
    ]
    digest = _hash_tensors(parameters)
    digest.update(json.dumps([configs, states], sort_keys=True, default=_plain).encode())
    return digest.hexdigest()


def _hash_tensors(tensors: Mapping[str, torch.Tensor]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest


def _hash_modules(model: nn.Module) -> str:
    """Return the SHA-256 of every module's class and of the numbers among its attributes."""
    listing = [(path, type(module).__qualname__, _settings(module)) for path, module in model.named_modules()]
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def _settings(module: nn.Module) -> dict[str, Any]:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if name not in _OF_TRAINING and _is_numeric(value)}


def _is_numeric(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_numeric(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, bool | int | float)


def _precision() -> dict[str, Any]:
    """Return how torch rounds in the products of matrices, and the dtype of autocast where it is on."""
    backends: Any = torch.backends
    fp32 = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return {
        "fp32": [backend.fp32_precision for backend in fp32],
        "reduced": [getattr(backends.cuda.matmul, name) for name in _REDUCED],
        "autocast": {device: str(torch.get_autocast_dtype(device)) for device in devices},
    }


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _digest(request: TokenRequest) -> str:
    return hashlib.blake2b(
        array("q", (len(request.targets), *request.tokens, request.targets[-1])).tobytes(), digest_size=16
    ).hexdigest()
