"""Rows kept in the cache: a line that says what they are, and a line for each row.

The first line holds the hash of all that follows, so that a damaged file is never taken for whole.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic, digest
from mens_exp.errors import DataError, Problems, SetupError
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mens_exp.rows.schema import TrainingPair

__all__ = ["keep", "recall"]


def keep(path: Path, header: Mapping[str, Any], pairs: Sequence[TrainingPair]) -> None:
    """Write rows to the cache, all or nothing.

    Args:
        path: the file; its directory is made where it is missing.
        header: what the rows are, plain JSON values; `format` and `version` among them.
        pairs: the rows.

    Raises:
        SetupError: the cache cannot be written.
    """
    rows = b"".join(digest.canonical_json(to_json(pair)) + b"\n" for pair in pairs)
    first = digest.canonical_json({**header, "rows_sha256": digest.sha256_bytes(rows)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, first + b"\n" + rows)
    except OSError as error:
        raise SetupError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="name a cache directory that can be written",
        ) from error


def recall(path: Path, content_sha256: str) -> tuple[dict[str, Any], list[TrainingPair]] | None:
    """Read rows from the cache.

    Args:
        path: the file.
        content_sha256: what its header must say they were made of.

    Returns:
        The header and the rows; None where there is no file, or none that can be trusted.
    """
    try:
        head, _, rows = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if header["content_sha256"] != content_sha256 or header[
            "rows_sha256"
        ] != digest.sha256_bytes(rows):
            return None
        return header, [parse_row(json.loads(line), str(path)) for line in rows.splitlines()]
    except (OSError, ValueError, KeyError, TypeError, DataError, Problems):
        return None
