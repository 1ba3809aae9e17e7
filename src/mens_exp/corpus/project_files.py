"""The source files of projects: of a directory as it stands, of a commit, or one file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.corpus import git_files
from mens_exp.errors import DataError, MensError, Problems

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from mens_exp.config.corpus import ExtractConfig

__all__ = ["MAX_FILE_BYTES", "SUFFIXES", "Project", "SourceFile", "projects_of"]

SUFFIXES: Final = {"python": (".py",), "rust": (".rs",), "markdown": (".md", ".markdown")}
MAX_FILE_BYTES: Final = 2**20  # unverified guess: a larger source file is generated, or data
# Made by tools, or other people's code.
_SKIPPED: Final = frozenset(
    {"__pycache__", "build", "dist", "node_modules", "site-packages", "target", "vendor", "venv"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file: its path under the project, with slashes, its language and its bytes."""

    path: str
    language: str
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """The project that one entry of `corpus.input` names.

    Attributes:
        name: the first part of its rows' groups.
        root: the directory, or the one file.
        languages: what is read of it.
        commit: the full name of the commit it is read at; None reads the files as they are.
    """

    name: str
    root: Path
    languages: tuple[str, ...]
    commit: str | None = None

    def sha256(self) -> str:
        """Hash what `files` would read: every path with its content."""
        if self.commit is not None:
            # The names of git's contents are hashes of them.
            listed = git_files.blobs(self.root, self.commit)
            return digest([[blob.path, blob.oid] for blob in listed if self._language(blob.path)])
        return digest([[name, sha256_file(path)] for name, path in self._walked()])

    def files(self, dropped: Counter[str]) -> Iterator[SourceFile]:
        """Yield the source files, by path.

        Args:
            dropped: counts, by reason, files that were not read; added to.
        """
        for name, size, data in self._contents():
            if size > MAX_FILE_BYTES:
                dropped["file_too_large"] += 1
                continue
            language = self._language(name)
            assert language is not None, "others are not listed"
            yield SourceFile(path=name, language=language, data=data)

    def _contents(self) -> Iterator[tuple[str, int, bytes]]:
        if self.commit is None:
            for name, path in self._walked():
                size = path.stat().st_size
                yield name, size, path.read_bytes() if size <= MAX_FILE_BYTES else b""
            return
        listed = git_files.blobs(self.root, self.commit)
        wanted = [blob for blob in listed if self._language(blob.path)]
        small = (blob for blob in wanted if blob.size <= MAX_FILE_BYTES)
        for blob in wanted:
            if blob.size > MAX_FILE_BYTES:
                yield blob.path, blob.size, b""
        for blob, data in git_files.contents(self.root, small):
            yield blob.path, blob.size, data

    def _walked(self) -> list[tuple[str, Path]]:
        if self.root.is_file():
            return [(self.root.name, self.root)]
        found = []
        for directory, inner, names in os.walk(self.root):  # links are not followed
            inner[:] = [name for name in inner if not _is_skipped(name)]
            for name in names:
                path = Path(directory, name)
                relative = path.relative_to(self.root).as_posix()
                if self._language(relative) and path.is_file() and not path.is_symlink():
                    found.append((relative, path))
        return sorted(found)

    def _language(self, path: str) -> str | None:
        """Return the language of a file by its ending; None where it is none to read."""
        *directories, name = path.split("/")
        if any(_is_skipped(directory) for directory in directories):
            return None
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  # a text, no file
        return next((one for one in self.languages if suffix in SUFFIXES[one]), None)


def _is_skipped(directory: str) -> bool:
    return directory.startswith(".") or directory in _SKIPPED


def projects_of(paths: Sequence[Path], config: ExtractConfig) -> list[Project]:
    """Return the projects that paths name.

    Args:
        paths: directories, files or checkouts.
        config: the settings of the step; a commit is settled.

    Raises:
        DataError: a path is not there, is no checkout, or has no such commit; or two projects have
            one name.
        Problems: several of them.
    """
    problems: list[MensError] = []
    found: dict[str, Project] = {}
    for path in paths:
        try:
            project = _project(path, config)
        except MensError as error:
            problems.append(error)
            continue
        if project.name in found:
            problems.append(
                DataError(
                    "two projects have one name",
                    where="corpus.input",
                    found=f"{found[project.name].root} and {path}",
                    expected="names that differ, for they begin the groups of the split",
                    remedy="rename a directory",
                )
            )
        found[project.name] = project
    Problems.raise_if(problems)
    return list(found.values())


def _project(path: Path, config: ExtractConfig) -> Project:
    if not path.exists():
        raise DataError(
            "no such directory or file",
            where="corpus.input",
            found=str(path),
            expected="a directory of source files, a file, or a git checkout",
        )
    commit = None
    if config.commit is not None:
        if path.is_file():
            raise DataError(
                "a file is not read at a commit",
                where="corpus.input",
                found=str(path),
                expected="a git checkout, because corpus.extract.commit is set",
            )
        commit = git_files.resolved_commit(path, config.commit)
    name = config.project or path.resolve().name
    return Project(name=name, root=path, languages=tuple(config.languages), commit=commit)
