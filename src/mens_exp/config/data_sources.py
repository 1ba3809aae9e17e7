"""The data sources: built-in ones, and user classes that return rows.

A user class is named by `data._target_` in an option of ``./conf/data``, or provided by an
installed package under the entry point group ``mens_exp.sources`` (:mod:`mens_exp.config.plugins`).
It is instantiated with the option's settings as keyword arguments, and imported only when a command
needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from omegaconf import MISSING

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
from mens_exp.config.plugins import Registry, named_class, target_at
from mens_exp.errors import ConfigError, MensError


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
