"""``data=stdlib``: documented functions of the running interpreter's standard library.

This is real code that comes with every Python and needs no download. Tests, bundled packages and
generated caches are excluded. Extraction takes seconds, so the result is cached under a name that
contains the hash of the source files; each interpreter has its own cache file.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts import digest
from mens_exp.corpus.extraction import python_pairs
from mens_exp.corpus.python_source import decode
from mens_exp.corpus.row_files import load_stored_rows, store_rows
from mens_exp.corpus.split import without_duplicates
from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.rows.schema import TrainingPair

CATEGORY: Final = "stdlib"
CACHE_FORMAT: Final = "mens_exp_stdlib"
# Increase it with every change to the extraction, so that an older cache is not found.
CACHE_VERSION: Final = 1
SKIPPED_DIRECTORIES: Final = frozenset(
    {
        "__pycache__",
        "_bundled",  # ensurepip's wheels, third-party code
        "dist-packages",
        "idle_test",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
# Site-specific, not part of the library.
SKIPPED_FILES: Final = frozenset({"sitecustomize.py", "usercustomize.py"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """The functions taken from a library.

    Attributes:
        pairs: the rows, by file and position, without exact duplicates.
        content_sha256: hash of the files read, from `stdlib_digest`.
        files: number of files read.
        dropped: number of skipped functions by reason.
    """

    pairs: list[TrainingPair]
    content_sha256: str
    files: int
    dropped: dict[str, int]


def extract(root: Path | None = None) -> Extraction:
    """Extract a pair from each documented function of a library.

    Args:
        root: the library's directory; None means the running interpreter's.

    Returns:
        The pairs, grouped by file path relative to the root.

    Raises:
        SetupError: there are no source files.
    """
    dropped: Counter[str] = Counter()
    hashes: list[tuple[str, str]] = []
    pairs: list[TrainingPair] = []
    for name, data in _files(_root(root)):
        hashes.append((name, digest.sha256_bytes(data)))
        text = decode(data)
        if text is None:
            dropped["file_does_not_decode"] += 1
            continue
        pairs += python_pairs(
            text, module=_module(name), group=name, category=CATEGORY, dropped=dropped
        )
    kept, duplicates = without_duplicates(pairs)
    dropped["duplicate"] = duplicates
    return Extraction(
        pairs=kept,
        content_sha256=digest.digest(hashes),
        files=len(hashes),
        dropped={reason: count for reason, count in sorted(dropped.items()) if count},
    )


def stdlib_digest(root: Path | None = None) -> str:
    """Hash the files that `extract` reads, without parsing them.

    Args:
        root: the library's directory; None means the running interpreter's.

    Returns:
        The SHA-256, in hex, over each file's relative path and content.

    Raises:
        SetupError: there are no source files.
    """
    return digest.digest([(name, digest.sha256_bytes(data)) for name, data in _files(_root(root))])


def load(cache: Path, root: Path | None = None) -> Extraction:
    """Return the result of `extract`, from the cache if it is present and intact.

    Args:
        cache: the cache directory; created if it is missing.
        root: the library's directory; None means the running interpreter's.

    Returns:
        The extraction. A damaged cache file is replaced.

    Raises:
        SetupError: there are no source files, or the cache cannot be written.
    """
    content = stdlib_digest(root)
    path = _cache_path(cache, content)
    cached = _read(path, content)
    if cached is not None:
        return cached
    extraction = extract(root)
    header = {
        "format": CACHE_FORMAT,
        "version": CACHE_VERSION,
        "content_sha256": content,
        "files": extraction.files,
        "dropped": extraction.dropped,
    }
    store_rows(path, header, extraction.pairs)
    return extraction


def is_cached(cache: Path, root: Path | None = None) -> bool:
    """Return whether `load` would find its cache file, without reading it."""
    return _cache_path(cache, stdlib_digest(root)).is_file()


def source_bytes(root: Path | None = None) -> int:
    """Return the size in bytes of the files that `extract` reads."""
    return sum(len(data) for _, data in _files(_root(root)))


def _cache_path(cache: Path, content: str) -> Path:
    return cache / f"stdlib-{content[:12]}-v{CACHE_VERSION}.jsonl"


def _root(root: Path | None) -> Path:
    return Path(sysconfig.get_path("stdlib")) if root is None else root


def _module(name: str) -> str:
    """Turn ``json/decoder.py`` into ``json.decoder`` and ``json/__init__.py`` into ``json``."""
    parts = name.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the relative path, with slashes, and content of each file, sorted by path."""
    found = sorted((path.relative_to(root).as_posix(), path) for path in _walk(root))
    if not found:
        raise SetupError(
            "this Python has no standard library in source form",
            where="data=stdlib",
            found=str(root),
            expected="a directory of .py files",
            remedy="use a Python installed with its sources, or data=jsonl data.path=…",
        )
    for name, path in found:
        yield name, path.read_bytes()


def _walk(directory: Path) -> Iterator[Path]:
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        if entry.is_dir():
            # A directory link could lead out of the library or form a cycle.
            if entry.name not in SKIPPED_DIRECTORIES and not entry.is_symlink():
                yield from _walk(entry)
        elif entry.suffix == ".py" and entry.name not in SKIPPED_FILES and entry.is_file():
            yield entry


def _read(path: Path, content: str) -> Extraction | None:
    """Read a cache file; return None if it is missing, damaged or stale."""
    try:
        header, pairs = load_stored_rows(path, content) or ({}, [])
        return Extraction(
            pairs=pairs,
            content_sha256=content,
            files=int(header["files"]),
            dropped={str(reason): int(count) for reason, count in header["dropped"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
