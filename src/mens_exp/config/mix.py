"""Sources of ``data=mix``: each list entry is converted to a `data` group."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mens_exp.config.data import DataConfig, MixData, WrittenData
from mens_exp.config.data_sources import SOURCES
from mens_exp.config.option_files import group_options
from mens_exp.errors import ConfigError, MensError, Problems, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN: Final = ("name", "weight", "source")
# Validation and reading options are set for the whole mix.
_OF_THE_MIX: Final = {"val_path", "val_split"} | {
    field.name for schema in (DataConfig, WrittenData) for field in dataclasses.fields(schema)
} - {"filter"}
_ALONE: Final = {"streaming", "shuffle_buffer"}  # a mix must know all its rows to sample them
_EXAMPLE: Final = "[{path:a.jsonl,weight:0.7},{path:b.jsonl,weight:0.3}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class MixSource:
    """One source: its name in the record, its relative weight, and its rows."""

    name: str
    weight: float
    data: DataConfig


def sources_of(config: MixData) -> list[MixSource]:
    """Parse the sources of a mix.

    Args:
        config: the `data` group. Each entry has a `weight` and the settings of the `data` option
            named by its `source`; a `path` implies jsonl, and an `id` implies hub. `name` defaults
            to the file, the id, or the option.

    Raises:
        ConfigError: an entry is not a valid source, a weight is not a finite number above zero,
            or two sources have the same name.
        Problems: several of these.
    """
    if not isinstance(config.sources, list) or not config.sources:
        raise ConfigError(
            "no source given",
            where="data.sources",
            found=config.sources,
            expected=f"a list such as {_EXAMPLE}",
        )
    problems: list[ConfigError] = []
    found: list[MixSource] = []
    for number, entry in enumerate(config.sources):
        wrong = list(_problems(entry, f"data.sources[{number}]"))
        problems += wrong
        if not wrong:
            try:
                found.append(_source(entry, f"data.sources[{number}]", config))
            except ConfigError as problem:
                problems.append(problem)
    names = Counter(one.name for one in found)
    problems += [
        ConfigError(
            "two sources have the same name",
            where="data.sources",
            found=name,
            expected="a distinct name for each, under which its share is recorded",
            remedy="give each a name: {name:…,…}",
        )
        for name, count in names.items()
        if count > 1
    ]
    Problems.raise_if(problems)
    return found


def in_source(problem: MensError, number: int) -> MensError:
    """Rewrite the paths in a problem of one source to its entry in the mix.

    Args:
        problem: as raised for the source alone; a problem outside ``data.…`` is unchanged.
        number: index of the source, from 0.
    """
    where = problem.where or ""
    if not where.startswith("data."):
        return problem
    return type(problem)(
        problem.what,
        where=f"data.sources[{number}].{where.removeprefix('data.')}",
        found=problem.found,
        expected=problem.expected,
        remedy=problem.remedy,
    )


def _problems(entry: Any, where: str) -> Iterator[ConfigError]:
    """Yield the problems of an entry's keys and weight."""
    if not isinstance(entry, dict):
        yield ConfigError("is not a source", where=where, found=entry, expected=f"as in {_EXAMPLE}")
        return
    weight = entry.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        yield ConfigError(
            "has no weight", where=f"{where}.weight", found=weight, expected="a number above 0"
        )
    elif not (math.isfinite(weight) and weight > 0):
        yield ConfigError(
            "out of range", where=f"{where}.weight", found=weight, expected="a finite value > 0"
        )
    name = entry.get("name")
    if name is not None and (not isinstance(name, str) or not name):
        yield ConfigError("is not a name", where=f"{where}.name", found=name, expected="a string")
    option = _option(entry)
    options = {*SOURCES.built_in, *SOURCES.installed_names()} - {"mix"}
    if option not in options:
        if option != "mix" and option in group_options()["data"]:
            yield ConfigError(
                "an option in ./conf cannot be a source of a mix",
                where=f"{where}.source",
                found=option,
                expected="a file, a dataset, or a source of an installed package",
                remedy="give the path or id that it names; for a class, write its rows to a file, "
                "or install it under the entry point group mens_exp.sources",
            )
            return
        yield ConfigError(
            "does not say where its rows come from",
            where=f"{where}.source",
            found=entry.get("source"),
            expected=f"a path, an id, or a source: {expected_name(str(option), options)}",
        )
        return
    keys = _keys(str(option))
    for key in entry:
        if key not in keys:
            told = "belongs to the whole mix" if key in _OF_THE_MIX else f"is not a key of {option}"
            told += " in a mix" if key in _ALONE else ""
            yield ConfigError(
                told, where=f"{where}.{key}", found=entry[key], expected=expected_name(key, keys)
            )


def _option(entry: dict[str, Any]) -> Any:
    said = entry.get("source")
    return said or ("jsonl" if "path" in entry else "hub" if "id" in entry else None)


def _keys(option: str) -> set[str]:
    fields = {field.name for field in dataclasses.fields(SOURCES.named(option).schema)}
    return (fields - _OF_THE_MIX - _ALONE) | set(_OWN)


def _source(entry: dict[str, Any], where: str, config: MixData) -> MixSource:
    schema = SOURCES.named(_option(entry)).schema
    values = {key: value for key, value in entry.items() if key not in _OWN}
    if issubclass(schema, WrittenData):
        values |= {"on_bad_row": config.on_bad_row, "max_bad_frac": config.max_bad_frac}
    try:
        data = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        key = error.full_key
        raise ConfigError(
            "cannot be read",
            where=f"{where}.{key}" if key else where,
            found=str(error).splitlines()[0],
            expected=f"the settings of data={_option(entry)}",
        ) from error
    assert isinstance(data, DataConfig)
    return MixSource(name=entry.get("name") or _name(data), weight=entry["weight"], data=data)


def _name(data: DataConfig) -> str:
    path = getattr(data, "path", None)
    if isinstance(path, str):
        return PurePath(path).name
    return str(getattr(data, "id", data.source))
