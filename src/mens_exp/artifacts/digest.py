"""SHA-256 of bytes, files and JSON values."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mens_exp.artifacts.atomic import json_line

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["canonical_json", "digest", "sha256_bytes", "sha256_file"]


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of `data`, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, read in pieces.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(obj: object) -> bytes:
    """Return the one JSON form of `obj`: sorted keys, no spaces, UTF-8, no final newline.

    Raises:
        MensError: a number in `obj` is not finite, or a value has no JSON form.
    """
    return json_line(obj, "canonical JSON").removesuffix(b"\n")


def digest(obj: object) -> str:
    """Return the SHA-256 of the canonical JSON of `obj`.

    Raises:
        MensError: as `canonical_json`.
    """
    return sha256_bytes(canonical_json(obj))
