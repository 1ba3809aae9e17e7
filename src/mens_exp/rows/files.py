"""The files that a setting names: one, a list of them, or a glob."""

from __future__ import annotations

import glob
from pathlib import Path

from mens_exp.artifacts.nearest import nearest_file
from mens_exp.errors import DataError, MensError, Problems

__all__ = ["COMPRESSED", "ROWS", "inner_suffix", "resolve_files"]

COMPRESSED = (".gz", ".zst")
_TEXT = (".jsonl", ".json")
ROWS = (*_TEXT, *(f"{text}{end}" for text in _TEXT for end in COMPRESSED), ".parquet", ".arrow")


def inner_suffix(path: Path) -> str:
    """Return how the name of a file ends, in lower case, less what says how it is compressed."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def resolve_files(names: str | list[str], field: str) -> list[Path]:
    """Return the files that a setting names, a glob's in the order of their names.

    Args:
        names: a path, a glob, or a list of them; a tilde is the user's home.
        field: the setting's dotted path, for messages.

    Returns:
        Each file once, in the order given. A path without glob characters is returned as it is,
        whether it exists or not.

    Raises:
        DataError: a glob matches no file, or a file is named twice.
        Problems: several of them.
    """
    found: dict[Path, Path] = {}
    problems: list[MensError] = []
    for name in [names] if isinstance(names, str) else names:
        for path in _matches(name, field, problems):
            real = path.resolve()
            if real in found:
                problems.append(DataError("a file is named twice", where=field, found=str(path)))
            found[real] = path
    Problems.raise_if(problems)
    return list(found.values())


def _matches(name: str, field: str, problems: list[MensError]) -> list[Path]:
    path = Path(name).expanduser()
    if not glob.has_magic(name) or path.exists():  # a file may be called a[1].jsonl
        return [path]
    matched = sorted(Path(one) for one in glob.glob(str(path), recursive=True))  # noqa: PTH207  # an absolute pattern, which Path.glob refuses
    files = [one for one in matched if one.is_file()]
    if not files:
        problems.append(
            DataError(
                "no file matches",
                where=field,
                found=name,
                expected=f"a glob of files of rows{nearest_file(path.parent, path.name, ROWS)}",
                remedy="in a shell, quote the glob so that it arrives as written",
            )
        )
    return files
