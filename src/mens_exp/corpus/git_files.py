"""The files of a git checkout as they were at a commit; its work tree is not looked at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mens_exp.errors import DataError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Blob", "blobs", "contents", "resolved_commit"]

_REGULAR: Final = frozenset({"100644", "100755"})  # neither a link nor a submodule
_GIT: Final = ("git", "-c", "core.fsmonitor=false")


class Blob(NamedTuple):
    """One file: its path under the directory asked for, and its content's name in git."""

    path: str
    oid: str
    size: int


def resolved_commit(directory: Path, commit: str) -> str:
    """Return the full name of the commit that a name means in a checkout.

    Raises:
        DataError: the directory is in no checkout, or has no such commit.
        SetupError: there is no git.
    """
    inside = _git(directory, "rev-parse", "--is-inside-work-tree")
    if inside is None:
        raise DataError(
            "not in a git checkout",
            where="corpus.input",
            found=str(directory),
            expected="a checkout, because corpus.extract.commit is set",
            remedy="name a checkout, or drop corpus.extract.commit to read the files as they are",
        )
    name = _git(directory, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    if name is None:
        raise DataError(
            "the checkout has no such commit",
            where="corpus.extract.commit",
            found=commit,
            expected=f"a commit, tag or branch of {directory}",
            remedy="git fetch it first, or name another",
        )
    return name.decode("ascii").strip()


def blobs(directory: Path, commit: str) -> list[Blob]:
    """List the regular files that a commit has under a directory, by path.

    Raises:
        DataError: git cannot list them.
    """
    top = _git(directory, "rev-parse", "--show-prefix") or b""
    prefix = os.fsdecode(top.strip(b"\n"))
    listed = _git(
        directory, "ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--", f"./{prefix}"
    )
    if listed is None:
        raise DataError("git cannot list the commit", where=str(directory), found=commit)
    found = []
    for entry in listed.split(b"\0")[:-1]:
        told, _, name = entry.partition(b"\t")
        mode, _, oid, size = told.decode("ascii").split()
        if mode in _REGULAR:
            path = os.fsdecode(name).removeprefix(prefix)
            found.append(Blob(path, oid, int(size)))
    return sorted(found)


def contents(directory: Path, wanted: Iterable[Blob]) -> Iterator[tuple[Blob, bytes]]:
    """Yield files with their content, one after the other through one process of git.

    Raises:
        DataError: git does not give a content.
    """
    process = subprocess.Popen(  # noqa: S603  # fixed arguments
        [*_GIT, "-C", str(directory), "cat-file", "--batch"],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None, "asked for"
    assert process.stdout is not None, "asked for"
    try:
        for blob in wanted:
            process.stdin.write(f"{blob.oid}\n".encode("ascii"))
            process.stdin.flush()
            header = process.stdout.readline().split()
            if len(header) != 3 or header[1] != b"blob":  # noqa: PLR2004  # name, kind, size
                raise DataError(
                    "git does not give the content of a file",
                    where=str(directory),
                    found=f"{blob.path} ({blob.oid})",
                    expected="a complete clone",
                    remedy="git fsck it, or fetch what is missing",
                )
            data = process.stdout.read(int(header[2]))
            process.stdout.read(1)  # the newline after it
            yield blob, data
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _git(directory: Path, *arguments: str) -> bytes | None:
    """Return what git says; None where it refuses."""
    where = directory if directory.is_dir() else Path.cwd()
    try:
        done = subprocess.run(  # noqa: S603  # fixed arguments
            [*_GIT, "-C", str(where), *arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise SetupError(
            "git is needed to read a checkout at a commit",
            where="corpus.extract.commit",
            remedy="install git, or drop corpus.extract.commit",
        ) from error
    except subprocess.CalledProcessError:
        return None
    return done.stdout


def _environment() -> dict[str, str]:
    """Return our own, less what would point git at another repository, and let it write nothing."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    return kept | {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
