"""An adapter in whichever schema it lies on disk, read as v3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts import adapter_v2, adapter_v3
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest

__all__ = ["read_directory", "read_files", "schema_in"]

_FORMATS = (*adapter_v3.FORMATS, *adapter_v2.FORMATS)


def schema_in(directory: Path) -> str | None:
    """Return ``v3`` or ``v2``, whichever schema's header lies in a directory, or None."""
    names = {
        adapter_v3.MANIFEST_NAME: "v3",
        adapter_v3.OLDER_MANIFEST_NAME: "v3",
        adapter_v2.META_NAME: "v2",
    }
    return next((schema for name, schema in names.items() if (directory / name).is_file()), None)


def read_directory(
    directory: Path,
) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read an adapter under its schema's own file names; v3 where both lie there.

    Args:
        directory: holds the two files.

    Raises:
        DataError: a file is missing, truncated, of a newer version or breaks one rule.
        Problems: several rules are broken, in either file.
    """
    if schema_in(directory) == "v2":
        meta, tensors = adapter_v2.read_adapter_v2(directory)
        return adapter_v2.lift(meta), tensors
    return adapter_v3.read_adapter(directory)


def read_files(
    tensors: Path, meta: Path, *, double_quant: bool = True
) -> tuple[AdapterManifest, dict[str, npt.NDArray[np.float32]]]:
    """Read an adapter from two files of any names; `format` of the header tells the schema.

    Args:
        tensors: the safetensors file.
        meta: the JSON header, of schema v2 or v3 or an older name of either.
        double_quant: what a v2 is lifted with.

    Returns:
        The manifest in schema v3, and float32 tensors by name.

    Raises:
        DataError: a file is missing, truncated, of a newer version or breaks one rule.
        Problems: several rules are broken, in either file.
    """
    value = parse_json(read_bytes(meta), str(meta))
    named = value.get("format") if isinstance(value, dict) else None
    if named in adapter_v2.FORMATS:
        header, found = adapter_v2.read_meta(meta, tensors)
        return adapter_v2.lift(header, double_quant=double_quant), found
    if named in adapter_v3.FORMATS:
        return adapter_v3.read_manifest(meta, tensors)
    raise DataError(
        "no header of an adapter",
        where=f"{meta}: format",
        found="no such key" if named is None else named,
        expected=f"one of {', '.join(_FORMATS)}",
        remedy="name the adapter_manifest.json or the candle_qlora_adapter_meta.json beside it",
    )
