"""Hydra's config loader with a memory: each file is read once, each choice of options merged once.

Hydra reads some two hundred small files for one configuration, and reads them all again for the
next. The cells of a sweep, and what is composed to judge a command before it runs, differ in
values more than in options: they start from a copy of what the same options came to before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser

from mens_exp.config.own_conf import own_fingerprint

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.default_element import ResultDefault
    from hydra.core.override_parser.types import Override
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import DictConfig

__all__ = ["RememberingLoader"]

_MERGED = 32  # choices of options that are kept, some hundred kilobytes each


@dataclass(slots=True)
class _Memory:
    """What was read and merged while ``./conf`` was as its fingerprint says; ours never changes."""

    fingerprint: Any = None
    files: dict[str, ConfigResult | None] = field(default_factory=dict)
    merged: dict[Any, DictConfig] = field(default_factory=dict)


_memory = _Memory()


def _remembered() -> _Memory:
    """Return the memory, a new one where ``./conf`` has changed."""
    global _memory  # noqa: PLW0603  # one for the process: Hydra makes a loader for each command
    fingerprint = own_fingerprint()
    if _memory.fingerprint != fingerprint:
        _memory = _Memory(fingerprint)
    return _memory


class RememberingLoader(ConfigLoaderImpl):
    """Composes as Hydra does, from copies of what it has composed before."""

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
        if not isinstance(repo, _Files):
            return super()._compose_config_from_defaults_list(defaults, repo)
        merged = _remembered().merged
        key = tuple((one.config_path, one.package, one.is_self, one.primary) for one in defaults)
        if key not in merged:
            while len(merged) >= _MERGED:
                del merged[next(iter(merged))]
            merged[key] = super()._compose_config_from_defaults_list(defaults, _Copies(repo, {}))
        return copy.deepcopy(merged[key])


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
        return None if read is None else replace(read, config=copy.deepcopy(read.config))
