"""The data sources: ours, and classes of your own that give rows.

A class of your own is named by `data._target_`, in an option of ``./conf/data``, or comes with an
installed package under the entry point group ``mens_exp.sources`` (:mod:`mens_exp.config.plugins`).
Either way it is made with the option's own settings as keyword arguments, and asked for its rows.
Nothing here imports it before a command asks for it.
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
    """A class whose objects give rows.

    A class that also has a method ``validation_rows``, of the same form, names the rows to validate
    on; then no row of ``rows`` validates. Both give the same rows each time they are called.
    """

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows in order, each with the keys of a row in a JSONL file."""


@dataclass(kw_only=True, slots=True)
class GivenData(WrittenData):
    """Rows that a class of your own gives; what a subclass adds are the class's arguments."""

    @property
    def own_settings(self) -> dict[str, Any]:
        """The arguments of the class."""
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
        protocol: Any = RowSource  # abstract, which mypy accepts for no type[...]
        found: type[RowSource] = named_class(
            spec.rows, protocol, of=f"the data source {self.source}"
        )
        return found

    @property
    def validates_apart(self) -> bool:
        """Whether the class names its rows to validate on; false if it cannot be imported."""
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
        schema: its settings; those of a package's source extend :class:`GivenData`.
        rows: ``module:name`` of its :class:`RowSource`; None where we read the rows.
    """

    name: str
    schema: type[DataConfig]
    rows: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings of another name, and a class without settings for it or the reverse."""
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
