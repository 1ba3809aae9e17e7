"""The data sources: built-in ones, user classes that return rows, and the sources of a mix.

A user class is named by `data._target_` in an option of ``./conf/data``, or provided by an
installed package under the entry point group ``mens_exp.sources`` (:mod:`mens_exp.config.plugins`).
It is instantiated with the option's settings as keyword arguments, and imported only when a command
needs it. Each entry of the list `data.sources` of ``data=mix`` is converted to a `data` group.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mens_exp.config.data import (
    DataConfig,
    HubData,
    JsonlData,
    MixData,
    StdlibData,
    SyntheticData,
    WrittenData,
)
from mens_exp.config.fields import setting
from mens_exp.config.option_files import group_options
from mens_exp.config.plugins import Registry, named_class, target_at
from mens_exp.errors import ConfigError, MensError, Problems, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterator


@runtime_checkable
class RowSource(Protocol):
    """Protocol of a class that returns rows.

    If the class also has a method ``validation_rows`` of the same form, only those rows are used
    for validation. Both methods must return the same rows on every call.
    """

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows in order, with the keys of rows in a JSONL file."""


@dataclass(kw_only=True, slots=True)
class GivenData(WrittenData):
    """Rows that a class of your own gives; what a subclass adds are the class's arguments."""

    @property
    def own_settings(self) -> dict[str, Any]:
        """The keyword arguments of the class."""
        common = {field.name for field in dataclasses.fields(OwnData)}
        names = [field.name for field in dataclasses.fields(self) if field.name not in common]
        return {name: getattr(self, name) for name in names}

    @property
    def target(self) -> str:
        """The class, as ``module.Class``."""
        spec = SOURCES.named(self.source)
        assert spec.rows is not None, "SourceSpec requires it with such a schema"
        return spec.rows.replace(":", ".")

    def row_class(self) -> type[RowSource]:
        """Import the class.

        Raises:
            MensError: it cannot be imported, or has no method ``rows``.
        """
        spec = SOURCES.named(self.source)
        assert spec.rows is not None, "SourceSpec requires it with such a schema"
        protocol: Any = RowSource  # mypy rejects abstract classes as type[...]
        found: type[RowSource] = named_class(
            spec.rows, protocol, of=f"the data source {self.source}"
        )
        return found

    @property
    def validates_apart(self) -> bool:
        """Whether the class provides validation rows; false if it cannot be imported."""
        try:
            return hasattr(self.row_class(), "validation_rows")
        except MensError:  # reported by preflight
            return False


@dataclass(kw_only=True, slots=True)
class OwnData(GivenData):
    """Rows of a class that an option of your own names; its other keys are the arguments."""

    _target_: str = setting(MISSING, "Class of the source; set by the option.")

    @property
    def target(self) -> str:
        """The class, as ``module.Class``."""
        return self._target_

    def row_class(self) -> type[RowSource]:
        """Import the class.

        Raises:
            ConfigError: it cannot be imported, or has no method ``rows``.
        """
        found = target_at("data", self._target_)
        if not (isinstance(found, type) and issubclass(found, RowSource)):
            raise ConfigError(
                "has the wrong type",
                where="data._target_",
                found=self._target_,
                expected="a class with a method rows",
            )
        return found


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One data source.

    Attributes:
        name: value of `data.source`, and the name in records.
        schema: its settings; a package's source extends :class:`GivenData`.
        rows: ``module:name`` of its :class:`RowSource`; None for built-in readers.
    """

    name: str
    schema: type[DataConfig]
    rows: str | None = None

    def __post_init__(self) -> None:
        """Refuse a schema with another name, and a class without its schema or vice versa."""
        named = {field.name: field.default for field in dataclasses.fields(self.schema)}["source"]
        if named != self.name:
            raise TypeError(f"data source {self.name}: source is {named!r} in its schema")
        if (self.rows is not None) != issubclass(self.schema, GivenData):
            raise TypeError(
                f"data source {self.name}: rows names a class exactly where schema extends "
                "mens_exp.config.data_sources.GivenData"
            )


SOURCES = Registry(
    kind="data source",
    group="mens_exp.sources",
    spec=SourceSpec,
    built_in={
        name: SourceSpec(name=name, schema=schema)
        for name, schema in {
            "stdlib": StdlibData,
            "jsonl": JsonlData,
            "hub": HubData,
            "mix": MixData,
            "synthetic": SyntheticData,
        }.items()
    },
)

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
        wrong = list(_entry_problems(entry, f"data.sources[{number}]"))
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


def _entry_problems(entry: Any, where: str) -> Iterator[ConfigError]:
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
            what = "belongs to the whole mix" if key in _OF_THE_MIX else f"is not a key of {option}"
            what += " in a mix" if key in _ALONE else ""
            yield ConfigError(
                what, where=f"{where}.{key}", found=entry[key], expected=expected_name(key, keys)
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
