"""Steps that create rows: extract, from the source files of projects, and generate.

A project is a directory in its current state, a git checkout at a commit (ignoring its work tree),
or one file. Rows are documented definitions, and code blocks in Markdown. Generated rows are
appended to existing rows.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.corpus import extraction
from mens_exp.corpus.generator.generate import drawn_tasks
from mens_exp.corpus.python_source import decode
from mens_exp.corpus.split import PROJECT_END, Side
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_rows
from mens_exp.errors import DataError, MensError, Problems, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mens_exp.config.corpus import ExtractConfig
    from mens_exp.rows.schema import TrainingPair

_REGULAR: Final = frozenset({"100644", "100755"})  # neither a link nor a submodule
_GIT: Final = ("git", "-c", "core.fsmonitor=false")


class Blob(NamedTuple):
    """One file: its path under the requested directory, and the object name of its content."""

    path: str
    oid: str
    size: int


def resolved_commit(directory: Path, commit: str) -> str:
    """Resolve a revision in a checkout to a full commit hash.

    Raises:
        DataError: the directory is not in a checkout, or there is no such commit.
        SetupError: git is not installed.
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
            "the checkout does not have this commit",
            where="corpus.extract.commit",
            found=commit,
            expected=f"a commit, tag or branch of {directory}",
            remedy="git fetch it first, or name another",
        )
    return name.decode("ascii").strip()


def blobs(directory: Path, commit: str) -> list[Blob]:
    """List the regular files of a commit under a directory, by path.

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
    """Yield files with their content, read through one git process.

    Raises:
        DataError: git does not return a content.
    """
    process = subprocess.Popen(  # noqa: S603  # fixed arguments
        [*_GIT, "-C", str(directory), "cat-file", "--batch"],
        env=_git_environment(),
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
                    "git cannot read the content of a file",
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
    """Return git's output; None if it fails."""
    where = directory if directory.is_dir() else Path.cwd()
    try:
        done = subprocess.run(  # noqa: S603  # fixed arguments
            [*_GIT, "-C", str(where), *arguments],
            env=_git_environment(),
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


def _git_environment() -> dict[str, str]:
    """Return our environment without variables that redirect git, and with writes disabled."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    return kept | {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}


SUFFIXES: Final = {"python": (".py",), "rust": (".rs",), "markdown": (".md", ".markdown")}
MAX_FILE_BYTES: Final = 2**20  # unverified guess: larger source files are generated or data
# Generated or third-party code.
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
        root: the directory or file.
        languages: the languages to read.
        commit: the full hash of the commit to read; None reads the current files.
    """

    name: str
    root: Path
    languages: tuple[str, ...]
    commit: str | None = None

    def sha256(self) -> str:
        """Hash the paths and contents that `files` would read."""
        if self.commit is not None:
            # Git's object names are content hashes.
            listed = blobs(self.root, self.commit)
            return digest([[blob.path, blob.oid] for blob in listed if self._language(blob.path)])
        return digest([[name, sha256_file(path)] for name, path in self._walked()])

    def files(self, dropped: Counter[str]) -> Iterator[SourceFile]:
        """Yield the source files, by path.

        Args:
            dropped: counter of skipped files by reason; updated in place.
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
        listed = blobs(self.root, self.commit)
        wanted = [blob for blob in listed if self._language(blob.path)]
        small = (blob for blob in wanted if blob.size <= MAX_FILE_BYTES)
        for blob in wanted:
            if blob.size > MAX_FILE_BYTES:
                yield blob.path, blob.size, b""
        for blob, data in contents(self.root, small):
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
        """Return the language of a file by its suffix; None if it is not to be read."""
        *directories, name = path.split("/")
        if any(_is_skipped(directory) for directory in directories):
            return None
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  # a name only
        return next((one for one in self.languages if suffix in SUFFIXES[one]), None)


def _is_skipped(directory: str) -> bool:
    return directory.startswith(".") or directory in _SKIPPED


def projects_of(paths: Sequence[Path], config: ExtractConfig) -> list[Project]:
    """Return the projects at the given paths.

    Args:
        paths: directories, files or checkouts.
        config: the settings of the step; a commit is resolved.

    Raises:
        DataError: a path does not exist, is not a checkout, or has no such commit; or two projects
            have the same name.
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
                    "two projects have the same name",
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
                "a single file cannot be read at a commit",
                where="corpus.input",
                found=str(path),
                expected="a git checkout, because corpus.extract.commit is set",
            )
        commit = resolved_commit(path, config.commit)
    name = config.project or path.resolve().name
    return Project(name=name, root=path, languages=tuple(config.languages), commit=commit)


_ROOTS: Final = frozenset({"src", "lib", "main"})  # names that are not part of a module path


def extract(step: StepInput) -> StepResult:
    """Read the input projects, one file at a time.

    A row's group is its project and file; its category is the project.

    Raises:
        MensError: an input does not exist or is not a checkout, or a reader is not installed.
    """
    dropped: Counter[str] = Counter()
    read: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    commits = {}
    with RowWriter(step.directory) as writer:
        for project in projects_of(step.files, step.config.extract):
            commits[project.name] = project.commit
            for file in project.files(dropped):
                read[file.language] += 1
                for pair in _pairs_of_file(project, file, dropped):
                    writer.write(pair)
                    rows[pair.language or ""] += 1
        total = writer.total
    return StepResult(
        rows_in=total + sum(dropped.values()),
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={
            "commits": commits,
            "files": dict(sorted(read.items())),
            "rows_by_language": dict(sorted(rows.items())),
        },
    )


def _pairs_of_file(project: Project, file: SourceFile, dropped: Counter[str]) -> list[TrainingPair]:
    text = _text(file)
    if text is None:
        dropped["file_does_not_decode"] += 1
        return []
    group = f"{project.name}{PROJECT_END}{file.path}"
    if file.language == "python":
        pairs = extraction.python_pairs(
            text,
            module=_module(file.path, ".py", "__init__").replace("/", "."),
            group=group,
            category=project.name,
            dropped=dropped,
            classes=True,
            language="python",
        )
    elif file.language == "rust":
        parts = _module(file.path, ".rs", "mod").split("/")
        crate = "::".join(["crate", *(part for part in parts if part not in _ROOTS)])
        pairs = extraction.rust_pairs(
            text, crate=crate, group=group, category=project.name, dropped=dropped
        )
    else:
        pairs = extraction.markdown_pairs(text, group=group, category=project.name, dropped=dropped)
    return [pair for pair in pairs if _can_be_written(pair, dropped)]


def _text(file: SourceFile) -> str | None:
    """Decode a file: Python with its declared encoding, others as UTF-8."""
    if file.language == "python":
        return decode(file.data)
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _module(path: str, ending: str, of_directory: str) -> str:
    """Turn ``src/json/decoder.py`` into ``json/decoder`` and ``json/__init__.py`` into ``json``."""
    parts = path.removesuffix(ending).split("/")
    if parts[0] == "src" and len(parts) > 1:
        parts = parts[1:]
    return "/".join(parts[:-1] if parts[-1] == of_directory and len(parts) > 1 else parts)


def _can_be_written(pair: TrainingPair, dropped: Counter[str]) -> bool:
    """Return whether a row can be written as UTF-8 and read back."""
    texts = (pair.prompt, pair.response)
    if all(text.strip() and "\0" not in text for text in texts):
        return True
    dropped["not_text"] += 1
    return False


_SETTING: Final = "corpus.generate.rows"
_PROJECT: Final = "generated"


def generate(step: StepInput) -> StepResult:
    """Pass on the rows of the previous step, and add generated ones.

    They come only from training families, never from families for validation in `data=synthetic` or
    for the benchmark. A row's group is ``generated`` and its family; its category is the family's
    theme.

    Raises:
        DataError: the families do not have that many different tasks.
    """
    config = step.config.generate
    dropped: Counter[str] = Counter()
    with RowWriter(step.directory) as writer:
        for pair in read_rows(step.files):
            writer.write(pair)
        before = writer.total
        tasks = drawn_tasks(
            Side.TRAIN, config.rows, config.seed, config.repair_frac, dropped, where=_SETTING
        )
        for task in tasks:
            group = f"{_PROJECT}{PROJECT_END}{task.pair.group}"
            writer.write(dataclasses.replace(task.pair, group=group, language="python"))
        total = writer.total
    return StepResult(
        rows_in=total + sum(dropped.values()),
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={"passed_on": before, "generated": total - before},
    )
