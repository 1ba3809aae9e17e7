"""Task files of EleutherAI's lm-evaluation-harness, read without executing code that they name.

``!function`` in a task file names Python that the harness imports when it loads the task, so code
that must not run is detected here first. Data come only from local files.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.untrusted_input import YAML_LOADER, parse_yaml
from mens_exp.errors import ConfigError, DataError, MensError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator

_READERS: Final = ("json", "csv", "text", "parquet", "arrow")
_MOST_PROBLEMS: Final = 20
_MOST_FILES: Final = 10_000


class _Function(str):
    """A Python function that a task file names."""

    __slots__ = ()


class _Loader(YAML_LOADER):  # type: ignore[misc,valid-type]  # libyaml's if available
    """A YAML loader with the harness's custom tag."""


def _function(loader: _Loader, node: yaml.Node) -> _Function:
    assert isinstance(node, yaml.ScalarNode), "the harness takes a dotted name"
    return _Function(loader.construct_scalar(node))


_Loader.add_constructor("!function", _function)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles:
    """The content of a directory of task files.

    Attributes:
        directory: the directory.
        tasks: names of single tasks, sorted.
        names: names of tasks, groups and tags.
        sha256: content hash of each file that the tasks depend on, by its path relative to the
            directory, or by its path in the task files if it is elsewhere.
    """

    directory: Path
    tasks: tuple[str, ...]
    names: frozenset[str]
    sha256: dict[str, str]


def read_task_files(directory: Path, *, calls_functions: bool) -> TaskFiles:
    """Read every task file in a directory and below it.

    Args:
        directory: the user's directory.
        calls_functions: whether Python functions that the files name may run in this process.

    Raises:
        DataError: there is no task file, or one is invalid, executes code, or needs data that are
            not local.
        ConfigError: a file names Python functions, which may not run.
        Problems: several of these.
    """
    if not directory.is_dir():
        raise DataError("is not a directory", where="suite.path", found=str(directory))
    problems: list[MensError] = []
    read: dict[Path, dict[str, Any]] = {}
    known: dict[Path, _File] = {}
    sources = set(directory.rglob("*.py"))
    for path in sorted(p for end in ("*.yaml", "*.yml") for p in directory.rglob(end)):
        try:
            found, its = _read(path, known)
        except DataError as error:
            problems.append(error)
            continue
        read[path] = found
        sources |= set(its)
        problems += list(_refusals(found, path, calls_functions=calls_functions))
    Problems.raise_if(problems[:_MOST_PROBLEMS])
    tasks = {one["task"] for one in read.values() if isinstance(one.get("task"), str)}
    if not tasks:
        raise DataError(
            "contains no task file",
            where="suite.path",
            found=str(directory),
            expected="YAML files of lm-evaluation-harness, each with task: <name>",
        )
    groups = {one["group"] for one in read.values() if isinstance(one.get("group"), str)}
    data = {path for one in read.values() for path in _data(one)}
    return TaskFiles(
        directory=directory,
        tasks=tuple(sorted(tasks)),
        names=frozenset(tasks | groups | {tag for one in read.values() for tag in _tags(one)}),
        sha256=_hashes(directory, sources | data),
    )


_File = tuple[dict[str, Any], list[Path]]  # its values, and the files that they come from


def _read(
    path: Path, known: dict[Path, _File], chain: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], list[Path]]:
    """Return a file merged over its includes, and the paths of all of them; read each once."""
    place = path.resolve()
    if place in known:
        return known[place]
    own: Any = parse_yaml(read_bytes(path), str(path), _Loader)
    if not isinstance(own, dict):
        raise DataError("is not a task file", where=str(path), found=type(own).__name__)
    merged: dict[str, Any] = {}
    sources = [path]
    included = own.get("include")
    for name in included if isinstance(included, list) else [included] if included else []:
        if not isinstance(name, str):
            raise DataError("is not a path", where=f"{path}: include", found=name)
        under = path.parent / name
        if under.resolve() in {one.resolve() for one in (*chain, path)}:
            raise DataError("includes itself", where=str(path), found=name)
        values, more = _read(under, known, (*chain, path))
        merged |= values
        sources += more
    known[place] = merged | own, list(dict.fromkeys(sources))
    return known[place]


def _refusals(value: Any, path: Path, *, calls_functions: bool) -> Iterator[MensError]:
    """Yield problems that prevent the use of a file, anywhere in it."""
    if isinstance(value, _Function) and not calls_functions:
        yield ConfigError(
            "a task file names Python code, which only task=evaluate runs",
            where=f"suite.path: {path}",
            found=f"!function {value}",
            expected="task files without functions, or task=evaluate",
        )
    elif isinstance(value, list):
        for one in value:
            yield from _refusals(one, path, calls_functions=calls_functions)
    elif isinstance(value, dict):
        if value.get("unsafe_code"):
            yield DataError(
                "the task executes model output outside of any sandbox",
                where=f"{path}: unsafe_code",
                found=value["unsafe_code"],
                expected="a task that compares texts",
                remedy="use suite=humaneval, whose programs run in the sandbox",
            )
        yield from _foreign_data(value, path)
        for one in value.values():
            yield from _refusals(one, path, calls_functions=calls_functions)


def _foreign_data(value: dict[str, Any], path: Path) -> Iterator[DataError]:
    """Yield problems of data that are missing or not local."""
    named = value.get("dataset_path")
    if named is None:
        return
    if named not in _READERS and not _is_directory(str(named)):
        yield DataError(
            "the data are not files on this machine",
            where=f"{path}: dataset_path",
            found=named,
            expected=f"one of {', '.join(_READERS)} with dataset_kwargs.data_files, or a directory",
            remedy="download the data set, and name its files",
        )
    elif named in _READERS and not _data_files(value):
        yield DataError(
            "no data file is named",
            where=f"{path}: dataset_kwargs.data_files",
            expected="a path, or paths by split",
        )
    for name in _data_files(value):
        if not any(path.is_file() for path in _files(name)):
            yield DataError("file not found", where=f"{path}: data_files", found=name)


def _is_directory(named: str) -> bool:
    try:
        return Path(named).is_dir()
    except (OSError, ValueError):  # not a valid file name
        return False


def _data_files(value: dict[str, Any]) -> list[str]:
    """Return the files and patterns that a mapping names, relative to the working directory."""
    options = value.get("dataset_kwargs")
    files = options.get("data_files") if isinstance(options, dict) else None
    listed = [
        name
        for one in (files.values() if isinstance(files, dict) else [files])
        for name in (one if isinstance(one, list) else [one])
    ]
    return [str(name) for name in listed if name]


def _files(named: str) -> list[Path]:
    return [Path(one) for one in glob.glob(named, recursive=True)]  # noqa: PTH207  # absolute ones too


def _data(value: Any) -> Iterator[Path]:
    """Yield the data files named anywhere in a task file."""
    if isinstance(value, list):
        for one in value:
            yield from _data(one)
    if not isinstance(value, dict):
        return
    for name in _data_files(value):
        yield from _files(name)
    named = value.get("dataset_path")
    if named is not None and named not in _READERS:
        yield from _files_below(Path(str(named)))
    for one in value.values():
        yield from _data(one)


def _files_below(directory: Path) -> Iterator[Path]:
    """Yield the files of a data directory.

    Raises:
        DataError: it has implausibly many files, such as the root of a disk.
    """
    count = 0
    for place, _, names in os.walk(directory):
        for path in (Path(place) / name for name in names):
            count += 1
            if count > _MOST_FILES:
                raise DataError(
                    "the directory has too many files for data of a task",
                    where="dataset_path",
                    found=str(directory),
                    expected=f"at most {_MOST_FILES:,}",
                    remedy="name the directory that holds this task's data alone",
                )
            if os.path.isfile(path):  # noqa: PTH113  # false for inaccessible files
                yield path


def _tags(one: dict[str, Any]) -> list[str]:
    tags = one.get("tag") or []
    return [tags] if isinstance(tags, str) else [str(tag) for tag in tags]


def _hashes(directory: Path, paths: set[Path]) -> dict[str, str]:
    return {_place(directory, path): sha256_file(path) for path in sorted(paths) if path.is_file()}


def _place(directory: Path, path: Path) -> str:
    """Return a unique name for a file that does not depend on how the directory was spelled."""
    for inside, of in ((path, directory), (path.resolve(), directory.resolve())):
        if inside.is_relative_to(of):
            return inside.relative_to(of).as_posix()
    return path.as_posix()
