"""``./conf`` of the working directory: options of the user's own beside ours.

Its files add options to our groups. They never replace one of ours: two options of one name would
make a command mean another thing in another directory, so that is an error.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.nearest import nearest
from mens_exp.artifacts.plain_yaml import parse_yaml
from mens_exp.config.own_schema import CLASS_GROUPS, key_problems
from mens_exp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "config_directory",
    "frozen_as",
    "group_options",
    "our_options",
    "our_targets",
    "own_directory",
    "own_fingerprint",
    "own_problems",
    "own_targets",
    "own_trusted_models",
    "targets_in",
]

_frozen: Path | None = None


def config_directory() -> Path:
    """Return the directory of our config groups, in an installed wheel or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def own_directory() -> Path | None:
    """Return ``./conf`` of the working directory, where there is one and it is not ours."""
    if _frozen is not None:
        return _frozen
    here = Path.cwd() / "conf"
    return here if here.is_dir() and here.resolve() != config_directory().resolve() else None


@contextmanager
def frozen_as(copy: Path | None) -> Iterator[None]:
    """Read ``./conf`` from a copy inside the block, whatever becomes of the original."""
    global _frozen  # noqa: PLW0603  # Hydra's plugins are classes that it makes itself
    before, _frozen = _frozen, copy
    try:
        yield
    finally:
        _frozen = before


@functools.cache
def our_options() -> dict[str, tuple[str, ...]]:
    """List our config groups, each with its options, from the files that are there."""
    root = config_directory()
    groups: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.yaml")):
        group = file.parent.relative_to(root).as_posix()
        if group not in {".", "hydra"} and not group.startswith("hydra/"):
            groups.setdefault(group, []).append(file.stem)
    return {group: tuple(options) for group, options in sorted(groups.items())}


def group_options() -> dict[str, tuple[str, ...]]:
    """List every config group with the options it has, ours first."""
    own: dict[str, list[str]] = {}
    for file in _own_files():
        group, _, option = file.with_suffix("").as_posix().partition("/")
        own.setdefault(group, []).append(option)
    return {
        group: (*options, *(option for option in own.get(group, ()) if option not in options))
        for group, options in our_options().items()
    }


def _own_files() -> list[Path]:
    """List the user's files, relative to their ``conf``."""
    root = own_directory()
    if root is None:
        return []
    return sorted(file.relative_to(root) for file in root.rglob("*.yaml"))


def own_fingerprint() -> tuple[Any, ...]:
    """Tell one state of ``./conf`` from another: where it is, and its files with size and time."""
    root = own_directory()
    if root is None:
        return ()
    states = [(file, (root / file).stat()) for file in _own_files()]
    return (root, *((file, state.st_size, state.st_mtime_ns) for file, state in states))


def own_problems() -> Iterator[ConfigError]:
    """Yield what would make a file of ``./conf`` do nothing, or not what it says."""
    root = own_directory()
    if root is None:
        return
    for file in _own_files():
        yield from _file_problems(root, file)
    for stray in sorted(root.rglob("*.yml")):
        yield ConfigError(
            "is not read",
            where=f"conf/{stray.relative_to(root).as_posix()}",
            expected="a name that ends in .yaml",
            remedy=f"rename it to {stray.stem}.yaml",
        )


def _file_problems(root: Path, file: Path) -> Iterator[ConfigError]:
    where = f"conf/{file.as_posix()}"
    ours = config_directory() / file
    group = file.parts[0]
    if ours.is_file():
        if ours.read_bytes() != (root / file).read_bytes():  # a copy of ours changes nothing
            yield ConfigError(
                "has the name of one of ours, which would win",
                where=where,
                expected="a name of its own",
                remedy=f"rename it, and choose it with {group}=<its name>"
                if len(file.parts) > 1
                else "write what it sets into conf/experiment/<name>.yaml",
            )
    elif len(file.parts) > 1 and group != "hydra" and group not in our_options():
        close = nearest(group, our_options())
        if close is not None:  # any other folder is none of our business
            yield ConfigError(
                "is in no config group", where=where, found=group, expected=f"such as {close}"
            )
    elif isinstance(values := _read(root / file), str):
        yield ConfigError("is no YAML mapping", where=where, found=values)
    elif group in CLASS_GROUPS and "_target_" in values:
        yield from key_problems(values, where)


def _read(file: Path) -> dict[str, Any] | str:
    """Read a file's mapping, or say why there is none."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    except DataError as error:
        return str(error.found)
    except (OSError, UnicodeDecodeError) as error:
        return " ".join(str(error).split())
    if values is None:
        return {}
    return values if isinstance(values, dict) else type(values).__name__


def targets_in(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted place and the value of every ``_target_``, however deep."""
    if isinstance(values, dict):
        for key, value in values.items():
            if key == "_target_":
                yield f"{prefix}{key}", value
            else:
                yield from targets_in(value, f"{prefix}{key}.")
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from targets_in(value, f"{prefix}{number}.")


@functools.cache
def our_targets() -> frozenset[str]:
    """Return every class that our own options name."""
    return _targets_under(config_directory())


def own_targets() -> frozenset[str]:
    """Return every class that ``./conf`` of the working directory names."""
    root = own_directory()
    return frozenset() if root is None else _targets_under(root) - our_targets()


def own_trusted_models() -> frozenset[str]:
    """Return the ids of models whose code ``./conf`` of the working directory trusts."""
    root = own_directory()
    files = [] if root is None else sorted(root.glob("model/*.yaml"))
    options = [values for file in files if isinstance(values := _read(file), dict)]
    return frozenset(str(o.get("id")) for o in options if o.get("trust_remote_code") is True)


def _targets_under(root: Path) -> frozenset[str]:
    return frozenset(
        str(target) for file in root.rglob("*.yaml") for _, target in targets_in(_read(file))
    )
