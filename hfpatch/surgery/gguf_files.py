"""GGUF files as bases: finding a file, reading its header, and making a plain model of its dequantised weights."""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, first_line
from hfpatch.support.files import sha256_file
from hfpatch.support.modes import replaced

SUFFIX = ".gguf"
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_FLOATS = ("F32", "F16", "BF16", "F64")
_MOST = re.compile(r"^(ALL|MOSTLY)_")
_STRING, _ARRAY = 8, 9  # GGUF's numbers of these types
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_ALIGNMENT = 32  # GGUF's, where a file names none
_PARSING = threading.RLock()
_ROPE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is complete.

    Attributes:
        path: the file.
        sha256: of the whole file.
        quantization: the format of most of its weights, in llama.cpp's words: Q4_1, Q4_K_M, F16, ...
        metadata: its header without lists.
        sizes: the number of values of each tensor, by llama.cpp's name.
    """

    path: Path
    sha256: str
    quantization: str
    metadata: dict[str, Any]
    sizes: dict[str, int]

    @property
    def facts(self) -> dict[str, str]:
        """The file in results."""
        verb = "read as" if self.quantization in _FLOATS else "dequantised from"
        return {
            "file": self.path.name,
            "file_sha256": self.sha256,
            "quantization": self.quantization,
            "weights": f"{verb} {self.quantization}",
        }


def find_gguf(name: str, revision: str | None = None) -> Path | None:
    """Return the local path of the GGUF file that a base's name means; None if it means something else.

    Args:
        name: ``FILE.gguf``, a folder that has one and no ``config.json``, or ``ORG/REPO/FILE.gguf``, which is
            downloaded from the hub.
        revision: hub branch, tag or commit.

    Raises:
        HfpatchError: if there is no such file, the folder has several, the hub cannot be reached, or the name is empty.
    """
    if not name.strip():
        raise HfpatchError("the model has no name; give a hub id, a folder or a .gguf file")
    path = Path(name)
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise HfpatchError(f"{name}: has several GGUF files ({names}); name one of them")
        return files[0].absolute() if files else None
    if not name.endswith(SUFFIX):
        return None
    if path.is_file():
        return path.absolute()
    owner, *rest = name.split("/", 2)
    if len(rest) < 2 or owner in ("", ".", "..", "~", "tinyworld") or path.parent.exists():
        beside = ", ".join(file.name for file in sorted(path.parent.glob(f"*{SUFFIX}"))) or "none"
        raise HfpatchError(f"{name}: no such file (GGUF files in its folder: {beside}); of the hub: ORG/REPO/FILE.gguf")
    from transformers.utils.hub import cached_file

    try:
        return Path(str(cached_file(f"{owner}/{rest[0]}", rest[1], revision=revision)))
    except OSError as error:
        raise HfpatchError(
            f"{name}: cannot be downloaded from the hub: {first_line(error)} Check the name, the network and "
            "HF_HUB_OFFLINE"
        ) from error


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, check that the file is as long as its tensors need, and hash it.

    Raises:
        HfpatchError: if the package ``gguf`` is not installed, or the file is damaged, truncated, big-endian or a part
            of several.
    """
    if importlib.util.find_spec("gguf") is None:
        raise HfpatchError(f"{path.name}: GGUF files need the package gguf; pip install 'hfpatch[gguf]'")
    if shard := _SHARD.search(path.name):
        raise HfpatchError(f"{path}: is one of {int(shard[1])} parts; join them: llama-gguf-split --merge FIRST OUT")
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # The metadata, and name, shape, type and offset of each tensor
            if data[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            header, metadata, tensors = _Header(data, offset=4), dict[str, Any](), []
            version = header.number("<I")
            if version and version % 0x1_0000 == 0:  # its bytes in the other order
                raise HfpatchError(f"{path}: is big-endian; convert a copy of it: gguf-convert-endian COPY little")
            if version not in (2, 3):
                raise ValueError(f"version {version} of the format")
            count, keys = header.number("<Q"), header.number("<Q")
            for _ in range(keys):
                key, kind = header.string(), header.number("<I")
                if (value := header.value(kind)) is not None:
                    metadata[key] = value
            for _ in range(count):
                name, dimensions = header.string(), header.number("<I")
                shape = tuple(header.number("<Q") for _ in range(dimensions))
                tensors.append((name, shape, header.number("<I"), header.number("<Q")))

            # Where they end
            alignment = int(metadata.get("general.alignment", _ALIGNMENT))
            start, sizes, by_kind = -(-header.offset // alignment) * alignment, {}, Counter[str]()
            for name, shape, number, offset in tensors:
                kind = GGMLQuantizationType(number)
                block, length = GGML_QUANT_SIZES[kind]
                sizes[name], stored = prod(shape), prod(shape) // block * length
                by_kind[kind.name] += stored
                if start + offset + stored > len(data):
                    raise ValueError(f"{name} ends after {start + offset + stored:,} of {len(data):,} bytes")
        if not tensors or "general.architecture" not in metadata:
            raise ValueError("it has no model")
        most = metadata.get("general.file_type")  # it may be newer than the package, or a guess of llama.cpp's
        named = next((kind.name for kind in LlamaFileType if kind == most and _MOST.match(kind.name)), "")
    except HfpatchError:
        raise
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, struct.error) as error:
        raise HfpatchError(
            f"{path}: damaged, truncated or not a GGUF file ({first_line(error)}); download it again"
        ) from error
    quantization = _MOST.sub("", named) or max(by_kind, key=by_kind.__getitem__)
    return GgufFile(path, sha256_file(path), quantization, metadata, sizes)


@dataclass
class _Header:
    """A reader of the header of a GGUF file that skips lists, such as the tokenizer's."""

    data: mmap.mmap
    offset: int

    def value(self, kind: int) -> Any:
        """Return a value of the metadata; None for a list, which is skipped."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _FORMATS:
            self.offset += count * struct.calcsize(_FORMATS[kind])
        else:
            for _ in range(count):
                self.value(kind)
        return None

    def number(self, layout: str) -> Any:
        number = struct.unpack_from(layout, self.data, self.offset)[0]
        self.offset += struct.calcsize(layout)
        return number

    def string(self) -> str:
        length = self.number("<Q")
        text = self.data[self.offset : self.offset + length]
        if len(text) < length:
            raise ValueError("it ends within its header")
        self.offset += length
        return text.decode()


@contextmanager
def parsed_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once, not for configuration, tokenizer and weights each.

    It also slices the file as a plain array, not as a `numpy.memmap`, and builds llama.cpp's table of names once, not
    for each module. The result is the same. A file that changed is parsed again.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    parsed: dict[tuple[str, int, int], Reader] = {}

    def reader(path: str | os.PathLike[str], mode: Any = "r") -> Any:
        if mode != "r":
            return plain(path, mode)
        stat = Path(path).stat()
        key = os.fspath(path), stat.st_size, stat.st_mtime_ns
        if key not in parsed:
            parsed[key] = Reader(key[0])
        return parsed[key]

    with _PARSING:  # the module is every thread's
        plain, names = gguf.GGUFReader, gguf.get_tensor_name_map
        with replaced(gguf, GGUFReader=reader, get_tensor_name_map=functools.cache(names)):
            yield


def gguf_loading() -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that dequantise a file."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # older versions always dequantise
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def as_plain(model: Any) -> Any:
    """Remove transformers' records of the quantiser from a dequantised model, so that it saves and exports."""
    for key in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(key, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    return model


def check_complete(model: Any, file: GgufFile) -> None:
    """Check that transformers read all of a file: it skips tensors and scalings that it does not know.

    Raises:
        HfpatchError: if the file's rotary frequencies are scaled and the model's are not, or their numbers of values
            differ.
    """
    architecture, kind = file.metadata["general.architecture"], type(model).__name__
    advice = "it would be another model; take the original one"
    scaling = str(file.metadata.get(f"{architecture}.rope.scaling.type", "none"))
    of_config = str(getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None))
    tables = [name for name in file.sizes if _ROPE.fullmatch(name)]
    if (scaling != "none" and scaling not in of_config) or (tables and "'default'" in of_config):
        what = tables[0] if tables else f"RoPE scaling {scaling!r}"
        raise HfpatchError(f"{file.path}: transformers does not read its {what}, so {advice}")
    tied = "output.weight" if model.get_output_embeddings().weight is model.get_input_embeddings().weight else ""
    stored = sum(size for name, size in file.sizes.items() if name not in (*tables, tied))
    values = sum(parameter.numel() for parameter in model.parameters())
    if stored != values:
        raise HfpatchError(
            f"{file.path}: has {stored:,} values and {kind} has {values:,}: transformers reads another layout, so "
            f"{advice}"
        )
