"""Hydra's source for ``./conf`` of the working directory: after ours, each class with a schema.

A YAML that names a class and inherits from nothing gets a schema of its own keys, put at the head
of its defaults list; a callback's lands under ``callbacks.<file>``. So ten lines of YAML are
enough, and no user has to know of schemas or packages.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from mens_exp.config.own_conf import own_directory
from mens_exp.config.own_schema import CLASS_GROUPS, own_schema

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult

__all__ = ["OwnSearchPath", "OwnSource", "read_own_conf"]

_SCHEME = "mens-own"
_SCHEMAS = "schema/own/"


class OwnSource(FileConfigSource):
    """The files of ``./conf``, and under ``schema/own`` the schemas made of them."""

    @staticmethod
    def scheme() -> str:
        """Name the kind of source."""
        return _SCHEME

    def is_config(self, config_path: str) -> bool:
        """Tell whether there is such a file, or the file that such a schema is made of."""
        return super().is_config(config_path.removeprefix(_SCHEMAS))

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file and name its schema in it, or make a schema."""
        result = super().load_config(config_path.removeprefix(_SCHEMAS))
        file = PurePosixPath(config_path.removeprefix(_SCHEMAS)).with_suffix("")
        config = result.config
        if not isinstance(config, DictConfig) or not _is_class(file.parts[0], config):
            return result
        if config_path.startswith(_SCHEMAS):
            values = OmegaConf.to_container(config)
            assert isinstance(values, dict)
            own = {str(key): value for key, value in values.items() if key != "defaults"}
            schema = own_schema(file.parts[0], own, f"conf/{file}.yaml")
            return dataclasses.replace(
                result, config=OmegaConf.structured(schema), header={"package": None}
            )
        config["defaults"] = [f"/{_SCHEMAS}{file}@_here_", "_self_"]
        group = file.parts[0]
        if group == "callbacks":
            result.header["package"] = result.header.get("package") or f"callbacks.{file.name}"
        else:
            implied = {"name": file.name, "labels": "assistant"}
            for key in implied.keys() & CLASS_GROUPS[group].__dataclass_fields__.keys():  # type: ignore[attr-defined]
                config.setdefault(key, implied[key])
        return result


def _is_class(group: str, config: DictConfig) -> bool:
    """Tell whether a file names a class and inherits from no option, whose schema would hold."""
    others = [entry for entry in config.get("defaults") or [] if entry != "_self_"]
    return group in CLASS_GROUPS and "_target_" in config and not others


class OwnSearchPath(SearchPathPlugin):
    """Puts ``./conf`` of the working directory behind ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the directory, where there is one."""
        directory = own_directory()
        if directory is not None:
            search_path.append("./conf", f"{_SCHEME}://{directory}")


def read_own_conf() -> None:
    """Let Hydra look into ``./conf`` from now on; doing so again changes nothing."""
    plugins = Plugins.instance()
    plugins.register(OwnSource)
    plugins.register(OwnSearchPath)
