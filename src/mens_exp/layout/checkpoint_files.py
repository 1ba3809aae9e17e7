"""Checkpoint files: safetensors headers and their writer, the model directory, its licence.

Headers are read and checked without the tensors. The format is eight bytes of little-endian header
length, a JSON header, then the data
(https://huggingface.co/docs/safetensors/index#format). The writer receives the tensors one by one
and does not keep them in memory. The header comes first, so every name, type and shape is known
before the first byte of data. Equal tensors in equal order give identical bytes.

Only licences with unambiguous terms are listed, each with its clause; for others the answer is
unknown. This is not legal advice, and other requirements of a licence are not considered.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.errors import DataError, ModelFileError
from mens_exp.layout import prequantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from typing import BinaryIO

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_REMEDY = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's entry: its type, shape, and byte range in the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, keyed by name, without reading their data.

    Raises:
        ModelFileError: the file is missing or truncated, or its header is inconsistent.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            _check_length(path, length, size)
            raw = file.read(length)
    except OSError as error:
        raise ModelFileError("cannot be read", where=str(path), found=str(error)) from error
    tensors = _parse(path, raw)
    _check_extent(path, tensors, size - _LENGTH_BYTES - length)
    return tensors


def data_start(path: Path) -> int:
    """Return the byte offset of the data in a safetensors file whose header was read."""
    with path.open("rb") as file:
        return _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")


def _check_length(path: Path, length: int, size: int) -> None:
    if length > _MAX_HEADER_BYTES:
        raise ModelFileError(
            "header length is not credible",
            where=str(path),
            found=f"{length} bytes",
            expected=f"at most {_MAX_HEADER_BYTES}",
            remedy=_REMEDY,
        )
    if _LENGTH_BYTES + length > size or length == 0:
        raise ModelFileError(
            "the file is truncated inside its header",
            where=str(path),
            found=f"{size} bytes",
            expected=f"more than {_LENGTH_BYTES + length}",
            remedy=_REMEDY,
        )


def _parse(path: Path, raw: bytes) -> dict[str, TensorInfo]:
    try:
        header: Any = json.loads(raw)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        return {name: _entry(path, name, value) for name, value in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ModelFileError(
            "the header is not a safetensors header",
            where=str(path),
            found=str(error),
            remedy=_REMEDY,
        ) from error


def _entry(path: Path, name: str, value: dict[str, Any]) -> TensorInfo:
    start, end = (operator.index(offset) for offset in value["data_offsets"])
    shape = tuple(operator.index(n) for n in value["shape"])
    info = TensorInfo(value["dtype"], shape, start, end)
    if info.dtype not in ITEM_BYTES:
        raise ModelFileError("unknown dtype", where=f"{path}: {name}", found=info.dtype)
    needed = math.prod(info.shape) * ITEM_BYTES[info.dtype]
    if end - start != needed:
        raise ModelFileError(
            "offsets disagree with shape and dtype",
            where=f"{path}: {name}",
            found=f"{end - start} bytes",
            expected=f"{needed} for {list(info.shape)} {info.dtype}",
            remedy=_REMEDY,
        )
    return info


def _check_extent(path: Path, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    expected = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != expected:
            raise ModelFileError(
                "tensors overlap or leave a gap",
                where=f"{path}: {name}",
                found=f"start {info.start}",
                expected=f"start {expected}",
                remedy=_REMEDY,
            )
        expected = info.end
    if expected != data_bytes:
        raise ModelFileError(
            "the file is truncated"
            if data_bytes < expected
            else "the file has extra bytes at its end",
            where=str(path),
            found=f"{data_bytes} bytes of data",
            expected=f"{expected}",
            remedy=_REMEDY,
        )


_MOST_STATE = 1 << 16  # bytes; bitsandbytes' state of a layer has some two hundred
_ALIGNMENT = 8  # header alignment of the reference implementation


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """One tensor of a file to be written: its safetensors type name and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Writer that writes the header at once and then the data of each tensor in turn.

    Attributes:
        order: the names in the order in which their data must be written: wide types first, so
            that every tensor is aligned, and within a type in the given order.
    """

    def __init__(
        self,
        file: BinaryIO,
        outlines: Mapping[str, Outline],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the header.

        Args:
            file: an open, empty file.
            outlines: every tensor of the file, by name.
            metadata: free-form header metadata; None omits the key.
        """
        self.order = sorted(outlines, key=lambda name: -ITEM_BYTES[outlines[name].dtype])
        self._file = file
        header: dict[str, object] = {} if metadata is None else {"__metadata__": {**metadata}}
        self._ends: dict[str, int] = {}
        end = 0
        for name in self.order:
            start, end = end, end + outlines[name].nbytes
            header[name] = {
                "dtype": outlines[name].dtype,
                "shape": list(outlines[name].shape),
                "data_offsets": [start, end],
            }
            self._ends[name] = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        file.write(len(text).to_bytes(8, "little") + text)
        self._written = 0
        self._left = list(reversed(self.order))

    def write(self, name: str, piece: bytes | memoryview) -> None:
        """Append bytes to a tensor; tensors come in `order`, each completed before the next."""
        self._pass_whole()
        assert self._left, "every tensor is whole"
        assert name == self._left[-1], f"{self._left[-1]} comes first"
        self._written += self._file.write(piece)
        assert self._written <= self._ends[name], f"{name} has more bytes than its header says"

    def close(self) -> None:
        """Check that every tensor is complete; closing the file is up to the caller."""
        self._pass_whole()
        assert not self._left, f"{self._left[-1]} is not whole"

    def _pass_whole(self) -> None:
        """Advance to the next tensor that is not empty."""
        while self._left and self._written == self._ends[self._left[-1]]:
            self._left.pop()


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """The contents of a model directory, without its weights.

    Attributes:
        path: the directory.
        config: config.json.
        shards: the files of weights.
        tensors: by name; a layer stored as codes is listed as one weight (see `with_weights`).
    """

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]


def read_directory(path: Path) -> ModelDirectory:
    """Read config.json and every shard's header.

    Raises:
        ModelFileError: a file is missing, truncated or inconsistent; the message names it.
    """
    if not path.is_dir():
        raise ModelFileError(
            "is not a directory",
            where="model.id",
            found=str(path),
            expected="a directory with config.json, safetensors and tokenizer.json",
        )
    config = read_description(path)
    places = _places(path)
    shards = tuple(sorted(set(places.values()))) if places else (path / SINGLE,)
    headers = {shard: read_header(shard) for shard in shards}
    _check_index(path, places, {name for header in headers.values() for name in header})
    seen = _with_weights(config, headers, str(path))
    tensors = {name: info for header in seen.values() for name, info in header.items()}
    return ModelDirectory(path=path, config=config, shards=shards, tensors=tensors)


def read_headers(shards: Iterable[Path]) -> dict[Path, dict[str, TensorInfo]]:
    """Return the tensors of a checkpoint's files; a layer stored as codes is listed as one weight.

    Raises:
        ModelFileError: a file is missing, truncated or inconsistent.
    """
    headers = {shard: read_header(shard) for shard in shards}
    described = {shard.parent / "config.json" for shard in headers}
    configs = [_read_json(path) for path in described if path.is_file()]
    if len(configs) != 1:
        return headers
    return _with_weights(configs[0], headers, str(next(iter(described)).parent))


def _with_weights(
    config: dict[str, Any], headers: Mapping[Path, dict[str, TensorInfo]], where: str
) -> dict[Path, dict[str, TensorInfo]]:
    """Return the headers of files, with each layer stored as codes listed as one weight."""
    shard_of = {name: shard for shard, header in headers.items() for name in header}

    def read(name: str) -> bytes:
        shard = shard_of[name]
        info = headers[shard][name]
        if info.end - info.start > _MOST_STATE:
            raise ModelFileError(
                "is too large for the state of a quantized layer",
                where=f"{shard}: {name}",
                found=f"{info.end - info.start} bytes",
                expected=f"at most {_MOST_STATE}",
                remedy=_REMEDY,
            )
        with shard.open("rb") as file:
            file.seek(data_start(shard) + info.start)
            return file.read(info.end - info.start)

    tensors = {name: info for header in headers.values() for name, info in header.items()}
    kept, coded = with_weights(config, tensors, where, read)
    found = {
        shard: {name: info for name, info in header.items() if name in kept}
        for shard, header in headers.items()
    }
    for name, (codes, info) in coded.items():
        found[shard_of[codes]][name] = info
    return found


def with_weights(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    where: str,
    read: Callable[[str], bytes | None],
) -> tuple[dict[str, TensorInfo], dict[str, tuple[str, TensorInfo]]]:
    """Separate the plain tensors from the layers stored as codes, each listed as one weight.

    The weight's dtype is :data:`mens_exp.layout.prequantized.CODES`, and its bytes are those of
    the codes. An unsupported format, which planning refuses by name, is left unchanged.

    Args:
        config: config.json.
        tensors: of all files.
        where: the directory, for messages.
        read: returns the bytes of a small tensor, or None.

    Returns:
        The plain tensors by name; and, by the name of each weight, the name and entry of its codes.

    Raises:
        ModelFileError: a layer lacks its codes, or their shape is invalid.
    """
    try:
        stored = prequantized.format_of(config, where)
    except ModelFileError:
        stored = None
    if stored is None:
        return dict(tensors), {}
    layers = stored.layers({name: info.shape for name, info in tensors.items()}, where, read)
    parts = {name for path in layers for name in stored.names(path)}
    coded = {}
    for path, shape in layers.items():
        codes = f"{path}.{stored.codes}"
        info = replace(tensors[codes], dtype=prequantized.CODES, shape=shape)
        coded[f"{path}.weight"] = (codes, info)
    parts |= {name for name in tensors if prequantized.is_of_cache(name)}
    return {name: info for name, info in tensors.items() if name not in parts}, coded


def read_description(path: Path) -> dict[str, Any]:
    """Return config.json, after checking that there is a tokenizer next to it.

    Raises:
        ModelFileError: a file is missing or unreadable.
    """
    config = _read_json(path / "config.json")
    if not (path / "tokenizer.json").is_file():
        raise ModelFileError("is missing", where=str(path / "tokenizer.json"))
    return config


def license_of(path: Path) -> str | None:
    """Return the licence stated in the metadata of a model card; None if there is none.

    Format: https://huggingface.co/docs/hub/model-cards#model-card-metadata.
    """
    try:
        _, head, _ = (path / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        stated = parse_yaml(head, "README.md")
    except (OSError, ValueError, DataError):
        return None
    if not isinstance(stated, dict):
        return None
    name = stated.get("license_name" if stated.get("license") == "other" else "license")
    return name if isinstance(name, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError("is missing or unreadable", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError("is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileError("is not a JSON object", where=str(path))
    return value


def _places(path: Path) -> dict[str, Path]:
    """Return the shard of each tensor from the index; empty if a single file holds all tensors."""
    if (path / SINGLE).is_file():
        return {}  # even with an index, transformers loads the single file
    if not (path / INDEX).is_file():
        raise ModelFileError(
            "contains no safetensors weights",
            where=str(path),
            expected=f"{SINGLE} or {INDEX}",
        )
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict):
        raise ModelFileError(
            "does not list any tensors",
            where=str(path / INDEX),
            expected="a weight_map of names to files",
        )
    listed = {str(shard) for shard in weight_map.values()}
    missing = sorted(shard for shard in listed if not (path / shard).is_file())
    if missing:
        raise ModelFileError(
            "shards listed in the index are absent",
            where=str(path / INDEX),
            found=", ".join(missing),
            remedy="download the model again",
        )
    return {str(tensor): path / str(shard) for tensor, shard in weight_map.items()}


def _check_index(path: Path, places: dict[str, Path], tensors: set[str]) -> None:
    absent = sorted(places.keys() - tensors)
    if absent:
        raise ModelFileError(
            "tensors listed in the index are in no shard",
            where=str(path / INDEX),
            found=f"{absent[0]}, {len(absent)} in all",
            remedy="download the model again",
        )


# Ids as on the Hub. Those that require attribution: Apache-2.0 section 4, the copyright line
# of MIT and BSD, section 3(a) of CC BY 4.0, the notice file of each Llama licence (section 1.b,
# since Llama 3 with "Built with Llama"), that of the Gemma terms (section 3.1).
_ASK = frozenset(
    {
        *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause"),
        *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
        *("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "gemma"),
    }
)
_ASK_NOTHING = frozenset({"cc0-1.0", "unlicense", "mit-0", "0bsd"})


def attribution_required(licence: str | None) -> bool | None:
    """Return whether a licence requires attribution of the weights' origin.

    Args:
        licence: as named by the publisher, an SPDX or Hub id; case is ignored.

    Returns:
        The answer; None if the licence or its requirement is unknown.
    """
    name = (licence or "").lower()
    if name in _ASK:
        return True
    return False if name in _ASK_NOTHING else None
