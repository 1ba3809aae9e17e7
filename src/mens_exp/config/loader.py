"""Hydra's config loader with a memory: a choice of options is read and merged once in a process.

Hydra reads some two hundred small files for one configuration, merges them, and does it all again
for the next. The cells of a sweep, and what is composed to judge a command before it runs, differ
in values more than in options: they start from a copy of what the same options came to before.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from mens_exp.config.own_conf import own_fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.default_element import ResultDefault
    from hydra.core.override_parser.types import Override
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import Container, DictConfig

__all__ = ["RememberingLoader", "copied"]

_MOST = 32  # choices of options that are kept, some hundred kilobytes each
# Settings of Hydra's own that nothing else in its node is made of.
_LEAVES = ("hydra.run.", "hydra.sweep.", "hydra.launcher.", "hydra.sweeper.")


@dataclass(slots=True)
class _Memory:
    """Results of reading and merging under one fingerprint of ``./conf``; ours never change."""

    fingerprint: Any = None
    files: dict[str, ConfigResult | None] = field(default_factory=dict)
    chosen: dict[tuple[str, ...], bytes] = field(default_factory=dict)


_memory = _Memory()


def copied(config: Container) -> Any:
    """Return a copy of a node with all that it holds, in less than half of deepcopy's time."""
    return pickle.loads(_pickled(config))  # noqa: S301  # written here


def _pickled(config: Container) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(config)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles the schemas of a user's own options too, which are in no module."""

    def reducer_override(self, value: Any) -> Any:
        """Return what such a class is found by in this process; all else is pickled as usual."""
        if not isinstance(value, type) or value.__module__ != "types":  # as make_dataclass has it
            return NotImplemented
        _own[id(value)] = value
        return _own_class, (id(value),)


_own: dict[int, type] = {}


def _own_class(number: int) -> type:
    return _own[number]


def _remembered() -> _Memory:
    """Return the memory, a new one where ``./conf`` has changed."""
    global _memory  # noqa: PLW0603  # one for the process: Hydra makes a loader for each command
    fingerprint = own_fingerprint()
    if _memory.fingerprint != fingerprint:
        _memory = _Memory(fingerprint)
    return _memory


class RememberingLoader(ConfigLoaderImpl):
    """Composes as Hydra does, from copies of what it has composed before."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,  # Hydra's signature
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Return the configuration of the overrides; a known choice of options is only copied."""
        parsed = OverridesParser.create().parse_overrides(overrides)
        choices = [one for one in parsed if self._is_choice(one)]
        values = [one for one in parsed if not self._is_choice(one)]
        rest = (config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        if run_mode is not RunMode.RUN or not all(map(_is_plain, [*choices, *values])):
            return super().load_configuration(*rest)
        key = (str(config_name), *map(_line, choices))
        chosen = _remembered().chosen
        if key not in chosen:
            while len(chosen) >= _MOST:
                del chosen[next(iter(chosen))]
            options = list(key[1:])
            composed = super().load_configuration(config_name, options, *rest[2:])
            chosen[key] = _pickled(composed)
        config: DictConfig = pickle.loads(chosen[key])  # noqa: S301  # written above
        self._apply_overrides_to_config(values, config)
        _record(parsed, config)
        return config

    def _is_choice(self, override: Override) -> bool:
        is_group = bool(self.repository.group_exists(override.key_or_group))
        return is_group and not isinstance(override.value(), dict)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed = OverridesParser.create().parse_overrides(overrides)
        if any(one.get_key_element() == "hydra.searchpath" for one in parsed):  # other files
            return super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return parsed, _Files(self.repository, _remembered().files)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        own = _Copies(repo, {}) if isinstance(repo, _Files) else repo
        return super()._compose_config_from_defaults_list(defaults, own)


def _is_plain(override: Override) -> bool:
    """Tell whether an override sets one value that nothing but its own key is made of."""
    key = override.key_or_group
    is_change = not (override.is_add() or override.is_force_add() or override.is_delete())
    theirs = override.is_hydra_override() and "/" not in key
    return (
        is_change
        and not override.is_sweep_override()
        and override.package is None
        and (not theirs or key.startswith(_LEAVES))
    )


def _line(override: Override) -> str:
    assert override.input_line is not None, "the parser keeps what it read"
    return override.input_line


def _record(overrides: Sequence[Override], config: DictConfig) -> None:
    """Write what Hydra's node says of the command, and of the environment now."""
    ours = [one for one in overrides if not one.is_hydra_override()]
    node, naming = config.hydra, config.hydra.job.config.override_dirname
    node.overrides.hydra = [_line(one) for one in overrides if one.is_hydra_override()]
    node.overrides.task = [_line(one) for one in ours]
    node.runtime.cwd = str(Path.cwd())
    for name in node.job.env_copy:
        node.job.env_set[name] = os.environ[name]
    node.job.override_dirname = get_overrides_dirname(
        ours, list(naming.exclude_keys), item_sep=naming.item_sep, kv_sep=naming.kv_sep
    )


class _Files(CachingConfigRepository):
    """A repository that keeps what it reads in ``cache``, without copying the one behind it."""

    def __init__(
        self, repository: IConfigRepository, cache: dict[str, ConfigResult | None]
    ) -> None:
        self.delegate = repository
        self.cache = cache


class _Copies(_Files):
    """Hands out copies: merging changes what it merges."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a copy of what the file holds."""
        read = self.delegate.load_config(config_path)
        return None if read is None else replace(read, config=copied(read.config))
