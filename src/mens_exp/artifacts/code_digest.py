"""One hash over the code that is running, to notice that it has changed."""

from __future__ import annotations

from pathlib import Path

from mens_exp.artifacts.digest import digest, sha256_file

__all__ = ["code_digest"]

_PACKAGE = Path(__file__).resolve().parents[1]


def code_digest(package: Path = _PACKAGE) -> str:
    """Hash every file of the package by its path and content; compiled copies do not count.

    Args:
        package: the directory of the running code. Its config groups do not count: what was
            composed of them is kept.
    """
    files = sorted(
        path
        for path in package.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.relative_to(package).parts[0] != "conf"
    )
    return digest({path.relative_to(package).as_posix(): sha256_file(path) for path in files})
