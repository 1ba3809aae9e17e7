"""Rows returned by a user's class: validated like rows of a file, and hashed.

The class is called again for each reading, so a source whose rows differ between two readings is
refused before a run begins (:func:`refuse_unsteady`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import MixData, OnBadRow
from mens_exp.config.data_sources import GivenData, sources_of
from mens_exp.config.plugins import error_text
from mens_exp.corpus.row_files import RowsFile
from mens_exp.errors import DataError
from mens_exp.rows.decode import Located
from mens_exp.rows.readers import Reading, read_located, rows_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.config.data import DataConfig
    from mens_exp.rows.readers import FileOfRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The rows of a user's class, and its validation rows, if any."""

    rows: FileOfRows
    validation: FileOfRows | None

    @property
    def sha256(self) -> str:
        """The hash of all rows in order."""
        apart = () if self.validation is None else self.validation.pairs
        return rows_digest([*self.rows.pairs, *apart])

    def files(self) -> Iterator[RowsFile]:
        """Yield the record entry of each role."""
        for role, one in (("rows", self.rows), ("validation", self.validation)):
            if one is not None:
                yield RowsFile(
                    path=one.name,
                    role=role,
                    form=one.form.value,
                    rows=len(one.pairs),
                    ignored={},
                    sha256=rows_digest(one.pairs),
                )


def read_given(config: GivenData) -> Given:
    """Read the rows of the class; a row's location is ``module.Class.rows:<number>``, from 1.

    Raises:
        MensError: the class cannot be imported, or has the wrong type.
        DataError: it fails, does not return rows, or returns an invalid row.
        Problems: several rows are invalid.
    """
    cls: Any = config.row_class()
    try:
        source = cls(**config.own_settings)
    except Exception as error:
        raise _failed(config.target, error) from error
    apart = getattr(source, "validation_rows", None)
    return Given(
        rows=_read(f"{config.target}.rows", source.rows, config),
        validation=None
        if apart is None
        else _read(f"{config.target}.validation_rows", apart, config),
    )


def given_in(config: DataConfig) -> list[GivenData]:
    """Return the sources backed by a user's class: the source itself, or members of a mix.

    Raises:
        ConfigError: an entry of the mix is not a source.
        Problems: several entries are not sources.
    """
    parts = [one.data for one in sources_of(config)] if isinstance(config, MixData) else [config]
    return [one for one in parts if isinstance(one, GivenData)]


def refuse_unsteady(first: str, again: str) -> None:
    """Refuse a source whose rows differ between two readings.

    Args:
        first: hash of the rows of the first reading.
        again: hash of the rows of the second reading.

    Raises:
        DataError: the hashes differ.
    """
    if first != again:
        raise DataError(
            "returns different rows when it is called again",
            where="data",
            found=f"{first[:12]} and then {again[:12]}",
            expected="the same rows in the same order each time",
            remedy="sort what has no order, draw with random.Random(seed) of your own, and pin the "
            "version of what you download",
        )


def _read(name: str, give: Callable[[], Any], config: GivenData) -> FileOfRows:
    how = Reading(setting="data", quarantine=config.on_bad_row is OnBadRow.quarantine)
    found = read_located(name, _located(name, give), how)
    if not found.pairs and not found.bad:
        raise DataError("there are no rows", where=name, expected="at least one")
    return found


def _located(name: str, give: Callable[[], Any]) -> Iterator[Located]:
    """Yield each row with its location; translate errors of the class."""
    number = 0
    try:
        for number, row in enumerate(_several(name, give()), start=1):
            yield Located(f"{name}:{number}", row)
    except DataError:
        raise
    except Exception as error:
        raise _failed(f"{name}:{number + 1}", error) from error


def _several(name: str, rows: Any) -> Any:
    """Return the class's rows unchanged.

    Raises:
        DataError: they are a string or a single row, whose elements are not rows.
    """
    if isinstance(rows, str | bytes | dict):
        raise DataError(
            "does not return rows",
            where=name,
            found=f"a {type(rows).__name__}",
            expected="a list of rows, or another iterable of them",
        )
    return rows


def _failed(where: str, error: Exception) -> DataError:
    return DataError(
        "failed to return its rows",
        where=where,
        found=error_text(error),
        expected="rows, and no error",
    )
